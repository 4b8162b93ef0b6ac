"""Plug-ins: the packages, beside mhaprune, whose classes a config or a run folder may name."""

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

ENTRY_POINTS = "mhaprune.plugins"
"""The entry point group in which an installed package registers itself, so that users need not list it."""

_allowed = {"mhaprune"}


def allow(packages: Iterable[str]) -> None:
    """Allow configs to name classes of these packages too. Raises ValueError for a package that cannot be imported."""
    for package in packages:
        try:
            if not all(part.isidentifier() for part in package.split(".")):
                raise ImportError("no name of a package")
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"plugins={package}: cannot be imported ({error}), must name a package that is installed or in the"
                " working folder"
            ) from None
        _allowed.add(package)


def allow_typed(typed: Iterable[str]) -> list[str]:
    """Allow and return the packages that the user typed after `plugins=` (also from the working folder), and all
    installed plug-ins. Raises ValueError for a package that cannot be imported."""
    names = [name.strip() for text in typed for name in text.strip("[]\"'").split(",") if name.strip()]
    if names and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    allow(names)
    return list(dict.fromkeys([*names, *installed()]))


def modules(package: str) -> Iterator[ModuleType]:
    """Import a package with all its modules and yield them. Raises ValueError, one line, if an import fails."""
    top = importlib.import_module(package)
    yield top
    for found in pkgutil.walk_packages(getattr(top, "__path__", ()), f"{package}."):
        if found.name.endswith(".__main__"):  # importing it would run a program
            continue
        try:
            yield importlib.import_module(found.name)
        except Exception as error:  # a module of a plug-in may raise anything
            text = " ".join(str(error).split())
            raise ValueError(
                f"plugins={package}: {found.name} cannot be imported ({type(error).__name__}: {text})"
            ) from error


def allowed() -> list[str]:
    """Return the packages whose classes may be named: mhaprune, the listed ones, and all installed plug-ins."""
    return sorted(_allowed.union(installed()))


@cache
def installed() -> tuple[str, ...]:
    """Return the packages that are installed as plug-ins, once each; one in our own wheel only with all packages of the
    extra of its name. This is slow, because every installed package is examined."""
    points = [
        point
        for point in entry_points(group=ENTRY_POINTS)
        if point.dist is None or point.dist.name != "mhaprune" or _has_extra(point.name)
    ]
    found = dict.fromkeys(point.module for point in points)
    return tuple(name for name in found if find_spec(name.partition(".")[0]) is not None)


def _has_extra(extra: str) -> bool:
    """Return whether all packages of an extra of mhaprune are installed."""
    wanted = [each for each in requires("mhaprune") or () if f'extra == "{extra}"' in each.replace("'", '"')]
    nested = [found[1] for each in wanted if (found := re.match(r"mhaprune\[([\w-]+)\]", each))]
    with suppress(PackageNotFoundError):
        return bool(
            wanted and all(version(re.split(r"[^\w.-]", each)[0]) for each in wanted) and all(map(_has_extra, nested))
        )
    return False


def how_to_install(name: str) -> str:
    """Return what to do for an option of this name, of a package of `examples/` or in our wheel; empty for none."""
    places = CHECKOUT.glob("examples/*/mhaprune_*" if _in_checkout() else "mhaprune_*")
    for package in sorted(places):
        if not any(path.stem == name and path.suffix in (".py", ".yaml") for path in package.glob("**/*")):
            continue
        if _in_checkout():
            return f"is not installed: pip install -e examples/{package.parent.name}"
        if (extra := package.name.removeprefix("mhaprune_")) in metadata("mhaprune").get_all("Provides-Extra", []):
            return f"is not installed: pip install 'mhaprune[{extra}]'"
        return f"is of a plug-in, add plugins=[{package.name}]"
    return ""


def find_class(base: type, target: str) -> Any:
    """Return the class at MODULE.CLASS if it is a concrete subclass of `base`, else None. Only allowed packages are
    imported."""
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
    """Return the folder of the YAML files: beside the package in a checkout, inside the package if it was installed."""
    beside, inside = CHECKOUT / "conf", PACKAGE / "conf"
    return beside if _in_checkout() else inside


def results_folder() -> Path:
    """Return the folder of runs, sweeps and the cache.

    This is `results/` of the checkout that the package runs from; for an installed package, `results/` of the working
    folder. The path is relative if it is in the working folder.
    """
    if _in_checkout() and Path.cwd() != CHECKOUT:
        return CHECKOUT / "results"
    return Path("results")


def _in_checkout() -> bool:
    return (CHECKOUT / "pyproject.toml").exists() and (CHECKOUT / "conf" / "config.yaml").exists()
