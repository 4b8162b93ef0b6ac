"""Many masks that replay the pass before their first closed head, beside a whole pass per mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from benches.sides import DEFAULT, VOCABULARY_SIZE, Pair
from mhaprune.attention.gates import Softmax
from mhaprune.heads import HeadMask
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import measure, measure_masks
from mhaprune.schedules.base import Evidence
from mhaprune.schedules.greedy import Greedy
from mhaprune.subject import Subject


def ablation() -> list[Pair]:
    """Ablation of all heads of the default model, which replays what masks share, against whole passes."""
    model, examples = Seq2Seq(Transformer(), VOCABULARY_SIZE, Softmax()), Sort().splits().score
    return [("ablation default model", *shared_and_plain(model, examples, each_closed(len(model.grid))))]


def pairs_of_heads(config: Transformer = DEFAULT, num_examples: int = 64) -> list[Pair]:
    """The loss with every two heads of the default model closed, on 64 examples, against one pass per pair."""
    model, examples = Seq2Seq(config, VOCABULARY_SIZE, Softmax()), Sort().splits().score[:num_examples]
    every = HeadMask(model.grid)
    gates = torch.stack([every.without(*pair).gates() for pair in combinations(model.grid, 2)])
    return [("pairs of heads", *shared_and_plain(model, examples, gates))]


def oracle() -> list[Pair]:
    """All 4096 masks of a model with 12 heads, on 8 examples, against one mask a pass."""
    model = Seq2Seq(Transformer(num_heads=2), VOCABULARY_SIZE, Softmax())
    gates = torch.cartesian_prod(*[torch.tensor([1.0, 0.0])] * len(model.grid))
    return [("oracle", *shared_and_plain(model, Sort().splits().choose[:8], gates))]


def greedy(config: Transformer = DEFAULT, num_examples: int = 64) -> list[Pair]:
    """The greedy schedule from all heads of the default model to none, on 64 examples, against the same with one pass
    per candidate."""
    model, examples = Seq2Seq(config, VOCABULARY_SIZE, Softmax()), Sort().splits().score[:num_examples]

    def no_score(left: Subject) -> Tensor:
        raise AssertionError("greedy reads no score")

    def shared(masks: Sequence[HeadMask]) -> Tensor:
        return measure_masks(model, examples, torch.stack([mask.gates() for mask in masks])).loss.mean(dim=1)

    def plain(masks: Sequence[HeadMask]) -> Tensor:
        return torch.stack([measure(model, examples, mask.gates()).loss.mean() for mask in masks])

    budgets = range(len(model.grid) + 1)
    ours, peer = (partial(Greedy(), Evidence(model, no_score, loss), budgets) for loss in (shared, plain))
    return [("greedy", ours, peer)]


def shared_and_plain(
    model: Seq2Seq, examples: Examples, gates: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    return (
        lambda: measure_masks(model, examples, gates),
        lambda: [measure(model, examples, gates_N) for gates_N in gates],
    )


def each_closed(heads: int) -> Tensor:
    """Gates (1 + heads, heads): all open, then each head closed."""
    return torch.cat([torch.ones(1, heads), 1 - torch.eye(heads)])
