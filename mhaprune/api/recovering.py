"""Recoveries after a removal: a refit, a distillation, a training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from mhaprune.api.parsing import kept_random_state
from mhaprune.api.scored_heads import ScoredHeads
from mhaprune.data import Splits
from mhaprune.inputs import Study
from mhaprune.losses import Drift
from mhaprune.measure.outcomes import Diverged
from mhaprune.recoveries.base import AS_IT_WAS, Recovery, recover
from mhaprune.recoveries.fine_tune import FineTune
from mhaprune.recoveries.refit import Refit
from mhaprune.settings.ranges import Ge
from mhaprune.storage.cache import data_digest
from mhaprune.storage.functions import Undescribed, described
from mhaprune.storage.store import fingerprint
from mhaprune.subjects.batches import Batches
from mhaprune.wrapping.wrapped_model import WrappedModel

log = logging.getLogger(__name__)

FITTED = ("examples", "ridge", "feed_forward")
Fit = bool | dict[str, Any]
"""Whether to refit, or settings of `Refit`, those of `FITTED`, by name."""
TUNED = ("steps", "learning_rate", "batch_size", "distillation")
Steps = Annotated[int, Ge(0)] | dict[str, Any]
"""A number of training steps, or settings of `FineTune`, those of `TUNED`, by name."""


MINUTES = 10.0
"""The time of a distillation, if none is given."""
DISTILLING: dict[str, Any] = {"dropout": False, "learning_rate": 2e-4}
"""The settings of `distil=`. Of the learning rates 2e-4 and 4e-4 the first kept more of MiniLM in eight minutes, on
texts that are in no report."""


ALIKE = (
    "nothing is measured on examples unlike those that it was fitted to; give wrap(..., report={name: batches, ...})"
    " other kinds, or shift="
)


class Step(NamedTuple):
    """One recovery, with what a model is after it and the study that it reads."""

    done: str
    recovery: Recovery
    study: Study


@dataclass(frozen=True)
class Recoveries:
    """The recoveries that follow a removal, as the arguments of `Heads.prune` say."""

    refit: Fit = False
    fine_tune: Steps = 0
    distil: Any = None
    minutes: float | None = None
    tested: bool = False
    """Whether models are tested on the *choose* split, so that no weights may be chosen on it."""

    def __post_init__(self) -> None:
        if self.distil is not None:  # read once, also if it can be read only once
            object.__setattr__(self, "distil", Batches.of(self.distil, "distil"))
        if self.minutes is not None and self.distil is None:
            raise ValueError(f"minutes={self.minutes:g}: is how long distil= trains, give it batches or leave it out")

    def on(self, heads: ScoredHeads) -> list[Step]:
        """Return the recoveries in their order. Raises ValueError for a setting that is none."""
        found, fit = [], _settings("refit", self.refit, FITTED) if isinstance(self.refit, dict) else {}
        if self.refit is not False:
            refit, given = Refit(**fit), len(heads.splits.train)
            if given > refit.examples and "examples" not in fit:
                whole = f'refit={{"examples": {given}}}'
                log.warning("refit: reads %d of the %d examples, %s reads all", refit.examples, given, whole)
            found.append(Step("refitted", refit, study_of(heads)))
        if self.distil is not None:
            more: dict[str, Any] = {"distillation": 0.5 if isinstance(heads.subject.loss, Drift) else 1.0}
            recovery = FineTune(
                minutes=self.minutes or MINUTES, **DISTILLING, **more, keep="last" if self.tested else "best"
            )
            found.append(Step("distilled", recovery, study_of(heads, unreported(heads, self.distil))))
        if self.fine_tune != 0:
            settings = self.fine_tune if isinstance(self.fine_tune, dict) else {"steps": self.fine_tune}
            settings = _settings("fine_tune", settings, TUNED)
            found.append(Step("trained", FineTune(**settings), study_of(heads)))
        return found


def _settings(name: str, given: dict[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    if wrong := [key for key in given if key not in allowed]:
        raise ValueError(f"{name}={wrong[0]}: must be {', '.join(allowed)}")
    return given


def study_of(heads: ScoredHeads, train: Batches | None = None) -> Study:
    """Return the study of a model in torch, by default with its own examples to train on. If there is a cache, its
    trainings go on after a kill."""
    if train is None and "_study" in vars(heads):
        found: Study = vars(heads)["_study"]  # which remembers what the dense model computes for a refit
        return found
    splits = heads.splits if train is None else Splits(**{**heads.splits.given, "train": train})
    subject = heads.subject.changed(runtime="torch")
    study = replace(Study.of(heads), subject=subject, splits=splits)
    if subject.cache is not None and subject.identity is not None:
        with suppress(Undescribed):  # then nothing is kept
            read = {name: _facts(part) for name, part in splits.items() if name in ("train", "score", "choose")}
            trained = [weight.requires_grad for weight in subject.model.parameters()]
            about = {"read": read, "trained": trained, "seed": study.seed, "module": fingerprint(repr(subject.model))}
            study = replace(study, remember=subject.cache.about({**subject.identity, **about}))
    if train is None:
        vars(heads)["_study"] = study
    return study


def _facts(examples: Batches) -> list[Any]:
    """Return plain values that decide what is learnt from examples: also their lists, and what a batch has in
    common."""
    lists = [{name: x for name, x in stack.fields.items() if isinstance(x, list)} for stack in examples.stacks]
    constants = [dict(stack.constants) for stack in examples.stacks]
    rest = fingerprint(described([lists, constants]))
    return [data_digest(examples), rest, list(examples.kind_names), examples.largest]


def unreported(heads: ScoredHeads, texts: Batches) -> Batches:
    """Return texts to distil on. Raises ValueError if choices are made or numbers reported on some of them."""
    own, given = {*texts.digests()}, heads.splits.given
    for name, split in {**{name: given.get(name) for name in ("choose", "report")}, **heads.splits.shifts}.items():
        if split is not None and (shared := len(own.intersection(split.digests()))):
            raise ValueError(f"distil: {shared} examples are in *{name}* too, must be others")
    return texts


def recovered(heads: ScoredHeads, smaller: WrappedModel, steps: Sequence[Step]) -> WrappedModel:
    """Return a smaller model after these recoveries. Raises `Diverged` if a training does not stay finite."""
    if steps and all(step.study.splits.alike for step in steps) and not heads.promised.warned:
        heads.promised.warned = True
        log.warning("%s: %s", steps[0].done, ALIKE)
    with kept_random_state(heads.subject.device):
        for done, recovery, study in steps:
            smaller, history, failed, _ = recover(recovery, study, smaller)
            if failed:
                raise Diverged(failed.removeprefix(AS_IT_WAS))
            if len(history):
                heads.promised.curves.append(history.assign(then=done, units_kept=len(smaller.grid)))
    return smaller
