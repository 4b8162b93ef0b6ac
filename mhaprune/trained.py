"""A trained model with all that an experiment may do with it: trained, taken from the cache, or read from a file."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch

from mhaprune.cache import Cache, Make, Remember, data_digest, source_digests, weights_digest
from mhaprune.evaluation import nothing_learnt
from mhaprune.heads import HeadGrid
from mhaprune.model.checkpoint import BROUGHT, SavedModel, load, restore, to_bytes
from mhaprune.model.gates import GateConfig
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.recoveries.base import Recovery
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.store import describe, option_name
from mhaprune.tasks.base import Splits, Task
from mhaprune.timing import device_name
from mhaprune.training.loop import Training

log = logging.getLogger(__name__)

LARGE = (
    *("d_model", "num_heads", "head_dim", "num_encoder_layers", "num_decoder_layers", "dim_feedforward"),
    *("max_length", "train"),
)
"""The settings that decide how much memory a model and its examples take."""


class Save(Protocol):
    def __call__(self, one: Seq2Seq, steps: int = 0) -> bytes:
        """The content of a file from which `model_file` reads a model of this task back; `steps` were trained after the
        study's own."""
        ...


@dataclass(frozen=True)
class Study:
    """What an experiment is given. It exists so that no experiment knows where its model came from."""

    subject: Seq2Seq
    task: Task
    splits: Splits
    history: pd.DataFrame
    """The table that the training of the model left."""
    scorers: Mapping[str, Scorer]
    schedules: Mapping[str, Schedule]
    recoveries: Mapping[str, Recovery]
    training: Training
    steps_since: int
    """How many steps the model was trained after `training`, by recoveries."""
    seed: int
    remember: Remember
    """The cache of what was computed for this very model."""
    save: Save
    gate: GateConfig | None
    """What the gates of the model were made from."""
    retrain: Callable[[GateConfig], tuple[Seq2Seq, pd.DataFrame]]
    """Returns the model that the same training makes with another gate, and its history."""
    example: Sequence[str] | None = None
    """The symbols of a source that the user brought."""


@dataclass(frozen=True)
class Recipe:
    """All that decides which model is studied: how to train it, or the file that holds it. Nothing is computed yet."""

    task: Task
    model: Transformer
    training: Training
    gate: GateConfig | None
    seed: int
    device: str
    num_threads: int
    cache: str
    model_file: str | None = None

    @cached_property
    def saved(self) -> SavedModel | None:
        return None if self.model_file is None else load(self.model_file)

    @property
    def grid(self) -> HeadGrid:
        """The heads that the model will have."""
        full = HeadGrid.full(self.model.blocks, self.model.num_heads)
        return full if self.saved is None else HeadGrid(full.blocks, self.saved.heads)

    @property
    def trained_seed(self) -> int:
        """The seed of the training; for a model from a file not that of this run."""
        return self.seed if self.saved is None else int(self.saved.facts.get("seed", self.seed))

    def check_memory(self) -> None:
        """Raise ValueError for a model or examples that this machine cannot hold, by an estimate."""
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        model = self.model.bytes_to_train(len(self.task.vocabulary))
        for key, needed in (("model", model), ("task", self.task.bytes_of_examples())):
            if needed > have:
                given = {name: value for name, value in vars(getattr(self, key)).items() if name in LARGE and value}
                sizes = ", ".join(f"{name}={value}" for name, value in given.items())
                raise ValueError(
                    f"{key} with {sizes}: takes about {needed / 2**30:.3g} GiB, must be at most"
                    f" {have / 2**30:.3g} GiB, the memory of this machine"
                )

    def prepare(self) -> None:
        """Raise ValueError for examples that are too long for the model and for a cache that cannot be written."""
        assert len(self.splits.report)
        Cache(self.cache)

    def read_sources(self) -> None:
        """Digest the sources that decide the model now, before they may be edited."""
        source_digests(*self._modules, type(self).__module__, "mhaprune.model.transformer", "mhaprune.model.decoding")

    def study(
        self,
        scorers: Mapping[str, Scorer],
        schedules: Mapping[str, Schedule],
        recoveries: Mapping[str, Recovery],
        facts: Mapping[str, Any],
        example: Sequence[str] | None = None,
    ) -> Study:
        """The trained model, from the cache where it is there. `facts` go into the files of models that it saves."""
        torch.set_num_threads(self.num_threads)
        if self.device != "cpu":
            torch.cuda.set_device(self.device if ":" in self.device else "cuda:0")
        splits = self.splits
        for source, target in zip(splits.report.source[:2].tolist(), splits.report.target[:2].tolist(), strict=True):
            log.info("%s, for example: %s", option_name(self.task), self.task.show(source, target))
        model, history = self.trained(splits) if self.saved is None else self._loaded(self.saved)
        recipe = self._recipe(splits) | {"weights": weights_digest(model), "heads": list(map(str, model.grid))}

        def remember(kind: str, what: dict[str, Any], make: Make) -> dict[str, Any]:
            return Cache(self.cache).get(kind, recipe | what, make)

        steps_since = 0 if self.saved is None else self.saved.steps_since

        def save(one: Seq2Seq, steps: int = 0) -> bytes:
            settings = {name: describe(getattr(self, name)) for name in BROUGHT}
            if one.learned_gates() is None:
                settings["gate"] = None
            about = {**facts, "seed": self.trained_seed}
            return to_bytes(one, settings, history.to_dict("records"), about, steps_since + steps)

        return Study(
            subject=model,
            task=self.task,
            splits=splits,
            history=history,
            scorers=scorers,
            schedules=schedules,
            recoveries=recoveries,
            training=self.training,
            steps_since=steps_since,
            seed=self.seed,
            remember=remember,
            save=save,
            gate=self.gate,
            retrain=lambda gate: replace(self, gate=gate, seed=self.trained_seed).trained(splits),
            example=example,
        )

    @cached_property
    def splits(self) -> Splits:
        """The examples of the task, where the model computes."""
        splits = self.task.splits()
        longest = max(ids.shape[1] for _, examples in splits.items() for ids in (examples.source, examples.target))
        if longest > self.model.max_length:
            raise ValueError(
                f"model.max_length={self.model.max_length}: task {option_name(self.task)} has sequences of"
                f" {longest} tokens, so {longest} or more"
            )
        return Splits(**{name: examples.to(self.device) for name, examples in splits.items()})

    def untrained(self) -> Seq2Seq:
        """A model of the same heads and sizes with random weights: what it costs is known before it is trained."""
        with torch.random.fork_rng(devices=[]):
            return Seq2Seq(self.model, len(self.task.vocabulary), None, self.grid)

    def trained(self, splits: Splits) -> tuple[Seq2Seq, pd.DataFrame]:
        """The model that training ends in, and its history; the same recipe is trained once."""
        torch.manual_seed(self.seed)
        model = Seq2Seq(self.model, len(self.task.vocabulary), self.gate).to(self.device)

        def make(state: dict[str, Any] | None, save: Any) -> dict[str, Any]:
            history = self.training(model, splits.train, splits.valid, self.gate, self.seed, state, save)
            return {
                "model": model.state_dict(),
                "history": history.to_dict("records"),
                "environment": self.environment(),
            }

        content = Cache(self.cache).get("trained", self._recipe(splits), make)
        model.load_state_dict(content["model"])
        history = pd.DataFrame(content["history"])
        if warning := nothing_learnt(self.training, history, splits.valid):
            log.warning(warning)
        return model, history

    def environment(self) -> dict[str, Any]:
        """Where and by what the run is done."""
        packages = ("mhaprune", "torch", "hydra-core", "pandas", "numpy", "matplotlib")
        return {
            "command": shlex.join(["python", *sys.argv]),
            "git_commit": _git_commit(),
            "seed": self.seed,
            "num_threads": self.num_threads,
            "device": device_name(self.device),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        }

    def _loaded(self, saved: SavedModel) -> tuple[Seq2Seq, pd.DataFrame]:
        model = restore(saved, self.model, len(self.task.vocabulary), self.gate, self.device)
        return model, pd.DataFrame(saved.history)

    @property
    def _modules(self) -> list[str]:
        """The modules whose code, with what they import, decides what a training ends in."""
        modules = ["mhaprune.training.loop", "mhaprune.model.network"]
        return modules if self.gate is None else [*modules, type(self.gate).__module__]

    def _recipe(self, splits: Splits) -> dict[str, Any]:
        """All that decides which weights a training ends in: settings, code, data, and what computes them."""
        return {
            **{name: describe(getattr(self, name)) for name in ("model", "gate", "training", "seed")},
            "vocabulary_size": len(self.task.vocabulary),
            "data": [data_digest(splits.train), data_digest(splits.valid)],
            "sources": source_digests(*self._modules),
            "num_threads": self.num_threads,
            "device": torch.device(self.device).type,
            "torch": str(torch.__version__),
        }


def _git_commit() -> str | None:
    """The commit of the working copy that this package is imported from, with `+` where it has changes; None outside
    git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], stderr=subprocess.DEVNULL, text=True)
        changes = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changes else "")
