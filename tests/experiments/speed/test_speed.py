from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mhaprune.lab.experiments.base import figures_of
from mhaprune.lab.experiments.speed.speed import Speed
from mhaprune.lab.experiments.speed.speed_report import at_half
from mhaprune.lab.runs.run import build
from support.composing import compose, tables_in
from support.sizes import RUNS, chosen

Frames = Mapping[str, pd.DataFrame]


def run(cache: Path, *overrides: str) -> Frames:
    settings = [*chosen("experiment", "speed"), *RUNS["speed"], *overrides, f"cache={cache}"]
    return build(compose(*settings)).results().tables


@pytest.fixture(scope="module")
def folder(ran: Callable[[str], Path]) -> Path:
    return ran("speed")


@pytest.fixture(scope="module")
def tables(folder: Path) -> Frames:
    return tables_in(folder)


def test_every_size_has_a_row_per_share_of_the_heads(tables: Frames) -> None:
    speed = tables["speed"]
    assert len(speed) == 2 * 2 * 5
    assert set(speed["timed_d_model"]) == {16, 24}
    assert set(speed["d_model"]) == {16}, "the run's own model"
    for _, mine in speed.groupby(["timed_d_model", "batch_size"]):
        assert mine["heads_removed"].tolist() == [0, 2, 3, 5, 6]
    assert speed["device"].str.startswith("cpu (").all()


def test_numbers_that_belong_together_agree(tables: Frames) -> None:
    speed = tables["speed"]
    for name in ("speedup", "built_ratio", "aa_ratio"):
        assert (speed[f"{name}_q1"] <= speed[name]).all()
        assert (speed[name] <= speed[f"{name}_q3"]).all()
    for _, mine in speed.groupby(["timed_d_model", "batch_size"]):
        np.testing.assert_allclose(mine["latency_ms"] * mine["speedup"], (mine["latency_ms"] * mine["speedup"]).iloc[0])
        assert mine["aa_ratio"].nunique() == 1
        assert mine["flop_ratio"].iloc[0] == 1
        assert mine["flop_ratio"].is_monotonic_increasing
        assert (mine["parameters"].diff().dropna() < 0).all()


def test_in_short_there_is_what_half_of_the_heads_bring_at_every_size(tables: Frames) -> None:
    speed = tables["speed"]
    assert at_half(speed)["heads_removed"].tolist() == [3] * 4
    assert Speed.headline(tables)[0].value == at_half(speed)["speedup"].max()


def test_the_tradeoff_has_accuracy_and_time_of_every_plan_once_per_batch_size(tables: Frames) -> None:
    tradeoff, pruning = tables["tradeoff"], tables["pruning"]
    assert len(tradeoff) == 2 * 2 * 3, "two scorers, of the random one its first draw, 0, 1 and 3 heads, two batches"
    assert tradeoff["batch_size"].unique().tolist() == [1, 3]
    first = pruning[pruning["draw"] == 0]
    for _, mine in tradeoff.groupby("batch_size"):
        np.testing.assert_array_equal(mine["quality"], first["quality"])


def made_up() -> dict[str, pd.DataFrame]:
    """Three of six heads make it 2.2 times as fast at width 16 and 2.8 times at width 24."""
    sizes = [{"timed_d_model": width, "batch_size": 3, "source_length": 4, "target_length": 5} for width in (16, 24)]
    rows = []
    for size in sizes:
        width = size["timed_d_model"]
        for gone in (0, 3, 5):
            row = {"heads_removed": gone, "heads_total": 6}
            ratios = {"speedup": 1 + gone * width / 40, "built_ratio": 1 + width / 1000 + gone / 1e4, "aa_ratio": 1.0}
            quartiles = {f"{name}_{q}": ratio + off for name, ratio in ratios.items() for q, off in OFF.items()}
            rows.append(size | row | ratios | quartiles | {"flop_ratio": 1 + gone})
    tradeoff = [
        {"scorer": "gate", "draw": 0, "batch_size": 3, "aa_ratio": 1.0, "aa_ratio_q1": 0.99, "aa_ratio_q3": 1.01}
        | {"heads_total": 6, "heads_removed": gone, "removed": f"{gone}"}
        | {"latency_ms": time, "speedup": 8 / time, "speedup_q1": 7.9 / time, "speedup_q3": 8.1 / time}
        | {"quality": right - 0.01, "choose_quality": right}
        for gone, time, right in ((0, 8.0, 1.0), (1, 7.0, 1.0), (2, 6.5, 0.995), (6, 2.0, 0.0))
    ]
    speed = pd.DataFrame(rows).assign(latency_ms=1.0, device="cpu (x)")
    return {"speed": speed, "tradeoff": pd.DataFrame(tradeoff)}


OFF = {"q1": -0.02, "q3": 0.03}


def test_what_is_said(snapshot: Any) -> None:
    tables = made_up()
    slower = tables["tradeoff"]["heads_removed"].between(1, 5)
    slow = tables["tradeoff"].assign(speedup_q1=np.where(slower, 0.9, 1.0))
    noisy = tables["tradeoff"].assign(aa_ratio=1.0, aa_ratio_q1=0.9, aa_ratio_q3=1.3)
    cases = {
        "sizes and a trained model": tables,
        "a trained model alone": {"tradeoff": tables["tradeoff"]},
        "none is faster than the whole model": {"tradeoff": slow},
        "a gain within the noise": {"tradeoff": noisy},
        "nothing but a control": {"tradeoff": tables["tradeoff"].assign(scorer="random")},
    }
    found = {name: list(Speed.say(case)) for name, case in cases.items()}
    snapshot("speed", found)
    assert list(Speed.say(with_a_control(tables))) == found["sizes and a trained model"]


def test_a_speed_that_the_whole_model_has_against_itself_is_no_clear_gain() -> None:
    for noise, told in ((3.0, True), (2.7, False)):
        speed = made_up()["speed"].assign(aa_ratio_q3=noise)
        said = next(iter(Speed.say({"speed": speed, "tradeoff": pd.DataFrame({"batch_size": []})})))
        (number,) = Speed.headline({"speed": speed})
        assert ("That is no clear gain: the whole one against itself has quartiles 0.98 to 3.00." in said) == told
        assert number.beside.startswith("no clear gain; ") == told


def test_the_fastest_is_not_the_luckiest() -> None:
    """One head gone has the lowest median, and rounds that were slower than any with two."""
    tables = made_up()
    lucky = tables["tradeoff"]["heads_removed"] == 1
    tables["tradeoff"].loc[lucky, ["latency_ms", "speedup", "speedup_q1"]] = 6.0, 1.33, 1.1
    assert "the fastest has 2 of 6 heads" in list(Speed.say(tables))[-1]


def with_a_control(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """One draw of a control that happens to be fast and right, of several."""
    lucky = tables["tradeoff"].assign(scorer="random", latency_ms=1.0, speedup=8.0, speedup_q1=8.0, quality=1.0)
    draws = [{"scorer": "gate", "draw": 0}, *({"scorer": "random", "draw": draw} for draw in range(3))]
    both = pd.concat([tables["tradeoff"], lucky], ignore_index=True)
    return {**tables, "tradeoff": both, "pruning": pd.DataFrame(draws)}


def test_the_useless_model_without_heads_squeezes_no_curve_and_more_than_operations_allow_is_called_noise() -> None:
    tables = made_up()
    none_left = tables["speed"]["heads_removed"] == 5
    tables["speed"].loc[none_left, ["heads_removed", "speedup", "flop_ratio"]] = 6, 99.0, 99.0
    figures = {plot.name: plot for plot in figures_of(Speed, tables)}
    assert figures["speedup"].figure.axes[0].get_ylim()[1] < 4
    assert len(figures["speedup"].figure.axes) == 1, "one size of input"
    assert not any("noise or caching" in line for line in Speed.say(tables))
    tables["speed"]["flop_ratio"] = np.where(tables["speed"]["timed_d_model"] == 24, 2.5, 9.0)
    (line,) = (line for line in Speed.say(tables) if "noise or caching" in line)
    assert line.startswith("At width 24")
    assert "2.50 times" in line
