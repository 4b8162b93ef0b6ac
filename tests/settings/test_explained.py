"""`--cfg job`: every setting with a comment, from the dataclasses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mhaprune.front.command_line import main
from mhaprune.front.explained import about, about_fields, explained
from support import ROOT
from support.commands import run_here

TARGETS = sorted(
    {
        found
        for path in (ROOT / "conf").glob("*/*.yaml")
        for found in re.findall(r"_target_: (mhaprune\S+)", path.read_text())
    }
    | {"mhaprune.runs.run.Run", "mhaprune.settings.sweep.SweepSettings"}
)


def uncommented(text: str) -> list[str]:
    """The keys above which no comment stands."""
    lines = text.splitlines()
    keys = [(i, line.strip()) for i, line in enumerate(lines) if re.match(r"\s*\w+:", line)]
    return [key for i, key in keys if not key.startswith("_target_") and not lines[i - 1].lstrip().startswith("#")]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.removeprefix("mhaprune."))
def test_every_field_has_a_docstring(target: str) -> None:
    assert about(target)
    assert all(text and not text.startswith("Allowed:") for text in about_fields(target).values())


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=prune", "schedule=[greedy_refit,knapsack]", "recovery=[from_scratch,refit]", "task=inflection"],
        ["experiment=compare", "scorer=[shapley,hard_concrete,taylor_batch]", "gate=none"],
        ["model=hf", "experiment=speed"],
    ],
    ids=" ".join,
)
def test_every_key_has_a_comment_and_the_yaml_loads_to_the_same_values(overrides: list[str]) -> None:
    shown = run_here(main, *overrides, "--cfg", "job").stdout
    assert not uncommented(shown)
    bare = "".join(line for line in shown.splitlines(keepends=True) if not line.lstrip().startswith("#"))
    assert yaml.safe_load(shown) == yaml.safe_load(bare)
    assert max(map(len, shown.splitlines())) <= 120


def test_a_comment_says_meaning_and_range() -> None:
    shown = run_here(main, "--cfg", "job").stdout
    assert "  # Number of optimiser steps. Allowed: a whole number, 1 or more.\n  steps: 600\n" in shown


def test_a_part_of_the_settings_is_shown_too() -> None:
    shown = run_here(main, "--cfg", "job", "-p", "training").stdout
    assert shown.startswith("# @package training\n")
    assert not uncommented(shown)
    assert run_here(main, "--cfg", "job", "-p", "seed").stdout == "0\n"


def test_the_settings_of_one_run_are_shown() -> None:
    assert "--multirun, --cfg" in run_here(main, "-m", "seed=1,2", "--cfg", "job").stderr


def test_what_cannot_be_composed_is_refused_as_ever() -> None:
    assert "did you mean seed?" in run_here(main, "sped=1", "--cfg", "job").stderr


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package of the user's own, `my_tasks`."""
    (tmp_path / "my_tasks").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "my_tasks"


def test_a_plug_in_of_the_user_is_explained_with_what_it_inherits(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "sort.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Annotated\nfrom mhaprune.settings.ranges import Ge\n"
        "from mhaprune.tasks.sort import Sort\n"
        '@dataclass(frozen=True)\nclass Sort(Sort):\n    """Every symbol twice."""\n'
        '    times: Annotated[int, Ge(2)] = 2\n    """How often."""\n'
    )
    text = "task:\n  _target_: my_tasks.sort.Sort\n  times: 2\n  train: 5\n"
    assert "Every symbol twice" not in explained(text), "a package that was not named is not looked up"
    monkeypatch.setattr("mhaprune.settings.plugins._allowed", {"mhaprune", "my_tasks"})
    shown = explained(text)
    assert "Every symbol twice.\ntask:" in shown
    assert "  # How often. Allowed: a whole number, 2 or more.\n  times: 2\n" in shown
    assert re.search(r"  # .*examples.*\n  train: 5\n", shown), "it inherits this from a class of ours"


@pytest.mark.parametrize("text", ["", "0\n", "a: 1\n", "a:\n  _target_: nowhere.Thing\n  b: 1\n", "a: [1, {b: 2}]\n"])
def test_what_is_not_known_stays_as_it_is(text: str) -> None:
    assert explained(text) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"), [("training.", "training.steps="), ("seed=1 gate=no", "gate=none"), ("'", "")]
)
def test_a_line_is_completed_at_once_and_without_torch(line: str, offered: str) -> None:
    code = (
        "import sys, time\nfor name in ('torch', 'pandas', 'matplotlib'): sys.modules[name] = None\n"
        "from mhaprune.front.command_line import main\nend = main()\n"
        "print(time.process_time(), file=sys.stderr)\nsys.exit(end)"
    )
    env = {"COMP_LINE": f"python scripts/run.py {line}"}
    command = [sys.executable, "-c", code, "-sc", "query=bash"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert offered in done.stdout.split() if offered else not done.stdout.strip()
    assert float(done.stderr) < 2, "seconds, or an error, which a shell wants not"
