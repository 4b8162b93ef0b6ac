from __future__ import annotations

import numpy as np
import pytest
import torch

from mhaprune.experiments.compare.study import Regrets
from mhaprune.heads import Block, HeadGrid, HeadMask, Site
from mhaprune.pruning.plans import Plan
from mhaprune.statistics.intervals import difference_interval, mean_interval
from mhaprune.subject import AnswerOutcome

GRID = HeadGrid.full([Block(Site.CROSS, 0)], 3)


def without(*heads: int) -> HeadMask:
    return HeadMask(GRID, frozenset(GRID.heads[n] for n in heads))


@pytest.fixture
def regrets() -> Regrets:
    """A scorer that removes head 0, then 1; the best by loss is 2, then 1 and 2; by exact match 1, then 1 and 2."""
    draw = torch.Generator().manual_seed(0)
    mine = [Plan("mine", 0, "one_shot", without(*range(n))) for n in range(4)]
    best = [Plan("loss", 0, "exact", mask) for mask in (without(), without(2), without(1, 2), without(0, 1, 2))]
    best += [Plan("quality", 0, "exact", mask) for mask in (without(1), without(1, 2))]
    reported = {}
    for plan in [*mine, *best]:
        loss, exact = torch.rand(40, generator=draw), (torch.rand(40, generator=draw) < 0.6).float()
        reported.setdefault(plan.mask, AnswerOutcome(loss, exact, exact))
    return Regrets(mine, best, reported)


def test_regret_is_against_the_best_of_its_own_objective_and_size(regrets: Regrets) -> None:
    inner = regrets.of("mine")
    assert [len(plan.mask.removed) for plan in inner] == [1, 2]
    values = regrets.reported
    loss = [values[without(0)].loss - values[without(2)].loss, values[without(0, 1)].loss - values[without(1, 2)].loss]
    np.testing.assert_allclose(regrets.regret(inner, "loss"), torch.stack(loss).double().mean(0), rtol=1e-6)
    right = [values[mask].quality for mask in (without(1), without(1, 2), without(0), without(0, 1))]
    expected = ((right[0] - right[2]) + (right[1] - right[3])) / 2
    np.testing.assert_allclose(regrets.regret(inner, "quality"), expected)
    columns = regrets.columns(inner)
    assert list(columns)[:3] == [
        "regret_quality",
        "regret_quality_low",
        "regret_quality_high",
    ]
    assert columns["regret_quality"] == pytest.approx(float(expected.mean()))
    assert (columns["regret_loss_low"], columns["regret_loss_high"]) == pytest.approx(
        mean_interval(regrets.regret(inner, "loss"))
    )
    assert (columns["regret_quality_low"], columns["regret_quality_high"]) == pytest.approx(
        difference_interval(expected.double().numpy()), rel=1e-4
    )
