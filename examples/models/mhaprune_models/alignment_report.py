"""The report of `experiment=alignment_heads`: which heads align words and sound?"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.plots import CONTROL_COLOUR, Plot, needs
from mhaprune.statistics.intervals import CONFIDENCE
from mhaprune.tables import Tables

CHOSEN, PUBLISHED, UNTIMED, ALL, RANDOM = "chosen", "published", "without times of words", "all heads", "random"
"""The lists of heads."""
AGREED = "agreement"
"""What lists are judged against if it is not known when words are said."""
TOLERANCES = (0.05, 0.1, 0.2)
"""Seconds within which a begin or end of a word is right."""
TOP, MOVED = "within_100", "within_100_moved"
"""Columns: the share that is right within a tenth of a second, and what it is if all times are moved by one number."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences about the list that is chosen, the published one, and a list without times of words."""
    lists, sizes = tables["lists"].set_index("list"), tables["sizes"]
    own, timed = lists.loc[CHOSEN], lists["against"].iloc[0] != AGREED
    truth = "the times of words" if timed else "the path that the heads agree on, as the times of words are not known"
    are = "are" if own["size"] > 1 else "is"
    yield (
        f"{_heads(own)} {are} enough to align words and sound: {_right(own)} of the begins and ends of words of the"
        f" report split are right within 0.1 s, by {truth}; the mean error is {_error(own)}."
    )
    yield f"`generation_config.alignment_heads` is {_as_list(own['heads'])}."
    if PUBLISHED in lists.index:
        theirs = lists.loc[PUBLISHED]
        more, low, high = (100 * own[f"more{end}"] for end in ("", "_low", "_high"))
        how = "better" if low > 0 else "worse" if high < 0 else "neither surely better nor worse"
        yield (
            f"The published list of {theirs['size']} has {_right(theirs)} right and a mean error of {_error(theirs)}:"
            f" the list found here is {how}, by {more:.0f} points ({low:.0f} to {high:.0f}, 95 % interval over"
            " utterances)."
            f" Its times are {_late(theirs)}, those of the list found here {_late(own)} (medians). If all times are"
            f" moved by one number, the one that suits the choose split, {100 * theirs[MOVED]:.0f} % and"
            f" {100 * own[MOVED]:.0f} % are right."
        )
    if UNTIMED in lists.index:
        theirs = lists.loc[UNTIMED]
        yield f"A list of {int(theirs['size'])}, found without the times of words, has {_right(theirs)} right."
    if RANDOM in lists.index:
        chance, every = (_right(lists.loc[name]) for name in (RANDOM, ALL))
        yield f"As many heads at random have {chance} right, all heads together {every}."
    if own["size"] == sizes["size"].max():
        yield "Longer lists were not tried: `experiment.most` and `experiment.candidates` say how long they may be."
    best = sizes.loc[sizes["error"].idxmin()]
    if best["size"] > own["size"]:
        yield (
            f"With {best['size']} heads the error is smallest on the choose split ({1000 * best['error']:.0f} ms); this"
            " is no more than one standard error less."
        )


def _heads(row: pd.Series) -> str:
    many = int(row["size"])
    return f"{many} heads" if many > 1 else "1 head"


def _right(row: pd.Series) -> str:
    return f"{100 * row[TOP]:.0f} % ({100 * row[TOP + '_low']:.0f} to {100 * row[TOP + '_high']:.0f})"


def _error(row: pd.Series) -> str:
    return f"{1000 * row['error']:.0f} ms ({1000 * row['error_low']:.0f} to {1000 * row['error_high']:.0f})"


def _late(row: pd.Series) -> str:
    return f"{abs(1000 * row['late']):.0f} ms {'late' if row['late'] >= 0 else 'early'}"


def _as_list(heads: str) -> str:
    return str(sorted([int(part) for part in name.split(".")] for name in heads.split()))


def headline(tables: Tables) -> list[Number]:
    """Return the share of begins and ends of words that are right, and the number of heads."""
    lists = tables["lists"].set_index("list")
    own = lists.loc[CHOSEN]
    beside = f"published list: {_right(lists.loc[PUBLISHED])}" if PUBLISHED in lists.index else ""
    total = len(tables["heads"])
    return [
        Number("begins and ends of words within 0.1 s", float(own[TOP]), least=0.0, most=1.0, beside=beside),
        Number("alignment heads", float(own["size"]), total, "", 0.0, total, f"of {total} heads of cross-attention"),
    ]


@needs("sizes", "lists")
def sizes(tables: Tables) -> Plot:
    """Draw the mean error of lists of all sizes on the choose split."""
    table, lists = tables["sizes"], tables["lists"].set_index("list")
    figure = plots.new_figure(figsize=(6.4, 4.0))
    axes = figure.subplots()
    bars = 1000 * plots.errors(table, "error")
    axes.errorbar(
        table["size"], 1000 * table["error"], yerr=bars, capsize=2, **plots.line_style(0), label="lists found"
    )
    own = table[table["chosen"]].iloc[0]
    axes.scatter(own["size"], 1000 * own["error"], s=160, facecolor="none", edgecolor="black", label="chosen", zorder=3)
    for i, name in enumerate((PUBLISHED, ALL), 1):
        if name in lists.index:
            label, colour = f"{name}: {int(lists.loc[name, 'size'])}", plots.line_style(i)["color"]
            axes.axhline(1000 * lists.loc[name, "error"], color=colour, linestyle="--" if i == 1 else ":", label=label)
    axes.set(xlabel="number of heads in the list", ylabel="mean error of the times of words, ms", xticks=table["size"])
    axes.set_ylim(0)
    plots.legend_above(figure, axes, "The fewest heads that are enough: " + str(int(lists.loc[CHOSEN, "size"])))
    added = ", ".join(table["head"].str.removeprefix("decoder.encoder_attn."))
    caption = (
        f"Mean error of begins and ends of words on the choose split, for lists that grow by the head that helps most:"
        f" {added}. Bars are {100 * CONFIDENCE:.0f} % intervals over utterances. The circle has the fewest heads whose"
        " error is within one standard error of the smallest. Lines: other lists, on the report split."
    )
    return Plot("sizes", caption, figure)


@needs("words")
def words(tables: Tables) -> Plot:
    """Draw when each word of an utterance is said, and when it begins by each list."""
    table = tables["words"]
    figure = plots.new_figure(figsize=(7.2, 1.6 + 0.32 * len(table)))
    axes = figure.subplots()
    places = np.arange(len(table))
    true = "said" if table["against"].iloc[0] != AGREED else "agreed"
    axes.barh(places, table["end"] - table["begin"], left=table["begin"], height=0.8, color="0.88", label=true)
    for i, name in enumerate(each for each in (CHOSEN, PUBLISHED, UNTIMED) if f"begin_{each}" in table):
        style = plots.line_style(i)
        height = 0.22 * (i - 1)
        axes.scatter(table[f"begin_{name}"], places + height, s=26, linewidth=0, **style, label=name, zorder=3)
    axes.set(xlabel="seconds", yticks=places, xlim=(0, None))
    axes.set_yticklabels(table["word"])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    plots.legend_above(figure, axes, "When each word begins")
    caption = (
        "The words of the first utterance of the report split. Grey: when a word is said"
        + (", by what the heads agree on" if true == "agreed" else "")
        + ". Points: when it begins by dynamic time warping of the attention of each list of heads."
    )
    return Plot("words", caption, figure)


@needs("heads")
def errors_of_heads(tables: Tables) -> Plot:
    """Draw the error of each head by itself, the best ones first."""
    table = tables["heads"].head(24)[::-1].reset_index(drop=True)
    figure = plots.new_figure(figsize=(6.4, 1.4 + 0.24 * len(table)))
    axes = figure.subplots()
    kinds = {CHOSEN: table["chosen"], "only published": table["published"] & ~table["chosen"]}
    kinds["neither"] = ~(table["chosen"] | table["published"])
    bars = 1000 * plots.errors(table, "error")
    for i, (name, mine) in enumerate(kinds.items()):
        rows = np.flatnonzero(mine)
        style = plots.line_style(i) if name != "neither" else {"color": CONTROL_COLOUR, "marker": "o"}
        style = {**style, "linestyle": "none"}
        axes.errorbar(1000 * table["error"][rows], rows, xerr=bars[:, rows], capsize=2, label=name, **style)
    axes.set(xlabel="mean error of the times of words by this head alone, ms", yticks=range(len(table)))
    axes.set_yticklabels([f"{layer}.{head}" for layer, head in zip(table["layer"], table["head"], strict=True)])
    axes.set_xlim(0)
    plots.legend_above(figure, axes, "The heads of cross-attention by themselves")
    caption = (
        f"Layer and head, and the mean error of begins and ends of words by dynamic time warping of this head alone, on"
        f" the score split, with {100 * CONFIDENCE:.0f} % intervals over utterances; the {len(table)} best of"
        f" {len(tables['heads'])}."
    )
    return Plot("heads_alone", caption, figure)
