"""The scripts beside the package: benches and findings."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from scipy import stats

import bench
import findings
from benches import answers, masks, refit
from mhaprune.model.network import Transformer
from support import ROOT
from support.commands import run_here
from support.sizes import TINY, TINY_SEQUENCES


@pytest.mark.slow
def test_a_bench_prints_ratios_with_their_spread_and_the_control() -> None:
    done = run_here(bench.main, "training", "--pairs", "20", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == ["training", "training, A/A"]
    for row in rows:
        assert list(row) == ["name", "ours_ms", "peer_ms", "ratio", "q1", "q3"]
        assert 0 < row["q1"] <= row["ratio"] <= row["q3"]


def test_bad_names_and_too_few_pairs_are_refused() -> None:
    main = bench.main
    assert "NAME=speed: no such bench, allowed are training, recipes, removal, dec" in run_here(main, "speed").stderr
    assert "--pairs=3: must be 20 or more" in run_here(main, "--pairs", "3").stderr


@torch.no_grad()
def test_both_sides_of_a_pair_do_the_same() -> None:
    encoder, x_BTD = masks.Encoder(num_layers=2, num_heads=3, d_model=12), torch.randn(20, 5, 12)
    gates_MN = masks.each_closed(6)
    # A pass over many masks ends in another order, 16 examples first.
    ours = torch.cat([torch.cat(list(part.flatten(1))) for part in encoder.many(x_BTD, gates_MN)])
    plain = torch.cat([encoder(x_BTD, gates_N).flatten() for gates_N in gates_MN])
    torch.testing.assert_close(ours.sort().values, plain.sort().values)
    config = Transformer(d_model=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    ((_, shared, one_by_one),) = masks.greedy(config, num_examples=16)
    assert shared() == one_by_one()
    for name, cached, uncached in answers.decode(length=12):
        assert (cached() == uncached()).double().mean() > 0.99, f"{name}: but for ties that rounding decides"
    ((_, at_once, pass_by_pass),) = refit.refit(config, num_examples=32)
    for one, other in zip(at_once().parameters(), pass_by_pass().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    ((_, shared, one_by_one),) = masks.pairs_of_heads(config, num_examples=4)
    torch.testing.assert_close(shared().loss, torch.stack([outcome.loss for outcome in one_by_one()]))


CLAIMS = """
looked_at: 0-9
studies:
  sort: {settings: "experiment=ablate task=sort scorer=[ablation] recovery=[refit]", seeds: 20-23}
claims:
  - {claim: heads, study: sort, table: summary, rows: recovery == 'nothing', value: heads_removed, above: 1, below: 9}
  - {claim: gain, study: sort, table: summary, rows: recovery == 'refit', minus: recovery == 'nothing',
     value: heads_removed / 2, above: 1}
  - {claim: wrong, study: sort, table: summary, value: heads_removed, below: 4}
"""
SUMMARY = pd.DataFrame({
    "seed": [20, 21, 22, 23] * 2,
    "recovery": ["nothing"] * 4 + ["refit"] * 4,
    "heads_removed": [4, 5, 6, 5, 8, 6, 7, 9],
})  # fmt: skip


def read(tmp_path: Path, text: str = CLAIMS) -> Any:
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    return findings.read_claims(path)


def test_a_claim_is_a_mean_over_models_and_its_test(tmp_path: Path) -> None:
    studies, (heads, gain, wrong) = read(tmp_path)
    assert list(studies["sort"].numbers) == [20, 21, 22, 23]
    assert heads.per_model(SUMMARY).to_dict() == {20: 4, 21: 5, 22: 6, 23: 5}
    assert gain.per_model(SUMMARY).to_dict() == {20: 2, 21: 0.5, 22: 0.5, 23: 2}
    values = heads.per_model(SUMMARY)
    both = [stats.ttest_1samp(values, 1, alternative="greater"), stats.ttest_1samp(values, 9, alternative="less")]
    assert heads.p(values) == pytest.approx(max(each.pvalue for each in both))
    table = list(findings.lines([heads, gain, wrong], {"sort": {"summary": SUMMARY}}))
    assert [line.split(" | ")[-1] for line in table[2:5]] == ["holds |", "undecided |", "**fails** |"]
    assert "| heads | 4 | 1 to 9 | 5.00 (3.70 to 6.30) |" in table[2]
    p, corrected = (float(cell) for cell in table[3].split(" | ")[5:7])
    assert p == pytest.approx(gain.p(gain.per_model(SUMMARY)), abs=6e-4)
    assert corrected == pytest.approx(2 * p, abs=2e-3), "two of the three claims have no smaller p"
    assert table[-1] == "Of 3 claims 1 hold, 1 fail, 1 are not decided, at a level of 0.05 for all of them together."


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: 20-23", "seeds: 9-23", "studies.sort.seeds=9-23: seed 9 was looked at, choose others"),
        ("seeds: 20-23", "seeds: 20-21", "studies.sort.seeds=20-21: must be 3 seeds or more"),
        (", below: 4}", "}", "claim “wrong”: has no test, must say above, below or both"),
        ("below: 4", "beneath: 4", r"claims\[2\].beneath=4: no such setting, allowed are claim, study"),
        ("wrong, study: sort", "wrong, study: sorts", "claim “wrong”: study=sorts: must be one of sort"),
        ("claims:", "claims: [", "claims.yaml: is no YAML"),
        ("value: heads_removed, below: 4", "below: 4", r"claims\[2\].value: is missing, must be a text"),
    ],
)
def test_claims_that_cannot_be_tested_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CLAIMS
    with pytest.raises(ValueError, match=message):
        read(tmp_path, CLAIMS.replace(old, new))


def test_claims_about_columns_or_tables_that_are_not_there_are_refused(tmp_path: Path) -> None:
    _, (heads, *_) = read(tmp_path, CLAIMS.replace("value: heads_removed, above", "value: heads_gone, above"))
    with pytest.raises(ValueError, match="^claim “heads”: .*heads_gone.*$"):
        heads.per_model(SUMMARY)
    with pytest.raises(ValueError, match="claim “heads”: table=summary: must be one of answers"):
        list(findings.lines([heads], {"sort": {"answers": SUMMARY}}))
    with pytest.raises(ValueError, match="claim “heads”: no row of the table summary is meant"):
        heads.per_model(SUMMARY.assign(recovery="other", heads_gone=1))
    assert run_here(findings.main, "sorts").stderr.startswith("error: NAME=sorts: no such study, allowed are sort, rev")


def test_the_claims_of_this_repository_can_be_read() -> None:
    studies, claims = findings.read_claims(ROOT / "results" / "claims.yaml")
    assert {claim.study for claim in claims} == set(studies)


@pytest.mark.slow
def test_claims_are_tested_on_models_that_are_trained_for_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(CLAIMS)
    small = [*TINY, *TINY_SEQUENCES, "experiment.budgets=[1,2]", f"cache={tmp_path / 'cache'}"]
    asked = ["--claims", str(path), "--folder", str(tmp_path / "sweeps"), *small]
    assert findings.main(asked) == 0
    out = capfd.readouterr().out
    assert "| heads | 4 | 1 to 9 | " in out
    assert findings.main(asked) == 0
    again = capfd.readouterr()
    assert again.out.endswith(out[out.index("| claim |") :])
    assert "4 of 4 jobs are done and skipped" in again.err + again.out


def test_a_plan_counts_what_a_real_scoring_takes() -> None:
    pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    from plan_scale import checked, plan

    rows = {row["work"]: row["counted / planned"] for row in checked(2, texts=4)}
    assert set(rows) == {"gate_output", "taylor", "ablation", "refit of half the heads"}
    assert all(0.9 < ratio < 1.5 for ratio in rows.values())
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 99}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
    assert plan(model, 4, 8)["ablation"] == 2 * plan(model, 2, 8)["ablation"]
