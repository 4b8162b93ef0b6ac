"""The report of `experiment=explain`: what the heads look at, what they contribute, and what breaks without them."""

from collections.abc import Iterator
from math import ceil, isnan
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.heads import HeadId
from mhaprune.lab.experiments.explain.alignment import alignment_sentences
from mhaprune.lab.model.sites import SITES
from mhaprune.lab.reporting.head_map import REMOVED, Verdict
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.heat_map import MATTERS, MISSING, frame, heat_map
from mhaprune.lab.reporting.names import in_brackets, loss_suffix
from mhaprune.lab.reporting.plots import SIGNS, Plot, amount, needs, new_figure, number, wrapped
from mhaprune.lab.reporting.sentences import quality_of, right
from mhaprune.statistics.intervals import prunable, skewed_ends
from mhaprune.tables import HEAD, MOMENTS, QUALITY, REFERENCE, Tables

SPREAD = "spreads its attention evenly over all that it may look at"
NAMED = 3
"""Number of the most important heads that get a sentence each."""
MOST_PANELS = 100
"""Largest number of heads whose attention is drawn in one figure."""
ACROSS = 4
"""Largest number of panels in a row."""
PANEL = 2.2
"""The largest width of a panel in inches: four panels and the words beside them fit a page."""
CELL, LABEL = 0.21, 0.135
"""The largest size of a token's cell, and the size that its name needs, both in inches."""
LEAST_TOP = 0.3
"""The smallest maximum of a colour scale, so that small differences between nearly equal weights do not look large."""
NO_PATTERN = "no clear pattern"
WRITING = ("decoder_self", "cross")
"""The sites of mhaprune's own model at which a token is written."""
MOST_ROWS = 72
"""Largest number of heads in one figure; the most important heads are shown."""
CLEAR = 0.05
"""The smallest difference that is written in a cell: the attention of a head minus even attention, as shares."""
EVEN = 0.12
"""The largest difference of a weight from even attention that the colours of a map hardly show."""


def say(tables: Tables) -> Iterator[str]:
    """Yield sentences: which heads matter most, what they look at, and what breaks without them."""
    looks, unit = tables["looks"].query("not removed").sort_values("rank"), loss_suffix(tables)
    best, costs = looks.iloc[0], costs_of(looks, tables)
    rises = [number(float(ends_N[0]), 3) for ends_N in (costs[0], *skewed_ends(costs))]
    low, high = (quality_of(best[f"quality_{end}"], tables) for end in ("low", "high"))
    yield (
        f"{HeadId(*best[HEAD])} matters most of {len(looks)} heads by {best['scorer']}: without it the loss on the"
        f" score split rises by {rises[0]}{unit} (95 % interval {rises[1]} to {rises[2]}{on_examples(looks)})."
    )
    yield (
        f"Then {right(best[QUALITY], tables)} on the report split (95 % interval {low} to {high};"
        f" {quality_of(best['open_quality'], tables)} with all heads)."
    )
    for example in tables["examples"].itertuples() if "answer" in tables["examples"] else ():
        known = isinstance(example.right_answer, str)
        verdict = "right" if example.answer == example.right_answer else f"wrong, it is {example.right_answer}"
        answer = _cut(example.answer, example.source)
        line = f"Asked {example.source} the model says {answer} ({verdict if known else 'no answer is known'})."
        line += "" if example.ended else " It finds no end."
        if example.symbols > example.trained_symbols:
            line += f" It was never trained on more than {example.trained_symbols} symbols."
        yield line
    wrong = tables["wrong"].drop_duplicates(HEAD).set_index(HEAD) if "wrong" in tables else None
    for (_, head), cost in zip(looks.head(NAMED).iterrows(), costs[0], strict=False):
        key = tuple(head[HEAD])
        line = f"{HeadId(*key)} {_look(head, tables['patterns'])}. Without it"
        if wrong is None:
            yield f"{line} the loss rises by {number(cost, 3)}{unit}."
            continue
        line += f" {head['turned_wrong']:.0f} of {head['examples']:.0f} examples turn wrong"
        if key in wrong.index:
            example = wrong.loc[key]
            said = _cut(example["said_without_it"] or "nothing", example["example"])
            line += f"; of {example['example']} it makes {said}"
        yield f"{line}."
    yield from alignment_sentences(tables)


def on_examples(looks: pd.DataFrame) -> str:
    """Return how many examples the score split has, to stand after an interval; older runs do not say it."""
    return f", {looks['scored_examples'].iloc[0]} examples" if "scored_examples" in looks else ""


def costs_of(looks: pd.DataFrame, tables: Tables) -> np.ndarray:
    """Return how much the loss on the score split rises without each of these heads, as moments (3, N); NaN if
    removed."""
    heads = tables["heads"]
    costs = heads[(heads["scorer"] == REFERENCE) & (heads["draw"] == 0)].set_index(HEAD)[MOMENTS]
    return costs.reindex(pd.MultiIndex.from_frame(looks[HEAD])).to_numpy().T


def _cut(answer: str, example: str) -> str:
    """Return an answer, cut after eight symbols, with “…”, if it is much longer than the source of the example."""
    if len(answer) <= max(16, 4 + len(example.partition("->")[0])):
        return answer
    blank = " " if " " in answer else ""
    return f"{blank.join((answer.split() if blank else answer)[:8])}{blank}…"


def _look(head: pd.Series, patterns: pd.DataFrame) -> str:
    """Return words for what a head looks at."""
    if name_of(head) == NO_PATTERN:
        return "follows no clear pattern"
    rows = patterns[(patterns[HEAD] == list(head[HEAD])).all(axis=1) & (patterns["meaning"] == head["name"])]
    if rows.empty:
        return SPREAD
    mass, largest, chance = (f"{100 * part:.0f} %" for part in rows.iloc[0][["mass", "largest", "chance"]])
    return (
        f"looks at “{head['name']}”: its largest weight is there in {largest} of the rows that have such a place, with"
        f" {mass} of its attention ({chance} by chance)"
    )


def head_map(tables: Tables) -> Verdict:
    """Return a decision for each head: it can go if it is prunable alone or was removed, and is undecided if it costs
    neither less nor more than the tolerance for sure. Names say what it looks at."""
    looks = tables["looks"]
    tolerance = looks["tolerance"].iloc[0]
    matters = prunable(costs_of(looks, tables) * [[-1.0], [1.0], [-1.0]], -tolerance)  # the same test, of the opposite
    heads = looks[[*HEAD, "score", "name"]].assign(stays=~(looks["removed"] | looks["prunable"]))
    heads["undecided"] = heads["stays"] & ~matters
    heads["name"] = heads["name"].astype(object).fillna("").map(in_words).mask(looks["removed"], REMOVED)
    remaining = looks[~looks["removed"]]
    first, count = remaining.iloc[0], int(remaining["prunable"].sum())
    title = f"None of {len(remaining)} heads costs next to nothing at 95 % confidence"
    if count:
        dense_quality, pruned_quality = first["open_quality"], first["without_prunable"]
        some = f"Any one of {count} heads (of {len(remaining)})" if count > 1 else f"One head (of {len(remaining)})"
        all_of_them = f" with all {count} closed" if count > 1 else " then"
        before, then = (quality_of(each, tables) for each in (dense_quality, pruned_quality))
        change = " as before" if before == then else f", not {before}"
        title = f"{some} can be closed at almost no cost;{all_of_them} {right(pruned_quality, tables)}{change}"
    within = f"{tolerance:g}{loss_suffix(tables)}"
    meaning = (
        f"Blue tiles are heads that cost more than {within} when they alone are closed; empty tiles are heads that cost"
        " less. Both hold at 95 % confidence on the score split, for all tiles of a kind together. Pale tiles with"
        f" a blue line are undecided: their cost is too near to {within}, or differs too much between examples."
    )
    return Verdict(
        heads, first["scorer"], title, meaning, together=False, tables=("looks", "heads"), unit=in_brackets(tables)
    )


def headline(tables: Tables) -> list[Number]:
    """Return the number of prunable heads. Each of them is prunable alone, not all together."""
    looks = tables["looks"].query("not removed")
    less = f"{looks['tolerance'].iloc[0]:g}{loss_suffix(tables)}"
    beside = f"the loss rises by less than {less} without it, at 95 % confidence{on_examples(looks)}"
    count, what = float(looks["prunable"].sum()), "heads that can be closed one at a time"
    return [Number(what, count, len(looks), "", 0.0, len(looks), beside)]


@needs("attention", "examples", "looks")
def attention_maps(tables: Tables) -> Iterator[Plot]:
    """Yield a figure per example and site: a panel for every head, queries down, keys across. A site of more than
    `MOST_PANELS` heads has none: they could not be read, and the touchable view shows them."""
    examples, scale = tables["examples"].set_index("example"), scale_of(tables["attention"])
    for (example, site), maps in tables["attention"].groupby(["example", "site"], sort=False):
        looks = tables["looks"].query("site == @site and layer in @maps.layer")
        if len(looks) > MOST_PANELS:
            continue
        where, shown, verdict = SITES.get(site, str(site)), examples.loc[example], ""
        said = str(shown["source"])
        if "answer" in shown:
            said += f" → {shown['answer']}"
            wrong = isinstance(shown["right_answer"], str) and shown["answer"] != shown["right_answer"]
            verdict = f" (wrong: it is {shown['right_answer']})" if wrong else ""
        figure = _draw_maps(maps, looks, str(site), scale)
        figure.suptitle(wrapped(f"{where}: {said}", figure.bbox.width / figure.dpi), fontsize=11)
        beyond = f" (darkest: {scale['vmax']:g} or more)" if maps["weight"].max() > scale["vmax"] else ""
        caption = (
            f"Where every head of {where} looks in {said}{verdict}. The darker a cell, the larger the attention weight,"
            f" on one scale for all figures of this kind{beyond}; grey is forbidden. A row is"
            f" {'the token that is written there' if site in WRITING else 'a token that is read'}, and its weights add"
            " up to 1. Above each its score and the pattern that it follows on the score split, if one is clear."
            f" {bold(looks, loss_suffix(tables))}"
        )
        seen = maps[maps["weight"] > 0]
        even = 1 / seen.groupby([*HEAD, "query"])["key"].transform("nunique")
        if (apart := (seen["weight"] - even).abs().max()) < EVEN:
            caption += (
                f" All heads of this site look almost evenly: no weight is more than {apart:.2f} from an even one."
            )
        yield Plot(f"attention-{example}-{site}", caption, figure)


def _draw_maps(attention: pd.DataFrame, looks: pd.DataFrame, site: str, scale: dict[str, Any]) -> Figure:
    """Draw an attention map for each head of a site. Each layer begins a new row of panels. Keys at which no head of a
    layer may look are grey."""
    used = attention.groupby(["layer", "query", "key"])["weight"].transform("max") > 0
    attention = attention.assign(weight=attention["weight"].where(used))
    layers = [rows for _, rows in looks.groupby("layer", sort=True)]
    columns = min(ACROSS, max(map(len, layers)))
    lines = [rows.iloc[start : start + columns] for rows in layers for start in range(0, len(rows), columns)]
    counts = attention["query"].nunique(), attention["key"].nunique()
    height, width = (count * min(CELL, PANEL / counts[1]) for count in counts)
    height, width = max(height, 0.6), max(width, 1.85)
    figure = new_figure(figsize=(1.6 + columns * (width + 0.15), 0.9 + len(lines) * (height + 0.62)))
    grid: Any = figure.subplots(len(lines), columns, squeeze=False)
    for i, rows in enumerate(lines):
        for axes in grid[i, len(rows) :]:
            axes.remove()
        for axes, (_, head) in zip(grid[i], rows.iterrows(), strict=False):
            matters = not head["removed"] and not head["prunable"]
            title = f"head {head['head']}, {head['scorer']} {amount(head['score'])}\n{name_of(head)}"
            title = f"head {head['head']}\n " if head["removed"] else title
            axes.set_title(title, fontsize=9.5, fontweight="bold" if matters else "normal", loc="left")
            weights = attention[(attention["layer"] == head["layer"]) & (attention["head"] == head["head"])]
            frame(axes)
            if weights.empty:
                axes.set_facecolor(MISSING)
                axes.text(0.5, 0.5, REMOVED, ha="center", va="center", fontsize=9.5, transform=axes.transAxes)
                continue
            table = weights.pivot_table(index="query", columns="key", values="weight", sort=True, dropna=False)
            image = heat_map(axes, table.to_numpy(float), **scale)
            tokens = weights.drop_duplicates("query")["writes" if site in WRITING else "reads"]
            _name_tokens(axes, "y", tokens, height, axes is grid[i, 0])
            _name_tokens(axes, "x", weights.drop_duplicates("key")["looks_at"], width, i == len(lines) - 1)
        reading = "writing" if site in WRITING else "at token"
        grid[i, 0].set_ylabel(f"layer {rows['layer'].iloc[0]}\n{reading}", fontsize=9.5)
    figure.supxlabel("it looks at", fontsize=9.5)
    shrink = min(1.0, 1.6 / len(lines) / height + 0.3)
    extend = "max" if attention["weight"].max() > scale["vmax"] else "neither"
    bar = figure.colorbar(image, ax=list(figure.axes), fraction=0.03, shrink=shrink, extend=extend)
    bar.set_label("attention weight")
    bar.outline.set_visible(False)
    return figure


def scale_of(attention: pd.DataFrame) -> dict[str, Any]:
    """Return a colour scale from 0 to the largest attention weight. Queries with few allowed keys are left out: their
    weights are large without a choice, and all others would be pale beside them."""
    weights = attention[attention["weight"] > 0]
    keys = weights.groupby(["example", *HEAD, "query"])["key"].transform("nunique")
    largest = weights.loc[keys > max(1, keys.max() / 2), "weight"].max()
    top = 1.0 if isnan(largest) else min(max(ceil(20 * largest - 1e-6) / 20, LEAST_TOP), 1.0)
    return {"cmap": MATTERS, "vmin": 0, "vmax": top}


def bold(looks: pd.DataFrame, unit: str) -> str:
    return f"Bold: heads that may matter: closing one of them alone may cost {looks['tolerance'].iloc[0]:g}{unit}."


def name_of(head: pd.Series) -> str:
    return in_words(head["name"]) if isinstance(head["name"], str) and head["name"] else NO_PATTERN


def in_words(name: str) -> str:
    return "spread evenly" if name == "everywhere" else name


def _name_tokens(axes: Axes, axis: Any, tokens: pd.Series, size: float, wanted: bool) -> None:
    """Name every token, or every second, third, ... token if there is no room for all."""
    words = [SIGNS.get(name, name) for name in tokens.astype(str)]
    step, last = ceil(LABEL * len(words) / size), len(words) - 1
    ticks = [*range(0, last - step + 1, step), last]  # the last token always has its name
    labels = [words[i] if wanted else "" for i in ticks]
    axes.tick_params(axis=axis, length=0)
    if axis == "y":
        axes.set_yticks(ticks, labels, fontsize=9)
    else:
        axes.set_xticks(ticks, labels, fontsize=9, rotation=90 if max(map(len, words)) > 1 else 0)


@needs("patterns", "looks")
def head_profiles(tables: Tables) -> Plot | None:
    """Draw how much more attention heads pay to the places of a pattern than a head that looks at all places equally: a
    panel per site, with the patterns that at least one of its heads follows; the heads that matter first."""
    remaining = tables["looks"].query("not removed").sort_values("rank")
    looks, patterns = remaining[:MOST_ROWS].sort_values("prunable", kind="stable"), tables["patterns"]
    beyond = patterns.assign(beyond=patterns["mass"] - patterns["chance"])
    panels: dict[str, tuple[pd.DataFrame, pd.DataFrame]] = {}
    for site, heads in looks.groupby("site", sort=False):
        of_site = beyond[beyond["site"] == site]
        shares = of_site.pivot_table(index=HEAD, columns="meaning", values="beyond")
        shares = shares.reindex(pd.MultiIndex.from_frame(heads[HEAD]), columns=of_site["meaning"].unique())
        shares = shares.loc[:, lambda each: each.max() >= CLEAR]
        if shares.shape[1]:
            panels[str(site)] = heads, shares
    if not panels:
        return None
    most = max(shares.shape[1] for _, shares in panels.values())
    cell, top = min(0.95, 5.6 / most), max(0.3, *(shares.max().max() for _, shares in panels.values()))
    heights = [0.9 + 0.235 * len(heads) for heads, _ in panels.values()]
    figure = new_figure(figsize=(1.5 + cell * most + 2.9, 0.5 + sum(heights)))
    grid: Any = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, (site, (heads, shares)) in zip(grid[:, 0], panels.items(), strict=True):
        values = shares.to_numpy(float)
        rows = [f"layer {layer} head {head}" for _, layer, head in shares.index]
        cells: Any = {"rows": rows, "columns": [wrapped(name, cell) for name in shares], "vmin": 0, "vmax": top}
        written = np.where(values >= CLEAR, 100 * values, np.nan)
        heat_map(axes, np.maximum(values, 0), write="+{:.0f}".format, written=written, **cells)
        axes.set_xlim(-0.5, most - 0.5 + 2.9 / cell)
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, labelsize=9)
        axes.spines[:].set_visible(False)
        axes.set_title(SITES.get(site, site), loc="left", fontweight="bold")
        for row, (_, head) in enumerate(heads.iterrows()):
            words = f"{amount(head['score'])}   {name_of(head)}"
            look: Any = {"fontsize": 9, "fontweight": "normal" if head["prunable"] else "bold"}
            axes.text(most - 0.5 + 0.15 / cell, row, words, va="center", **look)
    matter = looks[~looks["prunable"]]
    clear = int(matter["pattern"].fillna("").ne("").sum())
    title = f"{clear or 'None'} of the {len(matter)} heads that may matter follow{'s' * (clear == 1)} a clear pattern"
    names = remaining.loc[remaining["pattern"].fillna("") != "", "name"].value_counts()
    if len(names) and names.iloc[0] > len(remaining) / 2:  # most do the same, and that is the news
        title = f"{names.iloc[0]} of {len(remaining)} heads look mostly at the {names.index[0]}"
    figure.suptitle(wrapped(title, 0.9 * figure.bbox.width / figure.dpi))
    left_out = [SITES.get(site, site) for site in looks["site"].unique() if site not in panels]
    caption = (
        "Where heads look more than by chance: +19 means that a head pays 19 percentage points more of its attention to"
        f" these places than a head that looks evenly at all. Less than {100 * CLEAR:g} points have no number. At the"
        f" right stand the score of the head by {looks['scorer'].iloc[0]} and what it looks at, if that is clear: most"
        " of its largest weights are there, and clearly more of its attention than by chance."
        f" {bold(looks, loss_suffix(tables))}"
    )
    caption += f" Left out, because no head follows a pattern: {', '.join(left_out)}." if left_out else ""
    caption += f" The {len(looks)} heads of {len(remaining)} that matter most." if len(looks) < len(remaining) else ""
    return Plot("patterns", caption, figure)
