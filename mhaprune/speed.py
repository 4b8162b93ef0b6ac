"""How long calls take, measured side by side: in turn, in one process, against noise that is measured too."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pandas as pd
import torch
from torch.utils.benchmark import timer
from tqdm import tqdm

DENSE, CONTROL = "dense", "dense again"
"""The names of what everything is compared with, and of the same thing a second time: the A/A control."""


@torch.no_grad()
def in_turn(calls: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> pd.DataFrame:
    """Milliseconds of every call (columns) in every round (rows).

    In a round each call is made once, one after the other, in an order drawn anew, so that none always follows the
    same neighbour. The clock is torch's own benchmark timer, which waits
    for an accelerator to finish.
    """
    names, draw = list(calls), random.Random(0)
    rows: list[dict[str, float]] = []
    for turn in tqdm(range(-warmup, rounds), "timing", disable=None, leave=False):
        row = {}
        for name in draw.sample(names, len(names)):
            start = timer()
            calls[name]()
            row[name] = 1000 * (timer() - start)
        if turn >= 0:
            rows.append(row)
    return pd.DataFrame(rows, columns=names)


def ratios(times: pd.DataFrame, ours: str, peer: str) -> pd.Series:
    """Median and quartiles of `ours` over `peer`, taken round by round: what slows the machine down slows both."""
    ratio = times[ours] / times[peer]
    return pd.Series(
        {
            "ours_ms": times[ours].median(),
            "peer_ms": times[peer].median(),
            "ratio": ratio.median(),
            "q1": ratio.quantile(0.25),
            "q3": ratio.quantile(0.75),
        }
    )
