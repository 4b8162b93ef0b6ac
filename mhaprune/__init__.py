"""Attention heads of a transformer: which matter, how sure are we, and how much faster is it without the rest?

The front door: `mhaprune.run("experiment=ablate")`, `mhaprune.study("task=sort")`, `mhaprune.load("model.pt")`,
`mhaprune.wrap(your_model, loss, score=batches)`, `mhaprune.MultiHeadAttention`.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhaprune.attention.layer import MultiHeadAttention
    from mhaprune.front.budget import Budget
    from mhaprune.front.exporting import export
    from mhaprune.front.heads import Heads, wrap
    from mhaprune.front.python import run, study
    from mhaprune.front.saved import load, save
    from mhaprune.heads import HeadMask
    from mhaprune.wrapping.blocks import AttentionBlock, Rows

_HOME = {
    "run": "front.python",
    "study": "front.python",
    "load": "front.saved",
    "save": "front.saved",
    "export": "front.exporting",
    "wrap": "front.heads",
    "Heads": "front.heads",
    "AttentionBlock": "wrapping.blocks",
    "Budget": "front.budget",
    "Rows": "wrapping.blocks",
    "MultiHeadAttention": "attention.layer",
    "HeadMask": "heads",
}

__all__ = ["AttentionBlock", "Budget", "HeadMask", "Heads", "MultiHeadAttention", "Rows", "export", "load", "losses"]
__all__ += ["run", "save", "study", "wrap"]


def __dir__() -> list[str]:
    return [*__all__, "__version__", "__doc__"]


def __getattr__(name: str) -> Any:
    """Import a name on its first use, so that the command line answers `--help` and typing errors without torch."""
    if name == "losses":
        return import_module("mhaprune.wrapping.losses")
    if name == "__version__":
        return version("mhaprune")
    if name not in _HOME:
        raise AttributeError(f"module 'mhaprune' has no attribute {name!r}, it has {', '.join(__all__)}")
    return getattr(import_module(f"mhaprune.{_HOME[name]}"), name)
