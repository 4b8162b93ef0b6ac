"""The hook for trackers: a function of a plug-in that gets the tables and figures of each run."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mhaprune.lab.cli.command_line import main
from mhaprune.settings import plugins
from support.commands import run_here
from support.sizes import slow

SMALL = ("experiment=train", "task=copy", "training.steps=4", "task.train=64", "task.score=16", "task.choose=16")
CODE = """
from pathlib import Path

def log(tables, figures):
    lines = [f"{name} {type(each).__name__}" for given in (tables, figures) for name, each in given.items()]
    Path("seen.txt").write_text("\\n".join(lines))

def broken(tables, figures):
    raise ConnectionError("no server\\nthere")

def leaves(tables, figures):
    raise SystemExit(3)

number = 3
"""


@pytest.fixture(autouse=True)
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("my_tracker", "my_tracker_too"):
        (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "_allowed", {"mhaprune"})
    yield
    sys.modules.pop("my_tracker", None)


def given(tmp_path: Path, cache: Path, *more: str) -> tuple[str, ...]:
    return *SMALL, f"cache={cache}", f"hydra.run.dir={tmp_path / 'run'}", *more


@pytest.mark.figures
def test_it_gets_the_tables_and_figures_of_a_run_that_is_complete(tmp_path: Path, cache: Path) -> None:
    done = run_here(main, *given(tmp_path, cache, "plugins=[my_tracker]", "on_results=my_tracker.log"))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "seen.txt").read_text().splitlines()
    files = [*(tmp_path / "run").rglob("*.csv"), *(tmp_path / "run").rglob("*.svg")]
    kinds = {".csv": "DataFrame", ".svg": "Figure"}
    assert {*lines} == {f"{path.stem} {kinds[path.suffix]}" for path in files}
    assert {path.suffix for path in files} == {*kinds}


@pytest.mark.parametrize(
    ("name", "error"), [("broken", "ConnectionError: no server there"), *slow(("leaves", "SystemExit: 3"))]
)
def test_an_error_of_it_is_said_and_loses_nothing(name: str, error: str, tmp_path: Path, cache: Path) -> None:
    done = run_here(main, *given(tmp_path, cache, "plugins=[my_tracker]", f"on_results=my_tracker.{name}"))
    assert done.returncode == 0
    said = f"on_results=my_tracker.{name}: failed ({error}); the results are complete"
    assert said in done.stdout + done.stderr
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.parametrize(
    "name", ["my_tracker_too.log", "my_tracker.number", "my_tracker.none", "os.getcwd", "log", "mhaprune.run"]
)
def test_what_it_may_name(name: str, tmp_path: Path, cache: Path) -> None:
    done = run_here(main, *given(tmp_path, cache, "plugins=[my_tracker]", f"on_results={name}"))
    assert done.returncode == 1
    assert f"on_results={name}: must be MODULE.FUNCTION of a package that plugins=[PACKAGE] names" in done.stderr
    assert not (tmp_path / "run").exists()
