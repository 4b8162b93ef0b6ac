"""Loss and accuracy of a subject on every example of a split, under gates.

Dimensions: E = examples of a split, N = all heads, K = head_dim, B = batch, T = positions, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhaprune.data import PAD, Examples
from mhaprune.statistics import bootstrap_interval, wilson_interval
from mhaprune.subject import Outcome, Subject

BATCH_SIZE = 128


@torch.no_grad()
def measure(
    subject: Subject,
    examples: Examples,
    gates: Tensor | None = None,
    fallback: Tensor | None = None,
    batch_size: int = BATCH_SIZE,
) -> Outcome:
    """The outcome of every example in their order, (E,) each; `gates` (N,) are the same for all of them."""
    # Examples of like length share a batch, so that little of it is padding.
    order = (examples.target != PAD).sum(dim=1).argsort(stable=True)
    parts = [subject.evaluate(batch, gates, fallback) for batch in examples[order].batches(batch_size)]
    return Outcome(*(torch.cat(values)[order.argsort()] for values in zip(*parts, strict=True)))


@torch.no_grad()
def mean_outputs(subject: Subject, examples: Examples, batch_size: int = BATCH_SIZE) -> Tensor:
    """(N, K): each head's mean output before gate and W_O, over all tokens of a split, padding excluded."""
    sums, tokens = torch.zeros(()), torch.zeros(())
    for batch in examples.batches(batch_size):
        outputs = subject.head_outputs(batch).values()
        sums = sums + torch.cat([torch.einsum("bhtk,bt->hk", c.double(), valid.double()) for c, valid in outputs])
        tokens = tokens + torch.cat([valid.sum().expand(len(c[0])) for c, valid in outputs])
    return (sums / tokens.unsqueeze(-1)).to(next(iter(outputs)).context.dtype)


@torch.no_grad()
def logit_difference(first: Subject, second: Subject, batch: Examples, gates: Tensor | None = None) -> float:
    """The largest absolute difference of a logit between `first` under `gates` and `second`, padding excluded."""
    difference_BTV = first.logits(batch, gates) - second.logits(batch)
    return float(difference_BTV[batch.target != PAD].abs().max())


@torch.no_grad()
def greedy_disagreements(subject: Subject, examples: Examples, batch_size: int = BATCH_SIZE) -> int:
    """How many examples greedy decoding gets right where `sequence_accuracy` says wrong, or the other way round.

    The two are the same by induction over the tokens; anything but 0 is a tie broken differently by rounding, or a
    fault.
    """
    disagreements = 0
    for batch in examples.batches(batch_size):
        decoded_B = (subject.predict(batch) == batch.target).all(dim=1)
        disagreements += int((decoded_B != subject.evaluate(batch).sequence_accuracy.bool()).sum())
    return disagreements


def accuracy_columns(outcome: Outcome) -> dict[str, float]:
    """Mean loss, token accuracy and exact match, each with its 95 % interval over examples, `_low` and `_high`."""
    columns: dict[str, float] = {}
    for name, values in outcome._asdict().items():
        values_E = values.double().cpu().numpy()
        interval = wilson_interval if name == "sequence_accuracy" else bootstrap_interval
        low, high = interval(values_E)
        columns |= {name: float(values_E.mean()), f"{name}_low": low, f"{name}_high": high}
    return columns
