"""Racing against a loop over rounds, heads and pairs of heads, on ablations that are planted."""

from __future__ import annotations

from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from games import Game, numbered
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.racing import Racing
from mhaprune.tasks.base import Splits

EXAMPLES, HEADS = 200, 7


def planted_deltas(seed: int) -> Tensor:
    """(E, N): heads a little apart, on examples that are far apart, so that only pairs of heads can be told apart."""
    draw = torch.Generator().manual_seed(seed)
    hard_E1 = 2 * torch.randn(EXAMPLES, 1, generator=draw).double()
    own_EN = 0.1 * torch.randn(EXAMPLES, HEADS, generator=draw).double()
    return 1 + hard_E1 + own_EN + torch.tensor([0.08, 0.0, 0.3, 0.04, 0.081, 0.16, 0.12]).double()


def game_of(deltas_EN: Tensor) -> Game:
    """An example loses its own sum for the heads that are closed."""

    def loss(number: Tensor, gates: Tensor) -> Tensor:
        return 10.0 + ((1 - gates) * deltas_EN[number - 1]).sum(dim=1)

    return Game(HEADS, loss)


class Race(NamedTuple):
    """What is known of each head when it leaves the race, which stay, after how many rounds each was settled (0 for
    those that the last round left open), and the masks that were run for all examples together."""

    means: list[float]
    stderrs: list[float]
    kept: set[int]
    rounds: list[int]
    masks: int


def race_by_hand(deltas_EN: Tensor, keep: int, first: int, confidence: float) -> Race:
    """The race over examples in their order."""
    z, rows = NormalDist().inv_cdf(confidence), deltas_EN.tolist()
    means, stderrs, rounds = [0.0] * HEADS, [0.0] * HEADS, [0] * HEADS
    kept: set[int] = set()
    open_heads, seen, masks, number = set(range(HEADS)), 0, 0, 0
    while open_heads and seen < len(rows):
        before, seen, number = seen, min(len(rows), max(first, 2 * seen)), number + 1
        masks += (seen - before) * (1 + len(open_heads))
        for n in open_heads:
            column = [row[n] for row in rows[:seen]]
            means[n], stderrs[n] = fmean(column), stdev(column) / seen**0.5

        def surely_above(one: int, other: int, seen: int = seen) -> bool:
            differences = [row[one] - row[other] for row in rows[:seen]]
            return fmean(differences) > z * stdev(differences) / seen**0.5

        places = keep - len(kept)
        others = {n: open_heads - {n} for n in open_heads}
        stay = {n for n in open_heads if sum(surely_above(n, m) for m in others[n]) >= len(open_heads) - places}
        go = {n for n in open_heads if sum(surely_above(m, n) for m in others[n]) >= places}
        for n in stay | go:
            rounds[n] = number
        kept, open_heads = kept | stay, open_heads - stay - go
    kept |= set(sorted(open_heads, key=lambda n: -means[n])[: keep - len(kept)])
    return Race(means, stderrs, kept, rounds, masks)


@pytest.mark.parametrize("confidence", [0.6, 0.99, 0.9999])
@pytest.mark.parametrize("keep", range(1, HEADS))
def test_a_race_is_the_loop_over_pairs(keep: int, confidence: float) -> None:
    for seed in range(3):
        deltas = planted_deltas(seed)
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(seed))
        race = race_by_hand(deltas[order], keep, 16, confidence)
        scores = Racing(keep=keep, first=16, confidence=confidence)(game_of(deltas), numbered(range(1, 201)), seed)
        assert scores.stderr is not None
        torch.testing.assert_close(scores.stderr[0], torch.tensor(race.stderrs, dtype=torch.double))
        edge = max(race.means[n] for n in range(HEADS) if n not in race.kept)
        expected = [max(mean, edge) if n in race.kept else mean for n, mean in enumerate(race.means)]
        torch.testing.assert_close(scores.values[0], torch.tensor(expected, dtype=torch.double))
        assert set(scores.values[0].argsort(descending=True)[:keep].tolist()) == race.kept
        assert scores.forward_passes == race.masks / EXAMPLES


def test_the_planted_races_end_in_all_ways() -> None:
    """Heads that are settled at once, later, and never; and more of them where less confidence is asked for."""
    races = {
        confidence: [race_by_hand(planted_deltas(0), keep, 16, confidence) for keep in range(1, HEADS)]
        for confidence in (0.6, 0.99, 0.9999)
    }
    rounds = {number for race in races[0.99] for number in race.rounds}
    assert rounds >= {0, 1, 2, 3}
    assert sum(race.masks for race in races[0.6]) < sum(race.masks for race in races[0.99])
    assert sum(race.masks for race in races[0.99]) < sum(race.masks for race in races[0.9999])


def test_strongly_correlated_heads_are_told_apart_in_the_first_round() -> None:
    """Though each ablation by itself is known to no better than three times what they are apart."""
    deltas = planted_deltas(0)
    deltas = deltas[:, :1] + 0.1 * torch.arange(HEADS).double()
    scores = Racing(keep=3, first=16)(game_of(deltas), numbered(range(1, 201)), seed=0)
    assert scores.forward_passes == 16 * (1 + HEADS) / EXAMPLES
    assert scores.stderr is not None
    assert (scores.stderr > 0.3).all()
    assert scores.values[0].argsort().tolist() == list(range(HEADS))


@pytest.mark.parametrize("keep", [1, 5, 18])
def test_racing_to_the_end_is_ablation(model: Seq2Seq, splits: Splits, keep: int) -> None:
    """Where nothing settles early, the scores are those of all examples."""
    race = Racing(keep=keep, first=len(splits.score))(model, splits.score, seed=0)
    full = Ablation()(model, splits.score, seed=0)
    torch.testing.assert_close(race.values, full.values)
    assert race.forward_passes == full.forward_passes
