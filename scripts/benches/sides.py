"""Two sides of a comparison, timed in turn, and what they are timed on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from mhaprune.lab.model.config import Transformer
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.measure.times import in_turn, ratios

VOCABULARY_SIZE = 13
DEFAULT = Transformer()
Pair = tuple[str, Callable[[], object], Callable[[], object]]
"""A name, our side and its peer."""
Row = dict[str, Any]


def timed(pairs: list[Pair], rounds: int, clock: Callable[[], float] = time.perf_counter) -> list[Row]:
    """Two rows per pair: the ratio, and the peer against itself."""
    rows: list[Row] = []
    for name, ours, peer in pairs:
        # Both sides are called twice in a round: what is called more often would find more of itself in the caches.
        calls = {"ours": ours, "peer": peer, "ours again": ours, "peer again": peer}
        times = in_turn(calls, rounds, clock=clock)
        rows.append({"name": name, **ratios(times, "ours", "peer")})
        rows.append({"name": f"{name}, A/A", **ratios(times, "peer again", "peer")})
    return rows


def random_examples(batch_size: int, length: int) -> Examples:
    draw = torch.Generator().manual_seed(0)
    source, target = (torch.randint(3, VOCABULARY_SIZE, (batch_size, length), generator=draw) for _ in range(2))
    return Examples(source, target)
