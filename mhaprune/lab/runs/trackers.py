"""Hand what a run found to a tracker of experiments, or to any function of the user's."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mhaprune.settings.plugins import allowed

if TYPE_CHECKING:
    from mhaprune.lab.runs.results import Results

log = logging.getLogger(__name__)


def tracker(name: str) -> Callable[..., Any]:
    """Return the function that `on_results` names, as MODULE.FUNCTION of a plug-in. Raises ValueError for any other
    name: a setting runs no other code."""
    module, _, function = name.rpartition(".")
    found: Any = None
    if any(f"{module}.".startswith(f"{package}.") for package in allowed() if package != "mhaprune"):
        try:
            found = getattr(importlib.import_module(module), function, None)
        except ImportError as error:
            raise ValueError(f"on_results={name}: {module} cannot be imported ({error})") from None
    if not callable(found):
        raise ValueError(f"on_results={name}: must be MODULE.FUNCTION of a package that plugins=[PACKAGE] names")
    return found


def hand_over(name: str | None, results: Results) -> None:
    """Call the function that `on_results` names with all tables, frames by name, and all figures, of matplotlib, by
    name. An error of it is said and changes nothing: the run is complete."""
    if name is None:
        return
    try:
        tracker(name)(results.tables, {each: plot.figure for each, plot in results.figures.items()})
    except (Exception, SystemExit) as error:  # of code that is anybody's
        log.warning(
            "on_results=%s: failed (%s: %s); the results are complete",
            name,
            type(error).__name__,
            " ".join(str(error).split()),
        )
