"""Figures that several experiments draw from tables of the same names."""

from math import isnan
from typing import Any

import numpy as np
from matplotlib.ticker import SymmetricalLogLocator

from mhaprune.lab.model.sites import SITES
from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.agreement import with_reference
from mhaprune.lab.reporting.names import in_brackets
from mhaprune.lab.reporting.plots import COLOURS, MARKERS, Plot, needs
from mhaprune.statistics.intervals import skewed_ends
from mhaprune.tables import HEAD, MOMENTS, REFERENCE, Tables, candidates


@needs("heads", "agreement")
def agreement(tables: Tables) -> Plot | None:
    """Draw the cost of closing each head against its rank by another scorer: panels with Spearman's correlation."""
    heads, pairs = tables["heads"], tables["agreement"]
    others = [name for name in candidates(heads) if name != REFERENCE]
    reference = heads[heads["scorer"] == REFERENCE].set_index(HEAD)
    costs = reference["score"].dropna()
    if not others or costs.empty:
        return None
    sites = list(dict.fromkeys([*SITES, *heads["site"]]))  # mhaprune's own sites keep their colours
    label = f"ablation: rise of the loss{in_brackets(tables)}"
    figure, grid = plots.panelled(len(others), 4, (3.4, 3.6), (1.2, 0.3), "", label, sharey=True)
    rhos = {name: with_reference(pairs, name) for name in others}
    for axes, name in zip(grid, others, strict=True):
        scores = heads[heads["scorer"] == name].set_index(HEAD)["score"]
        for i, site in enumerate(sites):
            if site in scores.index.get_level_values("site"):
                x, y = scores.rank().loc[[site]], reference.loc[[site]]
                low, high = skewed_ends(y[MOMENTS].to_numpy().T)
                style: Any = {"color": COLOURS[i % len(COLOURS)], "fmt": MARKERS[i % len(MARKERS)], "markersize": 5}
                bars = [(y["score"] - low).to_numpy(), (high - y["score"]).to_numpy()]
                axes.errorbar(x, y["score"], bars, label=SITES.get(site, site), elinewidth=1, **style)
        rho = rhos[name]
        title = "no rank correlation" if isnan(rho) else f"Spearman ρ = {plots.number(rho, 2)}"
        axes.set(title=title, xlabel=plots.wrapped(f"rank by {name}", 3.2))
        axes.tick_params(labelbottom=True)
    near_zero = max(costs.abs().quantile(0.25), 1e-3 * costs.abs().max(), 1e-6)
    linear = float(10.0 ** np.ceil(np.log10(near_zero)))
    grid[0].set_yscale("symlog", linthresh=linear)
    bottom, top = grid[0].get_ylim()
    grid[0].set_ylim(min(bottom, 0), max(top, 0))
    if max(-bottom, top) < 100 * linear:  # else powers of ten are enough
        grid[0].yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=linear, subs=(1, 2, 5)))
    plots.plain_ticks(grid[0].yaxis)
    best = max(rhos, key=lambda name: -2 if isnan(rhos[name]) else rhos[name])
    order = f"{best} orders the heads most like ablation" if len(others) > 1 else f"How {best} orders the heads"
    title = order if isnan(rhos[best]) else f"{order}: rank correlation {plots.number(rhos[best], 2)}"
    plots.legend_above(figure, grid[0], title)
    caption = (
        "What closing each head really costs against its rank by another score, the most important one at the right;"
        " the axis is in proportion near 0 and logarithmic beyond, bars are 95 % intervals over examples, where there"
        " are enough for one."
    )
    return Plot("agreement", caption, figure)
