"""The one way from the core to the lab: by name, in a call of what only the lab has."""

from importlib import import_module
from typing import Any


def lab(module: str) -> Any:
    """Import and return a module of the lab. Raises ModuleNotFoundError, one line, for a missing package that the core
    does without."""
    try:
        return import_module(f"mhaprune.lab.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("mhaprune"):
            raise
        needs = "the command line, reports and the small model need it"
        raise ModuleNotFoundError(
            f"{error.name}: is not installed, and {needs}; pip install mhaprune brings it", name=error.name
        ) from None
