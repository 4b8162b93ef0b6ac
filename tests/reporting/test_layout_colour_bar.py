from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mhaprune.reporting.layout import place


def test_the_label_of_a_short_colour_bar_stands_beside_its_numbers() -> None:
    figure: Any = Figure(figsize=(9.5, 5), layout="constrained")
    grid = figure.subplots(2, 4)
    for axes in grid.flat:
        image = axes.imshow(np.eye(7), vmin=0, vmax=1, aspect="auto")
    bar = figure.colorbar(image, ax=list(grid.flat), fraction=0.03, pad=0.02, shrink=0.8, label="attention weight")
    place(figure)
    renderer = figure._get_renderer()
    figure.draw(renderer)
    numbers = max(text.get_window_extent(renderer).x1 for text in bar.ax.get_yticklabels())
    assert bar.ax.yaxis.label.get_window_extent(renderer).x0 > numbers
