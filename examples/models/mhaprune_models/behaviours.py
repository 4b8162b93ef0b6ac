"""What heads of a language model look at, on random tokens that come twice: a pattern of attention, not an effect.

Dimensions: B = batch, H = heads of a block, T = tokens, all of them; L = tokens that are repeated.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from mhaprune.scorers.scoring import head_columns
from mhaprune.subjects.batches import Batches

BEHAVIOURS = ("first token", "previous token", "duplicate token", "induction")
SIZE = 8
"""Number of texts in a batch."""


def places(length: int) -> dict[str, Tensor]:
    """Return for each behaviour the keys that it looks at, (T, T), from the queries of the second half, T = 1 + 2L.

    The first token stands before the L tokens that come twice. A duplicate is the earlier copy of the token that is
    read; induction looks at the token after it, which comes next (Elhage et al. 2021; Wang et al. 2023, section 3).
    """
    at = torch.arange(1 + 2 * length)
    query, key = at[:, None], at
    again = query > length
    found = (key == 0, key == query - 1, key == query - length, key == query - length + 1)
    return {name: places & again for name, places in zip(BEHAVIOURS, found, strict=True)}


def behaviours(heads: Any, vocabulary: range, texts: int = 16, length: int = 24, seed: int = 0) -> pd.DataFrame:
    """Return a row for each head: the mean share of its attention, 0 to 1, on the places of each of `BEHAVIOURS`.

    `heads` come from `mhaprune.wrap` of a causal model that takes `input_ids`; texts are random tokens of the
    `vocabulary`. Raises ValueError for a model whose attention is not between all tokens of a text.
    """
    draw = torch.Generator().manual_seed(seed)
    half = torch.randint(vocabulary.start, vocabulary.stop, (texts, length), generator=draw)
    first = torch.randint(vocabulary.start, vocabulary.stop, (texts, 1), generator=draw)
    ids = torch.cat([first, half, half], dim=1)
    masks, sums = places(length), dict[Any, Tensor]()
    for part in ids.split(SIZE):
        given = {"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part}
        batch = Batches.of([given], "texts").converted(heads.subject.device, heads.subject.dtype)
        for block, seen in heads.subject.attention_maps(batch).items():
            if seen.weights.shape[-2:] != (1 + 2 * length, 1 + 2 * length):
                raise ValueError(f"{block}: looks at {seen.weights.shape[-1]} places of {1 + 2 * length} tokens")
            shares_BHK = torch.stack([(seen.weights * mask).sum(dim=(2, 3)) / length for mask in masks.values()], dim=2)
            sums[block] = sums.get(block, 0) + shares_BHK.sum(dim=0)
    rows = [
        head_columns(head) | dict(zip(BEHAVIOURS, (sums[head.block][head.head] / texts).tolist(), strict=True))
        for head in heads.grid
    ]
    return pd.DataFrame(rows)
