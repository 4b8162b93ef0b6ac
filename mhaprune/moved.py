"""Modules by the names that they had before mhaprune had a lab, for plug-ins and saved files that use these names."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

LAB = ("model", "tasks", "sources", "experiments", "reporting", "runs")
MOVED = {
    "mhaprune.front.command_line": "mhaprune.lab.cli.command_line",
    "mhaprune.front.heads": "mhaprune.api.wrap",
    "mhaprune.model.network": "mhaprune.lab.model.config",
    "mhaprune.model.transformer": "mhaprune.lab.model.seq2seq",
    "mhaprune.wrapping.blocks": "mhaprune.hooks.blocks",
    "mhaprune.wrapping.losses": "mhaprune.losses",
    **{f"mhaprune.{room}": f"mhaprune.lab.{room}" for room in LAB},
}


class Moved(MetaPathFinder, Loader):
    """A finder that gives a module by its old name, the same object as by the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if _now(fullname) is None else ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        name = _now(module.__name__)
        assert name is not None
        sys.modules[module.__name__] = import_module(name)


def _now(name: str) -> str | None:
    """Return the new name of a module; None if it has not moved."""
    if not name.startswith("mhaprune."):
        return None
    if name == "mhaprune.front":
        return "mhaprune.api"
    room = ".".join(name.split(".")[:2])
    return MOVED.get(name) or (MOVED[room] + name.removeprefix(room) if room in MOVED else None)
