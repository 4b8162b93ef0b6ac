import json
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from mhaprune.lab.cli.command_line import main
from mhaprune.lab.model.training import Training
from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder, read_status
from mhaprune.storage.store import fingerprint
from support import ROOT
from support.commands import run_here, run_script
from support.composing import compose, tables_in
from support.figures import drawing
from support.real_sweeps import hear
from support.sizes import TINY, TINY_ABLATE, TINY_SEQUENCES, slow

SMALL = [*TINY, *TINY_SEQUENCES, *TINY_ABLATE]
PDF = "figure.format=[pdf]"
QUICK = ("scorer=[ablation]", "recovery=[]", "experiment.budgets=[0.5]")
CLOCK = {"seconds", "latency_ms", "speedup", "speedup_q1", "speedup_q3"}


def run(folder: Path, *overrides: str) -> dict[str, pd.DataFrame]:
    return tables_of(folder, *SMALL, *overrides)


def tables_of(folder: Path, *overrides: str) -> dict[str, pd.DataFrame]:
    with RunFolder(folder).recorded() as recorded:
        build(compose(*overrides))(recorded)
    return tables_in(folder)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, with its figures."""
    folder = tmp_path_factory.mktemp("first")
    with drawing():
        run(folder / "run", f"cache={folder / 'cache'}", "scorer.random.draws=3")
    return folder


def test_a_run_leaves_what_the_house_promises(first: Path) -> None:
    folder = first / "run"
    tables = tables_in(folder)
    own = {"summary", "heads", "pruning", "recovered", "agreement", "latency", "groups", "shift", "training"}
    assert set(tables) == own
    heads, pruning = tables["heads"], tables["pruning"]
    total = 2 + 2 + 2
    assert len(heads) == total * (3 + 3)
    assert {"scorer", "site", "layer", "head", "score", "stderr", "rank", "forward_passes", "seconds"} <= set(heads)
    assert sorted(pruning["heads_removed"].unique()) == [0, 1, 2, 3, 4, 5, 6]
    named = {f"{name}{end}" for name in ("loss", "token_accuracy", "quality") for end in ("", "_low", "_high")}
    size = {f"heads_{name}" for name in ("total", "kept", "removed")}
    assert named | size | {"fraction_removed", "parameters", "flops", "latency_ms", "speedup"} <= set(pruning)
    assert (pruning["heads_kept"] + pruning["heads_removed"] == total).all()
    assert pruning.loc[pruning["draw"] == 0, "latency_ms"].notna().all()
    assert {"step", "loss", "valid_quality", "gate_cross.0.1"} <= set(tables["training"])
    for table in tables.values():
        assert list(table)[:4] == ["run", "task", "gate", "seed"]
        assert table["run"].nunique() == 1
    status = read_status(folder)
    assert status["status"] == "done"
    assert status["checks"]["max_difference_masked_removed"] <= 1e-9
    assert status["checks"]["smallest_gate_effect"] > 0
    assert status["checks"]["greedy_decoding_disagreements"] == 0
    figures = {Path(name).stem for name in status["files"] if name.startswith("figures/")}
    assert {f"figures/{name}.{kind}" for name in figures for kind in ("png", "svg")} <= set(status["files"])
    assert {"matter", "accuracy"} <= figures
    page = (folder / "report.html").read_text()
    assert page.count("<img ") == page.count(' alt="') == len(figures)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["num_threads"] == 1
    assert environment["versions"]["torch"] == version("torch")
    trained_with = {"num_threads": 1, "device": environment["device"], "torch": version("torch")}
    assert status["trained_with"] == trained_with
    assert f"<dt>trained with</dt><dd><code>num_threads 1, device {environment['device']}, torch" in page
    assert [len(row) for row in status["head_map"]["rows"]] == [2, 2, 2]


def test_a_report_is_small_enough_to_be_sent(first: Path) -> None:
    """That of the tiny run has 396 KB, nearly all of it figures as lines, twice. A table that is not cut, or text that
    is written as outlines, goes beyond the bar."""
    assert 100_000 < (first / "run" / "report.html").stat().st_size <= 420_000


@pytest.mark.slow
@pytest.mark.figures
def test_the_same_seed_draws_the_same_figures_twice(tmp_path: Path) -> None:
    for name in ("one", "other"):
        run(tmp_path / name, f"cache={tmp_path / name}-cache")
    figures = sorted(path.name for path in (tmp_path / "one" / "figures").iterdir())
    timed = {"latency"}  # times differ
    assert figures
    for figure in figures:
        one, other = (tmp_path / name / "figures" / figure for name in ("one", "other"))
        if Path(figure).stem not in timed:
            assert one.read_bytes() == other.read_bytes(), figure


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tables_twice(first: Path, tmp_path: Path) -> None:
    """Each trained anew; what a clock has measured is left out."""
    tables = tables_in(first / "run")
    again = run(tmp_path / "again", f"cache={tmp_path / 'again' / 'cache'}", "scorer.random.draws=3")
    for name, table in tables.items():
        columns = [column for column in table if column not in CLOCK]
        pd.testing.assert_frame_equal(table[columns], again[name][columns], check_exact=True)


def test_another_seed_gives_another_model(first: Path, tmp_path: Path) -> None:
    tables, other = tables_in(first / "run"), run(tmp_path / "other", f"cache={tmp_path / 'cache'}", *QUICK, "seed=1")
    mine, others = (table[table["scorer"] == "ablation"]["score"] for table in (tables["heads"], other["heads"]))
    assert mine.tolist() != others.tolist()
    assert other["heads"]["run"].iloc[0] != tables["heads"]["run"].iloc[0]


def test_what_computes_a_model_is_part_of_what_tells_it_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and two threads sum in another order, and another torch computes with other kernels."""
    made = []

    def get(self: object, kind: str, recipe: dict[str, Any], make: object) -> Any:
        made.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("mhaprune.lab.sources.trained.Cache.get", get)
    names = []
    for threads, torch_version in ((1, "2.9"), (2, "2.9"), (1, "3.0")):
        monkeypatch.setattr(torch, "__version__", torch_version)
        described = build(compose(*SMALL, f"cache={tmp_path}", f"num_threads={threads}"))
        names.append(described.identity["run"])
        with pytest.raises(KeyboardInterrupt):
            described.study()
    assert len(set(names)) == 3
    assert len({fingerprint(recipe) for recipe in made}) == 3
    assert all(recipe["device"] == "cpu" for recipe in made)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps that are trained."""
    found: list[int] = []
    plain = Training.step

    def counted(*arguments: object, **keywords: object) -> torch.Tensor:
        found.append(len(found) + 1)
        return plain(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Training, "step", counted)
    return found


def test_the_same_recipe_is_trained_once(tmp_path: Path, steps: list[int]) -> None:
    """Another experiment, other scorers and other budgets do not train again; another seed does."""
    train = ["experiment=train", *TINY, *TINY_SEQUENCES, f"cache={tmp_path / 'cache'}"]
    trained = tables_of(tmp_path / "a", *train)
    assert steps == [1, 2, 3, 4, 5, 6]
    loaded = run(tmp_path / "b", train[-1], "scorer=[ablation]", "experiment.budgets=[1]")
    assert len(steps) == 6
    histories = (tables["training"].drop(columns="run") for tables in (trained, loaded))
    pd.testing.assert_frame_equal(*histories, check_exact=True)
    for changed, count in (("seed=1", 12), ("gate.learning_rate=0.5", 18)):
        build(compose(*train, changed)).study()
        assert len(steps) == count


def test_the_three_splits_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores do not change with the report split's contents, nor numbers reported with the score split's."""
    from mhaprune.lab.tasks.sort import Sort

    plain = run(tmp_path / "plain", f"cache={tmp_path / 'cache'}", *QUICK)
    splits = Sort.splits

    def changed(name: str) -> object:
        def other(self: Sort) -> object:
            whole = splits(self)
            replaced = dict(whole.items()) | {name: whole.train[:16]}
            return type(whole)(**replaced)

        return other

    monkeypatch.setattr(Sort, "splits", changed("report"))
    report = run(tmp_path / "report", f"cache={tmp_path / 'cache'}", *QUICK)
    assert report["heads"]["score"].equals(plain["heads"]["score"])
    assert report["pruning"]["choose_loss"].equals(plain["pruning"]["choose_loss"])
    assert not report["pruning"]["loss"].equals(plain["pruning"]["loss"])
    monkeypatch.setattr(Sort, "splits", changed("choose"))
    choose = run(tmp_path / "choose", f"cache={tmp_path / 'cache'}", *QUICK)
    assert choose["heads"]["score"].equals(plain["heads"]["score"])
    assert choose["pruning"]["loss"].equals(plain["pruning"]["loss"])
    assert not choose["pruning"]["choose_loss"].equals(plain["pruning"]["choose_loss"])


@pytest.mark.slow
@pytest.mark.figures
def test_a_run_writes_its_figures_in_the_form_that_is_wanted(first: Path, tmp_path: Path) -> None:
    places = [f"hydra.run.dir={tmp_path / 'run'}", f"cache={first / 'cache'}"]
    done = run_here(main, "experiment=train", *TINY, *TINY_SEQUENCES, *places, PDF)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "run" / "figures").iterdir()] == ["training.pdf"]


@pytest.mark.slow
def test_a_sweep_of_joblib_ends_in_the_same_tables(tmp_path: Path) -> None:
    """Over two seeds, each trained anew."""
    sweep = ["-m", "experiment=ablate", *SMALL, *QUICK, "seed=0,1"]
    for launch in ("basic", "joblib"):
        places = [f"hydra.sweep.dir={tmp_path / launch}", f"cache={tmp_path / launch / 'cache'}"]
        done = run_script("run.py", f"launch={launch}", *sweep, *places)
        assert done.returncode == 0, done.stderr
    for name in ("heads", "pruning", "training"):
        first, second = (pd.read_csv(tmp_path / launch / f"{name}.csv") for launch in ("basic", "joblib"))
        columns = [column for column in first if column not in CLOCK]
        assert first["label"].nunique() == 2
        assert name == "heads" or first["loss"].nunique() > 1
        pd.testing.assert_frame_equal(first[columns], second[columns], check_exact=True)


def train(tmp_path: Path) -> list[str]:
    """The arguments of a training."""
    output = [f"hydra.run.dir={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}"]
    return ["experiment=train", *TINY, *TINY_SEQUENCES, *output]


@pytest.mark.usefixtures("as_in_a_terminal")
@pytest.mark.parametrize("by", [signal.SIGTERM, *slow(signal.SIGINT, signal.SIGUSR1)])
def test_an_interrupted_run_says_so_and_goes_on_where_it_was(
    by: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    """Interrupted in the fifth of six steps, after which its state is saved. Real interrupts of another process are in
    the test below."""
    counted = Training.step

    def interrupted(*arguments: object, **keywords: object) -> torch.Tensor:
        if len(steps) == 4:
            signal.raise_signal(by)
        return counted(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Training, "step", interrupted)
    done = run_here(main, *train(tmp_path))
    assert done.returncode == 130
    assert done.stderr == "error: interrupted; the same command goes on from what was saved\n"
    assert read_status(tmp_path / "run")["status"] == "failed"
    assert read_status(tmp_path / "run")["reason"] == "interrupted"
    again = run_here(main, *train(tmp_path))
    assert again.returncode == 0
    assert "goes on from the interrupted one" in again.stdout
    assert len(steps) == 5 + 1, "no step is trained twice"


@pytest.mark.slow
def test_an_interrupted_process_says_so_and_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments = [argument for argument in train(tmp_path) if not argument.startswith("training.steps")]
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), *arguments]
    endless = subprocess.Popen([*command, "training.steps=100000"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150
    while not list((tmp_path / "cache").glob("*.partial.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    endless.send_signal(signal.SIGTERM)
    _, errors = endless.communicate(timeout=150)
    assert endless.returncode == 130
    assert errors == "error: interrupted; the same command goes on from what was saved\n"
    assert read_status(tmp_path / "run")["status"] == "failed"
    assert read_status(tmp_path / "run")["reason"] == "interrupted"
    [partial] = (tmp_path / "cache").glob("*.partial.pt")
    reached = torch.load(partial, weights_only=True)["content"]["step"]
    again = subprocess.Popen([*command, "training.steps=100000"], stdout=subprocess.PIPE, text=True, preexec_fn=hear)
    assert again.stdout is not None
    lines = iter(again.stdout.readline, "")
    assert any("goes on from the interrupted one" in line for line in lines)
    deadline = time.monotonic() + 150
    while torch.load(partial, weights_only=True)["content"]["step"] <= reached and time.monotonic() < deadline:
        time.sleep(0.05)
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=150)
    assert torch.load(partial, weights_only=True)["content"]["step"] > reached


def test_what_was_computed_for_other_weights_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe may end in other bits on another machine."""
    made = []
    for weights in ("here", "here", "elsewhere"):
        monkeypatch.setattr("mhaprune.lab.sources.trained.weights_digest", lambda model, weights=weights: weights)
        study = build(compose(*TINY, *TINY_SEQUENCES, f"cache={tmp_path}")).study()
        study.remember("oracle", {}, lambda state, save, weights=weights: made.append(weights) or {"x": 1})
    assert made == ["here", "elsewhere"]
