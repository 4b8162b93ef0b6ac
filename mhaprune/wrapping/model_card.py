"""The README of a saved model: what was removed, how well the model does, how to read it, and how it was made."""

import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.storage.store import write_bytes

CARD, MARK = "README.md", "\nSaved by mhaprune. "
TEXT = """---
library_name: {library}
tags: [pruned, mhaprune]
---

# {name}, pruned
{mark}{removed}

## How to read it

`{read}`

## How it was made

{command}, with {versions}. `checksums.json` has the SHA-256 of every other file.
"""


def write_card(model: Any, folder: Path, read: str) -> None:
    """Write the card of a model into a folder, unless a README of somebody else is there. `read` is a line of code that
    reads the folder."""
    if (folder / CARD).exists() and not wrote_card(folder):
        return
    name, noted = type(model).__name__, getattr(model, "pruned", [])
    removed = "The layers of this model have lost heads or neurons."
    if noted:
        removed = f"Removed from a `{name}` (site.layer: units, counted from 0 in the model before):"
    text = TEXT.format(
        name=name,
        library="transformers" if "from_pretrained" in read else "pytorch",
        mark=MARK.lstrip("\n"),
        removed="".join([removed, *(f"\n- {each}" for each in noted)]),
        read=read,
        command=f"`{_command()}`" if _command() else "In a notebook or an interactive session",
        versions=", ".join(filter(None, map(_version, ("mhaprune", "torch", "transformers")))),
    )
    write_bytes(folder / CARD, text.encode())


def add_table(folder: Path, table: pd.DataFrame) -> None:
    """Add to the card in a folder how well the model does."""
    rows = [list(table), ["---"] * len(table.columns), *table.itertuples(index=False)]
    lines = [" | ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row) for row in rows]
    card = (folder / CARD).read_text() if (folder / CARD).exists() else ""
    write_bytes(
        folder / CARD, "\n".join([card, "## How well it does", "", *(f"| {row} |" for row in lines), ""]).encode()
    )


def wrote_card(folder: Path) -> bool:
    """Return whether the README in a folder is one of `write_card`."""
    path = folder / CARD
    return path.exists() and MARK in path.read_text(errors="replace")


def _command() -> str:
    """Return the command line of this process, without the folder of its script; empty where a person types code."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return shlex.join(["python", Path(script).name, *sys.argv[1:]]) if script and not hasattr(sys, "ps1") else ""


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""
