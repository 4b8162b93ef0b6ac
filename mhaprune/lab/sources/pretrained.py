"""A pretrained model with its examples: as an option of the group `model`, and as the source of a run."""

from __future__ import annotations

import copy
import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import nn

from mhaprune.data import SPLITS, Splits
from mhaprune.heads import HeadGrid
from mhaprune.hooks.blocks import Unsupported
from mhaprune.inputs import Known, Study
from mhaprune.lab.sources.source import ModelSource
from mhaprune.lab.sources.texts import kinds_in
from mhaprune.lab.tasks.base import SplitSize
from mhaprune.losses import Judge
from mhaprune.recoveries.base import Recovery
from mhaprune.saving.folders import make_plain, save_folder
from mhaprune.scorers.base import Scorer
from mhaprune.settings.options import option_name
from mhaprune.settings.ranges import Checked, Ge
from mhaprune.storage.cache import Cache, code_digests, data_digest, weights_digest
from mhaprune.storage.store import fingerprint
from mhaprune.subjects.batches import Batches
from mhaprune.subjects.stacks import is_by_kind
from mhaprune.tables import USUAL
from mhaprune.wrapping.build import ModelWithData, understand
from mhaprune.wrapping.served import Runtime
from mhaprune.wrapping.wrapped_model import WrappedModel, check_runtime

log = logging.getLogger(__name__)

BATCH = 32
"""Number of examples in a batch. The texts of a batch are padded to the same length."""


@dataclass(frozen=True)
class Pretrained(Checked, ABC):
    """A model that was trained elsewhere, with examples to study it on."""

    score: SplitSize = 256
    """Number of texts that heads are scored on."""
    choose: SplitSize = 256
    """Number of texts that choices are made on."""
    report: SplitSize = 256
    """Number of texts that results are reported on."""
    train: Annotated[int, Ge(0)] = 0
    """Number of texts for recoveries: fine-tuning reads all of them, a refit its first `examples`. With 0 they read the
    texts that heads are scored on; these are few, so fine-tuning soon overfits them."""
    max_length: Annotated[int, Ge(1)] = 128
    """The largest number of tokens of a text; longer texts are cut."""
    units: tuple[Literal["head", "neuron"], ...] = ("head",)
    """What is scored and removed: attention heads, hidden neurons of feed-forward layers, or both."""
    runtime: Runtime = "torch"
    """The runtime that is timed: `torch`, `onnxruntime` or `onnxruntime-int8`. Quality is that of torch."""
    save: bool = False
    """Whether `experiment=prune` saves the pruned models, each as a folder that `mhaprune.load` reads."""

    @abstractmethod
    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        """Read the model and its examples. Raises ValueError, with a message of one line, if they cannot be read."""

    @property
    def title(self) -> str:
        """The name in titles."""
        return option_name(self)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of texts of each split."""
        sizes = {"score": self.score, "choose": self.choose, "report": self.report}
        return sizes | ({"train": self.train} if self.train else {})


Judges = tuple[Judge, Judge | None]
"""A loss and a quality, see `losses`; None for the usual quality of this loss."""


class PretrainedModel(NamedTuple):
    """A model, its examples, and its objective."""

    model: nn.Module
    splits: Mapping[str, Any]
    """The batches of `score`, `choose`, `report` and, if recoveries have texts of their own, `train`; of each a dict if
    there are kinds."""
    objective: Judges
    facts: Mapping[str, str]
    """The names of the task and the objective, as columns that identify runs."""
    packages: Sequence[str]
    """The packages that the model needs, whose versions the run records."""
    call: Callable[[nn.Module, Any], Any] | None = None
    """The function that calls the model, if it is not called in the usual way."""
    tokens: Callable[[Any], list[list[str]]] | None = None
    """A function that returns the tokens of each example of a batch as texts."""
    corrupt: Mapping[str, Any] = {}
    """For splits whose examples have counterparts without the thing asked about, the batches of these."""
    unit: Literal["head", "call"] = "head"
    """What is scored: a head, or a head in one of the calls of its layer."""
    known: Known | None = None
    """The heads whose work is known, if there are any."""


@dataclass(frozen=True, kw_only=True)
class PretrainedSource(ModelSource):
    """A pretrained model with its examples. At first use the model is read, and its heads are found and proved."""

    model: Pretrained
    data: str | None
    objective: str | None
    shift: Sequence[str] = ()
    """Files of examples of other kinds."""

    @cached_property
    def loaded(self) -> PretrainedModel:
        torch.set_num_threads(self.num_threads)
        read = self.model.read(self.data, self.objective, self.cache)
        splits = dict(read.splits)
        for file in self.shift:
            if (kind := Path(file).stem) in (*splits, *SPLITS, USUAL):
                raise ValueError(f"shift=[{file}]: must have a name of its own, {kind} is taken")
            try:
                least = 2 * kinds_in(file)  # of a file of another kind its own kinds are one
                few = replace(self.model, score=least, choose=least, train=0)
                found = few.read(file, self.objective, self.cache).splits["report"]
                splits[kind] = [each for part in found.values() for each in part] if is_by_kind(found) else found
            except ValueError as error:
                raise ValueError(f"shift={str(error).removeprefix('data=')}") from None
        return read._replace(splits=splits)

    @property
    def packages(self) -> Sequence[str]:
        return self.loaded.packages

    @cached_property
    def heads(self) -> ModelWithData:
        """The wrapped model, whose heads are proved."""
        read = self.loaded
        model, (loss, quality) = read.model.to(self.device).eval(), read.objective
        how: Any = {"call": read.call, "seed": self.seed, "cache": self.cache, "units": self.model.units}
        pairs = {
            split: Batches.of(read.splits[split], split).with_corrupt(each) for split, each in read.corrupt.items()
        }
        found = understand(model, loss, {**read.splits, **pairs}, quality=quality, **how)
        found = replace(found, subject=found.subject.grouped(read.unit))
        log.info("%s: %r", self.name, found)
        subject, splits = found.subject, found.splits
        if self.model.runtime != "torch":
            subject = subject.changed(runtime=self.model.runtime)
            check_runtime(subject, splits.proof)
        here = {name: split.converted(subject.device, subject.dtype) for name, split in splits.items()}
        return replace(found, subject=subject, splits=Splits(**here))

    @property
    def name(self) -> str:
        return self.model.title

    @property
    def identity(self) -> dict[str, Any]:
        return {"task": self.name, "gate": "none", "seed": self.seed, **self.loaded.facts}

    @property
    def decisive(self) -> dict[str, Any]:
        others = {name: data_digest(split) for name, split in self.splits.shifts.items()}
        shift = {"shift": others} if others else {}
        units = {} if self.model.units == ("head",) else {"units": list(self.model.units)}
        return {"cache": None, "model": self._content | units, "data": None, **shift, "torch": str(torch.__version__)}

    @property
    def facts(self) -> dict[str, Any]:
        sizes = ", ".join(f"{name} {len(split)}" for name, split in self.splits.items())
        return {"weights": self._content["weights"], "heads": repr(self.heads), "examples": sizes}

    @property
    def grid(self) -> HeadGrid:
        return self.heads.grid

    @property
    def splits(self) -> Splits[Batches]:
        return self.heads.splits

    def check(self) -> None:
        if why_not := self.heads.proven.why_not:
            raise Unsupported(f"model={self.name}: its heads can be gated, not removed: {why_not}")

    def usable(self, scorers: Mapping[str, Scorer], recoveries: Mapping[str, Recovery]) -> tuple[Any, Any]:
        reasons = {name: reason for name, scorer in scorers.items() if (reason := self._why_not(scorer))}
        trains = {name: reason for name, each in recoveries.items() if (reason := each.why_only_ours)}
        for group, chosen, refused in (("scorer", scorers, reasons), ("recovery", recoveries, trains)):
            for reason in dict.fromkeys(refused.values()):
                names = ",".join(name for name in refused if refused[name] == reason)
                said = f"{reason}, so it is not for {self.name}"
                if len(refused) == len(chosen):
                    raise ValueError(f"{group}=[{names}]: {said}; choose another")
                log.warning("%s=[%s] is left out: it %s", group, names, said)
        usable = {name: scorer for name, scorer in scorers.items() if name not in reasons}
        return usable, {name: recovery for name, recovery in recoveries.items() if name not in trains}

    def _why_not(self, scorer: Scorer) -> str:
        """Return why a scorer cannot be used for this model; empty if it can. Some scorers are tried on two examples to
        find out."""
        subject, few = self.heads.subject, self.splits.score[:2]
        if scorer.needs_gates and subject.learned_gates() is None:
            return "needs learned gates"
        try:
            if scorer.reads_pairs:
                few.counterpart()
            if scorer.reads_attention:
                subject.attention_maps(few)
            elif not scorer.reads_examples:
                scorer(subject, few, self.seed)
        except ValueError as error:
            return str(error).partition(";")[0]
        return ""

    @cached_property
    def _content(self) -> dict[str, Any]:
        """Digests of weights and data, and the objective. They identify a study, wherever its files are. Examples of
        other kinds are not among them: no score depends on them."""
        subject = self.heads.subject
        config: Any = getattr(subject.model, "config", None)
        settings = config.to_json_string() if hasattr(config, "to_json_string") else type(subject.model).__name__
        weights = fingerprint([weights_digest(subject.model), settings])
        return {
            "weights": weights,
            "data": [data_digest(split) for name, split in self.splits.items() if name not in self.splits.shifts],
            "judged_by": dict(self.loaded.facts),
            **({} if subject.runtime == "torch" else {"runtime": subject.runtime}),
        }

    def study(self, facts: Mapping[str, Any]) -> Study:
        torch.set_num_threads(self.num_threads)
        key = {
            **self._content,
            "heads": list(map(str, self.grid)),
            "sources": code_digests("mhaprune.wrapping.build"),
            "num_threads": self.num_threads,
            "device": torch.device(self.device).type,
            "torch": str(torch.__version__),
        }
        study, read = Study.of(self.heads, Cache(self.cache).about(key)), self.loaded.tokens
        study = replace(study, known=self.loaded.known)
        if self.model.save:
            study = replace(study, saved=files_of)
        return study if read is None else replace(study, tokens=lambda batch: read(batch.as_given()))


def files_of(name: str, model: WrappedModel, steps: int = 0) -> dict[str, bytes]:
    """Return the files of a folder that `mhaprune.load` reads; none, with a warning, if the model cannot be saved."""
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


def tokens_of(tokenizer: Any, batch: Any) -> list[list[str]]:
    """Return the tokens of each text of a batch, without padding. Raises ValueError for a batch that is no dict with
    `input_ids`."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise ValueError("tokenizer: names the tokens of batches that are dicts with `input_ids`, and these are not")
    ids = batch["input_ids"]
    real = batch.get("attention_mask", torch.ones_like(ids)) != 0
    return [[tokenizer.decode([i]) for i in row[mine].tolist()] for row, mine in zip(ids, real, strict=True)]


def batched(rows: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the rows in batches."""
    return [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]


def chosen(objective: str | None, known: Mapping[str, Judges], whose: str) -> tuple[str, Judges]:
    """Return the name and value of `objective` in `known`, by default the first. Raises ValueError for an unknown
    name."""
    name = objective or next(iter(known))
    if name not in known:
        raise ValueError(f"objective={name}: {whose} is judged by {' or '.join(known)}")
    return name, known[name]
