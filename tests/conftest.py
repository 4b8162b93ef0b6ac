"""One tiny model, its data, and ways to run things small."""

import copy
import gc
import io
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import mhaprune.lab.runs.collecting
from mhaprune import progress
from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.runs import results
from mhaprune.lab.runs.run_folder import RunFolder, read_status
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.settings import plugins
from mhaprune.storage.locks import locked
from support import ROOT
from support.composing import run_of
from support.figures import Drawing, drawing
from support.fixtures import model, one_thread, splits, task

__all__ = ["model", "one_thread", "splits", "task"]

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start, which do little and would wait for each other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Large files first: one that came last would leave the other workers without work."""
    items.sort(key=lambda item: (-item.path.stat().st_size, item.path))


def pytest_collection_finish() -> None:
    """What the imports have made stays: no collection need look through it again. Figures make many objects, so that
    a collection after every 700 would take a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def figures_where_they_are_wanted() -> Iterator[None]:
    of_run, of_runs = results.figures_of, mhaprune.lab.runs.collecting.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "figures_of", lambda *given: of_run(*given) if Drawing.wanted else [])
        patch.setattr(
            mhaprune.lab.runs.collecting,
            "draw",
            lambda *given: of_runs(*given) if Drawing.wanted or Drawing.collected else iter(()),
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_installed() -> Iterator[None]:
    """The plug-ins of who runs the tests take no part in them, nor do those whose build has left files here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "installed", lambda: ())
        yield


@pytest.fixture(scope="session", autouse=True)
def every_yaml_is_parsed_once() -> Iterator[None]:
    """Hydra parses all files of conf/ anew for each of the hundreds of configs that the tests compose."""
    known: dict[Any, Any] = {}
    load = OmegaConf.load

    def parsed(file: Any) -> Any:
        if not isinstance(file, io.TextIOWrapper):
            return load(file)
        state = os.stat(file.fileno())
        key = (file.name, state.st_ino, state.st_size, state.st_mtime_ns)
        if key not in known:
            known[key] = load(file)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", parsed)
        yield


@pytest.fixture(autouse=True)
def figures_by_mark(request: pytest.FixtureRequest) -> Iterator[None]:
    marks = {"figures": "wanted", "collected_figures": "collected"}
    with drawing(**{name: mark in request.keywords or getattr(Drawing, name) for mark, name in marks.items()}):
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all modules share, those of the other workers too."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "shared"
    (folder / "cache").mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """The shared cache, in a folder of the module's own.

    It is for code as it is: a test that breaks something needs a cache of its own.
    """
    folder = tmp_path_factory.mktemp("module")
    (folder / "cache").symlink_to(shared / "cache")
    return folder / "cache"


class Seen(list[Any]):
    """The steps in progress. `names` has those that have been in the outermost one."""

    def append(self, step: Any) -> None:
        super().append(step)
        if len(self) == 2:
            self.names = dict.fromkeys([*getattr(self, "names", ()), step.what])


@pytest.fixture(scope="session")
def ran(shared: Path) -> Callable[[str], Path]:
    """The folder of an experiment's run, without figures. It is run once for the tests of all modules."""

    def folder(experiment: str) -> Path:
        path = shared / experiment
        with locked(path.with_suffix(".lock")):
            if read_status(path).get("status") != "done":
                with RunFolder(path).recorded() as recorded, pytest.MonkeyPatch.context() as patch:
                    recorded.note(kind="run")
                    patch.setattr(progress, "under_way", seen := Seen())
                    run_of(experiment, shared / "cache")(recorded)
                    recorded.note(steps=list(seen.names))
        return path

    return folder


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    """Where a shell starts the tests in its background, SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def batch(splits: Splits) -> Examples:
    return splits.report


@pytest.fixture
def bias_lost_with_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A classic: a block that loses its last head loses the bias of W_O too."""
    plain = Seq2Seq.without

    def faulty(self: Seq2Seq, mask: HeadMask, shared: bool = False) -> Seq2Seq:
        pruned = plain(self, mask)
        with torch.no_grad():
            for sublayer in pruned.attention_sublayers().values():
                if sublayer.attention.num_heads == 0:
                    sublayer.attention.out_proj.bias.zero_()
        return pruned

    monkeypatch.setattr(Seq2Seq, "without", faulty)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--renew", action="store_true", help="write the sentences of the experiments anew, to be read in the diff"
    )


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, Mapping[str, Iterable[str]]], None]:
    """Compare all sentences of an experiment, case by case, with its file in `tests/experiments/snapshots`."""

    def check(name: str, cases: Mapping[str, Iterable[str]]) -> None:
        path = ROOT / "tests" / "experiments" / "snapshots" / f"{name}.txt"
        text = "\n".join("\n".join([f"== {case}", *lines, ""]) for case, lines in cases.items())
        if request.config.getoption("--renew"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text, "if the new sentences are better: python -m pytest --renew, and read the diff"

    return check
