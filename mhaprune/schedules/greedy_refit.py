"""Remove the head whose removal costs least after a refit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mhaprune.heads import Block, HeadId, HeadMask
from mhaprune.ranges import Ge
from mhaprune.schedules.base import Evidence, Stepwise


@dataclass(frozen=True)
class GreedyRefit(Stepwise):
    """Greedy backward elimination with a refit inside: what remains makes up for a head before its loss is measured.

    Each block proposes the heads that its other heads can best stand in for, by `refit_error` on the model so far. The
    model without each of these is refitted, and the head goes whose refitted model has the lowest loss. The refit is
    that of `recoveries.refitting`, of W_O only, which is enough to choose by. It is made on one half of the examples,
    and the loss is measured on the other. It uses no scores of a scorer.

    The masks are chosen for models that are refitted afterwards: use it with `recovery=[refit]`. As they are, such
    models answer worse than those of other schedules. `greedy` measures every head without a refit.
    """

    examples: Annotated[int, Ge(4)] = 512
    """Number of examples of the *score* split: half for the refits, half for their loss."""
    proposed: Annotated[int, Ge(1)] = 1
    """How many heads every block proposes at each step."""
    every: Annotated[int, Ge(1)] = 1
    """Number of heads to remove at each step, the best ones of those that were tried."""

    @property
    def scoring(self) -> Literal["none"]:
        return "none"

    @property
    def removes(self) -> bool:
        return True

    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        refits = evidence.refits(self.examples)
        mask = HeadMask(evidence.subject.grid)
        yield mask
        while candidates := self.removable(evidence, mask):
            left = refits.without(mask) if mask.removed else evidence.subject
            errors = dict(zip(mask.kept, refits.errors(left).tolist(), strict=True))
            proposals = self._lowest_of_each_block(candidates, errors)
            losses = {head: refits.loss(refits.without(mask.without(head))) for head in proposals}
            for head in sorted(losses, key=losses.__getitem__)[: self.every]:
                if head in self.removable(evidence, mask):
                    mask = mask.without(head)
                    yield mask

    def _lowest_of_each_block(self, heads: list[HeadId], errors: dict[HeadId, float]) -> list[HeadId]:
        blocks: dict[Block, list[HeadId]] = defaultdict(list)
        for head in sorted(heads, key=errors.__getitem__):
            blocks[head.block].append(head)
        return [head for block in blocks.values() for head in block[: self.proposed]]
