"""Two things side by side in one process: `python scripts/bench.py training removal --json`. Ratios, never promises of
time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pandas as pd
import torch

from benches.answers import decode, removal
from benches.masks import ablation, greedy, oracle, pairs_of_heads
from benches.refit import refit
from benches.scores import shapley
from benches.sides import Row, timed
from benches.sweep import sweep
from benches.training import recipes, training

TIMED = {
    bench.__name__: bench
    for bench in (training, recipes, removal, decode, ablation, pairs_of_heads, oracle, shapley, greedy, refit)
}
COUNTED = {bench.__name__: bench for bench in (sweep,)}
BENCHES = (*TIMED, *COUNTED)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--pairs", type=int, default=40, help="how often each is run, in turn: at least 20, default 40")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    if chosen.pairs < 20:
        parser.error(f"--pairs={chosen.pairs}: must be 20 or more")
    for name in chosen.names:
        if name not in BENCHES:
            parser.error(f"NAME={name}: no such bench, allowed are {', '.join(BENCHES)}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in chosen.names or BENCHES:
        rows += timed(TIMED[name](), chosen.pairs) if name in TIMED else COUNTED[name]()
    table = pd.DataFrame(rows)
    print(table.to_json(orient="records", indent=2) if chosen.json else table.round(3).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
