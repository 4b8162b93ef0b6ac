"""Configs as users write them, composed quickly, and the small runs of them."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
from hydra.core.override_parser.overrides_parser import OverridesParser

from mhaprune.front.command_line import plain
from mhaprune.runs.run import Run, build
from support import ROOT
from support.sizes import RUNS, TINY, TINY_SEQUENCES, chosen, options


def compose(*overrides: str) -> dict[str, Any]:
    """The composed config in plain values, as `scripts/run.py` builds it.

    Hydra takes long. So it chooses the options only, once for each choice, and plain values are put in afterwards.
    Whatever does not fit in is left to Hydra, for its words about it.
    """
    options = tuple(override for override in overrides if not VALUE.match(override))
    config = copy.deepcopy(_composed(*options))
    for override in overrides:
        if override not in options and not _put(config, *_parsed(override)):
            return copy.deepcopy(_composed(*overrides))
    return config


VALUE = re.compile(r"(?!hydra)\w+\.[\w.]+=|(seed|device|num_threads|cache|model_file|example)=")
"""Overrides that set a value and choose no option."""


def _put(config: dict[str, Any], key: str, value: Any) -> bool:
    """Replace the value at a dotted key; False where there is none, or where Hydra would merge."""
    *parents, last = key.split(".")
    for parent in parents:
        config = config.get(parent) or {}
    fits = last in config and not isinstance(value, dict)
    if fits:
        config[last] = copy.deepcopy(value)
    return fits


@functools.cache
def _parsed(override: str) -> tuple[str, Any]:
    """The key and the value, in the grammar of Hydra."""
    parsed = OverridesParser.create().parse_override(override)
    return parsed.key_or_group, parsed.value()


@functools.cache
def _composed(*overrides: str) -> dict[str, Any]:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return plain(hydra.compose("config", overrides=list(overrides)))


@functools.cache
def every(group: str) -> dict[str, Any]:
    """All options of conf/scorer, conf/schedule, conf/recovery or conf/task by name, built from their YAMLs as `tiny`
    has them."""
    if group == "task":
        return {name: build(compose("experiment=train", *TINY, *chosen(group, name))).task for name in options(group)}
    experiment = "experiment=prune" if group == "recovery" else "experiment=train"
    found: dict[str, Any] = getattr(build(compose(experiment, *chosen(group, *options(group)))), group)
    return found


def run_of(experiment: str, cache: Path) -> Run:
    """The small run of an experiment that its tests share."""
    settings = RUNS.get(experiment, (*TINY, *TINY_SEQUENCES))
    return build(compose(*chosen("experiment", experiment), *settings, f"cache={cache}"))


def tables_in(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of a run as they are read back."""
    return {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}
