"""One tiny model, its data, and ways to run things small."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import pandas as pd
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch import Tensor
from torch.nn import functional as F

import mhaprune.sweeps.collecting
from mhaprune.data import Examples, shift_right
from mhaprune.experiments import results
from mhaprune.front.command_line import plain
from mhaprune.heads import HeadMask
from mhaprune.model.gates import Softmax
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.recoveries.base import RecoveryContext
from mhaprune.runs.config import build
from mhaprune.runs.run import Run
from mhaprune.schedules.base import Evidence
from mhaprune.storage.locks import locked
from mhaprune.storage.store import RunFolder, read_status
from mhaprune.subject import Fallback
from mhaprune.tasks.base import Splits
from mhaprune.tasks.sort import Sort
from mhaprune.training.loop import Training
from tiny import chosen, options, small

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mhaprune"
TINY = (
    "model.d_model=16",
    "model.num_heads=2",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "model.dim_feedforward=16",
    "training.steps=6",
    "training.batch_size=8",
    "training.warmup_steps=1",
    "training.evaluate_every=3",
    "training.checkpoint_every=2",
    "task.valid=16",
    "task.score=16",
    "task.choose=16",
    "task.report=16",
)
LEARNT = (
    *TINY,
    "task.train=400",
    "task.max_length=4",
    "task.num_symbols=6",
    "task.score=60",
    "task.choose=60",
    "task.report=60",
    "training.steps=150",
    "training.batch_size=32",
    "training.learning_rate=0.02",
    "training.warmup_steps=10",
    "training.weight_decay=0.1",
    "training.optimiser=adamw",
    "training.sorted_batches=1",
    "training.evaluate_every=100",
    "training.checkpoint_every=100",
)
"""A model of six heads that has learnt to sort short sequences, so that every budget costs it something else."""
PRUNE = (
    *("schedule=[one_shot,greedy]", "recovery=[refit,fine_tune,fine_tune_between,from_scratch]"),
    *("experiment.budgets=[1,3,4]", "experiment.latency_rounds=2", "experiment.latency_batch=4"),
    *("recovery.fine_tune.steps=30", "recovery.fine_tune_between.steps=20", "recovery.from_scratch.draws=2"),
)
TINY_SEQUENCES = tuple(small("task", "sort"))
TINY_ABLATE = tuple(small("experiment", "ablate"))
RUNS = {
    "explain": (*LEARNT, "example=3 1 2", "experiment.shown=2"),
    "prune": (*LEARNT, *PRUNE),
    "speed": (*TINY, *TINY_SEQUENCES, "scorer=[ablation,random]"),
}
"""The settings of an experiment's run that its own tests read too; the others are run tiny."""


LONG = (
    "test_every_experiment",
    "test_prune",
    "test_run",
    "test_trained",
    "test_compare_figures",
    "test_command_line",
    "test_checkpoint",
    "test_config",
    "test_explain",
    "test_speed",
    "test_learn_figures",
)
"""The files that take longest, in that order."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: one that came last would leave the other workers without work."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    """What the imports have made stays: no collection need look through it again. Figures make many objects, so that
    a collection after every 700 would take a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Drawing:
    """Figures are most of the time of a small run, so in the tests none are drawn but where they are `wanted`."""

    wanted = False
    """By runs, and in what is collected from them."""
    collected = False
    """In what is collected only."""


@contextmanager
def drawing(**wanted: bool) -> Iterator[None]:
    """For fixtures whose runs should draw; a test says it by its marks `figures` and `collected_figures`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (wanted or {"wanted": True}).items():
            patch.setattr(Drawing, name, value)
        yield


@pytest.fixture(scope="session", autouse=True)
def figures_where_they_are_wanted() -> Iterator[None]:
    of_run, of_runs = results.figures_of, mhaprune.sweeps.collecting.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "figures_of", lambda *given: of_run(*given) if Drawing.wanted else [])
        patch.setattr(
            mhaprune.sweeps.collecting,
            "draw",
            lambda *given: of_runs(*given) if Drawing.wanted or Drawing.collected else iter(()),
        )
        yield


@pytest.fixture(autouse=True)
def figures_by_mark(request: pytest.FixtureRequest) -> Iterator[None]:
    marks = {"figures": "wanted", "collected_figures": "collected"}
    with drawing(**{name: mark in request.keywords or getattr(Drawing, name) for mark, name in marks.items()}):
        yield


@pytest.fixture(scope="session")
def task() -> Sort:
    return Sort(train=200, valid=16, score=24, choose=16, report=16, num_symbols=5, max_length=6)


@pytest.fixture(scope="session")
def splits(task: Sort) -> Splits:
    return task.splits()


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


@pytest.fixture(scope="session")
def ran(shared: Path) -> Callable[[str], Path]:
    """The folder of an experiment's run, without figures. It is run once for the tests of all modules."""

    def folder(experiment: str) -> Path:
        path = shared / experiment
        with locked(path.with_suffix(".lock")):
            if read_status(path).get("status") != "done":
                with RunFolder(path).recorded() as recorded:
                    recorded.note(kind="run")
                    run_of(experiment, shared / "cache")(recorded)
        return path

    return folder


def run_of(experiment: str, cache: Path) -> Run:
    """The small run of an experiment that its tests share."""
    settings = RUNS.get(experiment, (*TINY, *TINY_SEQUENCES))
    return build(compose(*chosen("experiment", experiment), *settings, f"cache={cache}"))


def tables_in(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of a run as they are read back."""
    return {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}


@pytest.fixture
def model(task: Sort) -> Seq2Seq:
    return gated_model(task)


def gated_model(task: Sort) -> Seq2Seq:
    """Three sites of two layers, all of them with unequal learned gates; float64, so that equal means equal."""
    torch.manual_seed(0)
    config = Transformer(
        d_model=12, num_heads=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16, max_length=16
    )
    model = Seq2Seq(config, len(task.vocabulary), Softmax()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def lesson_of(dense: Seq2Seq, splits: Splits) -> RecoveryContext:
    """For a recovery that takes a few steps, and can be interrupted after each."""
    training = Training(steps=3, batch_size=8, warmup_steps=1, evaluate_every=2, checkpoint_every=1)
    return RecoveryContext(dense, training, splits, seed=0, extra_steps=2)


@pytest.fixture
def batch(splits: Splits) -> Examples:
    return splits.report


@pytest.fixture
def bias_lost_with_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A classic: a block that loses its last head loses the bias of W_O too."""
    plain = Seq2Seq.without

    def faulty(self: Seq2Seq, mask: HeadMask) -> Seq2Seq:
        pruned = plain(self, mask)
        with torch.no_grad():
            for sublayer in pruned.attention_sublayers().values():
                if sublayer.attention.num_heads == 0:
                    sublayer.attention.out_proj.bias.zero_()
        return pruned

    monkeypatch.setattr(Seq2Seq, "without", faulty)


def loss_of_one(
    model: Seq2Seq, source: Tensor, target: Tensor, gates: Tensor | None = None, fallback: Fallback | None = None
) -> Tensor:
    """The mean cross-entropy of one example without any padding."""
    source, target = source[source != 0][None], target[target != 0][None]
    return F.cross_entropy(model(source, shift_right(target), gates, fallback)[0], target[0])


def judged(model: Seq2Seq, scores_N: Tensor) -> Evidence:
    """For schedules that ask once: these scores."""

    def no_loss(masks: Sequence[HeadMask]) -> Tensor:
        raise AssertionError("no loss was to be measured")

    return Evidence(model, lambda left: scores_N, no_loss)


def compose(*overrides: str) -> dict[str, Any]:
    """The composed config in plain values, as `scripts/run.py` builds it.

    Hydra takes long. So it chooses the options only, once for each choice, and plain values are put in afterwards.
    Whatever does not fit in is left to Hydra, for its words about it.
    """
    options = tuple(override for override in overrides if not VALUE.match(override))
    config = copy.deepcopy(_composed(*options))
    for override in overrides:
        if override not in options and not _put(config, *_parsed(override)):
            return copy.deepcopy(_composed(*overrides))
    return config


VALUE = re.compile(r"(?!hydra)\w+\.[\w.]+=|(seed|device|num_threads|cache|model_file|example)=")
"""Overrides that set a value and choose no option."""


def _put(config: dict[str, Any], key: str, value: Any) -> bool:
    """Replace the value at a dotted key; False where there is none, or where Hydra would merge."""
    *parents, last = key.split(".")
    for parent in parents:
        config = config.get(parent) or {}
    fits = last in config and not isinstance(value, dict)
    if fits:
        config[last] = copy.deepcopy(value)
    return fits


@functools.cache
def _parsed(override: str) -> tuple[str, Any]:
    """The key and the value, in the grammar of Hydra."""
    parsed = OverridesParser.create().parse_override(override)
    return parsed.key_or_group, parsed.value()


@functools.cache
def _composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return plain(hydra.compose("config", overrides=list(overrides)))


@functools.cache
def every(group: str) -> dict[str, Any]:
    """All options of conf/scorer, conf/schedule, conf/recovery or conf/task by name, built from their YAMLs as `tiny`
    has them."""
    if group == "task":
        return {name: build(compose("experiment=train", *TINY, *chosen(group, name))).task for name in options(group)}
    experiment = "experiment=prune" if group == "recovery" else "experiment=train"
    found: dict[str, Any] = getattr(build(compose(experiment, *chosen(group, *options(group)))), group)
    return found


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_here(main: Callable[[Sequence[str]], int], *arguments: str) -> Done:
    """Call the `main` of a command in this process, which has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def run_script(name: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of `scripts/` as a user would."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | environment,
        timeout=280,
    )


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
