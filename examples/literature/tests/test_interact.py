"""`experiment=interact`: second differences of the loss over pairs of heads, and what they make expect."""

import math
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from scipy import stats

from mhaprune.heads import HeadMask
from mhaprune.lab.reporting.heat_map import MISSING
from mhaprune.lab.reporting.plots import Plot, draw
from mhaprune.lab.runs.run import Run, build
from mhaprune.measure.outcomes import measure
from mhaprune.tables import ENDS, HEAD, LOSS_RISE, QUALITY, Tables, named
from mhaprune_literature import interact
from mhaprune_literature.interact import (
    BROKEN,
    INTERACTION,
    NEITHER,
    OTHER_HEAD,
    STAND_IN,
    TOGETHER,
    Interact,
    kinds_of_pairs,
)
from support.composing import EXAMPLES, compose, registered
from support.figures import check_legible
from support.sizes import TINY, small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = ("experiment=interact", "scorer=[ablation,magnitude]", f"cache={tmp_path_factory.mktemp('cache')}")
    with registered([EXAMPLES]):
        return build(compose(EXAMPLES, *TINY, *small("task", "sort"), *settings))


@pytest.fixture(scope="module")
def tables(run: Run) -> Tables:
    return run.experiment(run.study()).tables


def test_interactions_are_second_differences_on_the_report_split(run: Run, tables: Tables) -> None:
    study = run.study()
    subject, examples = study.subject, study.splits.report
    pairs, heads = tables["pairs"], list(subject.grid)
    assert [(str(first), str(second)) for first, second in combinations(heads, 2)] == [
        (str(first), str(second)) for first, second in zip(named(pairs), interact.other_heads(pairs), strict=True)
    ]
    assert len(pairs) == len(heads) * (len(heads) - 1) // 2

    def loss(*closed: int) -> float:
        mask = HeadMask(subject.grid).without(*(heads[n] for n in closed))
        return float(measure(subject, examples, mask.gates()).loss.double().mean())

    for (i, j), row in zip(combinations(range(len(heads)), 2), pairs.to_dict("records"), strict=True):
        for head, columns in ((heads[i], HEAD), (heads[j], OTHER_HEAD)):
            assert [row[column] for column in columns] == [head.site, head.layer, head.head]
        assert row[LOSS_RISE] == pytest.approx(loss(i, j) - loss(), abs=1e-5)
        assert row[INTERACTION] == pytest.approx(loss(i, j) - loss(i) - loss(j) + loss(), abs=1e-5)
        assert row[f"{INTERACTION}_low"] < row[INTERACTION] < row[f"{INTERACTION}_high"]
    assert pairs[INTERACTION].abs().max() > 1e-4
    for head, rise in zip(heads, tables["alone"][LOSS_RISE], strict=True):
        assert rise == pytest.approx(loss(heads.index(head)) - loss(), abs=1e-5)
    assert (pairs["kind"] == kinds_of_pairs(pairs, tables["alone"])).all()
    mask = HeadMask(subject.grid).without(heads[1])
    assert tables["alone"][QUALITY][1] == pytest.approx(measure(subject, examples, mask.gates()).quality.mean())
    assert tables["alone"]["open_quality"][1] == pytest.approx(measure(subject, examples).quality.mean())


def test_up_to_two_heads_nothing_else_is_expected_than_is_measured(tables: Tables) -> None:
    """Of one head the sum is the measurement; of two, that with the pair."""
    table = tables["together"]
    assert set(table["scorer"]) == {"ablation", "magnitude"}
    for _, rows in table.groupby("scorer"):
        rows = rows.set_index("heads_removed")
        assert list(rows.index) == list(range(int(rows["heads_total"].iloc[0]) + 1))
        assert rows.loc[:1, "expected_alone"].tolist() == pytest.approx(rows.loc[:1, LOSS_RISE].tolist(), abs=1e-6)
        assert rows.loc[:2, "expected_pairs"].tolist() == pytest.approx(rows.loc[:2, LOSS_RISE].tolist(), abs=1e-6)
        everything = tables["alone"][LOSS_RISE].sum()
        assert rows["expected_alone"].iloc[-1] == pytest.approx(everything)
        assert rows["expected_pairs"].iloc[-1] == pytest.approx(everything + tables["pairs"][INTERACTION].sum())
        assert rows["expected_pairs"].iloc[-1] != pytest.approx(rows["expected_alone"].iloc[-1])


def made() -> dict[str, pd.DataFrame]:
    """Four heads: the first two can replace each other, the last two work together, the rest is noise."""
    heads = [(site, 0, head) for site in ("encoder_self", "cross") for head in range(2)]
    alone = pd.DataFrame(heads, columns=HEAD)
    alone = alone.assign(**{LOSS_RISE: [0.1, 0.2, 0.3, 0.4], QUALITY: 0.6, "open_quality": 0.9})
    pairs = pd.DataFrame([one + other for one, other in combinations(heads, 2)], columns=HEAD + OTHER_HEAD)
    values = np.array([0.5, 0.001, 0.002, -0.003, 0.0, -0.2])
    ends = {f"{INTERACTION}{end}": values + width for end, width in zip(ENDS, (0, -0.01, 0.01), strict=True)}
    pairs = pairs.assign(**{LOSS_RISE: [0.8, 0.401, 0.502, 0.497, 0.6, 0.5]}, **ends, tolerance=0.01)
    pairs[f"{INTERACTION}_p"] = [0.001, 0.001, 0.9, 0.9, 1.0, 0.001]
    pairs["kind"] = kinds_of_pairs(pairs, alone)
    counts = {"heads_removed": [0, 1, 2, 3, 4], "heads_total": 4}
    expected = {"expected_alone": [0.0, 0.1, 0.3, 0.6, 1.0], "expected_pairs": [0.0, 0.1, 0.8, 1.1, 1.3]}
    measured = np.array([0, 0.1, 0.8, 1.2, 1.5])
    rise = {f"{LOSS_RISE}{end}": measured + width for end, width in zip(ENDS, (0, -0.05, 0.1), strict=True)}
    rows = pd.DataFrame({"scorer": "ablation", **counts, **expected, **rise})
    return {"alone": alone, "pairs": pairs, "together": rows}


def test_what_is_said() -> None:
    """Two pairs differ from 0 surely by .001 and not surely by .002. A head that harms is no work of two."""
    broken, harms = made(), made()
    broken["alone"].loc[2, QUALITY] = 0.45
    broken["pairs"]["kind"] = kinds_of_pairs(broken["pairs"], broken["alone"])
    harms["alone"].loc[3, LOSS_RISE] = -0.05
    cases = {"a pair of each kind": made(), "one head breaks the model": broken, "one head harms": harms}
    text = "\n".join("\n".join([f"== {case}", *Interact.say(tables), ""]) for case, tables in cases.items())
    assert text == (Path(__file__).parent / "interact.txt").read_text()
    assert [number.large for number in Interact.headline(made())] == ["1 of 6", "1 of 6"]


def test_a_pair_in_a_model_that_one_head_breaks_does_not_work_together() -> None:
    """Whatever the pair costs: less than one of its heads alone is no sign of it."""
    tables = made()
    pairs, alone = tables["pairs"], tables["alone"]
    pairs.loc[5, LOSS_RISE] = 0.39
    assert kinds_of_pairs(pairs, alone)[5] == TOGETHER
    alone.loc[2, QUALITY] = 0.45
    pairs["kind"] = kinds_of_pairs(pairs, alone)
    assert list(pairs["kind"]) == [STAND_IN, NEITHER, NEITHER, NEITHER, NEITHER, BROKEN]
    assert Interact.headline(tables)[1].value == 0
    pairs.loc[[1, 4], "kind"] = STAND_IN  # a saturated pair is grey if both heads are shown for other pairs
    (grey,) = plot_of(interact.interactions, tables).figure.axes[0].patches
    assert isinstance(grey, Rectangle)
    assert (grey.get_x(), grey.get_y(), to_hex(grey.get_facecolor())) == (1.5, 1.5, MISSING)


def plot_of(figure: object, tables: Tables) -> Plot:
    (plot,) = draw((figure,), tables)  # type: ignore[arg-type]
    check_legible(plot)
    return plot


def test_the_triangle_has_what_is_large_and_sure_and_nothing_else() -> None:
    axes = plot_of(interact.interactions, made()).figure.axes[0]
    values = np.ma.filled(axes.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(values, [[0.5, np.nan], [np.nan, -0.2]])
    assert [text.get_text() for text in axes.texts] == ["+0.50", "−0.20"]
    assert [label.get_text()[-3:] for label in axes.get_yticklabels()] == ["0.1", "0.1"], "no row that is blank"
    alone = made()
    alone["pairs"].loc[5, "kind"] = NEITHER
    axes = plot_of(interact.interactions, alone).figure.axes[0]
    assert np.ma.filled(axes.images[0].get_array(), np.nan).tolist() == [[0.5]], "no row for a head without such a pair"
    alone["pairs"]["kind"] = NEITHER
    assert not list(draw((interact.interactions,), alone))


def test_what_is_measured_stands_beside_what_is_expected() -> None:
    plot = plot_of(interact.together, made())
    lines = {line.get_label(): line.get_ydata() for line in plot.figure.axes[0].get_lines()}
    np.testing.assert_allclose(lines["sum of each alone"], [0, 0.1, 0.3, 0.6, 1])
    np.testing.assert_allclose(lines["sum with pairs"], [0, 0.1, 0.8, 1.1, 1.3])


def test_means_differ_from_0_by_holm_over_all_of_them() -> None:
    """Of normal means .02 to .06, each with a standard error of .02: twice the normal tail, times 5, 4, 3, ..."""
    mean = np.array([0.03, -0.06, 0.02, 0.05, 0.04])
    p = interact.differs_p(np.stack([mean, np.full(5, 0.02), np.zeros(5)]), math.inf)
    alone = 2 * stats.norm.sf(np.abs(mean) / 0.02)
    assert p[[1, 3, 4, 0, 2]] == pytest.approx(alone[[1, 3, 4, 0, 2]] * [5, 4, 3, 2, 1])
    assert (alone < 0.05).sum() == 3
    assert (p < 0.05).sum() == 2
    flat = np.array([[0.0, 0.0, 0.0], [0.1, 0.0, 0.0]]).T
    assert interact.differs_p(flat, 12).tolist() == [1, 0]


def test_the_signed_colour_map_is_read_without_colour() -> None:
    """It grows darker all the way from its middle."""
    colours = matplotlib.colormaps[interact.EXTRA_COST](np.linspace(0, 1, 51))[:, :3]
    lightness = colours @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(lightness[:26]) > 0).all()
    assert (np.diff(lightness[25:]) < 0).all()
