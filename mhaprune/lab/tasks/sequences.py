"""Examples of the small model's tasks, sequences of symbols, and how its answers are judged.

Dimensions: E = examples, S = source positions, T = target positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import Data

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
        """Return the ids of symbols, closed by EOS. Raises ValueError with the first symbol that is not in the
        vocabulary."""
        try:
            return [self._ids[symbol] for symbol in symbols] + [EOS]
        except KeyError as unknown:
            raise ValueError(f"symbol={unknown}: not in the vocabulary {' '.join(self.symbols)}") from None

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the symbols up to the first EOS or padding."""
        return [(*SPECIAL, *self.symbols)[i] for i in takewhile(lambda i: i not in (PAD, EOS), ids)]


class AnswerOutcome(NamedTuple):
    """The results of a sequence-to-sequence model on the examples of a batch.

    `loss` is the mean cross-entropy in nats over the target tokens of an example. `token_accuracy` is the share of
    these tokens that the model ranks first, given the true prefix. `quality` is 1 if the model ranks all of them first.
    This is exact match under greedy decoding, which follows the true prefix as long as it makes no mistake.
    """

    loss: Tensor
    token_accuracy: Tensor
    quality: Tensor

    @classmethod
    def of(cls, logits: Tensor, target: Tensor) -> Self:
        """Judge logits (..., T, V) against targets (..., T)."""
        valid = target != PAD
        lengths = valid.sum(dim=-1)
        loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=PAD, reduction="none")
        hits = ((logits.argmax(dim=-1) == target) & valid).sum(dim=-1)
        exact = hits == lengths
        return cls(loss.view_as(target).sum(dim=-1) / lengths, hits.to(loss.dtype) / lengths, exact.to(loss.dtype))


@dataclass(frozen=True)
class Examples(Data):
    """Source (E, S) and target (E, T), both closed by EOS and padded on the right."""

    source: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: slice | Tensor) -> Self:
        """Return the examples at these positions, without the columns that are padding in all of them."""
        return type(self)(_trim(self.source[index]), _trim(self.target[index]))

    def lengths(self) -> Tensor:
        """Return the number of tokens of source and target together, with the end of sequence, (E,)."""
        return (self.source != PAD).sum(dim=1) + (self.target != PAD).sum(dim=1)

    def by_length(self) -> Tensor:
        """Return the positions (E,) of the examples, sorted by the length of the target."""
        return (self.target != PAD).sum(dim=1).argsort(stable=True)

    def tensors(self) -> Mapping[str, Tensor]:
        return {"source": self.source, "target": self.target}

    def counterpart(self) -> Self:
        """Return the examples with the source of another one of as many tokens; the target stays."""
        lengths, other = (self.source != PAD).sum(dim=1), torch.arange(len(self), device=self.device)
        for length in lengths.unique():
            alike = (lengths == length).nonzero().flatten()
            other[alike] = alike.roll(-1)
        return type(self)(self.source[other], self.target)

    @property
    def device(self) -> torch.device:
        return self.source.device

    def to(self, device: torch.device | str) -> Examples:
        return Examples(self.source.to(device), self.target.to(device))


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the rows as a tensor (rows, longest row), padded with PAD."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows], dtype=torch.long)


def shift_right(target_BT: Tensor) -> Tensor:
    """Return the decoder's input for a target: BOS first, the last token dropped."""
    return F.pad(target_BT[:, :-1], (1, 0), value=BOS)


def _trim(ids: Tensor) -> Tensor:
    return ids[:, : int((ids != PAD).sum(dim=1).max()) if len(ids) else 0]
