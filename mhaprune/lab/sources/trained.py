"""The study of a model of mhaprune: the model is trained, taken from the cache, or read from a file."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import torch

from mhaprune.attention.gates import GateConfig
from mhaprune.data import Splits
from mhaprune.heads import HeadGrid
from mhaprune.inputs import Study
from mhaprune.lab.model.checkpoint import SavedModel, load, restore, to_bytes
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.training import Training
from mhaprune.lab.sources.source import ModelSource
from mhaprune.lab.tasks.base import Task
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.recoveries.base import Recovery
from mhaprune.scorers.base import Scorer
from mhaprune.settings import options
from mhaprune.settings.options import describe, option_name
from mhaprune.settings.refusals import BROUGHT, foreign
from mhaprune.storage.cache import Cache, code_digests, data_digest, weights_digest
from mhaprune.tables import UNITS

log = logging.getLogger(__name__)

TRAINED_WITH = "trained_with"
"""The key, in a model's file, of the threads, the device and the version of torch that it was trained with."""
LARGE = (
    *("d_model", "num_heads", "head_dim", "num_encoder_layers", "num_decoder_layers", "dim_feedforward"),
    *("max_length", "train"),
)
"""Settings on which the memory of a model and its examples depends. The error message of `check` names them."""

COMPUTES = ("mhaprune.lab.model.training", "mhaprune.lab.model.seq2seq")
"""The modules that decide, with what they import, the weights after training. A change of their code means a new
training."""


@dataclass(frozen=True, kw_only=True)
class TrainedSource(ModelSource):
    """All settings that decide the model: how to train it, or the file to load it from. Nothing is computed yet."""

    task: Task
    model: Transformer
    training: Training
    gate: GateConfig | None
    model_file: str | None = None
    example: Sequence[str] | None = None
    """The symbols of the user's own source sequence; None without one."""
    shift: Sequence[str] | None = None
    """The names of the task's shifts to measure on; None for all."""

    @cached_property
    def saved(self) -> SavedModel | None:
        return None if self.model_file is None else load(self.model_file)

    @property
    def name(self) -> str:
        return option_name(self.task)

    @property
    def identity(self) -> dict[str, Any]:
        shape = ("d_model", "num_heads", "num_encoder_layers", "num_decoder_layers", "dim_feedforward")
        sizes = {name: getattr(self.model, name) for name in shape}
        return {"task": self.name, "gate": option_name(self.gate), "seed": self.seed, **sizes}

    @property
    def decisive(self) -> dict[str, Any]:
        return {"cache": None, "model_file": self.saved and self.saved.digest, "torch": str(torch.__version__)}

    @property
    def facts(self) -> dict[str, Any]:
        return {"vocabulary": " ".join(self.task.vocabulary.symbols)}

    @property
    def grid(self) -> HeadGrid:
        """The heads that the model will have."""
        full = self.model.grid
        return full if self.saved is None else HeadGrid(full.blocks, self.saved.heads)

    @property
    def trained_seed(self) -> int:
        """The seed of the training; a model from a file has its own."""
        return self.seed if self.saved is None else int(self.saved.facts.get("seed", self.seed))

    @property
    def by_toy_recipe(self) -> bool:
        """True if a task from outside of mhaprune is trained by the recipe of its toy tasks."""
        return type(self.task).__module__.partition(".")[0] != "mhaprune" and self.training == Training()

    def usable(self, scorers: Mapping[str, Scorer], recoveries: Mapping[str, Recovery]) -> tuple[Any, Any]:
        """Return all scorers and recoveries of the settings: none is left out."""
        return scorers, recoveries

    def check(self) -> None:
        """Raise ValueError for a model or examples that need more than this machine's memory, by an estimate, and for a
        shift that the task does not have."""
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
        if self.shift is not None:
            self.shifts()

    def study(self, facts: Mapping[str, Any]) -> Study:
        """Return the study of the trained model. The model comes from the cache if it was trained before."""
        torch.set_num_threads(self.num_threads)
        if self.device != "cpu":
            torch.cuda.set_device(self.device if ":" in self.device else "cuda:0")
        splits = self.splits
        for source, target in zip(splits.report.source[:2].tolist(), splits.report.target[:2].tolist(), strict=True):
            log.info("%s, for example: %s", option_name(self.task), self.task.show(source, target))
        if (saved := self.saved) is None:
            if self.by_toy_recipe:
                log.warning(
                    "task=%s: is trained by the recipe of the toy tasks (training=default), which may not suit it;"
                    " docs/extend.md says how a task brings its own",
                    self.name,
                )
            network, history, with_what = self.trained(splits)
        else:
            network = restore(saved, self.model, len(self.task.vocabulary), self.gate, self.device)
            history, with_what = pd.DataFrame(saved.history), saved.facts.get(TRAINED_WITH, {})
        key = self._key(splits) | {"weights": weights_digest(network), "heads": list(map(str, network.grid))}

        steps_since = 0 if saved is None else saved.steps_since

        def save(model: Seq2Seq, steps: int = 0) -> bytes:
            settings = {name: describe(getattr(self, name)) for name in BROUGHT}
            if model.learned_gates() is None:
                settings["gate"] = None
            about = {**facts, "seed": self.trained_seed, TRAINED_WITH: with_what}
            return to_bytes(model, settings, history.to_dict("records"), about, steps_since + steps)

        return Study(
            subject=network,
            whole_grid=self.model.grid,
            splits=splits,
            training=self.training,
            extra_steps=steps_since,
            seed=self.seed,
            remember=Cache(self.cache).about(key),
            saved=lambda name, model, steps=0: {f"{name}.pt": save(model, steps)},
            history=history,
            trained_with=with_what,
            task=self.task,
            example=self.example,
            words={} if network.counted == "heads" else {UNITS: network.counted},
        )

    @cached_property
    def splits(self) -> Splits[Examples]:
        """The examples of the task, on the device of the model."""
        splits = self.task.splits()
        longest = max(ids.shape[1] for _, examples in splits.items() for ids in (examples.source, examples.target))
        if longest > self.model.max_length:
            raise ValueError(
                f"model.max_length={self.model.max_length}: task {option_name(self.task)} has sequences of"
                f" {longest} tokens, so {longest} or more"
            )
        whole = dict(splits.items()) | self.shifts()
        return Splits(**{name: examples.to(self.device) for name, examples in whole.items()})

    def shifts(self) -> dict[str, Examples]:
        """Return the shifts of the task that `shift` names; by default all that the model can read. Raises ValueError
        for a name that the task does not have, and for sequences that are too long for the model."""
        had = self.task.shifts()
        if unknown := [name for name in self.shift or () if name not in had]:
            allowed = ", ".join(had) or "none at all"
            raise ValueError(f"shift=[{', '.join(unknown)}]: task {option_name(self.task)} has {allowed}")
        found = dict[str, Examples]()
        for name in had if self.shift is None else self.shift:
            longest = max(had[name].source.shape[1], had[name].target.shape[1])
            if longest <= self.model.max_length:
                found[name] = had[name]
            elif self.shift is not None:
                raise ValueError(
                    f"shift=[{name}]: has sequences of {longest} tokens, model.max_length={longest} allows it"
                )
        return found

    def trained(self, splits: Splits[Examples]) -> tuple[Seq2Seq, pd.DataFrame, dict[str, Any]]:
        """Return the model after training, its history, and its environment. Equal settings are trained only once."""
        torch.manual_seed(self.trained_seed)  # before the weights are drawn
        model = Seq2Seq(self.model, len(self.task.vocabulary), self.gate).to(self.device)

        def make(state: dict[str, Any] | None, save: Any) -> dict[str, Any]:
            history = self.training(model, splits.train, splits.valid, self.gate, self.seed, state, save)
            return {
                "model": model.state_dict(),
                "history": history.to_dict("records"),
                "environment": self.environment(),
            }

        content = Cache(self.cache).get("trained", self._key(splits), make)
        model.load_state_dict(content["model"])
        made = content["environment"]
        with_what = {"num_threads": made["num_threads"], "device": made["device"], "torch": made["versions"]["torch"]}
        return model, pd.DataFrame(content["history"]), with_what

    def _key(self, splits: Splits[Examples]) -> dict[str, Any]:
        """Return everything that decides the weights after training: settings, code, data, device, torch."""
        settings = {name: describe(getattr(self, name)) for name in ("model", "gate", "training", "seed")}
        settings["model"].pop("units")  # which training does not read
        return {
            **settings,
            "vocabulary_size": len(self.task.vocabulary),
            "data": [data_digest(splits.train), data_digest(splits.valid)],
            "sources": code_digests(*COMPUTES, *([] if self.gate is None else [type(self.gate).__module__])),
            "num_threads": self.num_threads,
            "device": torch.device(self.device).type,
            "torch": str(torch.__version__),
        }


BUILT_FROM = {"task": Task, "model": Transformer, "gate": GateConfig | None, "training": Training}


def restored(saved: SavedModel, device: torch.device | str = "cpu") -> tuple[Seq2Seq, Task]:
    """Return a saved model as a module, and the task that it was trained on."""
    parts = parts_of(saved)
    task = parts["task"]
    return restore(saved, parts["model"], len(task.vocabulary), parts["gate"], str(device)), task


def parts_of(saved: SavedModel) -> dict[str, Any]:
    """Return the settings in a saved file as objects. Damaged settings raise ValueError with the file's path."""
    with foreign(f"model_file={saved.path}: damaged"):
        return {name: options.build(kind, saved.settings[name], name) for name, kind in BUILT_FROM.items()}
