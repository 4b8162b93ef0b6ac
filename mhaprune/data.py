"""How symbols become tensors: the vocabulary of a task, and the examples of a split.

Dimensions: E = examples, S = source positions, T = target positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<bos>", "<eos>")


@dataclass(frozen=True)
class Vocabulary:
    """The symbols of a task; ids 0, 1 and 2 are padding, begin and end of sequence."""

    symbols: tuple[str, ...]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: len(SPECIAL) + i for i, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.symbols)

    def encode(self, symbols: Iterable[str]) -> list[int]:
        """Ids, closed by EOS; raises ValueError naming a symbol that is not in the vocabulary."""
        try:
            return [self._ids[symbol] for symbol in symbols] + [EOS]
        except KeyError as unknown:
            raise ValueError(f"symbol={unknown}: not in the vocabulary {' '.join(self.symbols)}") from None

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Symbols up to the first EOS or padding."""
        symbols = []
        for i in ids:
            if i in (PAD, EOS):
                break
            symbols.append((*SPECIAL, *self.symbols)[i])
        return symbols


@dataclass(frozen=True)
class Examples:
    """Source (E, S) and target (E, T), both closed by EOS and padded on the right."""

    source: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: slice | Tensor) -> Examples:
        """Some of the examples, without the columns that are padding for all of them."""
        return Examples(_trim(self.source[index]), _trim(self.target[index]))

    def batches(self, batch_size: int) -> Iterator[Examples]:
        """All examples in their order; the last batch may be smaller."""
        for start in range(0, len(self), batch_size):
            yield self[start : start + batch_size]

    def shuffled_batches(
        self, batch_size: int, order: torch.Generator, sorted_batches: int = 1, skip: int = 0
    ) -> Iterator[Examples]:
        """Endless batches: every epoch a new permutation. The first `skip` are dropped.

        The examples of `sorted_batches` batches are drawn together, sorted by length and cut into batches. These come
        in random order. 1 sorts nothing.
        """
        lengths = self.lengths().cpu()
        while True:
            for drawn in torch.randperm(len(self), generator=order).split(batch_size * sorted_batches):
                batches = drawn.split(batch_size)
                if sorted_batches > 1:
                    batches = drawn[lengths[drawn].argsort(stable=True)].split(batch_size)
                    batches = [batches[i] for i in torch.randperm(len(batches), generator=order)]
                for index in batches:
                    if skip > 0:
                        skip -= 1
                    else:
                        yield self[index.to(self.source.device)]

    def lengths(self) -> Tensor:
        """(E,): number of tokens of source and target together, end of sequence included."""
        return (self.source != PAD).sum(dim=1) + (self.target != PAD).sum(dim=1)

    def to(self, device: torch.device | str) -> Examples:
        return Examples(self.source.to(device), self.target.to(device))


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """(rows, longest row), filled up with PAD."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows], dtype=torch.long)


def shift_right(target_BT: Tensor) -> Tensor:
    """The decoder's input for a target: BOS first, the last token dropped."""
    return F.pad(target_BT[:, :-1], (1, 0), value=BOS)


def _trim(ids: Tensor) -> Tensor:
    return ids[:, : int((ids != PAD).sum(dim=1).max()) if len(ids) else 0]
