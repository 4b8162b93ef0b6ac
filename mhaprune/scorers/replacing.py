"""Close heads one by one, or put other outputs in their place."""

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import Replacement, all_open, measure_masks
from mhaprune.subject import Subject

LARGEST = 2**26
"""The largest number of gates of all masks that are measured together: those of neurons may fill the memory."""


@torch.no_grad()
def rises(subject: Subject, examples: Data, replacement: Replacement | None = None) -> Tensor:
    """Return for each example how much the loss rises when one head is closed, or replaced, (E, N)."""
    num_heads, parts = len(subject.grid), list[Tensor]()
    for rows in torch.arange(1 + num_heads).split(max(1, LARGEST // max(1, num_heads))):  # the first closes nothing
        gates_MN = all_open(subject, len(rows))
        gates_MN[rows > 0, rows[rows > 0] - 1] = 0.0
        parts.append(measure_masks(subject, examples, gates_MN, replacement).loss.double())
    loss_ME = torch.cat(parts)
    return (loss_ME[1:] - loss_ME[0]).T


def corrupted(examples: Data) -> Replacement:
    """Return a replacement: the outputs of the heads on the corrupt counterpart of each example."""
    pairs = examples.counterpart()
    return lambda subject, batch, at: subject.head_outputs(pairs[at])
