"""The README of a saved model: what was removed, how well the model does, how to read it, and how it was made."""

import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from mhaprune.storage.store import write_bytes

CARD, MARK = "README.md", "\nSaved by mhaprune. "
RECOVERED = ("refitted", "distilled", "trained")
FITTED = (
    "It was fitted to examples. On kinds of examples that are unlike them it may keep less, so measure it on yours."
)
LOST = "_lost_by_mhaprune"
"""The attribute of a pruned model that lists what it has lost, in words."""
TEXT = """---
library_name: {library}
tags: [mhaprune]
---

# {name}
{mark}{removed}{fitted}

## How to read it

`{read}`

## How it was made

{command}, with {versions}.
"""


def write_card(model: Any, folder: Path, read: str) -> None:
    """Write the card of a model into a folder, unless a README of somebody else is there. `read` is a line of code that
    reads the folder."""
    if (folder / CARD).exists() and not wrote_card(folder):
        return
    name, lost = type(model).__name__, vars(model).get(LOST, [])
    removed = f"Removed from a `{name}` (site.layer: units, counted from 0 in the model before):" if lost else ""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").name  # its arguments may be private
    text = TEXT.format(
        name=name,
        library="transformers" if "from_pretrained" in read else "pytorch",
        mark=MARK.lstrip("\n"),
        removed="".join([removed, *(f"\n- {each}" for each in lost)]),
        fitted=f"\n\n{FITTED}" if any(f", then {done}" in each for each in lost for done in RECOVERED) else "",
        read=read,
        command=f"By `{script}`" if script else "By hand",
        versions=", ".join(filter(None, map(_version, ("mhaprune", "torch", "transformers")))),
    )
    write_bytes(folder / CARD, text.encode())


def add_table(folder: Path, table: pd.DataFrame) -> None:
    """Add to the card in a folder how well the model does, unless the README is somebody else's."""
    table = table if isinstance(table.index, pd.RangeIndex) else table.reset_index()
    rows = [list(table), ["---"] * len(table.columns), *table.itertuples(index=False)]
    cells = [[f"{x:.4g}" if isinstance(x, float) else " ".join(str(x).split()) for x in row] for row in rows]
    lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in cells]
    if wrote_card(folder):
        text = "\n".join([(folder / CARD).read_text(), "## How well it does", "", *lines, ""])
        write_bytes(folder / CARD, text.encode())


BLOCK = r"([\w.]{1,200})(?:@\d{1,3})?\.\d{1,5}: (?:\d{1,6}(?: \d{1,6}){0,200}|\d{1,6} units)"
LINE = re.compile(
    r"- (\d{1,6} of \d{1,6} (?:heads|neurons|units|sublayers|key-value groups|attention layers|heads of single calls): "
    rf"{BLOCK}(?:, {BLOCK})*"
    rf"(?: \(they still see the first \d+ tokens and the last \d+\))?(?:, then (?:{'|'.join(RECOVERED)}))*)"
)
"""A line of a card that says what was removed, as `folders.tell` writes it."""


def lost_before(folder: Path, model: nn.Module) -> list[str]:
    """Return what the model in a folder has lost, as its card says, for the next card. The card may be anybody's, so
    only lines that we could have written of this model are taken over."""
    text = (folder / CARD).read_text(errors="replace") if wrote_card(folder) else ""
    lines = map(LINE.fullmatch, text.partition("\n## ")[0].splitlines())
    words = {"attention", "layer", "neuron", *(word for path, _ in model.named_modules() for word in path.split("."))}
    sites = re.compile(BLOCK)
    return [line[1] for line in lines if line and {w for s in sites.findall(line[1]) for w in s.split(".")} <= words]


def wrote_card(folder: Path) -> bool:
    """Return whether the README in a folder is one of `write_card`."""
    path = folder / CARD
    return path.is_file() and MARK in path.read_text(errors="replace")


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    return ""
