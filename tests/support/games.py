"""Subjects that are nothing but a loss: what a search or a score does with them can be worked out by hand."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from mhaprune.heads import BlockId, HeadGrid
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import EOS, AnswerOutcome, Examples


class Game:
    """A subject of so many heads that is nothing but its loss: of examples known by their number, (B,), under gates
    (B, N). It counts how often each set of heads was removed."""

    def __init__(self, num_heads: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.grid, self.loss = HeadGrid.full([BlockId(Site.CROSS, 0)], num_heads), loss
        self.device, self.dtype = torch.device("cpu"), torch.double
        self.runs: Counter[tuple[int, ...]] = Counter()

    def evaluate(self, batch: Examples, gates: Tensor, fallback: None = None) -> AnswerOutcome:
        gates_BN = gates.expand(len(batch), -1)
        loss = self.loss(batch.source[:, 0], gates_BN)
        self.runs[tuple((gates_BN[0] == 0).nonzero().flatten().tolist())] += 1
        return AnswerOutcome(loss, torch.zeros_like(loss), torch.zeros_like(loss))

    def evaluate_masks(self, batch: Examples, gates: Tensor, fallback: None = None) -> AnswerOutcome:
        rows = [self.evaluate(batch, gates_N) for gates_N in gates]
        return AnswerOutcome(*(torch.stack(values) for values in zip(*rows, strict=True)))

    def output_weights(self) -> dict[BlockId, Tensor]:
        return {block: torch.zeros(len(self.grid), 1, 1).double() for block in self.grid.blocks}

    def learned_gates(self) -> None:
        return None


def numbered(numbers: range) -> Examples:
    """Examples for a `Game`: sources of one token, the number, which must not be 0."""
    return Examples(torch.tensor(numbers)[:, None], torch.full((len(numbers), 1), EOS))


ONE = numbered(range(1, 2))
