"""The arguments of scripts that try many models and write a page: families.py and other_code.py.

Made docs/findings/families.md and docs/findings/other-code.md.
"""

import argparse
import sys
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from mhaprune.settings.options import did_you_mean


def chosen_models(
    description: str | None, models: Collection[str], csv: str, arguments: Sequence[str] | None
) -> argparse.Namespace | None:
    """Return the arguments `names`, `csv` and `page` of a script, with a default file for the rows; None, with a line
    that says why, if they do not fit. One thread computes from then on, without warnings."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to try; all if none is named")
    default = Path(__file__).parents[1] / "results" / csv
    parser.add_argument("--csv", type=Path, default=default, help="default %(default)s")
    parser.add_argument("--page", type=Path, help="a page of the docs, in which the table is written anew")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.names if name not in models]:
        print(f"error: NAME={unknown[0]}: no such model, {did_you_mean(unknown[0], models)}", file=sys.stderr)
        return None
    if chosen.page and chosen.names:
        print(f"error: --page={chosen.page}: has all models, leave out {chosen.names[0]}", file=sys.stderr)
        return None
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return chosen
