"""Make a table draw by draw, so that a script that was killed goes on."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from mhaprune.progress import track
from mhaprune.storage.store import write_bytes


def over_draws(path: Path, draws: Iterable[int], of_draw: Callable[[int], pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all draws that are in the file at the end. `of_draw` makes those of a draw, which are written
    at once; a draw that is in the file is not made again."""
    table = pd.read_csv(path) if path.exists() else pd.DataFrame({"draw": []})
    for draw in track([draw for draw in draws if draw not in {*table["draw"]}], "draws"):
        table = pd.concat([table, of_draw(draw).assign(draw=draw)], ignore_index=True)
        write_bytes(path, table.to_csv(index=False).encode())
    return table
