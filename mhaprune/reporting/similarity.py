"""An order in which what is alike stands side by side."""

from __future__ import annotations

import numpy as np


def similar_order(alike: np.ndarray) -> list[int]:
    """The order of the rows of a symmetric matrix of correlations in which similar rows are neighbours. Row 0 is in
    the first half.

    The eigenvector of the smallest eigenvalue but one of the matrix's Laplacian (Fiedler 1973) puts them on a line.
    What is NaN counts as 0.
    """
    weights = (1 + np.nan_to_num(alike)) / 2
    np.fill_diagonal(weights, 0)
    if len(weights) < 3:
        return list(range(len(weights)))
    places = np.linalg.eigh(np.diag(weights.sum(axis=0)) - weights)[1][:, 1].round(9)
    order = np.argsort(places, kind="stable")
    return list(map(int, order if 2 * list(order).index(0) < len(order) else order[::-1]))
