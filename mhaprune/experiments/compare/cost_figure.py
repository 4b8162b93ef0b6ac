"""What a choice of heads loses against what it costs to make."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from mhaprune.experiments.compare.figures import LONG_NAME, REGRET, best_subset
from mhaprune.experiments.compare.limits import passes
from mhaprune.reporting.labels import label_points
from mhaprune.reporting.plots import CONTROL_COLOUR, Plot, ceiling, elided, errors, line_style, number, power_of_ten
from mhaprune.tables import UNINFORMED, Tables, quality_name


def quality_cost(tables: Tables) -> Plot | None:
    """Mean regret against what a choice costs, every point with its name; down and left is better."""
    methods = tables["methods"].dropna(subset=[REGRET])
    if methods.empty:
        return None
    cost = passes(methods).to_numpy(float)
    figure = Figure(figsize=(8, 5.8))
    axes = figure.add_subplot()
    x = _scale_costs(axes, cost)
    y, bars = 100 * methods[REGRET].to_numpy(), 100 * errors(methods, REGRET)
    top = ceiling(100 * methods[f"{REGRET}_high"], methods["family"])
    above = y > top
    short = methods["scorer"].map(lambda name: elided(name, 14) if len(name) > LONG_NAME + 2 else name)
    names = [f"{name} (↑ {number(at, 1)})" if up else name for name, at, up in zip(short, y, above, strict=True)]
    y, bars = np.where(above, top, y), np.where(above, 0.0, bars)
    axes.axhline(0, color="black", linewidth=1.2, label=best_subset(tables.get("oracle", pd.DataFrame())))
    for limit in _limits(tables):
        axes.axvline(limit, color="black", linewidth=0.8, linestyle=":", zorder=0, label=f"{limit:g} passes")
    families = list(methods["family"].unique())
    known = [family for family in families if family != UNINFORMED]
    for family in families:
        members = (methods["family"] == family).to_numpy()
        style = line_style(known.index(family)) if family in known else {"color": CONTROL_COLOUR, "marker": "x"}
        style |= {"linestyle": "none", "markersize": 6, "elinewidth": 0.8}
        axes.errorbar(x[members], y[members], bars[:, members], label=family, **style)
    axes.set_xlabel("cost in forward passes (a backward counts two)")
    axes.set_ylabel(f"mean regret in {quality_name(tables)} (percentage points)")
    _scale_regrets(axes, np.concatenate([y - bars[0], y + bars[1]]))
    figure.legend(loc="outside upper center", ncols=5, columnspacing=1.2, handletextpad=0.4)
    label_points(axes, names, x, y, bars)
    caption = (
        "What a choice of heads loses to the best subset, on average over the budgets, against the cost of its scores"
        " or its search in passes over the score split, for all budgets together. Down and left is better; up to 1 the"
        " upright axis is linear, beyond it is logarithmic. Bars are 95 % intervals. An arrow and a number stand for a"
        " control far above."
    )
    if _limits(tables):
        caption += " The headline compares what stands left of the dotted line with all there is."
    return Plot("cost", caption, figure)


def _scale_regrets(axes: Axes, ends: np.ndarray) -> None:
    """Make the y axis linear up to a point and logarithmic beyond, because the best choices lie within a point."""
    axes.set_yscale("symlog", linthresh=1, linscale=0.7)
    axes.set_yticks([sign * tick for tick in (0, 1, 2, 5, 10, 20, 50, 100) for sign in (1, -1) if tick or sign == 1])
    axes.yaxis.set_major_formatter(lambda tick, _: number(tick, 0))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(min(1.3 * ends.min(), -0.5), max(1.3 * ends.max(), 1.5))


def _limits(tables: Tables) -> list[float]:
    """The costs up to which choices are compared apart from dearer ones."""
    limits = tables["winner"]["most_passes"] if "winner" in tables else pd.Series(dtype=float)
    return limits[np.isfinite(limits)].tolist()


def _scale_costs(axes: Axes, cost: np.ndarray) -> np.ndarray:
    """Make the x axis logarithmic, with a strip at its left for costs of zero; returns the place of each cost."""
    priced = np.log10(cost[cost > 0]) if (cost > 0).any() else np.zeros(1)
    middle, span = (priced.min() + priced.max()) / 2, max(np.ptp(priced), 1.0)
    left, nothing, edge, right = middle + span * np.array([-0.88, -0.79, -0.66, 0.68])
    left = left if (cost == 0).any() else edge
    exponents = np.arange(np.floor(edge), np.ceil(right))
    digits = (1,) if span > 2 else (1, 2, 5)
    major = {digit * 10**exponent: _passes(digit, int(exponent)) for exponent in exponents for digit in digits}
    minor = {digit * 10**exponent: "" for exponent in exponents for digit in range(2, 10)}
    axes.set_xscale("log")
    for ticks in (major, minor):
        seen = {tick: label for tick, label in ticks.items() if 10**edge < tick < 10**right}
        if ticks is major and (cost == 0).any():
            seen[10**nothing] = "0"
            axes.axvspan(10**left, 10**edge, color="black", alpha=0.05, linewidth=0)
        axes.set_xticks(list(seen), list(seen.values()), minor=ticks is minor)
    axes.set_xlim(10**left, 10**right)
    return np.where(cost > 0, cost, 10**nothing)


def _passes(digit: int, exponent: int) -> str:
    if -2 <= exponent <= 4:
        return f"{digit * 10**exponent:,g}"
    return (f"{digit} × " if digit > 1 else "") + power_of_ten(exponent)
