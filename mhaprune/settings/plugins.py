"""Plug-ins: the packages whose classes a config or a run folder may name, beside mhaprune."""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
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
                f"plugins={package}: cannot be imported ({error}), must name a package that is installed or in the"
                " working folder"
            ) from None
        _allowed.add(package)


def listed(typed: Iterable[str]) -> list[str]:
    """The names of packages in what was typed for `plugins=`."""
    return [name.strip() for text in typed for name in text.strip("[]\"'").split(",") if name.strip()]


def from_folder(packages: Iterable[str]) -> list[str]:
    """Return the packages with those that are installed as plug-ins. A listed one is looked for in the working folder
    too; raises ValueError for one that cannot be found."""
    names = list(packages)
    if names and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    allow(names)
    return list(dict.fromkeys([*names, *installed()]))


def modules(package: str) -> Iterator[ModuleType]:
    """Import a package and every module in it. Raises ValueError, one line, for one that cannot be imported."""
    top = importlib.import_module(package)
    yield top
    for found in pkgutil.walk_packages(getattr(top, "__path__", ()), f"{package}."):
        if found.name.endswith(".__main__"):  # a program, which would run
            continue
        try:
            yield importlib.import_module(found.name)
        except Exception as error:  # of a module that may be anybody's
            text = " ".join(str(error).split())
            raise ValueError(
                f"plugins={package}: {found.name} cannot be imported ({type(error).__name__}: {text})"
            ) from error


def allowed() -> list[str]:
    """The packages whose classes may be named: mhaprune, those that were listed, and those installed as plug-ins."""
    return sorted(_allowed.union(installed()))


@cache
def installed() -> tuple[str, ...]:
    """The packages that are installed as plug-ins. To find them takes long: every installed package is looked at."""
    return tuple(point.value.split(":")[0] for point in entry_points(group=ENTRY_POINTS))


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


PACKAGE = Path(__file__).parents[1]
CHECKOUT = PACKAGE.parent


def conf_folder() -> Path:
    """The YAML files: beside the package in a checkout, inside the package where it was installed from a wheel."""
    beside, inside = CHECKOUT / "conf", PACKAGE / "conf"
    return beside if _in_checkout() else inside


def results_folder() -> Path:
    """Return the folder of runs, sweeps and the cache.

    The rule: `results/` of the checkout that the package runs from; for an installed package `results/` of the working
    folder. The path is relative where that is the same.
    """
    if _in_checkout() and Path.cwd() != CHECKOUT:
        return CHECKOUT / "results"
    return Path("results")


def _in_checkout() -> bool:
    return (CHECKOUT / "pyproject.toml").exists() and (CHECKOUT / "conf" / "config.yaml").exists()
