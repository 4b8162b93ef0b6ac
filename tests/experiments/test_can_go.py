"""What can go and what surely can, from hand-made answers to 512 examples."""

from collections.abc import Sequence
from math import isnan, nan

import pandas as pd
import pytest
import torch

from mhaprune.experiments.can_go import summary_of, surely, surely_words
from mhaprune.measure.columns import choose_columns
from mhaprune.statistics.intervals import paired_interval
from mhaprune.subject import AnswerOutcome

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
    rows = [choose_columns(changed(*change), outcome(DENSE)) for change in changes]
    others = ["heads_total", "removed", "speedup", "speedup_q1", "speedup_q3", "quality", "quality_low", "quality_high"]
    return pd.DataFrame(rows).assign(heads_removed=range(0, 3 * len(rows), 3), **dict.fromkeys(others, 0.0))


def decided(*changes: tuple[int, int], tolerance: float = 0.01) -> tuple[float, float]:
    """The heads that can go, and those that surely can."""
    curve = curve_of([(0, 0), *changes])
    row = summary_of(curve, curve.iloc[0], tolerance)
    return row["heads_removed"], row["heads_removed_sure"]


def test_the_columns_are_what_is_lost_to_the_dense_model_pair_by_pair() -> None:
    columns = choose_columns(changed(4, 1), outcome(DENSE))
    assert columns["choose_quality"] == 497 / 512
    assert columns["choose_drop"] == 3 / 512
    ends = paired_interval(DENSE.numpy(), changed(4, 1).quality.numpy())
    assert (columns["choose_drop_low"], columns["choose_drop_high"]) == ends
    assert ends[0] < 3 / 512 < ends[1]
    wider = choose_columns(changed(9, 6), outcome(DENSE))
    assert wider["choose_drop"] == 3 / 512
    assert wider["choose_drop_high"] > columns["choose_drop_high"], "more pairs differ, so less is known"


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ([(0, 0)], (3, 3)),  # the upper end is .0074 where none is lost, and .0110 where one is
        ([(1, 0)], (3, 0)),
        ([(5, 0)], (3, 0)),  # 5 of 512 are less than a point
        ([(6, 0)], (0, 0)),
        ([(0, 0), (0, 0), (1, 0), (0, 0)], (12, 6)),  # the first budget that is not sure ends what is sure
        ([(1, 0), (0, 0)], (6, 0)),
    ],
)
def test_one_lost_answer_of_512_is_within_a_point_and_not_surely(
    changes: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    assert decided(*changes) == heads


def test_the_upper_end_may_be_the_tolerance_itself() -> None:
    high = curve_of([(1, 0)])["choose_drop_high"].item()
    assert decided((1, 0), tolerance=high) == (3, 3)
    assert decided((1, 0), tolerance=high - 1e-9) == (3, 0)


def test_the_order_of_the_rows_does_not_matter_and_the_dense_model_may_stay() -> None:
    curve = curve_of([(0, 0), (0, 0), (1, 0), (9, 0)])
    for rows, heads in ((curve, (6, 3)), (curve[::-1], (6, 3)), (curve[3:], (0, 0))):
        row = summary_of(rows, curve.iloc[0], 0.01)
        assert (row["heads_removed"], row["heads_removed_sure"]) == heads


def test_without_an_interval_nothing_is_said_of_what_is_sure() -> None:
    assert isnan(surely(curve_of([(0, 0), (0, 0)]).assign(choose_drop_high=nan), 0.01))
    row = {"heads_total": 12, "heads_removed_sure": nan}
    assert surely_words(row) == ""
    assert surely_words(row | {"heads_removed_sure": 3.0}) == " (3 at 95 % confidence)"
    assert surely_words(row | {"heads_removed_sure": 0}) == " (none at 95 % confidence)"
