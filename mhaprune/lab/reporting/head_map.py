"""The map of heads: which heads stay and which can be removed, by the tables of an experiment."""

import textwrap
from collections.abc import Mapping
from math import isnan
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.patches import FancyBboxPatch, Rectangle

from mhaprune.lab.model.sites import block_label, head_label
from mhaprune.lab.reporting.heat_map import MATTERS, write_inside
from mhaprune.lab.reporting.plots import COLOURS, Plot, amount, new_figure
from mhaprune.tables import BLOCK, REFERENCE, blocks_in, named

REMOVED = "removed"
"""The text in the column `name` for a head that was removed before the run."""


class Verdict(NamedTuple):
    """A decision for each head, in the order of the heads in the model, and words that explain the decisions."""

    heads: pd.DataFrame
    """The head, whether it `stays`, its `score` (or NaN) and its `name`: what it looks at, empty if unknown. A column
    `undecided`, if there is one, marks heads that stay because nothing is known for sure, and `faint` those whose score
    is within its interval of 0."""
    scorer: str
    """The scorer of the column `score`; empty without scores."""
    title: str
    """The result in one line."""
    meaning: str
    """The sentence that explains what a tile of each kind means."""
    together: bool = True
    """True if the removable heads were removed together; False if each of them was judged alone."""
    tables: tuple[str, ...] = ()
    """The names of the tables that it was made from."""
    unit: str = ""
    """The unit of the loss in brackets, `" (nats)"`; empty if it has none."""


class SmallMap(NamedTuple):
    """The map of heads without scores and names."""

    title: str
    """The result in one line."""
    rows: list[str]
    """A text per block: `1` for a head that stays, `0` for one that can be removed, a blank for no head."""


KINDS = {"1": "fill:var(--mark,#0072B2)", "0": "fill:none;stroke:#8c8c8c"}
"""The looks of squares in a thumbnail: heads that stay and heads that are removed."""
BAR = 12
"""The number of squares of a bar in a thumbnail."""


def thumbnail(small: SmallMap | None, tile: int = 7) -> Markup:
    """Return the map of heads as a small SVG picture: full squares for heads that stay, hollow for the others. A square
    and the gap beside it are `tile` pixels wide."""
    if small is None or not any(small.rows):
        return Markup()
    side = tile - 2
    paths = []  # one path for all squares of a kind: a page opens faster than with an element for each
    for kind, look in KINDS.items():
        corners = [(x, y) for y, row in enumerate(small.rows) for x, each in enumerate(row) if each == kind]
        squares = "".join(f"M{x * tile + 1} {y * tile + 1}h{side}v{side}h-{side}z" for x, y in corners)
        paths.append(Markup('<path style="{}" d="{}"/>').format(look, squares) if squares else "")
    size = Markup('width="{}" height="{}"').format(max(map(len, small.rows)) * tile, len(small.rows) * tile)
    return Markup('<svg {} role="img"><title>{}</title>{}</svg>').format(size, small.title, Markup("").join(paths))


def in_small(verdict: Verdict) -> SmallMap:
    rows: dict[tuple[str, int], dict[int, str]] = {}
    heads = verdict.heads
    for site, layer, head, stays in zip(heads["site"], heads["layer"], heads["head"], heads["stays"], strict=True):
        rows.setdefault((site, layer), {})[int(head)] = "1" if stays else "0"
    return SmallMap(verdict.title, [_squares(row) for row in rows.values()])


def _squares(row: Mapping[int, str]) -> str:
    """Return a square per unit; of many units, a row of squares of which the same share is full."""
    if len(row) <= MOST_TILES:
        return "".join(row.get(i, " ") for i in range(max(row) + 1))
    full = round(BAR * [*row.values()].count("1") / len(row))
    return "1" * full + "0" * (BAR - full)


FAINT = "#ececec"
"""The colour of a head whose score may be 0."""
PALE = "#eaf2fa"
"""The colour of a head about which nothing is known for sure."""
LIGHTEST = 0.3
"""The palest colour of a head that stays, so that it never looks like a head that can be removed."""
TALLEST = 14.0
"""Height of all rows together, in inches, above which each row is drawn lower."""
MOST_TILES = 64
"""Largest number of units in a block that have a tile each. More of them, as of neurons, are one bar."""
MOST_NAMED = 8
"""Largest number of heads in a block whose names are written. With more, letters would be too small on a page."""
LETTER, SMALL_LETTER = 0.112, 0.078
"""Width of a letter of the title and of a letter in a tile, in inches."""
LONGEST = 8.0
"""Width in inches at which a long title is broken into lines; in a wider figure, the title is wider too."""


def heads_that_matter(verdict: Verdict) -> Plot:
    """Draw a map of the model with a tile per head: dark if the head matters, empty if it can be removed, pale with a
    blue line if that is undecided. The line around an empty tile is dashed if all such heads were removed together,
    solid if each can be removed alone."""
    heads, scorer, title, meaning, together, tables, unit = verdict
    heads = heads.assign(digits=["" if isnan(score) else amount(score) for score in heads["score"]])
    heads = heads.assign(**{kind: heads.get(kind, pd.Series(False, heads.index)) for kind in ("undecided", "faint")})
    rows = blocks_in(heads)
    counts = heads.groupby(BLOCK, sort=False)["stays"].agg(["sum", "size"])
    bars = {block: (int(stay), int(size)) for block, stay, size in counts.itertuples() if size > MOST_TILES}
    heads = heads[[block not in bars for block in heads[BLOCK].itertuples(index=False, name=None)]]
    numbers = sorted(heads["head"].unique())  # a group has the number of its first head
    columns = len(numbers) or MOST_NAMED
    if 0.55 * len(rows) > TALLEST or columns > MOST_NAMED:  # low or narrow tiles have no room for a second line
        heads["name"] = heads["name"].where(heads["name"] == REMOVED, "")
    named = (heads["name"] != "").any()
    longest = max([6, *heads["name"].str.len()])
    width = max(1.8 + (0.15 + SMALL_LETTER * longest) * columns, min(LETTER * len(title), LONGEST))
    words = textwrap.fill(title.replace(" %", "\u00a0%"), int(width / LETTER))
    height = 1.15 + 0.2 * words.count("\n") + min(0.55 * len(rows), max(TALLEST, 0.26 * len(rows)))
    figure = new_figure(figsize=(width, height))
    axes = figure.add_subplot()
    highest = heads["score"].max() if len(heads) else 0
    shade = PowerNorm(0.5, 0, highest if highest > 0 else 1.0)
    for _, head in heads.iterrows():
        share = 0.5 if isnan(head["score"]) else float(shade(max(head["score"], 0.0)))
        place = numbers.index(head["head"]), rows.index((head["site"], head["layer"]))
        _tile(axes, head, place, LIGHTEST + (1 - LIGHTEST) * share, together)
    for block, (stay, size) in bars.items():
        _bar(axes, stay, size, rows.index(block), columns)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="head" if numbers else "")
    axes.set_xticks(range(len(numbers)), numbers)
    axes.set_yticks(range(len(rows)), [block_label(*row) for row in rows])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    figure.suptitle(words, fontsize=12.5, fontweight="bold")
    undecided, goes = heads[heads["undecided"]], heads[~heads["stays"]]
    stays = heads[heads["stays"] & ~heads["undecided"]]
    caption = meaning
    if scorer:
        rise = (
            f"how much the loss rises{unit} if this one alone is closed"
            if scorer == REFERENCE
            else f"its score by {scorer}"
        )
        caption += f" The number is {rise}, on the score split: the darker the blue, the more."
        caption += " Below it stands what the head looks at, if that is clear." if named else ""
    can_go = "Can be removed" if together else "Cost next to nothing alone"
    gone = goes["name"] == REMOVED
    alt = f"{title}. Stay: {_list(stays) or 'none'}. {can_go}: {_list(goes[~gone]) or 'none'}."
    alt += f" Not decided: {_list(undecided)}." if len(undecided) else ""
    alt += f" Removed already: {_list(goes[gone])}." if gone.any() else ""
    alt += "".join(f" Of {block_label(*block)}, {stay} of {size} stay." for block, (stay, size) in bars.items())
    caption += " A bar is a block of many units; its full part is the share of them that stays." if bars else ""
    return Plot("matter", caption, figure, alt, tables=tables)


def _tile(axes: Axes, head: pd.Series, place: tuple[int, int], depth: float, together: bool) -> None:
    look: Any = {"facecolor": matplotlib.colormaps[MATTERS](depth), "edgecolor": "none"}
    ink = "white" if depth > 0.55 else "black"
    if head["undecided"]:
        look, ink = {"facecolor": PALE, "edgecolor": COLOURS[0], "linewidth": 1.5}, "black"
    elif head["stays"] and head["faint"]:
        look, ink = look | {"facecolor": FAINT}, "black"
    elif not head["stays"]:
        line = (0, (3, 2)) if together else "-"
        look, ink = {"facecolor": "none", "edgecolor": "#8c8c8c", "linestyle": line}, "#595959"
    box = FancyBboxPatch((place[0] - 0.45, place[1] - 0.42), 0.9, 0.84, "round,pad=0,rounding_size=0.1", **look)
    axes.add_patch(box)
    words = "\n".join(filter(None, [head["digits"], head["name"]])) or ("stays" if head["stays"] else "goes")
    weight = "bold" if head["stays"] else "normal"
    write_inside(axes, *place, words, fontsize=9, color=ink, fontweight=weight)


def _bar(axes: Axes, stay: int, size: int, row: int, columns: int) -> None:
    """Draw the share of many units that stay."""
    for start, end, look in (
        (0.0, stay / size, {"facecolor": matplotlib.colormaps[MATTERS](LIGHTEST), "edgecolor": "none"}),
        (stay / size, 1.0, {"facecolor": "none", "edgecolor": "#8c8c8c", "linestyle": (0, (3, 2))}),
    ):
        if end > start:
            corner, width = -0.45 + start * (columns - 0.1), (end - start) * (columns - 0.1)
            axes.add_patch(Rectangle((corner, row - 0.42), width, 0.84, **look))
    write_inside(axes, columns / 2 - 0.5, row, f"{stay:,} of {size:,} stay", fontsize=9, fontweight="bold")


def _list(heads: pd.DataFrame) -> str:
    scores = (f" ({digits})" if digits else "" for digits in heads["digits"])
    return ", ".join(f"{head_label(head)}{score}" for head, score in zip(named(heads), scores, strict=True))
