"""Tables of attention patterns: the share of each head's attention on the places of a pattern, and the name that this
gives the head.

Dimensions: B = batch, H = heads of a block, T = queries, U = keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import nan
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import BlockId
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import EOS, PAD, SPECIAL, Examples, shift_right
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.scorers.scoring import head_columns
from mhaprune.subject import AttentionMap, Subject
from mhaprune.tables import HEAD

LARGEST = 0.5
"""A head is named after a pattern only if its largest weight falls on the pattern for at least this share of queries,
and if its attention to the pattern exceeds chance. Voita et al. 2019, section 5.2, require a share of 0.9, but do not
compare with chance: there, a largest weight may be only a little larger than the others."""
ABOVE_CHANCE = 0.15
"""A pattern names a head only if the attention to it exceeds chance by at least this share of the most that is
possible, 1 − chance. Chance is large if few keys are allowed: 1 / (i + 1) in row i of a causal block."""
APPLIES = 0.5
"""A pattern names a head only if it has a place for at least this share of the queries."""
EVERYWHERE = 0.05
"""A head is named "everywhere" if at most this share of its attention must move to make it equal on all keys."""


@dataclass(frozen=True)
class View:
    """The tokens that the heads of one site may look at in a batch: `reads` (B, T) at the queries, `writes` (B, T)
    predicted there by the decoder (PAD in the encoder), and `keys` (B, U)."""

    reads: Tensor
    writes: Tensor
    keys: Tensor
    causal: bool

    @classmethod
    def of(cls, site: str, batch: Data, seen: AttentionMap | None = None) -> View:
        """Return the view of a batch.

        For a pretrained model, the attention map `seen` tells only which places are real (not padding), so all tokens
        count as equal. A square matrix of weights with only zeros above the diagonal is taken for causal attention.
        """
        if isinstance(batch, Examples):
            if site == Site.ENCODER_SELF:
                return cls(batch.source, torch.full_like(batch.source, PAD), batch.source, False)
            prefix_BT, cross = shift_right(batch.target).masked_fill(batch.target == PAD, PAD), site == Site.CROSS
            return cls(prefix_BT, batch.target, batch.source if cross else prefix_BT, not cross)
        assert seen is not None
        reads, keys = (len(SPECIAL) * real.long() for real in (seen.queries, seen.keys))
        square = seen.weights.shape[-1] == seen.weights.shape[-2] > 1
        causal = square and not bool((seen.weights * seen.queries[:, None, :, None]).triu(1).any())
        return cls(reads, torch.full_like(reads, PAD), keys, causal)

    @cached_property
    def allowed(self) -> Tensor:
        """The keys that each query may look at, (B, T, U)."""
        allowed = (self.reads != PAD)[:, :, None] & (self.keys != PAD)[:, None]
        return allowed.tril() if self.causal else allowed

    @cached_property
    def first(self) -> Tensor:
        """The place of the first symbol among the keys, (B, 1, 1)."""
        return (self.keys != PAD).long().argmax(dim=1)[:, None, None]

    @cached_property
    def last(self) -> Tensor:
        """The place of the last symbol among the keys, before the end of the sequence, (B, 1, 1)."""
        ended = (self.keys == EOS).any(dim=1).long()
        return self.first + ((self.keys != PAD).sum(dim=1) - 1 - ended)[:, None, None]

    @cached_property
    def query_places(self) -> Tensor:
        return torch.arange(self.reads.shape[1], device=self.reads.device)[None, :, None]

    @cached_property
    def key_places(self) -> Tensor:
        return torch.arange(self.keys.shape[1], device=self.keys.device)[None, None, :]


Points = Callable[[View], Tensor]
"""A function that returns the places of a pattern: a boolean tensor that broadcasts to (B, T, U)."""


def shifted(view: View, by: int) -> Tensor:
    return view.key_places == view.query_places + by


def mirrored(view: View, by: int) -> Tensor:
    return (view.key_places == view.last - view.query_places + by) & (view.key_places <= view.last)


def symbol_read(view: View) -> Tensor:
    """Return the keys with the same symbol as the query. In self-attention the query's own place is left out."""
    same_BTU = view.keys[:, None] == view.reads[:, :, None]
    return same_BTU & ~shifted(view, 0) if view.keys is view.reads else same_BTU


NEAR = ("i−2", "i−1", "i", "i+1", "i+2")
PLACES: dict[str, Points] = {
    **{name: partial(shifted, by=by) for by, name in enumerate(NEAR, -2)},
    **{name: partial(mirrored, by=by) for by, name in enumerate(("n−i−1", "n−i", "n−i+1"), -1)},
    "first": lambda view: view.key_places == view.first,
    "last": lambda view: view.key_places == view.last,
    "end": lambda view: (view.keys == EOS)[:, None],
    "=read": symbol_read,
    "=write": lambda view: (view.keys[:, None] == view.writes[:, :, None]) & (view.keys != EOS)[:, None],
}
"""For each pattern, a function that returns its places. Positions count from 0, and n is the position of the last
symbol. A decoder's query at i is about to write symbol i, and has read symbol i − 1."""


def near(*names: str) -> dict[str, str]:
    """Return words by place near the query: the first is for two places before the query, the next for one place."""
    return dict(zip(NEAR, names, strict=False))


PATTERNS: dict[str, dict[str, str]] = {
    Site.ENCODER_SELF: {
        **near("two before", "previous symbol", "itself", "next symbol", "two after"),
        "n−i": "reverse position",
        "first": "first symbol",
        "last": "last symbol",
        "end": "end of sequence",
        "=read": "same symbol elsewhere",
    },
    Site.DECODER_SELF: {
        **near("last but two", "last but one symbol", "symbol just written"),
        "first": "begin of sequence",
        "=read": "earlier copies",
        "=write": "symbol to write",
    },
    Site.CROSS: {
        **near("two before", "position before", "same position", "position after", "two after"),
        "n−i−1": "before reverse position",
        "n−i": "reverse position",
        "n−i+1": "after reverse position",
        "first": "first symbol",
        "last": "last symbol",
        "end": "end of sequence",
        "=read": "symbol just written",
        "=write": "symbol to write",
    },
}
"""The patterns of each site of mhaprune's own model, with their names in words."""
ALIGNED = "aligned"
"""The pattern of the source symbols that the written symbol stands for, for a task that knows them."""
OF_ANY_SITE = {
    **near("two before", "previous token", "itself", "next token", "two after"),
    "first": "first token",
    "last": "last token",
}
"""The patterns of every site of a pretrained model, with their names in words."""


class Observation(NamedTuple):
    """Tables of the places that the heads of a subject look at on a split.

    `patterns` has one row per head and pattern of its site. `mass` is the share of the head's attention that falls on
    the pattern; `largest` is the share of queries whose largest weight falls on it; `chance` is the mass that even
    attention would have. All three are means over the `queries` for which the pattern has a place. `applies` is the
    share of these queries among all.

    `looks` has one row per head: `entropy` in nats, as the scorer of that name defines it; `unevenness`, the share of
    its attention that must move to make it even; its `name` in words and its `pattern`, both empty if none is clear.
    """

    patterns: pd.DataFrame
    looks: pd.DataFrame


@torch.no_grad()
def observe(subject: Subject, examples: Data, aligned: Callable[[Any], Tensor] | None = None) -> Observation:
    """Return what heads look at. `aligned` returns, for a batch, the source symbols that each target symbol stands for,
    (B, T, S)."""
    masses: dict[tuple[BlockId, str], np.ndarray] = {}
    sums: dict[BlockId, np.ndarray] = {}
    for batch in examples.batches(BATCH_SIZE):
        for block, seen in subject.attention_maps(batch).items():
            view = View.of(block.site, batch, seen)
            sums[block] = sums.get(block, 0.0) + _evenness(seen, view)
            for name in PATTERNS.get(block.site, OF_ANY_SITE):
                masses[block, name] = masses.get((block, name), 0.0) + _masses(seen, view, PLACES[name](view))
            if aligned is not None and block.site == Site.CROSS:
                masses[block, ALIGNED] = masses.get((block, ALIGNED), 0.0) + _masses(seen, view, aligned(batch))
    heads = {block: pd.DataFrame(head_columns(h) for h in subject.grid if h.block == block) for block in sums}
    parts = []
    for (block, name), (mass_H, largest_H, chance_H, queries_H, possible_H) in masses.items():
        some_H = np.where(queries_H > 0, queries_H, nan)
        shares = {"mass": mass_H / some_H, "largest": largest_H / some_H, "chance": chance_H / some_H}
        counts = {"queries": queries_H.astype(int), "applies": queries_H / possible_H}
        meaning = PATTERNS.get(block.site, OF_ANY_SITE).get(name, "what it stands for")
        parts.append(heads[block].assign(pattern=name, meaning=meaning, **shares, **counts))
    patterns = pd.concat(parts, ignore_index=True)
    by_head = dict(list(patterns.groupby(HEAD)))
    means = {block: sums_3H[:2] / sums_3H[2] for block, sums_3H in sums.items()}
    parts_of_table = (
        heads[block].assign(entropy=mean_2H[0], unevenness=mean_2H[1]) for block, mean_2H in means.items()
    )
    table = pd.concat(parts_of_table, ignore_index=True)
    names = [
        ("everywhere", "") if uneven <= EVERYWHERE else named_after(by_head[site, layer, head])
        for site, layer, head, uneven in table[[*HEAD, "unevenness"]].itertuples(index=False)
    ]
    table["name"], table["pattern"] = zip(*names, strict=True)
    return Observation(patterns, table)


def _masses(seen: AttentionMap, view: View, there: Tensor) -> np.ndarray:
    """Return five sums per head, (5, H): mass, queries with the largest weight `there`, chance, queries for which the
    pattern has a place, all queries."""
    there_BTU = there & view.allowed
    largest_BHT1 = seen.weights.argmax(dim=3, keepdim=True)
    hits_H = there_BTU[:, None].expand_as(seen.weights).gather(3, largest_BHT1).sum(dim=(0, 2, 3))
    chance = (there_BTU.sum(dim=2) / view.allowed.sum(dim=2).clamp(min=1)).sum()
    counts = [chance, there_BTU.any(dim=2).sum(), (view.reads != PAD).sum()]
    return _sums((seen.weights * there_BTU[:, None]).sum(dim=(0, 2, 3)), hits_H, *counts)


def _evenness(seen: AttentionMap, view: View) -> np.ndarray:
    """Return three sums over a batch for each head, (3, H): entropy, unevenness, number of queries."""
    valid_BT = view.reads != PAD
    entropy_BHT = -seen.weights.xlogy(seen.weights).sum(dim=-1)
    even_BTU = view.allowed / view.allowed.sum(dim=2, keepdim=True).clamp(min=1)
    uneven_BHT = (seen.weights - even_BTU[:, None]).abs().sum(dim=-1) / 2
    return _sums(*((each * valid_BT[:, None]).sum(dim=(0, 2)) for each in (entropy_BHT, uneven_BHT)), valid_BT.sum())


def _sums(first_H: Tensor, *others: Tensor) -> np.ndarray:
    """Return a matrix with these tensors as rows, each (H,). A tensor with a single number is repeated for all
    heads."""
    return np.stack([each.expand_as(first_H).double().cpu().numpy() for each in (first_H, *others)])


def named_after(patterns: pd.DataFrame) -> tuple[str, str]:
    """Return the pattern whose mass exceeds chance most, which is the darkest cell of the figure: first in words, then
    as its key in `PLACES`; both empty if it is not clear."""
    above = patterns["mass"] - patterns["chance"]
    if not (there := above.notna() & (patterns["applies"] >= APPLIES)).any():
        return "", ""
    best = patterns.loc[above[there].idxmax()]
    clear = best["largest"] >= LARGEST and above[best.name] >= ABOVE_CHANCE * (1 - best["chance"])
    return (best["meaning"], best["pattern"]) if clear else ("", "")
