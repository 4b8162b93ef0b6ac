"""Shapley values against sums over all subsets and permutations."""

from collections.abc import Callable
from itertools import combinations, permutations
from math import factorial

import pytest
import torch
from torch import Tensor

from mhaprune.attention.gates import Softmax
from mhaprune.data import Splits
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import measure
from mhaprune_literature import shapley as module
from mhaprune_literature.shapley import Shapley
from support.games import ONE, Game, numbered

Value = Callable[[frozenset[int]], float]


@pytest.fixture
def small(task: Sort) -> Seq2Seq:
    """Six heads: few enough for all 64 subsets."""
    torch.manual_seed(1)
    config = Transformer(d_model=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8)
    return Seq2Seq(config, len(task.vocabulary), Softmax()).double()


def shapley_by_hand(model: Seq2Seq, examples: Examples) -> Tensor:
    """Over all subsets: Σ_S |S|! (N-|S|-1)! / N! (v(S + n) - v(S))."""
    n = len(model.grid)
    value = {}
    for size in range(n + 1):
        for subset in combinations(range(n), size):
            gates = torch.zeros(n, dtype=torch.float64)
            gates[list(subset)] = 1.0
            value[frozenset(subset)] = -float(measure(model, examples, gates).loss.mean())
    result = torch.zeros(n, dtype=torch.float64)
    for subset, without in value.items():
        for head in set(range(n)) - subset:
            weight = factorial(len(subset)) * factorial(n - len(subset) - 1) / factorial(n)
            result[head] += weight * (value[subset | {head}] - without)
    return result


def test_all_subsets_are_the_sum_over_them_and_add_up(small: Seq2Seq, splits: Splits) -> None:
    scores = Shapley(evaluations=64)(small, splits.score, seed=0)
    torch.testing.assert_close(scores.values[0], shapley_by_hand(small, splits.score))
    ends = torch.stack([torch.zeros(6), torch.ones(6)]).double()
    none, whole = (-measure(small, splits.score, gates).loss for gates in ends)
    torch.testing.assert_close(scores.values.sum(), (whole - none).mean())
    assert scores.forward_passes == 64
    by_example = torch.stack([shapley_by_hand(small, splits.score[n : n + 1]) for n in range(3)])
    few = Shapley(evaluations=64)(small, splits.score[:3], seed=1)
    assert few.stderr is not None
    torch.testing.assert_close(few.stderr[0], by_example.std(0) / 3**0.5)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4])
def test_all_subsets_are_all_permutations(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each head adds to those before it, mean over all orders; each subset is run once for each example."""
    monkeypatch.setattr(module, "MASKS_AT_ONCE", 3)
    value, orders = any_value(num_heads), list(permutations(range(num_heads)))
    expected = [0.0] * num_heads
    for order in orders:
        for i, head in enumerate(order):
            expected[head] += (value(frozenset(order[: i + 1])) - value(frozenset(order[:i]))) / len(orders)
    game = game_of(num_heads, value)
    scores = Shapley()(game, numbered(range(1, 3)), seed=0)
    assert scores.values[0].tolist() == pytest.approx(expected)
    assert scores.forward_passes == len(game.runs) == sum(game.runs.values()) == 2**num_heads


def test_subsets_that_do_not_fit_into_the_evaluations_are_sampled() -> None:
    game = game_of(5, any_value(5))
    two = numbered(range(1, 3))
    assert [Shapley(evaluations=n)(game, two, 0).forward_passes for n in (31, 32)] == [2 + 3 * 8, 32]
    assert [Shapley(exact_up_to=n)(game, two, 0).forward_passes for n in (4, 5)] == [2 + 124 * 8, 32]


def game_of(num_heads: int, value: Value) -> Game:
    """Its loss is minus the value of the open heads."""

    def loss(number: Tensor, gates: Tensor) -> Tensor:
        return -torch.tensor([value(frozenset(row.nonzero().flatten().tolist())) for row in gates], dtype=torch.double)

    return Game(num_heads, loss)


def any_value(num_heads: int) -> Value:
    """A number of its own for every set of heads."""
    values = torch.rand(2**num_heads, generator=torch.Generator().manual_seed(2), dtype=torch.double).tolist()
    return lambda heads: values[sum(2**n for n in heads)]


def pairs_by_hand(num_heads: int, value: Value, pairs: int, seed: int) -> list[list[float]]:
    """What each head adds to those before it, mean of a permutation and its reverse: (pairs, N)."""
    draw, result = torch.Generator().manual_seed(seed), []
    for _ in range(pairs):
        order, added = torch.randperm(num_heads, generator=draw).tolist(), [0.0] * num_heads
        for one in (order, order[::-1]):
            for i, head in enumerate(one):
                added[head] += (value(frozenset(one[: i + 1])) - value(frozenset(one[:i]))) / 2
        result.append(added)
    return result


def test_a_permutation_and_its_reverse_are_exact_where_heads_interact_in_pairs() -> None:
    """A head finds every other one before it in just one of the two."""
    draw = torch.Generator().manual_seed(3)
    alone, both = (torch.randn(*size, generator=draw, dtype=torch.double) for size in ((6,), (6, 6)))
    both = both.triu(1)

    def value(heads: frozenset[int]) -> float:
        return sum(float(alone[n]) for n in heads) + sum(float(both[n, m]) for n in heads for m in heads)

    for seed in range(3):
        scores = Shapley(evaluations=2 + 2 * 5)(game_of(6, value), ONE, seed)
        torch.testing.assert_close(scores.values[0], alone + (both + both.T).sum(0) / 2)
        assert scores.stderr is None
        assert scores.forward_passes == 12


@pytest.mark.parametrize("pairs", [2, 8, 11])
def test_sampling_is_the_loop_over_permutations(pairs: int) -> None:
    value = any_value(5)
    scores = Shapley(evaluations=2 + pairs * 8 + 7, exact_up_to=0)(game_of(5, value), ONE, seed=4)
    by_hand = torch.tensor(pairs_by_hand(5, value, pairs, seed=4), dtype=torch.double)
    torch.testing.assert_close(scores.values[0], by_hand.mean(0))
    assert scores.stderr is not None
    torch.testing.assert_close(scores.stderr[0], by_hand.std(0) / pairs**0.5)
    assert scores.forward_passes == 2 + pairs * 8
