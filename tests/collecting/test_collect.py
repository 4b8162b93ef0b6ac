from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from collect import main as collect_main
from conftest import run_here
from made_tables import pruning_table, summary
from mhaprune.collecting.collect import collect
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.experiments.train import Train
from mhaprune.storage.store import RunFolder, read_status, target


def make_run(path: Path, **identity: Any) -> None:
    with RunFolder(path).recorded() as folder:
        folder.note(kind="run", experiment=target(Ablate()), identity={"run": "abc", "task": "sort", **identity})
        folder.write_table("pruning", pruning_table().assign(run="abc"))
        folder.write_table("summary", summary().assign(tolerance=0.01))


def make_failed(path: Path, reason: str) -> None:
    def fail() -> None:
        with RunFolder(path).recorded() as folder:
            folder.note(kind="run", overrides=["model.num_heads=3"])
            folder.write_table("pruning", pruning_table())
            raise ValueError(reason)

    with pytest.raises(ValueError, match=reason):
        fail()


@pytest.mark.collected_figures
def test_runs_are_combined_and_told_apart_by_what_differs(tmp_path: Path) -> None:
    for job, heads in enumerate((2, 4, 8)):
        make_run(tmp_path / "sweep" / str(job), num_heads=heads, seed=0)
    lines = collect([tmp_path / "sweep"], tmp_path / "sweep")
    table = pd.read_csv(tmp_path / "sweep" / "pruning.csv")
    assert list(table["label"].unique()) == ["num_heads=2", "num_heads=4", "num_heads=8"]
    assert len(table) == 3 * len(pruning_table())
    assert (table["run"] == "abc").all()
    assert any(line.startswith("num_heads=8: 9 of 24 heads can go") for line in lines)
    assert {p.name for p in (tmp_path / "sweep" / "figures").iterdir()} == {
        "comparison.png",
        "comparison.svg",
        "headline.png",
        "headline.svg",
    }
    assert "num_heads=4" in (tmp_path / "sweep" / "report.html").read_text()
    again = collect([tmp_path / "sweep"], tmp_path / "sweep")  # its own output is not taken for a run
    assert again == lines


def test_a_setting_is_what_runs_share_that_differ_in_their_seed(tmp_path: Path) -> None:
    """It holds neither the seed nor the folder; a seed of something else is a setting like others."""
    for job, (heads, seed) in enumerate([(2, 0), (2, 1), (4, 0), (4, 1)]):
        make_run(tmp_path / "sweep" / str(job), num_heads=heads, seed=seed)
    for name in ("monday", "tuesday"):
        make_run(tmp_path / "same" / name, num_heads=2, seed=0)
    for seed in (0, 1):
        make_run(tmp_path / "seeds" / str(seed), num_heads=2, seed=seed)
        make_run(tmp_path / "data" / str(seed), num_heads=2, seed=0)
        status = read_status(tmp_path / "data" / str(seed)) | {"overrides": [f"task.seed={seed}"]}
        (tmp_path / "data" / str(seed) / "status.json").write_text(json.dumps(status))

    def names(folder: str) -> list[tuple[str, str]]:
        collect([tmp_path / folder], tmp_path / "out" / folder)
        table = pd.read_csv(tmp_path / "out" / folder / "pruning.csv", keep_default_na=False)
        return list(table[["label", "setting"]].drop_duplicates().itertuples(index=False, name=None))

    assert names("sweep") == [
        ("num_heads=2, seed=0", "num_heads=2"),
        ("num_heads=2, seed=1", "num_heads=2"),
        ("num_heads=4, seed=0", "num_heads=4"),
        ("num_heads=4, seed=1", "num_heads=4"),
    ]
    assert names("same") == [("monday", ""), ("tuesday", "")]
    assert names("seeds") == [("seed=0", ""), ("seed=1", "")]
    assert names("data") == [("task.seed=0", "task.seed=0"), ("task.seed=1", "task.seed=1")]


def test_an_index_lists_every_run(tmp_path: Path) -> None:
    """With a link to its report, the settings that vary, and its first numbers."""
    make_run(tmp_path / "runs" / "a b", num_heads=2)
    (tmp_path / "runs" / "a b" / "report.html").write_text("here")
    make_failed(tmp_path / "runs" / "1", "model.num_heads=3: must divide")
    collect([tmp_path / "runs"], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<title>ablate on sort, by num_heads</title>" in page
    assert '<a href="../runs/a%20b/report.html">num_heads=2</a>' in page
    for cell in ("<td>2</td>", ">9</td>", ">0.993</td>", ">1.21</td>", ">heads that can go<", ">times as fast<"):
        assert cell in page
    assert "<td>num_heads=3</td><td>failed</td>" in page


def test_failed_and_unfinished_runs_are_named_and_left_out(tmp_path: Path) -> None:
    make_run(tmp_path / "0", num_heads=2)
    make_failed(tmp_path / "1", "model.num_heads=3: must divide")
    (tmp_path / "2" / ".hydra").mkdir(parents=True)
    (tmp_path / "2" / ".hydra" / "config.yaml").touch()
    make_run(tmp_path / "10", num_heads=4)
    lines = collect([tmp_path], tmp_path / "out")
    assert lines[2].startswith("num_heads=3 is not in here, failed: ValueError: model.num_heads=3: must divide")
    assert lines[3].startswith("2 is not in here, no status")
    runs = pd.read_csv(tmp_path / "out" / "runs.csv")
    assert [Path(folder).name for folder in runs["folder"]] == ["0", "1", "2", "10"]
    assert len(pd.read_csv(tmp_path / "out" / "pruning.csv")) == 2 * len(pruning_table())
    assert len(read_status(tmp_path / "out")["failed"]) == 2


def test_runs_of_an_older_or_unknown_kind_are_named_in_a_line_each(tmp_path: Path) -> None:
    make_run(tmp_path / "new", num_heads=2)
    for name, experiment in (("old", None), ("foreign", "elsewhere.study.Study"), ("gone", "mhaprune.nowhere.Study")):
        make_run(tmp_path / name, num_heads=4)
        status = {key: value for key, value in read_status(tmp_path / name).items() if key != "experiment"}
        status |= {} if experiment is None else {"experiment": experiment}
        (tmp_path / name / "status.json").write_text(json.dumps(status))
    lines = collect([tmp_path], tmp_path / "out")
    compared, *left_out = lines
    assert sorted(line.split(" is not in here, ")[1].split(" (")[0].rstrip(".") for line in left_out) == [
        "of an experiment that is not installed, elsewhere.study.Study",
        "of an experiment that is not installed, mhaprune.nowhere.Study",
        "too old: its status names no experiment, run it again",
    ]
    assert compared.startswith("experiment=ablate, num_heads=2: 9 of 24 heads can go")
    assert "elsewhere" not in sys.modules


@pytest.mark.collected_figures
def test_every_experiment_says_and_draws_what_its_own_runs_found(tmp_path: Path) -> None:
    make_run(tmp_path / "a", num_heads=2)
    with RunFolder(tmp_path / "b").recorded() as folder:
        folder.note(kind="run", experiment=target(Train()), identity={"run": "x", "task": "sort", "num_heads": 4})
        row = {f"{name}{end}": 0.5 for name in ("quality", "token_accuracy") for end in ("", "_low", "_high")}
        folder.write_table("accuracy", pd.DataFrame([row]))
        folder.write_table("pruning", pd.DataFrame({"steps": [1]}))
    lines = collect([tmp_path], tmp_path / "out")
    assert lines[0].startswith("experiment=ablate, num_heads=2: 9 of 24")
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["experiment"]) == ["ablate", "train"]
    assert lines[1].startswith("experiment=train, num_heads=4: 0.500 exact match")
    names = {path.stem for path in (tmp_path / "out").glob("*.csv")}
    assert names == {"runs", "ablate-pruning", "ablate-summary", "train-accuracy", "train-pruning"}
    assert (tmp_path / "out" / "figures" / "ablate-comparison.png").exists()


def test_equal_runs_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        make_run(tmp_path / name, num_heads=2)
    collect([tmp_path / "monday", tmp_path / "tuesday"], tmp_path / "out")
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["label"]) == ["monday", "tuesday"]
    for name in ("a", "b"):
        make_run(tmp_path / name / "0", num_heads=2)
    collect([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["label"]) == ["a/0", "b/0"]


def test_runs_are_told_apart_by_whatever_the_command_line_set(tmp_path: Path) -> None:
    """Also by a setting that ends like one of the model: task.seed beside seed."""
    for i, varied in enumerate(("training.weight_decay", "task.seed", "experiment.budgets")):
        for value in ("1", "2"):
            folder = tmp_path / str(i) / value
            make_run(folder, num_heads=2, seed=0)
            status = read_status(folder)
            shared = ["experiment=ablate", "model.num_heads=2", "cache=/somewhere", "seed=0"]
            status["overrides"] = [f"{varied}={value}", *shared]
            (folder / "status.json").write_text(json.dumps(status))
        collect([tmp_path / str(i)], tmp_path / f"out{i}")
        labels = list(pd.read_csv(tmp_path / f"out{i}" / "runs.csv")["label"])
        assert labels == [f"{varied}=1", f"{varied}=2"]


def test_a_run_is_not_overwritten_by_what_is_collected_from_it(tmp_path: Path) -> None:
    make_run(tmp_path / "a", num_heads=2)
    with pytest.raises(ValueError, match="out=.*: is the folder of a run, name one of its own"):
        collect([tmp_path / "a"], tmp_path / "a")
    assert (tmp_path / "a" / "pruning.csv").exists()


def test_only_failed_runs_still_give_a_report(tmp_path: Path) -> None:
    make_failed(tmp_path / "0", "no")
    [line] = collect([tmp_path], tmp_path / "out")
    assert "failed: ValueError: no" in line
    assert (tmp_path / "out" / "report.html").exists()


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder, name run folders"):
        collect([tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(ValueError, match="holds no run"):
        collect([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_script_does_the_same(tmp_path: Path) -> None:
    make_run(tmp_path / "a", num_heads=2)
    done = run_here(collect_main, str(tmp_path / "a"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "9 of 24 heads can go" in done.stdout
    refused = run_here(collect_main, str(tmp_path / "b"), "--out", str(tmp_path / "out"))
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: folder=")
    assert refused.stderr.count("\n") == 1
