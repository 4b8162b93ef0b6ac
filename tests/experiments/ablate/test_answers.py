"""One example, answered with fewer and fewer heads: how it is drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd

from legible import check_legible
from mhaprune.experiments.ablate.figures import MORE, answers
from mhaprune.reporting.plots import Plot, draw


def table(*said: tuple[str, int, str], right: str = "1 2 3", source: str = "3 1 2") -> pd.DataFrame:
    rows = [{"recovery": way, "heads_removed": removed, "answer": answer} for way, removed, answer in said]
    return pd.DataFrame(rows).assign(scorer="ablation", heads_total=4, source=source, right_answer=right)


def drawn(frame: pd.DataFrame) -> Plot:
    (plot,) = draw((answers,), {"answers": frame})
    return plot


def test_what_is_wrong_or_missing_is_red() -> None:
    plot = drawn(table(("nothing", 0, "1 2 3"), ("nothing", 2, "1 3"), ("refit", 0, "1 2 3"), ("refit", 2, "1 2 3 3")))
    check_legible(plot)
    plain, after = plot.figure.axes
    assert [plain.get_title(), after.get_title()] == ["as it is left", "after refit"]
    nan = np.nan
    for axes, wrong in ((plain, [[0, 0, 0, nan], [0, 1, 1, nan]]), (after, [[0, 0, 0, nan], [0, 0, 0, 1]])):
        np.testing.assert_array_equal(np.ma.filled(np.ma.asarray(axes.images[0].get_array(), float), nan), wrong)
    assert [text.get_text() for text in after.texts] == ["1", "2", "3", "1", "2", "3", "3"]


def test_an_answer_without_an_end_is_cut() -> None:
    (axes,) = drawn(table(("nothing", 0, "1 2 3"), ("nothing", 4, " ".join("0" * 64)))).figure.axes
    assert axes.images[0].get_size() == (2, 3 + MORE)
    assert axes.texts[-1].get_text() == "…"


def test_a_word_is_read_letter_by_letter_and_no_answer_is_wrong() -> None:
    """An empty cell comes back from a file as NaN."""
    frame = table(("nothing", 0, "walks"), ("nothing", 2, "walk"), right="walks", source="walk verb3")
    (axes,) = drawn(pd.concat([frame, frame.tail(1).assign(heads_removed=4, answer=np.nan)])).figure.axes
    wrong = np.ma.filled(np.ma.asarray(axes.images[0].get_array(), float), np.nan)
    assert list(wrong.sum(axis=1)) == [0, 1, 5]


def test_tables_without_answers_have_no_such_figure() -> None:
    assert answers({}) is None
    assert answers({"answers": pd.DataFrame()}) is None
