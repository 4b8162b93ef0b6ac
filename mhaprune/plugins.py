"""Which packages a config or a run folder may name classes of: mhaprune, and those that the user lists."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ENTRY_POINTS = "mhaprune.plugins"
"""The group under which an installed package names itself, so that its plug-ins need not be listed."""

_allowed = {"mhaprune"}


def allow(packages: Iterable[str]) -> None:
    """Let configs name classes of these packages too; raises ValueError for one that cannot be imported."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"plugins={package}: cannot be imported ({error}), must name an installed package"
            ) from None
        _allowed.add(package)


def conf_packages(listed: Iterable[str]) -> list[str]:
    """The folders `conf` of plug-ins, as packages: of `plugins=[a,b]` on the command line and of installed ones."""
    names = [name.strip() for text in listed for name in text.strip("[]\"'").split(",")]
    names += [point.value.split(":")[0] for point in entry_points(group=ENTRY_POINTS)]
    found = []
    for name in dict.fromkeys(filter(None, names)):
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            folders = spec.submodule_search_locations if spec is not None else None
            found += [f"{name}.conf" for folder in list(folders or ())[:1] if (Path(folder) / "conf").is_dir()]
    return found


def allowed() -> list[str]:
    """The packages whose classes may be named: mhaprune, those that were listed, and those installed as plug-ins."""
    return sorted(_allowed | {point.value.split(":")[0] for point in entry_points(group=ENTRY_POINTS)})


def find_class(base: type, target: str) -> Any:
    """The concrete subclass of `base` at MODULE.CLASS in an allowed package, else None. Nothing else is imported."""
    module, _, name = target.rpartition(".")
    if not any(module == package or module.startswith(f"{package}.") for package in allowed()):
        return None
    found: Any = None
    with suppress(ModuleNotFoundError):
        found = getattr(importlib.import_module(module), name, None)
    if isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found):
        return found
    return None
