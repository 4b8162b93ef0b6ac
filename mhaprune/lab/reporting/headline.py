"""The headline of several runs: the most important numbers of each run, drawn against the settings that vary."""

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from mhaprune.lab.reporting.names import in_percent
from mhaprune.lab.reporting.plots import COLOURS, CONTROL_COLOUR, Plot, legend_above, new_figure, room_for
from mhaprune.lab.reporting.sentences import share
from mhaprune.lab.reporting.settings import ALL_RUNS, Setting
from mhaprune.statistics.intervals import LEAST_RUNS, prediction_interval, student_interval
from mhaprune.tables import LABEL

MOST_ROWS = 6
"""Largest number of rows of panels in one figure."""
MOST_COLOURS = 12
"""Largest number of values of the setting that is shown by colours."""
MOST_SAID = 12
"""Largest number of mean values in one sentence."""
NOTE = (
    "The first interval is for the mean over models, the second for one new model, both at 95 %. They suppose runs that"
    " scatter around one middle: if there are two groups, or a few fail, look at the single runs. If the models share"
    " their examples, new examples add scatter: 'task.seed=${seed}' gives each model its own."
)
"""The sentence that explains the intervals."""
WHOLE: Any = {"color": CONTROL_COLOUR, "linewidth": 1.8}


class Number(NamedTuple):
    """A number that a comparison of runs shows first."""

    what: str
    """The name in figures and tables."""
    value: float
    """NaN if the run has no such number."""
    whole: float = math.nan
    """The value of the whole model, for comparison; NaN if there is none."""
    after: str = ""
    """The recovery before the measurement; empty for none."""
    least: float = -math.inf
    """The smallest possible value."""
    most: float = math.inf
    """The largest possible value."""
    beside: str = ""
    """Words for the report to put under the number: its interval, and what it is compared with."""
    decimals: int | None = None
    """The decimals to write; None for what suits the number."""

    @property
    def name(self) -> str:
        """The name as a column of a table: `what`, with the recovery if there is one."""
        return f"{self.what}, after {self.after}" if self.after else self.what

    @property
    def possible(self) -> bool:
        """False for a number that cannot have been measured: infinite, or beyond the smallest or largest value."""
        within = math.isfinite(self.value) and self.least <= self.value <= self.most
        return not math.isinf(self.whole) and (math.isnan(self.value) or within)

    @property
    def large(self) -> str:
        """The number as the first screen of a report shows it: `12 of 24`, `99.2 %`, `1.34`; a dash for NaN."""
        if math.isnan(self.value):
            return "–"
        if self.most == self.whole > 1:
            return f"{self.value:g} of {self.whole:g}"
        if (self.least, self.most) == (0, 1):
            return f"{100 * self.value:.1f} %"
        ratio, whole = self.whole == 1 and abs(self.value) < 10, self.value.is_integer()
        decimals = self.decimals if self.decimals is not None else 2 if ratio else 0 if whole else 1
        return f"{round(self.value, decimals) + 0.0:,.{decimals}f}".replace("-", "−")


def quality_number(what: str, value: float, whole: float = math.nan, after: str = "", beside: str = "") -> Number:
    """Return a quality as a `Number`, in percent if it is a share of answers."""
    share = in_percent(what) and 0 <= value <= 1
    ends = (0.0, 1.0) if share else (-math.inf, math.inf)
    return Number(what, float(value), float(whole), after, *ends, beside, None if share else 3)


def against_settings(numbers: pd.DataFrame, settings: Sequence[Setting]) -> Plot | None:
    """Draw a panel per number. The first setting is the x axis, the second the colour, and the others make rows.

    `numbers` has a row for each `Number` of each run: the fields of the `Number`, the `label` of the run, and a column
    per setting. Returns None if there are fewer than two runs, or if too much varies for one figure.
    """
    numbers = _comparable(numbers).assign(**{ALL_RUNS.name: ALL_RUNS.values[0]})
    across, colours, *others = [*settings, ALL_RUNS, ALL_RUNS][: max(2, len(settings))]
    rows = list(numbers.groupby(["after", *(each.name for each in others)], sort=False))
    if numbers[LABEL].nunique() < 2 or len(rows) > MOST_ROWS or len(colours.values) > MOST_COLOURS:
        return None
    whats = list(numbers["what"].unique())
    width = max(3.1, 0.3 * len(across.values) * len(colours.values) ** 0.5)
    figure = new_figure(figsize=(0.6 + width * len(whats), 1.1 + 2.6 * len(rows)))
    grid = figure.subplots(len(rows), len(whats), squeeze=False, sharey="col")
    for i, (key, row) in enumerate(rows):
        for axes, what in zip(grid[i], whats, strict=True):
            panel = row[row["what"] == what]
            if panel.empty:
                axes.remove()
                continue
            ends = _draw(axes, panel, across, colours)
            across.draw_axis(axes)
            axes.set_title("\n".join([what, *(f"after {after}" for after in key[:1] if after), *key[1:]]))
            axes.set_xlabel(across.name if i == len(rows) - 1 else "")
            of_number = numbers[numbers["what"] == what]
            low, high = room_for(pd.concat([of_number["value"], of_number["whole"]]).dropna(), ends)
            low = max(low, -0.06 * high) if of_number["least"].min() == 0 else low  # no number below 0
            axes.set_ylim(low, min(high, of_number["most"].max() + 0.04 * (high - low)))  # a mark at the most is whole
    styles = {} if colours is ALL_RUNS else colours.styles
    legend = [
        Line2D([], [], label=f"{colours.name}={value}", markersize=6, linestyle="", **style)
        for value, style in styles.items()
    ]
    legend += [Line2D([], [], label="the whole model", **WHOLE)] if numbers["whole"].notna().any() else []
    legend_above(figure, legend)
    return Plot("headline", _caption(numbers, settings), figure, tables=("runs",))


def _comparable(numbers: pd.DataFrame) -> pd.DataFrame:
    """Leave out numbers that are missing in some runs: their mean would cover only the successful ones. Turn counts
    into shares where the runs have different totals: 48 of 96 heads and 6 of 12 are both 0.5. A count is not compared
    with the whole model: all of its heads are no result."""
    missing = numbers["value"].isna().groupby([numbers["what"], numbers["after"]]).transform("any")
    numbers = numbers[~missing]
    counted = numbers["most"] == numbers["whole"]
    totals = numbers["whole"].groupby(numbers["what"])
    differ = counted.groupby(numbers["what"]).transform("all") & (totals.transform("nunique") > 1)
    shares = numbers.assign(
        what="share of " + numbers["what"],
        value=numbers["value"] / numbers["whole"],
        whole=math.nan,
        least=0.0,
        most=1.0,
    )
    numbers = numbers.assign(whole=numbers["whole"].mask(counted & (numbers["whole"] > 1)))
    return shares.where(differ, numbers)


def _draw(axes: Axes, panel: pd.DataFrame, across: Setting, colours: Setting) -> list[float]:
    """Draw a mark per run. If at least `LEAST_RUNS` runs differ only in their seed, draw their mean as a larger mark
    with its interval. Return the ends of all intervals."""
    dodge = 0.7 / len(colours.values)
    ends: list[float] = []
    for i, colour in enumerate(colours.values):
        of_colour = panel[panel[colours.name] == colour]
        style = {"color": COLOURS[0], "marker": "o"} if colours is ALL_RUNS else colours.styles[colour]
        means = {}
        for value in across.values:
            runs = of_colour[of_colour[across.name] == value]
            if runs.empty:
                continue
            place = across.values.index(value) + dodge * (i - (len(colours.values) - 1) / 2)
            means[place] = runs["value"].mean()
            if runs["whole"].notna().any():
                axes.hlines(runs["whole"].mean(), place - dodge / 2, place + dodge / 2, zorder=1, **WHOLE)
            if len(runs) == 1:
                axes.scatter([place], runs["value"], s=34, linewidth=0, zorder=3, **style)
                continue
            few = len(runs) < LEAST_RUNS
            beside = (-0.14, 0.14) if few else (-0.38, -0.14)  # beside each other, and beside their mean
            places = place + dodge * np.linspace(*beside, len(runs))
            axes.scatter(places, runs["value"], s=26 if few else 13, linewidth=0, alpha=0.55, zorder=2, **style)
            if not few:
                low, high = _within(runs, student_interval)
                ends += [low, high]
                axes.vlines(place, low, high, color=style["color"], linewidth=1.4, zorder=3)
                axes.scatter([place], [means[place]], s=46, edgecolor="white", linewidth=0.7, zorder=4, **style)
        if across.numeric:
            axes.plot(list(means), list(means.values()), color=style["color"], linewidth=1.1, zorder=1.5)
    return ends


def _within(runs: pd.DataFrame, interval: Callable[[pd.Series], tuple[float, float]]) -> tuple[float, float]:
    """Return both ends of an interval over runs, clipped to the smallest and largest possible value."""
    low, high = np.clip(interval(runs["value"]), runs["least"].min(), runs["most"].max())
    return float(low), float(high)


def _caption(numbers: pd.DataFrame, settings: Sequence[Setting]) -> str:
    *first, last = numbers["what"].unique()
    whats = f"{', '.join(first)} and {last}" if first else last
    caption = whats[0].upper() + whats[1:]
    if settings:
        caption += f" against {settings[0].name}"
    if _repeated(numbers, settings):
        caption += ": a small mark per run, a large one for the mean of three or more that differ only in their"
        caption += " seed, with its 95 % interval"
        caption += "; the line joins the means" if settings and settings[0].numeric else ""
    return caption + ("." if numbers["whole"].isna().all() else "; grey is the whole model.")


def _repeated(numbers: pd.DataFrame, settings: Sequence[Setting]) -> bool:
    """Return whether any runs differ only in their seed."""
    return bool(numbers.duplicated(["what", "after", *(each.name for each in settings)]).any())


def means_in_words(numbers: pd.DataFrame, settings: Sequence[Setting]) -> Iterator[str]:
    """Yield a sentence per number, with the mean over runs that differ only in their seed; for few runs, their values.
    Nothing is yielded if no runs differ only in their seed."""
    for (what, after), of_number in numbers.groupby(["what", "after"], sort=False):
        if len(of_number) > 1 and (lacking := int(of_number["value"].isna().sum())):
            of = f"{lacking} of {numbers[LABEL].nunique()} runs"
            yield f"{_first_words(what, after)}: not compared, {of} have no such number."
    numbers = _comparable(numbers)
    if numbers.empty or not _repeated(numbers, settings):
        return
    means = False
    for (what, after), of_number in numbers.groupby(["what", "after"], sort=False):
        groups = []
        for values in product(*(each.values for each in settings)):
            runs = of_number[(of_number[[each.name for each in settings]] == list(values)).all(axis=1)]
            label = ", ".join(f"{each.name}={value}" for each, value in zip(settings, values, strict=True))
            groups += [(label, runs)] if len(runs) else []
        if len(groups) <= MOST_SAID:
            parts = [f"{_mean(runs)}{f' with {label}' if label else ''}" for label, runs in groups]
            counts = [len(runs) for _, runs in groups if len(runs) >= LEAST_RUNS]
            over = " to ".join(map(str, dict.fromkeys([min(counts), max(counts)]))) if counts else ""
            yield f"{_first_words(what, after)}: {'; '.join(parts)}{f' (means over {over} runs)' if over else ''}."
            means |= bool(over)
    if means:
        yield NOTE


def _first_words(what: str, after: str) -> str:
    name = Number(what, math.nan, after=after).name
    return name[0].upper() + name[1:]


def means_table(numbers: pd.DataFrame, settings: Sequence[Setting]) -> pd.DataFrame:
    """Return a row per setting and number: its mean over models, the interval of the mean, that for one new model, and
    how many models there are. Below `LEAST_RUNS` models there is no interval."""
    numbers, names, rows = _comparable(numbers), [each.name for each in settings], []
    for each in reversed(settings):
        numbers = numbers.sort_values(
            each.name, key=lambda values, each=each: values.map(each.values.index), kind="stable"
        )
    for (what, after, *values), runs in numbers.groupby(["what", "after", *names], sort=False):
        found = {"mean": runs["value"].mean(), "models": len(runs)}
        if len(runs) >= LEAST_RUNS:
            for name, interval in (("mean", student_interval), ("new", prediction_interval)):
                found[f"{name}_low"], found[f"{name}_high"] = _within(runs, interval)
        text = _mean(runs).partition(";")[0] + ")" * (len(runs) >= LEAST_RUNS)
        rows.append(
            dict(zip(names, values, strict=True)) | {"number": Number(what, math.nan, after=after).name} | found
        )
        rows[-1]["text"] = text
    return pd.DataFrame(rows, columns=[*names, "number", *MEANS, "text"])


MEANS = ["mean", "mean_low", "mean_high", "new_low", "new_high", "models"]


def means_in_latex(means: pd.DataFrame) -> str:
    """Return the table of `means_table` as LaTeX of the package booktabs: a row per setting, a column per number, the
    95 % interval of its mean below it. The last column has the number of models, several if it is not the same for all
    numbers."""
    settings, numbers = list(means.columns[: -len(MEANS) - 2]), means["number"].unique()
    percent = {number: bool(means["text"][means["number"] == number].str.contains("%").all()) for number in numbers}
    rows = []
    for _, of_setting in means.groupby([means[name] for name in settings] or [0] * len(means), sort=False):
        texts = dict(zip(of_setting["number"], of_setting["text"], strict=True))
        cells = [_in_latex(texts.get(number, ""), percent[number]) for number in numbers]
        models = ", ".join(map(str, of_setting["models"].unique()))
        rows.append([*(_escaped(str(of_setting[name].iloc[0])) for name in settings), *cells, models])
    names = [f"{number} (%)" if percent[number] else number for number in numbers]
    heads = [_stacked([*map(_escaped, textwrap.wrap(name, 16))]) for name in (*settings, *names, "models")]
    lines = [" & ".join(cells) + r" \\" for cells in (heads, *rows)]
    columns = "l" * len(settings) + "c" * (len(names) + 1)
    parts = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([*parts, r"\end{tabular}", ""])


def _in_latex(text: str, percent: bool) -> str:
    """Return the text of a mean as a cell: the number, and below it, smaller, its interval."""
    mean, _, interval = text.replace(" %", "" if percent else r" \%").partition(" (")
    mean, *ends = (re.sub("^[-−](?=[0-9])", "$-$", part) for part in (mean, *interval.rstrip(")").split(" to ")))
    return _stacked([mean, rf"{{\scriptsize [{', '.join(ends)}]}}"]) if interval else mean


def _stacked(lines: Sequence[str]) -> str:
    """Return lines below each other in one cell."""
    inside = r"\\".join(lines)
    return inside if len(lines) == 1 else rf"\begin{{tabular}}[t]{{@{{}}c@{{}}}}{inside}\end{{tabular}}"


def _escaped(text: str) -> str:
    """Return a text of anybody's as LaTeX; in braces if it begins with a bracket, which would be an option of a row."""
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    text = "".join(signs.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)
    return f"{{}}{text}" if text.startswith(("[", "*")) else text


def _mean(runs: pd.DataFrame) -> str:
    """Return the mean with its interval and the interval for a new run, in words; the values, if they are few."""
    ratios = bool(np.isinf(runs["most"]).all()) and runs["value"].max() < 10
    said = share if (runs["most"] == 1).all() else "{:.2f}".format if ratios else "{:.3g}".format
    if len(runs) < LEAST_RUNS:
        values = list(dict.fromkeys(map(said, runs["value"])))  # equal values once
        return " and ".join(values) + " each" * (len(values) < len(runs))
    within = [_within(runs, interval) for interval in (student_interval, prediction_interval)]
    mean, low, high, least, most = map(said, [runs["value"].mean(), *within[0], *within[1]])
    return f"{mean} ({low} to {high}; new run {least} to {most})"
