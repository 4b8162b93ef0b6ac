"""The base of recoveries: each takes a model that has lost heads, and returns a better one of that shape."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import pandas as pd

from mhaprune.data import Data, Splits
from mhaprune.measure.outcomes import Diverged
from mhaprune.settings.options import describe, modules_of
from mhaprune.settings.ranges import Checked
from mhaprune.storage.cache import Remember, sources, weights_digest
from mhaprune.tables import VALID_QUALITY
from mhaprune.wrapping.descent import Descent

State = dict[str, Any]
Left = Any
"""A subject that has lost heads, with a `state_dict`: our own network, or a pretrained model."""
Made = TypeVar("Made")
HISTORY = ["step", "seconds", "loss", "valid_loss", "valid_token_accuracy", VALID_QUALITY]
"""The first columns of the history of a training, a row for each evaluation; a recovery that trains nothing has no
rows."""


@dataclass(frozen=True)
class RecoveryContext:
    """The input of a recovery: the model before heads were removed, how it was trained, and on what."""

    dense: Left
    """The model before heads were removed."""
    training: Descent
    """How the dense model was trained or, for a pretrained model, how it is trained on."""
    splits: Splits[Data]
    """The examples."""
    seed: int
    """The seed of the run."""
    extra_steps: int = 0
    """The largest number of steps that a model of the run is trained for beyond `training`."""
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of `make` for a key, computed once for all the models that are recovered in a run."""
        if key not in self._known:
            self._known[key] = make()
        known: Made = self._known[key]
        return known


@dataclass(frozen=True)
class Recovery(Checked, ABC):
    """A way to bring back what a removal cost."""

    kept: ClassVar[bool] = True
    """Whether the cache keeps what it makes; it need not if that takes a second."""

    @property
    def why_only_ours(self) -> str:
        """Why it is not for a pretrained model, to follow "it"; empty if it is."""
        return ""

    @property
    def extra_steps(self) -> int:
        """Number of steps that it trains beyond those of the dense model; 0 if it trains nothing."""
        return 0

    @property
    def between(self) -> bool:
        """True if it comes after every budget, before more heads go, and not only at the end."""
        return False

    @property
    def control(self) -> bool:
        """True if it keeps only the shape of the pruned model."""
        return False

    @property
    def draws(self) -> int:
        """Number of repetitions, each with other random numbers."""
        return 1

    @abstractmethod
    def starts_from(self, lesson: RecoveryContext, left: Left) -> Any:
        """All of what is left that decides its result, as plain values."""

    @abstractmethod
    def __call__(
        self, lesson: RecoveryContext, left: Left, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Left, pd.DataFrame]:
        """A recovered model of the shape of `left`, which stays as it is, and the history of its training (`HISTORY`).

        `state` is what an interrupted call gave to `save`. Raises `Diverged` where a number is not finite.
        """


class RecoveryResult(NamedTuple):
    """The model, the history of its training and, where that diverged and `left` was kept, what happened."""

    model: Left
    history: pd.DataFrame
    note: str


def recover(recovery: Recovery, lesson: RecoveryContext, left: Left, draw: int, remember: Remember) -> RecoveryResult:
    """Recover what is left, once for each shape and weights; a recovery that diverges leaves it as it was."""

    def make(state: State | None, save: Callable[[State], None]) -> State:
        try:
            model, history = recovery(lesson, left, draw, state, save)
        except Diverged as error:
            return {"weights": None, "history": {}, "note": f"diverged, so it is as it was: {error}"}
        return {"weights": model.state_dict(), "history": history.to_dict("list"), "note": ""}

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
        model.load_state_dict(content["weights"])
    return RecoveryResult(model, pd.DataFrame(content["history"]), content["note"])


def left_digest(left: Left) -> list[Any]:
    """Identify a pruned model, for the cache: the names of its heads, and a digest of its weights."""
    return [[str(head) for head in left.grid], weights_digest(left)]
