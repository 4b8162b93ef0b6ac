"""Many runs are combined, named by what differs between them, and compared by their first numbers."""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.experiments.train import Train
from mhaprune.lab.reporting.figure_settings import FigureSettings
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.sentences import if_poor
from mhaprune.lab.runs.collecting import collect, numbers_of, settings_of
from mhaprune.lab.runs.run_folder import RunFolder, read_status
from mhaprune.lab.runs.run_reader import FoundRun
from mhaprune.settings.options import target
from mhaprune.storage.seals import checksum
from support.made_tables import pruning_table, summary

FOUND = {"findings": ["9 of 24 heads can go."], "head_map": {"title": "its map", "rows": ["10", " 1"]}}
"""What a run says of itself."""


def make_run(path: Path, **identity: Any) -> None:
    with RunFolder(path).recorded() as folder:
        identity = {"run": "abc", "task": "sort", **identity}
        folder.note(kind="run", experiment=target(Ablate()), identity=identity, **FOUND)
        folder.write_table("pruning", pruning_table().assign(run="abc"))
        folder.write_table("summary", summary().assign(tolerance=0.01))


def change_status(run: Path, **fields: Any) -> None:
    (run / "status.json").write_text(json.dumps(read_status(run) | fields))


def sealed_again(run: Path, name: str, data: bytes) -> None:
    """As one does who changes a table on purpose."""
    (run / name).write_bytes(data)
    change_status(run, files=read_status(run)["files"] | {name: checksum(data)})


def change_summary(run: Path, **columns: float) -> None:
    frame = pd.read_csv(run / "summary.csv").assign(**columns)
    sealed_again(run, "summary.csv", frame.to_csv(index=False).encode())


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
    assert list(pd.read_csv(tmp_path / "sweep" / "means.csv")["num_heads"].unique()) == [2, 4, 8]
    assert (tmp_path / "sweep" / "means.tex").read_text().count(r" & 9 & 99.3 & ") == 3
    assert len(table) == 3 * len(pruning_table())
    assert (table["run"] == "abc").all()
    assert any(line.startswith("num_heads=8: 9 of 24 heads can go") for line in lines)
    drawn = {path.name for path in (tmp_path / "sweep" / "figures").iterdir()}
    assert drawn == {"headline.png", "headline.svg"}
    assert "num_heads=4" in (tmp_path / "sweep" / "report.html").read_text()
    collect([tmp_path / "sweep"], tmp_path / "out", FigureSettings(format=("pdf",)))
    assert {path.suffix for path in (tmp_path / "out" / "figures").iterdir()} == {".pdf"}
    again = collect([tmp_path / "sweep"], tmp_path / "sweep")  # its own output is not taken for a run
    assert again == lines


HEADS_AND_SEEDS = [(heads, seed) for heads in (2, 4) for seed in (0, 1)]


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (
            {f"{heads}-{seed}": {"num_heads": heads, "seed": seed} for heads, seed in HEADS_AND_SEEDS},
            [(f"num_heads={heads}, seed={seed}", f"num_heads={heads}") for heads, seed in HEADS_AND_SEEDS],
        ),
        ({"monday": {"num_heads": 2}, "tuesday": {"num_heads": 2}}, [("monday", ""), ("tuesday", "")]),
        ({"a/0": {"num_heads": 2}, "b/0": {"num_heads": 2}}, [("a/0", ""), ("b/0", "")]),
        # Names of columns that a table has anyway take the place of none.
        ({"0": {"seed": 0, "label": "x", "setting": "y"}, "1": {"seed": 1}}, [("seed=0", ""), ("seed=1", "")]),
    ],
)
def test_runs_are_told_apart_by_settings_and_where_these_are_equal_by_folders(
    runs: dict[str, dict[str, int]], names: list[tuple[str, str]], tmp_path: Path
) -> None:
    """A setting is what runs share that differ in their seed: it holds neither the seed nor the folder."""
    for place, identity in runs.items():
        make_run(tmp_path / "runs" / place, **identity)
    collect([tmp_path / "runs"], tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "pruning.csv", keep_default_na=False)
    assert list(table[["label", "setting"]].drop_duplicates().itertuples(index=False, name=None)) == names


@pytest.mark.parametrize("varied", ["training.weight_decay", "task.seed", "experiment.budgets"])
def test_runs_are_told_apart_by_whatever_the_command_line_set(varied: str, tmp_path: Path) -> None:
    """Also by a setting that ends like one of the model: task.seed beside seed."""
    for value in ("1", "2"):
        make_run(tmp_path / "runs" / value, num_heads=2, seed=0)
        shared = ["experiment=ablate", "model.num_heads=2", "cache=/somewhere", "seed=0"]
        change_status(tmp_path / "runs" / value, overrides=[f"{varied}={value}", *shared])
    collect([tmp_path / "runs"], tmp_path / "out")
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["label"]) == [f"{varied}=1", f"{varied}=2"]


def test_an_index_lists_every_run(tmp_path: Path) -> None:
    """With a link to its report, the settings that vary, and its first numbers."""
    make_run(tmp_path / "runs" / "a b", num_heads=2)
    (tmp_path / "runs" / "a b" / "report.html").write_text("here")
    make_failed(tmp_path / "runs" / "1", "model.num_heads=3: must divide")
    collect([tmp_path / "runs"], tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<title>ablate on sort, by num_heads</title>" in page
    assert '<a href="../runs/a%20b/report.html">num_heads=2</a>' in page
    assert page.count("<title>its map</title>") == 1
    for cell in (
        "<td>2</td>",
        ">9</td>",
        ">0.993</td>",
        ">1.21</td>",
        ">heads that can be removed<",
        ">times as fast<",
    ):
        assert cell in page
    assert "<td>num_heads=3</td><td></td><td>failed</td>" in page


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
        if experiment is not None:
            change_status(tmp_path / name, experiment=experiment)
    change_status(tmp_path / "new", experiment="mhaprune.lab.experiments.ablate.study.Ablate")  # its module was renamed
    old = read_status(tmp_path / "old")
    (tmp_path / "old" / "status.json").write_text(json.dumps({key: old[key] for key in old if key != "experiment"}))
    lines = collect([tmp_path], tmp_path / "out")
    alone, compared, *left_out = lines
    assert alone == "No figure compares runs of ablate: there is one."
    assert sorted(line.split(" is not in here, ")[1].split(" (")[0].rstrip(".") for line in left_out) == [
        "of an experiment that is not installed, elsewhere.study.Study",
        "of an experiment that is not installed, mhaprune.nowhere.Study",
        "too old: its status names no experiment, run it again",
    ]
    assert compared.startswith("experiment=ablate, num_heads=2: 9 of 24 heads can go")
    assert "elsewhere" not in sys.modules


@pytest.mark.collected_figures
def test_every_experiment_says_and_draws_what_its_own_runs_found(tmp_path: Path) -> None:
    make_run(tmp_path / "a", num_heads=2, seed=0)
    make_run(tmp_path / "c", num_heads=2, seed=1)
    with RunFolder(tmp_path / "b").recorded() as folder:
        identity = {"run": "x", "task": "sort", "num_heads": 4, "seed": 0}
        folder.note(kind="run", experiment=target(Train()), identity=identity, findings=["0.500 exact match"])
        row = {f"{name}{end}": 0.5 for name in ("quality", "token_accuracy") for end in ("", "_low", "_high")}
        folder.write_table("accuracy", pd.DataFrame([row]))
        folder.write_table("pruning", pd.DataFrame({"steps": [1]}))
    lines = collect([tmp_path], tmp_path / "out")
    assert lines[0] == "3 runs of 2 experiments; each is compared with those of its kind."
    assert (lines[1], lines[2]) == ("ablate, 2 runs:", "Heads that can be removed: 9 each.")
    runs = [line.partition(":")[0] for line in lines if line.startswith("experiment=")]
    assert runs == [
        f"experiment={run}"
        for run in ("ablate, num_heads=2, seed=0", "ablate, num_heads=2, seed=1", "train, num_heads=4, seed=0")
    ]
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["experiment"]) == ["ablate", "train", "ablate"]
    assert lines[-1].endswith(": 0.500 exact match")
    assert lines[-2] == "No figure compares runs of train: there is one."
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.index("ablate, 2 runs:") < page.index("<summary>3 of the runs, each") < page.index("9 of 24")
    names = {path.stem for path in (tmp_path / "out").glob("*.csv")}
    means = {"ablate-means", "train-means"}
    assert names == means | {"runs", "ablate-pruning", "ablate-summary", "train-accuracy", "train-pruning"}
    assert (tmp_path / "out" / "figures" / "ablate-headline.png").exists()


def test_what_cannot_be_collected_is_refused(tmp_path: Path) -> None:
    make_failed(tmp_path / "a", "no")
    with pytest.raises(ValueError, match="out=.*: is the folder of a run, name one of its own"):
        collect([tmp_path / "a"], tmp_path / "a")
    with pytest.raises(ValueError, match="no such folder, name run folders"):
        collect([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no run"):
        collect([tmp_path / "empty"], tmp_path / "out")
    assert (tmp_path / "a" / "pruning.csv").exists()
    assert not (tmp_path / "out").exists()
    [line] = collect([tmp_path / "a"], tmp_path / "out")
    assert "failed: ValueError: no" in line
    assert (tmp_path / "out" / "report.html").exists(), "also of failed runs only"


def test_a_page_without_a_figure_says_why(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "0", num_heads=2, seed=0)
    assert collect([tmp_path / "runs"], tmp_path / "out")[0] == "No figure compares runs of ablate: there is one."
    assert "No figure compares runs of ablate" in (tmp_path / "out" / "report.html").read_text()


def test_runs_of_one_model_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run done again, or a copy of its folder, is no further model: it has no interval. Only its times are new."""
    compared: list[pd.DataFrame] = []
    monkeypatch.setattr(Ablate, "say_in_common", staticmethod(lambda tables: compared.append(tables["pruning"]) or ()))
    for name, seed in (("a", 0), ("b", 0), ("c", 0)):
        make_run(tmp_path / "runs" / name, num_heads=2, seed=seed)
    change_summary(tmp_path / "runs" / "c", speedup=1.51)
    lines = collect([tmp_path / "runs"], tmp_path / "out")
    assert lines[0] == "The 3 runs have 1 model: runs with equal settings and seed count as one."
    assert not any("new run" in line for line in lines)
    for seed in (1, 2):
        make_run(tmp_path / "runs" / str(seed), num_heads=2, seed=seed)
    said = collect([tmp_path / "runs"], tmp_path / "out")
    assert [line for line in said if "means over 3 runs" in line] == said[:3], "three seeds"
    assert said[2].startswith(f"Times as fast: {(1.31 + 1.21 + 1.21) / 3:.2f} ("), "the mean of its times, once"
    assert "The 5 runs have 3 models" in said[4]
    assert len(pd.read_csv(tmp_path / "out" / "runs.csv")) == 5, "the table has them all"
    assert [frame["label"].nunique() for frame in compared] == [1, 3]


@pytest.mark.parametrize("poor", [0, 1, 2])
def test_a_sweep_warns_of_the_poor_models_in_it(poor: int, tmp_path: Path) -> None:
    training = pd.DataFrame({"step": [1], "valid_quality": [0.5]})
    for seed in range(3):
        make_run(tmp_path / "runs" / str(seed), num_heads=2, seed=seed)
        if seed < poor:
            findings = [*FOUND["findings"], *if_poor({"training": training})]
            change_status(tmp_path / "runs" / str(seed), findings=findings)
    lines = collect([tmp_path / "runs"], tmp_path / "out")
    warned = [line for line in lines if "poor" in line]
    assert len(warned) == bool(poor)
    assert all(f"in {poor} of 3 runs" in line for line in warned)
    index = (tmp_path / "out" / "index.html").read_text()
    assert index.count("<td>done, poor model</td>") == poor
    assert f"{poor} done, poor model" in index or not poor


def test_a_size_that_was_not_tried_is_no_zero_of_a_mean(tmp_path: Path) -> None:
    """Two models lose 9 heads; of the third no size that was tried can go, which may be any number below it."""
    for seed in range(3):
        make_run(tmp_path / "runs" / str(seed), num_heads=2, seed=seed)
    change_summary(tmp_path / "runs" / "2", heads_removed=0)
    lines = collect([tmp_path / "runs"], tmp_path / "out")
    assert lines[0] == "Heads that can be removed: not compared, 1 of 3 runs have no such number."
    means = [line.partition(":")[0] for line in lines if "means over 3 runs" in line]
    assert means == ["Exact match", "Times as fast"], "the third keeps its heads, and is as good and as fast as it is"
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["heads that can be removed"].isna()) == [False, False, True]


def found(value: float = 1.0, **settings: str) -> FoundRun:
    status = {"status": "done", "experiment": target(Ablate())}
    label = ", ".join(settings.values())
    return FoundRun(Path(), status, label=label, settings=settings, headline=[Number("x", value)])


def test_the_settings_that_vary_are_found_without_the_seed() -> None:
    runs = [
        found(task=task, width=width, heads=heads, seed=seed, gate="none")
        for task in ("sort", "copy")
        for width, heads in (("64", "4"), ("16", "1"), ("32", "2"))
        for seed in "01"
    ]
    assert [(each.name, each.values) for each in settings_of(runs)] == [
        ("width", ("16", "32", "64")),  # heads always change with it
        ("task", ("sort", "copy")),
    ]
    assert not settings_of(runs[:2])


def test_a_setting_that_some_runs_do_not_have_is_a_value_of_its_own() -> None:
    runs = [found(2.0, task="sort"), found(3.0, task="sort", width="8")]
    [width] = settings_of(runs)
    assert width.values == ("not set", "8")
    assert numbers_of(runs, [width])[["value", "width"]].to_numpy().tolist() == [[2.0, "not set"], [3.0, "8"]]


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """A sweep over heads and seeds, one of whose jobs has failed."""
    root = tmp_path / "sweep"
    names = [f"{heads}-{seed}" for heads in (2, 4) for seed in (0, 1)]
    for name in names:
        heads, seed = map(int, name.split("-"))
        make_run(root / name, num_heads=heads, seed=seed, d_model=64)
        change_status(root / name, trained_with={"num_threads": heads, "torch": "2.8.0"}, seconds=1.5)
    make_failed(root / "3-0", "model.num_heads=3: must divide")
    return root


def test_the_table_of_runs_has_settings_numbers_and_what_trained_the_models(swept: Path) -> None:
    collect([swept], swept)
    runs = pd.read_csv(swept / "runs.csv")
    assert list(runs)[:3] == ["label", "num_heads", "seed"]
    done = runs[runs["state"] == "done"]
    assert list(done["heads that can be removed"]) == [9, 9, 9, 9]
    assert list(done["trained with num_threads"]) == [2, 2, 4, 4]
    varies = [name for name in runs if runs[name].nunique(dropna=False) > 1]
    assert list(runs) == varies + [name for name in runs if name not in varies]
    pruning = pd.read_csv(swept / "pruning.csv")
    assert list(pruning)[:2] == ["label", "setting"]
    assert set(list(pruning)[-2:]) <= {"task", "run", "heads_total"}


def test_title_command_and_what_is_shared_are_on_both_pages(swept: Path) -> None:
    collect([swept], swept, command="python scripts/run.py -m model.num_heads=2,3,4")
    report, index = ((swept / name).read_text() for name in ("report.html", "index.html"))
    for page in (report, index):
        assert "<h1>ablate on sort, by num_heads, 2 seeds</h1>" in page
        assert "<code>python scripts/run.py -m model.num_heads=2,3,4</code>" in page
        assert "collect.py" not in page
    shared = index[index.index("The same in all runs") :]
    assert "<dt>trained with torch</dt><dd><code>2.8.0</code>" in shared
    assert "<dt>d_model</dt><dd><code>64</code>" in shared
    assert "trained with num_threads" not in shared
    out = swept.parent / "out"
    collect([swept], out)
    assert f"--out {out}</code>" in (out / "report.html").read_text()


def test_many_runs_are_said_one_by_one_in_the_index_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhaprune.lab.runs.collecting.MOST_RUNS", 3)
    for seed in range(4):
        make_run(tmp_path / str(seed), num_heads=2, seed=seed)
    lines = collect([tmp_path], tmp_path / "out")
    assert len(lines) == 5, "three numbers, what their intervals are, and where the rest is"
    assert lines[-1] == "What each of 4 runs found is in index.html."
    assert (tmp_path / "out" / "index.html").read_text().count("9 of 24 heads can go") == 4
