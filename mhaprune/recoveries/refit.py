"""Fit what is left in closed form to what the dense model computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import EOS, PAD, Data, Examples
from mhaprune.measure import BATCH_SIZE, Diverged, by_length
from mhaprune.model.sublayers import sublayers
from mhaprune.model.surgery import copied
from mhaprune.ranges import Ge
from mhaprune.recoveries.base import HISTORY, Lesson, Recovery, State, left_digest
from mhaprune.recoveries.least_squares import correct

if TYPE_CHECKING:
    from mhaprune.model.transformer import Seq2Seq

log = logging.getLogger(__name__)


@runtime_checkable
class RefitsItself(Protocol):
    """A subject that knows itself how its linear maps are fitted anew, for a model whose layers are not ours."""

    def refitted(self, dense: Self, data: Data, ridge: float, feed_forward: bool) -> Self:
        """A copy whose residual stream follows that of `dense` on the data; `feed_forward` fits more than the maps that
        end attention. Raises `Diverged` where a number is not finite."""
        ...


@dataclass(frozen=True)
class Refit(Recovery):
    """The last linear map of each sublayer, W_O or W_2, is fitted anew; nothing is trained.

    Sublayer by sublayer, in forward order, the map and its bias minimise

        ‖A W + b − (y − x)‖² + ridge · mean(diag AᵀA) · ‖W − W_old‖²

    over all tokens. y is the residual stream of the dense model after the sublayer. x is that of the pruned model
    before it, and A what its map reads. So a sublayer also makes up for what those before it could not. The bias of a
    block without heads becomes the mean of y − x.

    It reads sources of the *train* split and no target: the decoders read what the dense model answers. A model that
    others made is fitted on the *score* split, with its own way to do so. Kin: Kwon et
    al. 2022 tune one number per head in this way; K-prune (Park et al. 2024) fits to what the dense sublayer puts out;
    both follow the optimal brain surgeon (Hassibi & Stork 1992), which corrects the weights left when one goes.
    """

    kept: ClassVar[bool] = False

    examples: Annotated[int, Ge(1)] = 1024
    """Number of sources; all of the split if that has fewer. 1024 are some 8000 tokens, for at most 129 unknowns per
    output of the default model. Four times as many gained .04 of exact match at most, with 20 of 24 heads gone."""
    ridge: Annotated[float, Ge(0)] = 1e-3
    """How strongly weights stay at their old values. 0 is least squares. For a model that others made, each map chooses
    between this and five more, each ten times the one before."""
    feed_forward: bool = True
    """Whether W_2 is fitted too, or only W_O."""
    when: Literal["after", "between"] = "after"
    """Whether to refit after all heads are removed, or between two budgets."""

    @property
    def between(self) -> bool:
        return self.when == "between"

    def starts_from(self, lesson: Lesson, left: Seq2Seq) -> Any:
        return left_digest(left)

    def __call__(
        self, lesson: Lesson, left: Seq2Seq, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Seq2Seq, pd.DataFrame]:
        if isinstance(left, RefitsItself):
            itself: Any = left
            data = lesson.splits.score
            model = itself.refitted(lesson.dense, data[: self.examples], self.ridge, self.feed_forward)
            return model, pd.DataFrame(columns=HISTORY)
        source = lesson.splits.train.source[: self.examples]
        shown = lesson.once(("refit", self.examples), lambda: show(lesson.dense, source))
        model = refit(left, shown, self.ridge, self.feed_forward)
        return model, pd.DataFrame(columns=HISTORY)


class Shown(NamedTuple):
    """What the dense model shows: batches with its own answers as targets, and its residual stream after every
    sublayer, for each batch at the tokens that are no padding, (tokens, D)."""

    batches: Sequence[Examples]
    streams: Sequence[Sequence[Tensor]]


@torch.no_grad()
def show(dense: Seq2Seq, source: Tensor) -> Shown:
    """What there is to fit to, the same for every pruned model: one greedy decoding of the sources and one pass.

    It holds the streams of all sublayers in the precision of the model.
    """
    decoded = [dense.decode_greedily(part, dense.config.max_length, stop=True) for part in source.split(BATCH_SIZE)]
    answers_ET = torch.cat(decoded)
    answers_ET[answers_ET[:, 0] == PAD, 0] = EOS  # a poor model may answer padding; no answer is without a token
    _, parts = by_length(Examples(source, answers_ET), BATCH_SIZE)
    batches = [batch for batch, _ in parts]
    streams, widths = [], []
    for step in zip(*(sublayers(dense, batch) for batch in batches), strict=True):
        streams.append([one.output()[one.valid] for one in step])
        widths.append(step[0].last.in_features)
    fewest = min(sum(map(len, stream)) for stream in streams)
    if fewest < max(widths):
        log.warning(
            "refit: %d tokens are fewer than the %d inputs of a map; what they leave open stays as it was",
            *(fewest, max(widths)),
        )
    return Shown(batches, streams)


@torch.no_grad()
def refit(left: Seq2Seq, shown: Shown, ridge: float, feed_forward: bool = True) -> Seq2Seq:
    """A copy whose residual stream follows that of the dense model, at the cost of one pass and one solution per map.

    All batches go forward together. Raises `Diverged` where a stream is not finite.
    """
    model = copied(left)
    walk = zip(*(sublayers(model, batch) for batch in shown.batches), strict=True)
    for step, wanted in zip(walk, shown.streams, strict=True):
        first = step[0]
        if first.feed_forward and not feed_forward:
            continue
        parts = [
            (one.hidden[one.valid], stream_TD - one.output()[one.valid])
            for one, stream_TD in zip(step, wanted, strict=True)
        ]
        if not all(bool(missing_TD.isfinite().all()) for _, missing_TD in parts):
            raise Diverged(f"the states of {first.name} are not finite")
        correct(first.last.weight, first.last.bias, parts, ridge)
    return model
