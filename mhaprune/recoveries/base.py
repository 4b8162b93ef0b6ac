"""The base of recoveries. Each takes a model that has lost heads and returns a better one of the same shape."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from math import nan
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import pandas as pd

from mhaprune.data import Data, Splits
from mhaprune.measure.outcomes import Diverged
from mhaprune.settings.options import describe, modules_of
from mhaprune.settings.ranges import Checked, Ge, Gt
from mhaprune.storage.cache import Remember, sources, weights_digest
from mhaprune.tables import VALID_QUALITY
from mhaprune.wrapping.descent import Descent

State = dict[str, Any]
Left = Any
"""A `GatedModel` that has lost heads: our own network, or a pretrained model."""
Made = TypeVar("Made")
HISTORY = ["step", "seconds", "loss", "valid_loss", "valid_token_accuracy", VALID_QUALITY]
"""The first columns of the history of a training. The history has a row for each evaluation, and no rows if nothing is
trained."""


@dataclass(frozen=True)
class RecoveryContext:
    """The input of a recovery in addition to the pruned model: the dense model, the settings of its training, and the
    examples."""

    dense: Left
    """The model before heads were removed."""
    training: Descent
    """The training of the dense model; for a pretrained model, the settings for fine-tuning."""
    splits: Splits[Data]
    """The examples."""
    seed: int
    """The seed of the run."""
    extra_steps: int = 0
    """The largest number of extra training steps that a model of the run gets after the steps of `training`."""
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of `make()`. It is computed once per key and shared by all models of the run."""
        if key not in self._known:
            self._known[key] = make()
        known: Made = self._known[key]
        return known


@dataclass(frozen=True)
class Recovery(Checked, ABC):
    """A way to improve a model after heads were removed."""

    kept: ClassVar[bool] = True
    """True if the cache keeps the result. A recovery that takes only a second need not be kept."""
    control: ClassVar[bool] = False
    """True if the recovery uses only the shape of the pruned model, not its weights."""

    @property
    def why_only_ours(self) -> str:
        """The reason why the recovery does not work for a pretrained model, as the rest of a sentence that begins with
        "it"; an empty text if it works."""
        return ""

    @property
    def reads_wider(self) -> bool:
        """True if the recovery reads examples of other kinds (`Task.wider`)."""
        return False

    @property
    def extra_steps(self) -> int:
        """The number of training steps that one call of the recovery adds to a pruned model. It is 0 for a recovery
        that does not train, and for a control."""
        return 0

    @property
    def between(self) -> bool:
        """True if the recovery runs after every budget, before further removals; False if only at the end."""
        return False

    @property
    def follows(self) -> bool:
        """True if the recovery takes a model that has lost its heads, all at once, and changes its weights."""
        return not self.between and not self.control

    @property
    def draws(self) -> int:
        """Number of repetitions, each with other random numbers."""
        return 1

    @abstractmethod
    def starts_from(self, lesson: RecoveryContext, left: Left) -> Any:
        """Return everything about the pruned model that decides the result, as plain values for the cache."""

    @abstractmethod
    def __call__(
        self, lesson: RecoveryContext, left: Left, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Left, pd.DataFrame]:
        """Return a recovered model of the shape of `left`, which is not changed, and the history of its training
        (`HISTORY`).

        `state` is what an interrupted call passed to `save`. Raises `Diverged` if a number is not finite.
        """


@dataclass(frozen=True)
class ShortTraining(Checked):
    """The settings of a training that goes on after the training of the dense model."""

    steps: Annotated[int, Ge(1)] = 300
    """Number of optimiser steps."""
    learning_rate: Annotated[float | None, Gt(0)] = None
    """The highest learning rate, reached after warm-up. None means 1e-3, or 5e-5 for a pretrained model."""
    batch_size: Annotated[int | None, Ge(1)] = None
    """Number of examples per step. None means the number in the training of the dense model, or 16 for a pretrained
    model."""

    def descent(self, lesson: RecoveryContext) -> Descent:
        """Return the training of the dense model with these settings."""
        usual = lesson.training
        return replace(
            usual,
            steps=self.steps,
            learning_rate=self.learning_rate or usual.fine_tuning_rate,
            batch_size=self.batch_size or usual.batch_size,
            warmup_steps=min(usual.warmup_steps, self.steps // 10),
        )


class RecoveryResult(NamedTuple):
    """The recovered model and the history of its training. If the training diverged: the pruned model without recovery,
    and a note."""

    model: Left
    history: pd.DataFrame
    note: str
    seconds: float
    """The time that the recovery took when it was computed. A time of one run on one machine, not measured in turn."""


def recover(recovery: Recovery, lesson: RecoveryContext, left: Left, draw: int, remember: Remember) -> RecoveryResult:
    """Recover a pruned model. If the recovery has `kept`, an earlier result is taken from the cache. If the training
    diverges, the model is returned as it was."""

    def make(state: State | None, save: Callable[[State], None]) -> State:
        start = time.perf_counter()
        try:
            model, history = recovery(lesson, left, draw, state, save)
        except Diverged as error:
            return {"weights": None, "history": {}, "note": f"diverged, so it is as it was: {error}", "seconds": nan}
        # The history of a training that was interrupted has the seconds of all its parts.
        took = time.perf_counter() - start
        seconds = float(history["seconds"].iloc[-1]) if len(history) and "seconds" in history else took
        return {
            "weights": model.module.state_dict(),
            "history": history.to_dict("list"),
            "note": "",
            "seconds": seconds,
        }

    settings = describe(recovery)
    settings.pop("draws", None)  # one draw is the same however many others there are
    what = {
        "recovery": settings,
        "from": recovery.starts_from(lesson, left),
        "draw": draw,
        "recovered_with": sources(*modules_of(recovery)),
    }
    content = remember("recovered", what, make) if recovery.kept else make(None, lambda state: None)
    model = left.copied()
    if content["weights"] is not None:
        model.module.load_state_dict(content["weights"])
    return RecoveryResult(model, pd.DataFrame(content["history"]), content["note"], content.get("seconds", nan))


def left_digest(left: Left) -> list[Any]:
    """Return facts that identify a pruned model in the cache: its heads, and a digest of its weights."""
    return [[str(head) for head in left.grid], weights_digest(left.module)]
