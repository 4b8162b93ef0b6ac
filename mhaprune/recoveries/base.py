"""The base of recoveries. Each takes a model that has lost heads and returns a better one of the same shape."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any, ClassVar, NamedTuple

import pandas as pd

from mhaprune.inputs import Study
from mhaprune.measure.outcomes import Diverged
from mhaprune.settings.options import describe, modules_of
from mhaprune.settings.ranges import Checked
from mhaprune.storage.cache import code_digests, weights_digest
from mhaprune.tables import VALID_QUALITY

State = dict[str, Any]
Pruned = Any
"""A `GatedModel` that has lost heads: our own network, or a pretrained model."""
HISTORY = ["step", "seconds", "loss", "valid_loss", "valid_token_accuracy", VALID_QUALITY]
"""The first columns of the history of a training. The history has a row for each evaluation, and no rows if nothing is
trained."""


AS_IT_WAS = "diverged, so it is as it was: "
"""The beginning of the note of a model whose recovery failed."""


@dataclass(frozen=True)
class Recovery(Checked, ABC):
    """A way to improve a model after heads were removed.

    >>> @dataclass(frozen=True)
    ... class Louder(Recovery):
    ...     '''W_O is scaled up by as much as its block has fewer heads.'''
    ...
    ...     def starts_from(self, study, pruned):
    ...         return pruned_digest(pruned)
    ...
    ...     def __call__(self, study, pruned, draw, state, save):
    ...         model, before = pruned.copied(), study.subject.by_name
    ...         for name, block in model.by_name.items():
    ...             model.module.get_submodule(block.out).weight.data *= before[name].heads / max(1, block.heads)
    ...         return model, pd.DataFrame(columns=HISTORY)
    >>> study, pruned = Study.of(heads), heads.without({0: [1, 2]})
    >>> louder, _ = Louder()(study, pruned, 0, None, print)
    >>> weights = zip(louder.output_weights().values(), pruned.output_weights().values())
    >>> [float((new / old).mean().detach()) for new, old in weights]
    [2.0, 1.0]
    """

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
    def starts_from(self, study: Study, pruned: Pruned) -> Any:
        """Return everything about the pruned model that decides the result, as plain values for the cache."""

    @abstractmethod
    def __call__(
        self, study: Study, pruned: Pruned, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Pruned, pd.DataFrame]:
        """Return a recovered model of the shape of `pruned`, which is not changed, and the history of its training
        (`HISTORY`).

        `state` is what an interrupted call passed to `save`. Raises `Diverged` if a number is not finite.
        """


class RecoveryResult(NamedTuple):
    """The recovered model and the history of its training. If the training diverged: the pruned model without recovery,
    and a note."""

    model: Pruned
    history: pd.DataFrame
    note: str
    seconds: float
    """The time that the recovery took when it was computed. A time of one run on one machine, not measured in turn."""


def recover(recovery: Recovery, study: Study, pruned: Pruned, draw: int = 0) -> RecoveryResult:
    """Recover a pruned model. If the recovery has `kept`, an earlier result is taken from the cache. If the training
    diverges, the model is returned as it was."""

    def make(state: State | None, save: Callable[[State], None]) -> State:
        start = time.perf_counter()
        try:
            model, history = recovery(study, pruned, draw, state, save)
        except Diverged as error:
            return {"weights": None, "history": {}, "note": f"{AS_IT_WAS}{error}", "seconds": nan}
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
        "from": recovery.starts_from(study, pruned),
        "draw": draw,
        "recovered_with": code_digests(*modules_of(recovery)),
    }
    if not recovery.kept:
        start = time.perf_counter()
        try:
            model, history = recovery(study, pruned, draw, None, lambda state: None)
        except Diverged as error:
            return RecoveryResult(pruned.copied(), pd.DataFrame(), f"{AS_IT_WAS}{error}", nan)
        return RecoveryResult(model, history, "", time.perf_counter() - start)
    content = study.remember("recovered", what, make)
    model = pruned.copied()
    if content["weights"] is not None:
        model.module.load_state_dict(content["weights"])
    return RecoveryResult(model, pd.DataFrame(content["history"]), content["note"], content.get("seconds", nan))


def pruned_digest(pruned: Pruned) -> list[Any]:
    """Return facts that identify a pruned model in the cache: its heads, and a digest of its weights."""
    return [[str(head) for head in pruned.grid], weights_digest(pruned.module)]
