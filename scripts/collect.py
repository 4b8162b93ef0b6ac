"""Combine run folders: `python scripts/collect.py results/runs/ablate --out results/collected`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mhaprune.lab.reporting.figure_settings import FigureSettings
from mhaprune.lab.runs.collecting import collect
from mhaprune.settings.options import construct
from mhaprune.settings.refusals import one_line, show_all, visible


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="run folders, or folders that hold some"
    )
    parser.add_argument("--out", type=Path, default=Path("results/collected"), help="default: results/collected")
    default = FigureSettings()
    parser.add_argument("--format", nargs="+", default=default.format, help="of figures: svg, png, pdf")
    parser.add_argument("--width", type=float, help="of figures in inches")
    parser.add_argument("--dpi", type=int, default=default.dpi, help="of PNG files")
    chosen = parser.parse_args(arguments)
    show_all()
    try:
        wanted = {"format": chosen.format, "width": chosen.width, "dpi": chosen.dpi}
        figure = construct(FigureSettings, wanted, "figure")
        for line in collect(chosen.folders, chosen.out, figure):
            print(line)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    print(f"Report: {visible(str(chosen.out / 'report.html'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
