"""Where the settings are read from and where results go. No torch in here: help and typing errors must be quick."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
CHECKOUT = PACKAGE.parent


def conf_folder() -> Path:
    """The YAML files: beside the package in a checkout, inside the package where it was installed from a wheel."""
    beside, inside = CHECKOUT / "conf", PACKAGE / "conf"
    return beside if _in_checkout() else inside


def results_folder() -> Path:
    """Where runs, sweeps and the cache are kept by default.

    The rule: `results/` of the checkout that the package runs from; for an installed package `results/` of the working
    folder. The path is relative where that is the same.
    """
    if _in_checkout() and Path.cwd() != CHECKOUT:
        return CHECKOUT / "results"
    return Path("results")


def _in_checkout() -> bool:
    return (CHECKOUT / "pyproject.toml").exists() and (CHECKOUT / "conf" / "config.yaml").exists()
