"""Scores that are found by training or by playing: trained gates, and Shapley values against sums over all subsets."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations
from math import factorial

import pytest
import torch
from torch import Tensor

from mhaprune.attention.gates import Softmax
from mhaprune.data import PAD, Examples, Splits
from mhaprune.heads import HeadId
from mhaprune.measure.outcomes import measure
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers import shapley as module
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.scorers.gate_training import TrainedGates
from mhaprune.scorers.hard_concrete import LOGIT_BOUND, HardConcrete, probability_open, stretched
from mhaprune.scorers.shapley import Shapley
from mhaprune.scorers.subset import Subset, relaxed_top_k
from mhaprune.tasks.sort import Sort
from support.composing import every
from support.games import ONE, Game, numbered
from support.models import judged
from support.sizes import slow

PLANTED = ("encoder_self.1.2", "decoder_self.0.1", "cross.1.0")


@pytest.fixture
def planted(model: Seq2Seq, splits: Splits) -> tuple[Seq2Seq, Examples]:
    """A model that needs three known heads: the others write next to nothing, and its own answers are the task."""
    with torch.no_grad():
        for block, sublayer in model.attention_sublayers().items():
            columns = sublayer.attention.out_proj.weight.unflatten(1, (3, 4))
            for head in range(3):
                columns[:, head] *= 4.0 if str(HeadId(*block, head)) in PLANTED else 0.01
        examples = Examples(splits.train.source[:128], splits.train.target[:128])
        answers = model.call(examples)[..., 3:].argmax(-1) + 3
    return model, Examples(examples.source, answers.masked_fill(examples.target == PAD, PAD))


FAST = {"keep": 3, "steps": 100, "batch_size": 8}


@pytest.mark.parametrize("scorer", [HardConcrete(**FAST), Subset(**FAST), Ablation()], ids=repr)
def test_planted_heads_are_found_and_exactly_so_many_kept(planted: tuple[Seq2Seq, Examples], scorer: Scorer) -> None:
    model, examples = planted
    scores = scorer(model, examples, seed=0)
    (mask,) = OneShot()(judged(model, scores.values[0]), [len(model.grid) - 3])
    assert {str(head) for head in mask.kept} == set(PLANTED)
    if isinstance(scorer, HardConcrete):
        assert (scores.values[0] > 0.5).sum() == 3


WORTHS = torch.logspace(-3, 0.5, 18, dtype=torch.double)[[(5 * n + 2) % 18 for n in range(18)]]
"""Nats that each of 18 heads is worth, from 0.001 to 3; no two alike."""


def worth_game(worths_N: Tensor, seen: list[Tensor] | None = None) -> Game:
    """Every head is worth so many nats whatever the others do; the gates of every step are written to `seen`."""

    def loss(number: Tensor, gates: Tensor) -> Tensor:
        if seen is not None:
            seen.append(gates.detach().clone())
        return ((1 - gates) * worths_N).sum(dim=1)

    return Game(len(worths_N), loss)


@pytest.mark.parametrize("keep", [3, 12, *slow(2, 6, 9)])
def test_the_heads_of_most_worth_are_kept_and_about_so_many(keep: int) -> None:
    """By hard concrete; by subset heads of much worth."""
    examples, best = numbered(range(1, 129)), WORTHS.argsort(descending=True)[:keep]
    values = HardConcrete(keep=keep)(worth_game(WORTHS), examples, seed=0).values[0]
    order = values.argsort(descending=True)
    assert set(order[:keep].tolist()) == set(best.tolist())
    assert values[order[keep - 1]] - values[order[keep]] > 0.01
    assert abs(int((values > 0.5).sum()) - keep) <= 1
    assert float(values.sum()) == pytest.approx(keep, abs=1)
    values = Subset(keep=keep)(worth_game(WORTHS), examples, seed=0).values[0]
    order = values.argsort(descending=True)
    assert values[order[keep - 1]] - values[order[keep]] > 1e-3
    assert WORTHS[order[:keep]].sum() > 0.95 * WORTHS[best].sum()


@pytest.mark.parametrize("keep", [6, 12])
def test_the_budget_of_hard_concrete_is_the_expected_number_of_open_gates(keep: int) -> None:
    """Heads of no worth stay undecided, all alike, so that only the penalty says how open they are. It is least with
    one gate fewer than wanted."""
    values = HardConcrete(keep=keep)(worth_game(torch.zeros(18).double()), numbered(range(1, 65)), seed=0).values[0]
    assert float(values.std()) < 1e-6
    assert keep - 1.2 < float(values.sum()) < keep


def test_logits_stay_within_their_bound() -> None:
    """Heads of much worth and of none would go far beyond it."""
    worths = torch.tensor([9.0, 8.0, -8.0, -9.0]).double()
    values = HardConcrete(keep=2)(worth_game(worths), numbered(range(1, 33)), seed=0).values[0]
    lowest, highest = probability_open(torch.tensor([-LOGIT_BOUND, LOGIT_BOUND], dtype=torch.double))
    torch.testing.assert_close(values[:2], highest.expand(2))
    assert (values < highest + 1e-9).all()
    assert (values > lowest - 1e-9).all()
    logits = Bounded(keep=2, steps=30)(worth_game(worths), numbered(range(1, 33)), seed=0).values[0]
    assert logits.tolist() == [1.5, 1.5, -1.5, -1.5]


class Bounded(TrainedGates):
    """The sigmoid of each logit."""

    bound = 1.5

    def sample(self, logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        return logits_N.sigmoid().expand(batch, -1)


def test_the_temperature_of_subset_falls_log_linearly() -> None:
    """Gates of equal logits are as far from 0 and 1 as a relaxed choice at that temperature is."""
    seen: list[Tensor] = []
    scorer = Subset(keep=4, steps=3, batch_size=4000, learning_rate=1e-9, start_temperature=2.0, end_temperature=0.02)
    scorer(worth_game(WORTHS[:12], seen), numbered(range(1, 4001)), seed=0)
    for gates, temperature in zip(seen, (2.0, 0.2, 0.02), strict=True):
        torch.testing.assert_close(gates.sum(dim=1), torch.full((4000,), 4.0).double())
        noise = -torch.empty(4000, 12, dtype=torch.double).exponential_().log()
        expected = relaxed_top_k(noise, 4, temperature)
        softness = float((gates * (1 - gates)).mean())
        assert softness == pytest.approx(float((expected * (1 - expected)).mean()), rel=0.1)


def test_a_step_takes_a_batch_or_what_there_is(planted: tuple[Seq2Seq, Examples]) -> None:
    model, examples = planted
    for scorer in (HardConcrete(steps=3), Subset(steps=3)):
        scores = scorer(model, examples, seed=0)
        assert scores.forward_passes == scores.backward_passes == 3 * 32 / len(examples)
        few = scorer(model, examples[:24], seed=0)
        assert few.forward_passes == few.backward_passes == 3


def test_the_relaxed_top_k_sums_to_k_and_hardens() -> None:
    logits = torch.stack([torch.randperm(12) for _ in range(5)]).double()
    for temperature in (10.0, 1.0, 0.1, 0.01):
        gates = relaxed_top_k(logits, 4, temperature)
        torch.testing.assert_close(gates.sum(-1), torch.full((5,), 4.0).double())
        assert gates.isfinite().all()
    chosen = logits.argsort(descending=True)[:, :4]
    torch.testing.assert_close(gates.gather(1, chosen), torch.ones(5, 4).double(), rtol=0, atol=0.05)


def test_the_probability_of_an_open_gate_is_that_of_its_draws() -> None:
    logits = torch.tensor([-2.0, -0.5, 0.0, 1.0]).double()
    u = torch.rand(200_000, 4, dtype=torch.double)
    gates = stretched((u.log() - (1 - u).log() + logits) * 3)
    torch.testing.assert_close((gates > 0).double().mean(0), probability_open(logits), rtol=0, atol=0.005)
    assert ((gates >= 0) & (gates <= 1)).all()


def test_a_number_of_heads_and_a_temperature_that_cannot_be_are_refused(model: Seq2Seq, splits: Splits) -> None:
    with pytest.raises(ValueError, match="end_temperature=2.0: must be at most start_temperature=1.0"):
        Subset(end_temperature=2.0)
    for scorer in every("scorer").values():
        if isinstance(scorer, Budgeted):
            with pytest.raises(ValueError, match="keep=19: of 18 heads these are 19, allowed are 1 to 18"):
                scorer.keeping(19)(model, splits.score, seed=0)
            with pytest.raises(ValueError, match="keep=1.5: a share must be above 0.0 and at most 1.0, a number of"):
                replace(scorer, keep=1.5)
            with pytest.raises(ValueError, match="keep=0: a share must be above 0.0"):
                scorer.keeping(0)
            with pytest.raises(ValueError, match="keep=0.02: of 18 heads these are 0, allowed are 1 to 18"):
                replace(scorer, keep=0.02).check(18, gated=True)
            assert scorer.keeping(7) == replace(scorer, keep=7)


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
    alone, both = torch.randn(6, generator=draw), torch.randn(6, 6, generator=draw).triu(1)

    def value(heads: frozenset[int]) -> float:
        return sum(float(alone[n]) for n in heads) + sum(float(both[n, m]) for n in heads for m in heads)

    for seed in range(3):
        scores = Shapley(evaluations=2 + 2 * 5)(game_of(6, value), ONE, seed)
        torch.testing.assert_close(scores.values[0], (alone + (both + both.T).sum(0) / 2).double())
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
