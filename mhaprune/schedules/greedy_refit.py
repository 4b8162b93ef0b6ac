"""Remove the head whose removal raises the loss least after a refit."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from mhaprune.heads import BlockId, HeadId, HeadMask
from mhaprune.schedules.base import Evidence, Stepwise
from mhaprune.settings.ranges import Ge


@dataclass(frozen=True)
class GreedyRefit(Stepwise):
    """Greedy backward elimination, with a refit before every measurement.

    At each step every block proposes a head: the one that the other heads of the block can best replace, by
    `refit_error` on the smaller model. For each proposal the model without that head is refitted and its loss is
    measured. The head whose removal gives the lowest loss is removed. The refit (`recoveries.refitting`) changes only
    W_O. One half of the examples is for the refits, the other half for the losses.

    Use it with `recovery=[refit]`: the masks are chosen for models that are refitted afterwards. Without a refit, these
    models are often worse than those of other schedules.
    """

    examples: Annotated[int, Ge(4)] = 512
    """Number of examples of the *score* split: half for the refits, half for the losses."""
    proposed: Annotated[int, Ge(1)] = 1
    """Number of heads that every block proposes at each step."""
    every: Annotated[int, Ge(1)] = 1
    """Number of heads to remove at each step, but at most half of the proposals. If all proposed heads were removed,
    every block would lose heads at each step, and blocks would not compete."""

    scoring, removes = "none", True

    def path(self, evidence: Evidence) -> Iterator[HeadMask]:
        refits = evidence.refits(self.examples)
        mask = HeadMask(evidence.subject.grid)
        yield mask
        while candidates := self.removable(evidence, mask):
            left = refits.without(mask) if mask.removed else evidence.subject
            errors = dict(zip(mask.kept, refits.errors(left).tolist(), strict=True))
            by_block: dict[BlockId, list[HeadId]] = defaultdict(list)
            for head in sorted(candidates, key=errors.__getitem__):
                by_block[head.block].append(head)
            proposals = [head for heads in by_block.values() for head in heads[: self.proposed]]
            losses = {head: refits.loss(refits.without(mask.without(head))) for head in proposals}
            for head in sorted(losses, key=losses.__getitem__)[: min(self.every, max(1, len(losses) // 2))]:
                if head in self.removable(evidence, mask):
                    mask = mask.without(head)
                    yield mask
