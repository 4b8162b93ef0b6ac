"""The scripts beside the package: benches and findings."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import bench
import findings
from benches import answers, masks, refit
from findings import Claim, lines, overlap
from mhaprune.model.network import Transformer
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


def frame(task: str, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({**columns, "task": task})


def said(claims: Any) -> dict[str, list[float]]:
    return {claim.words: claim.per_model.sort_index().round(9).tolist() for claim in claims}


def test_what_can_go_is_read_for_each_task_before_and_after_a_refit() -> None:
    recovery = ["nothing", "refit"] * 2
    rows = frame("sort", seed=[1, 1, 0, 0], recovery=recovery, heads_removed=[9, 15, 12, 18])
    other = frame("reverse", seed=[0, 0], recovery=recovery[:2], heads_removed=[3, 6])
    assert said(findings.refit({"summary": pd.concat([rows, other])})) == {
        "sort: heads that can go as they are": [12, 9],
        "sort: heads that can go after a refit": [18, 15],
        "reverse: heads that can go as they are": [3],
        "reverse: heads that can go after a refit": [6],
    }


def test_a_mean_of_ratios_is_geometric_and_equal_models_need_no_interval() -> None:
    assert str(Claim("", pd.Series([1.0, 2, 3]))) == "2.0 (−0.5 to 4.5; one new model −3.0 to 7.0)"
    assert str(Claim("", pd.Series([1.0, 2, 4]), is_ratio=True)) == "2.00 (0.36 to 11.19)"
    assert Claim("", pd.Series([0.1, 10]), is_ratio=True).value()[0] == pytest.approx(1)
    assert str(Claim("", pd.Series([1.0, 1]))) == "1.0 in each"


def test_intervals_that_share_a_value_overlap() -> None:
    low, high, wide = (Claim("a", pd.Series(values)) for values in ([1.0, 1.2, 1.1], [3.0, 3.2, 3.1], [0.0, 2, 4]))
    assert [overlap(*pair) for pair in ((low, high), (high, low), (low, wide), (wide, low))] == [False] * 2 + [True] * 2
    table = list(lines([low, wide], [high, low]))
    assert table[0] == "| | claimed, 3 models | found, 3 models | intervals overlap |"
    assert [line.split(" | ")[-1] for line in table[2:4]] == ["no |", "yes |"]
    assert table[-1] == "1 of 2 intervals overlap."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["refitt"], "NAME=refitt: no such finding, allowed are refit, chosen_for_a_refit, regret, interactions"),
        (["refit", "--found", "7,8"], "--found=7,8: must be 3 seeds or more, such as 0,1,2, or there is no interval"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    assert run_here(findings.main, *arguments)[::2] == (1, f"error: {message}\n")


@pytest.mark.slow
def test_a_finding_is_repeated_on_both_lots_of_models(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = [*TINY, *TINY_SEQUENCES, "experiment.budgets=[1,2]", "task=sort", f"cache={tmp_path / 'cache'}"]
    seeds = ["--claimed", "0,1,2", "--found", "3,4,5", "--folder", str(tmp_path / "sweeps")]
    assert findings.main(["refit", *seeds, *small]) == 0
    out = capfd.readouterr().out
    assert "| | claimed, 3 models | found, 3 models | intervals overlap |" in out
    assert "sort: heads that can go after a refit | " in out
    assert {path.name for path in (tmp_path / "sweeps").iterdir()} == {"refit-claimed", "refit-found"}
    assert findings.main(["refit", *seeds, *small]) == 0
    again = capfd.readouterr()
    assert again.out.endswith(out[out.index("| |") :])
    assert "3 of 3 jobs are done and skipped" in again.err + again.out


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
