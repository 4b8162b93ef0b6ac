"""The words and the figure of the table `alignment`: whether the heads that align are those that matter."""

from collections.abc import Iterator
from math import isnan

import pandas as pd

from mhaprune.heads import HeadId
from mhaprune.reporting import plots
from mhaprune.reporting.plots import Plot, needs, number
from mhaprune.reporting.sentences import share
from mhaprune.tables import HEAD, REFERENCE, Tables, candidates, in_brackets


def alignment_sentences(tables: Tables) -> Iterator[str]:
    """Yield which head aligns best and, of several heads, whether ablation ranks the heads that align first."""
    if "alignment" not in tables:
        return
    table = tables["alignment"].query("scorer == @REFERENCE")
    best = table.loc[table["accuracy"].idxmax()]
    yield (
        f"{HeadId(*best[HEAD])} aligns best: for {share(best['accuracy'])} of the symbols that are written its largest"
        f" weight is on a symbol that they stand for ({share(best['chance'])} by chance,"
        f" {share(best['offset_accuracy'])} for a head that always looks at the same distance). By ablation it has rank"
        f" {int(best['rank'])}."
    )
    if not isnan(best["spearman"]):  # as of a single head
        rho = number(best["spearman"], 2)
        yield (
            f"Among the {len(table)} heads of cross-attention, alignment and ablation have a rank correlation of {rho}."
        )


def _title(table: pd.DataFrame) -> str:
    """Return how well ablation or, without it, the first scorer agrees with alignment; empty if unknown."""
    names = list(table["scorer"].unique())
    name = REFERENCE if REFERENCE in names else names[0]
    rho = table.loc[table["scorer"] == name, "spearman"].iloc[0]
    return "" if isnan(rho) else f"Alignment and {name} have a rank correlation of {number(rho, 2)}"


@needs("alignment")
def alignment_scores(tables: Tables) -> Plot | None:
    """Draw each score of the cross-attention heads against how well they align: a panel per scorer."""
    table = tables["alignment"]
    names = [name for name in candidates(table.assign(draw=0)) if name != "random"]
    figure, grid = plots.panelled(len(names), 3, (3.3, 3.0), (0.6, 0.9), "alignment accuracy")
    for i, (axes, name) in enumerate(zip(grid, names, strict=True)):
        own = table[table["scorer"] == name]
        axes.axvline(own["offset_accuracy"].iloc[0], color="black", linestyle=":", label="the same distance always")
        axes.axvline(own["chance"].mean(), color=plots.CONTROL_COLOUR, label="chance")
        for layer, rows in own.groupby("layer", sort=True):
            colour = plots.COLOURS[int(layer) % len(plots.COLOURS)]
            axes.plot([], [], "s", color=colour, label=f"layer {layer}")
            for _, row in rows.iterrows():
                axes.plot(row["accuracy"], row["score"], marker=f"${row['head']}$", color=colour, markersize=8)
        label = f"rise of the loss{in_brackets(tables)}" if name == REFERENCE else "score"
        title = plots.wrapped(f"{name}: ρ = {number(own['spearman'].iloc[0], 2)}", 3.1)
        axes.set(title=title, ylabel=label, xlim=(-0.03, 1.03))
        axes.tick_params(labelbottom=True, labelleft=True)
        if i == 0:
            plots.legend_above(figure, axes, _title(table))
    caption = (
        "Each number is a head of cross-attention. To the right are heads"
        " whose largest weight is often on the source symbols that the written symbol stands for; high up are heads"
        " that a score calls important. ρ is Spearman's correlation over these heads of one model."
    )
    return Plot("alignment", caption, figure)
