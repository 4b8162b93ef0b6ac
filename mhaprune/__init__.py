"""Which attention heads of a transformer matter, how sure are we, and how much faster is it without the rest?

The front door: `mhaprune.run("experiment=ablate")`, `mhaprune.load("model.pt")`, `mhaprune.MultiHeadAttention`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mhaprune.api import load, run
    from mhaprune.model.attention import MultiHeadAttention

_HOME = {"run": "api", "load": "api", "MultiHeadAttention": "model.attention"}

__all__ = ["MultiHeadAttention", "load", "run"]


def __getattr__(name: str) -> Any:
    """Imported on first use: the command line answers `--help` and typing errors without torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'mhaprune' has no attribute {name!r}, it has {', '.join(__all__)}")
    return getattr(import_module(f"mhaprune.{_HOME[name]}"), name)
