"""A pretrained model as the source of a run."""

import copy
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from mhaprune.heads import HeadGrid
from mhaprune.recoveries.base import Recovery
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.storage.cache import Cache, Remember, data_digest, no_memory, sources, weights_digest
from mhaprune.storage.store import fingerprint
from mhaprune.studies.study import Source, Study, environment
from mhaprune.wrapping.batches import Batches, UserSplits
from mhaprune.wrapping.blocks import Unsupported
from mhaprune.wrapping.losses import Judge
from mhaprune.wrapping.saving import make_plain, save_folder
from mhaprune.wrapping.training import FINE_TUNING
from mhaprune.wrapping.wrap import ModelWithData, understand
from mhaprune.wrapping.wrapped import WrappedModel

log = logging.getLogger(__name__)


class Objective(NamedTuple):
    """A loss and a quality, see `wrapping.losses`."""

    loss: Judge
    quality: Judge | None = None
    """None is what goes with the loss."""


class PretrainedModel(NamedTuple):
    """A model, its examples, and what judges it."""

    model: nn.Module
    splits: Mapping[str, Sequence[Any]]
    """The batches of `score`, `choose`, `report` and, if a recovery has texts of its own, `train`."""
    objective: Objective
    facts: Mapping[str, str]
    """What tells its runs apart from those of other models, tasks and objectives."""
    packages: Sequence[str]
    """What the model needs, for the environment of the run."""
    call: Callable[[nn.Module, Any], Any] | None = None
    """How the model is called, if not in the usual way."""
    tokens: Callable[[Any], list[list[str]]] | None = None
    """Returns the tokens of each example of a batch, as a person reads them."""
    saves: bool = False
    """Whether pruned models are saved."""


@dataclass(frozen=True)
class PretrainedSource(Source):
    """A pretrained model, with its examples. It is read and proved when it is first asked for."""

    key: ClassVar[str] = "model"

    title: str
    read: Callable[[], PretrainedModel]
    seed: int
    device: str
    num_threads: int
    cache: str

    @cached_property
    def loaded(self) -> PretrainedModel:
        torch.set_num_threads(self.num_threads)
        return self.read()

    @cached_property
    def heads(self) -> ModelWithData:
        """The wrapped model, proved."""
        read = self.loaded
        model, (loss, quality) = read.model.to(self.device).eval(), read.objective
        found = understand(model, loss, read.splits, quality, call=read.call, seed=self.seed)
        log.info("%s: %r", self.title, found)
        subject, splits = found.subject, found.splits
        here = {name: split.converted(subject.device, subject.dtype) for name, split in splits.items()}
        return replace(found, splits=here)

    @property
    def name(self) -> str:
        return self.title

    @property
    def identity(self) -> dict[str, Any]:
        return {"task": self.title, "gate": "none", "seed": self.seed, **self.loaded.facts}

    @property
    def decisive(self) -> dict[str, Any]:
        return {"cache": None, "model": self._content, "data": None, "torch": str(torch.__version__)}

    @property
    def facts(self) -> dict[str, Any]:
        sizes = ", ".join(f"{name} {len(split)}" for name, split in self.heads.splits.items())
        return {"weights": self._content["weights"], "heads": repr(self.heads), "examples": sizes}

    @property
    def grid(self) -> HeadGrid:
        return self.heads.grid

    @property
    def splits(self) -> UserSplits:
        return self.heads.user_splits

    def sketch(self) -> WrappedModel:
        """The model itself."""
        return self.heads.subject

    def check(self) -> None:
        if why_not := self.heads.proven.why_not:
            raise Unsupported(f"model={self.title}: its heads can be gated, not removed: {why_not}")

    def prepare(self) -> None:
        Cache(self.cache)

    def usable(self, scorers: Mapping[str, Scorer], recoveries: Mapping[str, Recovery]) -> tuple[Any, Any]:
        reasons = {name: reason for name, scorer in scorers.items() if (reason := self._why_not(scorer))}
        trains = {name: reason for name, each in recoveries.items() if (reason := each.why_only_ours)}
        for group, chosen, refused in (("scorer", scorers, reasons), ("recovery", recoveries, trains)):
            for reason in dict.fromkeys(refused.values()):
                names = ",".join(name for name in refused if refused[name] == reason)
                said = f"{reason}, so it is not for {self.title}"
                if len(refused) == len(chosen):
                    raise ValueError(f"{group}=[{names}]: {said}; choose another")
                log.warning("%s=[%s] is left out: it %s", group, names, said)
        usable = {name: scorer for name, scorer in scorers.items() if name not in reasons}
        return usable, {name: recovery for name, recovery in recoveries.items() if name not in trains}

    def _why_not(self, scorer: Scorer) -> str:
        """Return what a scorer needs and this model lacks; empty if it can be scored. What cannot be seen from
        outside is tried on two examples."""
        subject, few = self.heads.subject, self.splits.score[:2]
        if scorer.needs_gates and subject.learned_gates() is None:
            return "needs learned gates"
        if scorer.needs is not None and not isinstance(subject, scorer.needs):
            return "needs layers that only mhaprune's own model has"
        try:
            if scorer.reads_attention:
                subject.attention_maps(few)
            elif not scorer.reads_examples:
                scorer(subject, few, self.seed)
        except ValueError as error:
            return str(error).partition(";")[0]
        return ""

    def environment(self) -> dict[str, Any]:
        return environment(self.seed, self.num_threads, self.device, *self.loaded.packages)

    @cached_property
    def _content(self) -> dict[str, Any]:
        """The weights, the data and what judges them, as digests: what is studied, wherever it lies."""
        subject = self.heads.subject
        config: Any = getattr(subject.model, "config", None)
        settings = config.to_json_string() if hasattr(config, "to_json_string") else type(subject.model).__name__
        weights = fingerprint([weights_digest(subject.model), settings])
        return {
            "weights": weights,
            "data": [data_digest(split) for split in self.heads.splits.values()],
            "judged_by": dict(self.loaded.facts),
        }

    def study(
        self,
        scorers: Mapping[str, Scorer],
        schedules: Mapping[str, Schedule],
        recoveries: Mapping[str, Recovery],
        facts: Mapping[str, Any],
        example: Sequence[str] | None = None,
    ) -> Study:
        torch.set_num_threads(self.num_threads)
        subject = self.heads.subject
        recipe = {
            **self._content,
            "heads": list(map(str, subject.grid)),
            "sources": sources("mhaprune.attention", "mhaprune.wrapping"),
            "num_threads": self.num_threads,
            "device": torch.device(self.device).type,
            "torch": str(torch.__version__),
        }

        study = study_of(self.heads, scorers, schedules, recoveries, Cache(self.cache).about(recipe))
        saved = files_of if self.loaded.saves else no_files
        return replace(study, saved=saved, tokens=self._tokens)

    def _tokens(self, batch: Batches) -> list[list[str]]:
        read = self.loaded.tokens
        return [] if read is None else read(batch.as_given())


def study_of(
    model: ModelWithData,
    scorers: Mapping[str, Scorer],
    schedules: Mapping[str, Schedule],
    recoveries: Mapping[str, Recovery],
    remember: Remember = no_memory,
) -> Study:
    """Return what an experiment is given of a wrapped model; nothing is kept in a cache by default."""
    return Study(
        subject=model.subject,
        splits=model.user_splits,
        scorers=scorers,
        schedules=schedules,
        recoveries=recoveries,
        seed=model.seed,
        remember=remember,
        saved=no_files,
        words=model.words,
        fine_tuning=FINE_TUNING,
    )


def files_of(name: str, model: WrappedModel, steps: int = 0) -> dict[str, bytes]:
    """The files of a folder that `mhaprune.load` reads; none, with a notice, for a model that no folder can hold."""
    plain = copy.deepcopy(model.model)
    make_plain(plain)
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_folder(plain, folder)
        except Unsupported as error:
            log.warning("%s is not saved: %s", name, error)
            return {}
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {f"{name}/{path.relative_to(folder)}": path.read_bytes() for path in files}


def no_files(name: str, model: WrappedModel, steps: int = 0) -> dict[str, bytes]:
    """Pruned pretrained models are large, so they are saved only where that is asked for."""
    return {}
