"""Attention heads of a transformer: which matter, how sure are we, and how much faster is it without the rest?

The front door: `mhaprune.run("experiment=ablate")`, `mhaprune.study("task=sort")`, `mhaprune.load("model.pt")`,
`mhaprune.wrap(your_model, loss, score=batches)`, `mhaprune.MultiHeadAttention`.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mhaprune.moved import Moved

if TYPE_CHECKING:
    from mhaprune.api.budget import Budget
    from mhaprune.api.exporting import export
    from mhaprune.api.saved import load, save
    from mhaprune.api.verifying import verify
    from mhaprune.api.wrap import Heads, wrap
    from mhaprune.attention.layer import MultiHeadAttention
    from mhaprune.heads import HeadMask
    from mhaprune.hooks.blocks import AttentionBlock, Rows
    from mhaprune.lab.cli.python import run, study

sys.meta_path.insert(0, Moved())  # before the finder of files, which would find another copy

_HOME = {
    "run": "lab.cli.python",
    "study": "lab.cli.python",
    "load": "api.saved",
    "save": "api.saved",
    "verify": "api.verifying",
    "export": "api.exporting",
    "wrap": "api.wrap",
    "Heads": "api.wrap",
    "AttentionBlock": "hooks.blocks",
    "Budget": "api.budget",
    "Rows": "hooks.blocks",
    "MultiHeadAttention": "attention.layer",
    "HeadMask": "heads",
}

__all__ = ["AttentionBlock", "Budget", "HeadMask", "Heads", "MultiHeadAttention", "Rows", "export", "load", "losses"]
__all__ += ["run", "save", "study", "verify", "wrap"]


def __dir__() -> list[str]:
    return [*__all__, "__version__", "__doc__"]


def __getattr__(name: str) -> Any:
    """Import a name on its first use, so that the command line answers `--help` and typing errors without torch."""
    if name == "losses":
        return import_module("mhaprune.losses")
    if name == "__version__":
        return version("mhaprune")
    if name not in _HOME:
        raise AttributeError(f"module 'mhaprune' has no attribute {name!r}, it has {', '.join(__all__)}")
    if not _HOME[name].startswith("lab."):
        return getattr(import_module(f"mhaprune.{_HOME[name]}"), name)
    try:
        return getattr(import_module("mhaprune.api.to_lab").lab(_HOME[name].removeprefix("lab.")), name)
    except ModuleNotFoundError as error:
        raise AttributeError(str(error)) from None  # so that `hasattr` and `dir` work without the lab
