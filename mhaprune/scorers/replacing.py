"""The replacements that scores measure: heads closed one by one, or other outputs in their place.

Dimensions: E = examples, N = all heads, M = masks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import Replacement, all_open, measure_masks
from mhaprune.subject import Batch, Fallback, Subject

KEPT = 2**28
"""The most bytes of replacements that are kept."""
LARGEST = 2**26
"""The largest number of gates of all masks that are measured together: those of neurons may fill the memory."""


@torch.no_grad()
def rises(
    subject: Subject, examples: Data, replacement: Replacement | None = None, heads: Sequence[int] | None = None
) -> Tensor:
    """Return for each example how much the loss rises when one head is closed, or replaced: (E, N) for all heads, in
    the order of `heads` for some."""
    num_heads, parts = len(subject.grid), list[Tensor]()
    closed = torch.tensor([-1, *(range(num_heads) if heads is None else heads)])  # the first closes nothing
    for some in closed.split(max(1, LARGEST // max(1, num_heads))):
        gates_MN = all_open(subject, len(some))
        gates_MN[some >= 0, some[some >= 0]] = 0.0
        parts.append(measure_masks(subject, examples, gates_MN, replacement).loss.double())
    loss_ME = torch.cat(parts)
    return (loss_ME[1:] - loss_ME[0]).T


def corrupted(examples: Data) -> Replacement:
    """Return a replacement: the outputs of the heads on the corrupt counterpart of each example. They are kept for the
    next pass if they are small."""
    pairs, known = examples.counterpart(), dict[tuple[int, ...], Fallback]()

    def replace(subject: Subject, batch: Batch, at: Tensor) -> Fallback:
        if (place := tuple(at.tolist())) in known:
            return known[place]
        found = subject.head_outputs(pairs[at])
        if sum(x.nbytes for each in (*known.values(), found) for x in each.values()) <= KEPT:
            known[place] = found
        return found

    return replace
