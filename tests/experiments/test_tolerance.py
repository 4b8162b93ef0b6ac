"""What can go and what surely can, from hand-made answers to 512 examples."""

from collections.abc import Sequence
from math import isnan, nan

import numpy as np
import pandas as pd
import pytest
import torch

from mhaprune.lab.experiments.tolerance import (
    count_words,
    examples_needed,
    fewest_that_fail,
    numbers_of_summary,
    removable,
    summary_of,
    surely,
    surely_words,
)
from mhaprune.lab.tasks.sequences import AnswerOutcome
from mhaprune.measure.accuracy import choose_columns
from mhaprune.statistics.intervals import ONE_SIDED, counted_interval, paired_interval
from support.models import OF_ONE_KIND

DENSE = torch.ones(512)
DENSE[500:] = 0


def outcome(exact: torch.Tensor) -> AnswerOutcome:
    return AnswerOutcome(1 - exact, exact, exact)


def changed(lost: int, gained: int = 0) -> AnswerOutcome:
    """The dense model's answers with some right ones lost and some wrong ones gained."""
    exact = DENSE.clone()
    exact[:lost] = 0
    exact[500 : 500 + gained] = 1
    return outcome(exact)


def curve_of(changes: Sequence[tuple[int, int]]) -> pd.DataFrame:
    """Models without 0, 3, 6, ... heads that lose and gain so many answers."""
    rows = [choose_columns(changed(*change), outcome(DENSE), OF_ONE_KIND) for change in changes]
    others = ["heads_total", "removed", "speedup", "speedup_q1", "speedup_q3", "quality", "quality_low", "quality_high"]
    return pd.DataFrame(rows).assign(heads_removed=range(0, 3 * len(rows), 3), **dict.fromkeys(others, 0.0))


def decided(*changes: tuple[int, int], tolerance: float = 0.01) -> tuple[float, float]:
    """The heads that can go, and those that surely can."""
    curve = curve_of([(0, 0), *changes])
    row = summary_of(curve, curve.iloc[0], tolerance)
    return row["heads_removed"], row["heads_removed_sure"]


def test_the_columns_are_what_is_lost_to_the_dense_model_pair_by_pair() -> None:
    columns = choose_columns(changed(4, 1), outcome(DENSE), OF_ONE_KIND)
    assert columns["choose_quality"] == 497 / 512
    assert columns["choose_drop"] == 3 / 512
    ends = paired_interval(DENSE.numpy(), changed(4, 1).quality.numpy())
    assert (columns["choose_drop_low"], columns["choose_drop_high"]) == ends
    assert ends[0] < 3 / 512 < ends[1]
    wider = choose_columns(changed(9, 6), outcome(DENSE), OF_ONE_KIND)
    assert wider["choose_drop"] == 3 / 512
    assert wider["choose_drop_high"] > columns["choose_drop_high"], "more pairs differ, so less is known"


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ([(1, 0)], (3, 3)),  # the one-sided end is .0087 where one is lost, and .0117 where two are
        ([(2, 0)], (3, 0)),
        ([(5, 0)], (3, 0)),  # 5 of 512 are less than a point
        ([(6, 0)], (0, 0)),
        ([(0, 0), (1, 0), (2, 0), (0, 0)], (12, 6)),  # the first budget that is not sure ends what is sure
        ([(2, 0), (0, 0)], (6, 0)),
    ],
)
def test_two_lost_answers_of_512_are_within_a_point_and_not_surely(
    changes: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    assert decided(*changes) == heads


def test_the_upper_end_may_be_the_tolerance_itself() -> None:
    most = curve_of([(1, 0)])["choose_drop_most"].item()
    assert decided((1, 0), tolerance=most) == (3, 3)
    assert decided((1, 0), tolerance=most - 1e-9) == (3, 0)


def test_the_order_of_the_rows_does_not_matter_and_the_dense_model_may_stay() -> None:
    curve = curve_of([(0, 0), (0, 0), (2, 0), (9, 0)])
    for rows, heads in ((curve, (6, 3)), (curve[::-1], (6, 3)), (curve[3:], (0, 0))):
        row = summary_of(rows, curve.iloc[0], 0.01)
        assert (row["heads_removed"], row["heads_removed_sure"]) == heads


def test_without_an_interval_nothing_is_said_of_what_is_sure() -> None:
    assert isnan(surely(curve_of([(0, 0), (0, 0)]).assign(choose_drop_most=nan), 0.01))
    row = {"heads_total": 12, "heads_removed_sure": nan}
    assert surely_words(row, {}) == ""
    assert surely_words(row | {"heads_removed_sure": 3.0}, {}) == "3 at 95 % confidence"
    assert surely_words(row | {"heads_removed_sure": 0}, {}) == "none at 95 % confidence"


@pytest.mark.parametrize("tried", [(14, 18), (2,), (3, 6, 9, 12), (1, 14)])
def test_no_size_that_was_tried_is_not_said_to_be_none(tried: tuple[int, ...]) -> None:
    """With one head tried, none can be removed; without it, fewer heads are not known."""
    known = 1 in tried
    tables = {"recovery": pd.DataFrame({"heads_removed": [0, *tried]})}
    curve = curve_of([(0, 0)])
    row = summary_of(curve, curve.iloc[0], 0.01) | {"recovery": "nothing", "heads_total": 24}
    [heads, quality, speed] = numbers_of_summary(pd.DataFrame([row]), tables)
    assert isnan(heads.value) != known, "a mean must not count it as 0"
    assert (quality.value, speed.value) == (row["quality"], row["speedup"]), "the whole model is what is left"
    sizes = f"{tried[0]} and {tried[1]}" if len(tried) == 2 else f"{tried[0]} to {tried[-1]}"
    sizes = str(tried[0]) if len(tried) == 1 else sizes
    said = removable(0, 24, tables)
    assert said == ("None of 24 heads" if known else f"None of the sizes tried ({sizes} of 24 heads, not fewer)")
    assert count_words(0, tables) == ("none" if known else "none of the sizes tried")
    assert (count_words(14, tables), removable(14, 24, tables)) == ("14", "14 of 24 heads")


@pytest.mark.parametrize("n", [512, 2000])
def test_of_losses_at_the_tolerance_one_in_twenty_passes(n: int) -> None:
    """A claim at 95 % confidence may be wrong in 5 % of draws, and it should use them."""
    draw, tolerance = np.random.default_rng(0), 0.01
    for gained in (0.0, 0.005, 0.02):
        counts = draw.multinomial(n, [tolerance + gained, gained, 1 - tolerance - 2 * gained], size=4000)
        pairs, often = np.unique(counts[:, :2], axis=0, return_counts=True)
        passed = [counted_interval(lost, won, n, ONE_SIDED)[1] < tolerance for lost, won in pairs]
        assert 0.02 < often[passed].sum() / 4000 < 0.07


def test_what_a_split_of_this_size_can_decide_is_exact() -> None:
    """The numbers in words are those at which the decision changes."""
    for n, tolerance in ((512, 0.01), (512, 0.05), (3000, 0.01)):
        fails = fewest_that_fail(n, tolerance)
        assert (
            counted_interval(fails, 0, n, ONE_SIDED)[1] > tolerance >= counted_interval(fails - 1, 0, n, ONE_SIDED)[1]
        )
    needed = examples_needed(0.005, 0.01)
    assert counted_interval(0.005 * needed * 1.1, 0, needed * 1.1, ONE_SIDED)[1] < 0.01
    assert counted_interval(0.005 * needed * 0.9, 0, needed * 0.9, ONE_SIDED)[1] > 0.01
