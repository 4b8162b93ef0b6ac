"""What differs between runs comes first, and is what they are drawn against and named by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from test_collect import make_failed, make_run

from mhaprune.collecting.collect import collect
from mhaprune.collecting.overview import title_of
from mhaprune.collecting.parts import Part
from mhaprune.collecting.runs import FoundRun
from mhaprune.collecting.varying import numbers_of, settings_of, varying_first
from mhaprune.reporting.headline import Number
from mhaprune.reporting.plots import MOST_RUNS
from mhaprune.storage.store import read_status
from mhaprune.storage.sweeps import Job, Sweep, write


def part(value: float = 1.0, **settings: str) -> Part:
    label = ", ".join(settings.values())
    return Part(FoundRun(Path(), {}), label, settings=settings, headline=[Number("x", value)])


def test_the_settings_that_vary_are_found_without_the_seed() -> None:
    parts = [
        part(task=task, width=width, heads=heads, seed=seed, gate="none")
        for task in ("sort", "copy")
        for width, heads in (("64", "4"), ("16", "1"), ("32", "2"))
        for seed in "01"
    ]
    found = settings_of(parts)
    assert [(each.name, each.values) for each in found] == [
        ("width", ("16", "32", "64")),  # heads always change with it
        ("task", ("sort", "copy")),
    ]
    assert not settings_of(parts[:2])


def test_a_setting_that_some_runs_do_not_have_is_a_value_of_its_own() -> None:
    parts = [part(2.0, task="sort"), part(3.0, task="sort", width="8")]
    [width] = settings_of(parts)
    assert width.values == ("not set", "8")
    numbers = numbers_of(parts, [width])
    assert list(numbers["value"]) == [2.0, 3.0]
    assert list(numbers["width"]) == ["not set", "8"]


def test_the_title_names_tasks_settings_and_seeds() -> None:
    parts = [part(task=task, width="8", seed=seed) for task in ("sort", "copy", "reverse") for seed in "01"]
    assert title_of(parts, ["task", "seed"]) == "Runs on sort, copy and reverse, 2 seeds"
    assert title_of(parts[:2], ["width", "d_model"]) == "Runs on sort, by width and d_model, 2 seeds"
    assert title_of(parts[:1], []) == "Runs on sort"
    assert title_of([replace(parts[0], why_not="failed")], ["width"]) == "Runs on no task, by width"


def test_columns_that_never_vary_come_last() -> None:
    frame = pd.DataFrame({"task": "sort", "x": [1, 2], "nothing": np.nan, "label": "a", "half": [np.nan, 1], "y": "b"})
    assert list(varying_first(frame)) == ["label", "x", "half", "task", "nothing", "y"]
    pd.testing.assert_frame_equal(varying_first(frame)[list(frame)], frame)


def status_with(path: Path, **facts: Any) -> None:
    (path / "status.json").write_text(json.dumps(read_status(path) | facts))


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """A sweep over heads and seeds, one of whose jobs has failed."""
    root = tmp_path / "sweep"
    names = [f"{heads}-{seed}" for heads in (2, 4) for seed in (0, 1)]
    for name in names:
        heads, seed = map(int, name.split("-"))
        make_run(root / name, num_heads=heads, seed=seed, d_model=64)
        status_with(root / name, trained_with={"num_threads": heads, "torch": "2.8.0"}, seconds=1.5)
    make_failed(root / "3-0", "model.num_heads=3: must divide")
    jobs = [Job(name, name, [f"model.num_heads={name[0]}"]) for name in [*names, "3-0"]]
    write(root, Sweep(["model.num_heads", "seed"], "x", 1, "python scripts/run.py -m model.num_heads=2,3,4", jobs))
    return root


def test_the_table_of_runs_has_settings_numbers_and_what_trained_the_models(swept: Path) -> None:
    collect([swept], swept)
    runs = pd.read_csv(swept / "runs.csv")
    assert list(runs)[:3] == ["label", "num_heads", "seed"]
    assert list(runs.loc[:3, "heads that can go"]) == [9, 9, 9, 9]
    assert list(runs.loc[:3, "trained with num_threads"]) == [2, 2, 4, 4]
    varies = [name for name in runs if runs[name].nunique(dropna=False) > 1]
    assert list(runs) == varies + [name for name in runs if name not in varies]
    pruning = pd.read_csv(swept / "pruning.csv")
    assert list(pruning)[:2] == ["label", "setting"]
    assert set(list(pruning)[-2:]) <= {"task", "run", "heads_total"}


def test_title_command_and_what_is_shared_are_on_both_pages(swept: Path) -> None:
    collect([swept], swept)
    report, index = ((swept / name).read_text() for name in ("report.html", "index.html"))
    for page in (report, index):
        assert "<h1>ablate on sort, by num_heads, 2 seeds</h1>" in page
        assert "<code>python scripts/run.py -m model.num_heads=2,3,4</code>" in page
        assert "collect.py" not in page
    shared = index[index.index("The same in all runs") :]
    assert "<dt>trained with torch</dt><dd><code>2.8.0</code>" in shared
    assert "<dt>d_model</dt><dd><code>64</code>" in shared
    assert "trained with num_threads" not in shared
    assert "<button>trained with num_threads</button>" in index
    heads = [name.removesuffix("</button>") for name in index.split("<button>")[1:]]
    heads = [name.partition("<")[0] for name in heads]
    assert heads.index("found") < heads.index("heads that can go"), "it never varies here"
    out = swept.parent / "out"
    collect([swept], out)
    elsewhere = (out / "report.html").read_text()
    assert "<code>python scripts/run.py -m model.num_heads=2,3,4</code>" in elsewhere
    assert f"--out {out}</code>" in elsewhere


@pytest.mark.collected_figures
def test_what_is_first_in_the_report_is_what_the_sweep_is_for(swept: Path) -> None:
    lines = collect([swept], swept)
    assert lines[0] == "Heads that can go: 9 in both runs with num_heads=2; 9 in both runs with num_heads=4."
    report = (swept / "report.html").read_text()
    assert report.index("against num_heads: a small mark per run") < report.index("share of heads removed")
    assert {path.stem for path in (swept / "figures").glob("*.png")} == {"headline", "comparison"}


def test_many_runs_are_said_one_by_one_in_the_index_only(tmp_path: Path) -> None:
    for seed in range(MOST_RUNS + 1):
        make_run(tmp_path / str(seed), num_heads=2, seed=seed)
    lines = collect([tmp_path], tmp_path / "out")
    assert len(lines) == 5, "three numbers, what their intervals are, and where the rest is"
    assert lines[-1] == f"What each of {MOST_RUNS + 1} runs found is in index.html."
    assert (tmp_path / "out" / "index.html").read_text().count("9 of 24 heads can go") == MOST_RUNS + 1
