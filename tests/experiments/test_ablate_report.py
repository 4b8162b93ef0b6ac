"""The sentences and figures of one run of `experiment=ablate`, and of several."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mhaprune.lab.experiments.ablate import Ablate, latency_curves
from mhaprune.lab.reporting.plots import Plot, draw
from mhaprune.lab.reporting.shared_figures import agreement
from mhaprune.tables import Tables
from support.made_tables import all_tables, refitted, said_over_runs, summary, text_of


def drawn(tables: Tables) -> Iterator[Plot]:
    return draw(Ablate.figures, tables)


@pytest.fixture(scope="module")
def plots() -> dict[str, Plot]:
    """All figures of all tables."""
    return {plot.name: plot for plot in drawn(all_tables())}


def test_a_recovery_is_drawn_beside_the_curve_of_its_scorer() -> None:
    tables = all_tables()
    tables["recovered"] = refitted(tables["pruning"], quality=0.9)
    plot = next(plot for plot in drawn(tables) if plot.name == "accuracy")
    (axes,) = plot.figure.axes
    lines = {line.get_label(): line for line in axes.containers if line.get_label()}
    plain, after = (lines[name].lines[0] for name in ("ablation", "ablation, then refit"))  # type: ignore[attr-defined]
    assert plain.get_color() == after.get_color()
    assert plain.get_linestyle() != after.get_linestyle()
    np.testing.assert_allclose(np.asarray(after.get_ydata(), dtype=float), 0.9)
    assert {"the most within the tolerance", "0.01 below the whole"} <= {each.get_label() for each in axes.get_lines()}


def test_if_only_a_recovery_helps_it_comes_first() -> None:
    """In sentences, in numbers, and in the map; the quality has its own unit."""
    tables = {**all_tables(), "pruning": all_tables()["pruning"].assign(quality_name="similarity")}
    hurts = (tables["heads"]["scorer"] == "ablation") & (tables["heads"]["head"] == 2)
    tables["heads"] = tables["heads"].assign(score=tables["heads"]["score"].mask(hurts, -50.0))
    after = tables["summary"].iloc[[1]].assign(recovery="refit")
    plain = tables["summary"].assign(heads_removed=0, removed="")
    tables["summary"] = pd.concat([plain, after], ignore_index=True).assign(removed="cross.0.0 cross.0.2")
    sentences, numbers = list(Ablate.say(tables)), Ablate.headline(tables)
    assert sentences[0] == "2 of 24 heads can be removed after refit: similarity is still 0.993 (1.000 with all heads)."
    [without] = [each for each in sentences if each.startswith("Without refit none of")]
    assert without.endswith("can be removed within 0.01 of the whole model's similarity (1.000).")
    assert [each.after for each in numbers] == ["refit"] * 3 + [""] * 3
    assert (numbers[0].large, numbers[1].large) == ("2 of 24", "0.993")
    verdict = Ablate.head_map(tables)
    assert verdict is not None
    assert verdict.title == "2 of 4 heads removed, then refit: similarity is 0.993"
    assert verdict.heads["stays"].tolist() == [True, True, False, False]
    assert verdict.heads["faint"].tolist() == [True, False, False, False], "one score is 0, and one is surely below"


def test_every_head_stands_at_its_cost_and_its_rank_by_another_score() -> None:
    """A score that is equal for all heads has no rank correlation, and the figure says so: never `nan`."""
    tables = all_tables()
    (plot,) = draw((agreement,), tables)
    costs = tables["heads"].query("scorer == 'ablation'")["score"]
    places = np.vstack([bars.lines[0].get_xydata() for bars in plot.figure.axes[0].containers])
    np.testing.assert_allclose(sorted(places.tolist()), np.c_[range(1, 5), costs])
    assert "Spearman ρ = 0.88" in text_of(plot)
    (equal,) = draw((agreement,), tables | {"agreement": tables["agreement"].assign(spearman=np.nan)})
    assert "no rank correlation" in text_of(equal)
    assert "nan" not in text_of(equal)


@pytest.mark.parametrize("largest", [0.04, 0.9, 50.0])
def test_the_costs_of_heads_have_several_numbers_beside_them(largest: float) -> None:
    tables = all_tables()
    heads, costs = tables["heads"].copy(), tables["heads"]["scorer"] == "ablation"
    heads.loc[costs, "score"], heads.loc[costs, "stderr"] = [0.0024, 0.003, 0.005, largest], 1e-5
    (plot,) = draw((agreement,), tables | {"heads": heads})
    axis = plot.figure.axes[0].yaxis
    low, high = axis.get_view_interval()
    shown = [place for place in axis.get_majorticklocs() if low <= place <= high]
    assert 0 in shown
    assert 3 <= len(shown) <= 9


def test_speed_is_drawn_against_heads_removed_and_neither_mark_nor_noise_is_cut() -> None:
    tables = all_tables()
    noisy = tables["latency"].assign(speedup_q1=0.7, speedup_q3=9.0)
    for latency in (tables["latency"], noisy):
        (plot,) = draw((latency_curves,), tables | {"latency": latency})
        (axes,) = plot.figure.axes
        lines = {bars.get_label(): bars.lines[0] for bars in axes.containers}
        assert set(lines) == {"chosen by ablation"}, "the scorer of the summary"
        np.testing.assert_allclose(np.asarray(lines["chosen by ablation"].get_xydata()), [[0, 1], [2, 1.5], [4, 2]])
        (others,) = [line for line in axes.get_lines() if line.get_label() == "by another score"]
        np.testing.assert_allclose(others.get_xydata(), [[2, 1.5], [4, 2]], err_msg="one draw of a control is noise")
        low, high = axes.get_ylim()
        whiskers = tables["pruning"].query("scorer == 'ablation'")
        assert low < min(latency["speedup_q1"].item(), whiskers["speedup_q1"].min())
        assert high > max(latency["speedup_q3"].item(), whiskers["speedup_q3"].max())
        assert [text.get_text() for text in axes.texts] == ["1.21 times"]


@pytest.mark.parametrize("missing", ["heads", "agreement", "pruning", "latency", "training", "summary"])
def test_what_cannot_be_drawn_is_left_out(missing: str, plots: dict[str, Plot]) -> None:
    tables = all_tables()
    del tables[missing]
    assert 0 < len(list(drawn(tables))) < len(plots)


PLAIN = summary().assign(recovery="nothing", heads_removed_sure=[3, 6])
FIFTEEN = {"removed": " ".join(f"cross.1.{n}" for n in range(15)), "quality": 0.985, "speedup": 1.4}
AFTER = refitted(summary(), heads_removed=15, heads_removed_sure=11, speedup_q1=1.38, speedup_q3=1.42, **FIFTEEN)
BOTH = pd.concat([PLAIN, AFTER], ignore_index=True)


def said(tables: Tables) -> list[str]:
    return list(Ablate.say(tables))


def test_what_is_said(snapshot: Any) -> None:
    failed = refitted(summary()).assign(note="diverged, so it is as it was: why")
    sizes = {"pruning": pd.DataFrame({"heads_removed": [0, 0, 3], "choose_examples": 128})}
    large = {"pruning": sizes["pruning"].assign(choose_examples=512)}
    lost = BOTH.assign(heads_removed_sure=0, choose_drop=0.005)
    runs = [PLAIN.assign(label="one"), BOTH.assign(label="other")]
    cases = {
        "without a recovery": {"summary": PLAIN},
        "after a refit": {"summary": BOTH},
        "none is sure, with a choose split that is too small": sizes | {"summary": lost},
        "none is sure, with a larger split": large | {"summary": lost},
        "none can be removed": {"summary": BOTH.assign(heads_removed=0, heads_removed_sure=0)},
        "none of the sizes tried": sizes | {"summary": BOTH.assign(heads_removed=0, heads_removed_sure=0)},
        "a recovery that failed": {"summary": PLAIN, "recovered": failed},
    }
    over = said_over_runs(Ablate, {"summary": pd.concat(runs, ignore_index=True)})
    snapshot("ablate", {name: said(tables) for name, tables in cases.items()} | {"two runs": over})


@pytest.mark.parametrize(
    ("low", "high", "best", "refit"),
    [
        (0.98, 1.199, False, False),
        (0.97, 1.2, True, False),
        (1.22, 1.38, True, True),
        (1.221, 1.38, False, True),
        (0.5, 9.0, True, True),
    ],
)
def test_a_speed_up_within_the_noise_is_said_and_drawn_so(low: float, high: float, best: bool, refit: bool) -> None:
    """Its quartiles, 1.20 to 1.22 and 1.38 to 1.42, meet those of the noise; noise below or above leaves it a gain."""
    rows = [("ablation", 1.3, 0.1, 9.0), ("dense", 1.0, 1.0, 1.0), ("dense again", 1.0, low, high)]
    latency = pd.DataFrame(rows, columns=["scorer", "speedup", "speedup_q1", "speedup_q3"]).assign(timed_examples=32)
    plain, after = (
        line for line in said({"summary": BOTH, "latency": latency}) if "1.21 times" in line or "1.40 t" in line
    )
    noise = f"the whole model against itself is at {low:.2f} to {high:.2f}."
    assert "32 examples" in plain
    assert "(quartiles 1.20 to 1.22)" in plain
    once = BOTH.assign(speedup_q1=BOTH["speedup"], speedup_q3=BOTH["speedup"])
    assert "1.21 times as fast (timed once)" in " ".join(said({"summary": once, "latency": latency}))
    assert (noise in plain, noise in after) == (best, refit)
    (plot,) = draw((latency_curves,), all_tables() | {"latency": latency})
    assert ("(within the noise)" in text_of(plot)) == best
