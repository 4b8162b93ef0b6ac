"""Configs as users write them, composed quickly, and the small runs of them."""

import copy
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins

from mhaprune.lab.cli.command_line import plain, register
from mhaprune.lab.runs.run import GROUPS, SEVERAL, Run, build
from mhaprune.settings import plugins
from mhaprune.settings.options import options_of, settings_of
from support import ROOT
from support.sizes import RUNS, TINY, TINY_SEQUENCES, chosen, options


def compose(*overrides: str) -> dict[str, Any]:
    """The composed config in plain values, as `scripts/run.py` builds it.

    Hydra takes long. So it chooses the options only, once for each choice; lists of options and plain values are put in
    afterwards. Whatever does not fit in is left to Hydra, for its words about it.
    """
    lists = [override for override in overrides if LIST.match(override)]
    values = [override for override in overrides if VALUE.match(override)]
    config = copy.deepcopy(_composed(*(override for override in overrides if override not in (*lists, *values))))
    for group, names in (override.split("=") for override in lists):
        chosen = names.strip("[]").split(",") if names.strip("[]") else []
        if not set(chosen) <= set(options(group)):
            return copy.deepcopy(_composed(*overrides))
        config.pop(group, None)
        config |= {group: {name: settings_of(group, name) for name in chosen}} if chosen else {}
    if all(_put(config, *_parsed(override)) for override in values):
        return config
    return copy.deepcopy(_composed(*overrides))


LIST = re.compile(r"(scorer|recovery)=(\[[\w,]*\]|\w+)$")
"""Overrides that choose several options of a group whose YAMLs choose nothing in turn, as those of schedules do."""


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
    with registered(overrides), hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return plain(hydra.compose("config", overrides=list(overrides)))


@contextmanager
def registered(overrides: Sequence[str]) -> Iterator[None]:
    """Tell Hydra the options of the packages after `plugins=`, for one config only."""
    if not any(override.startswith("plugins=") for override in overrides):
        yield
        return
    Plugins.instance()  # its own options are there before and after
    store, allowed = ConfigStore.instance(), plugins._allowed
    before, plugins._allowed = copy.deepcopy(store.repo), set(allowed)
    register(overrides)
    try:
        yield
    finally:
        store.repo, plugins._allowed = before, allowed


EXAMPLES = "plugins=[mhaprune_literature,mhaprune_words]"
"""The plug-ins of examples/literature and examples/words."""


@functools.cache
def known(group: str) -> list[str]:
    """The names of all options of a group, those of the examples too."""
    with registered([EXAMPLES]):
        found = [*options_of("mhaprune_literature", GROUPS, SEVERAL), *options_of("mhaprune_words", GROUPS, SEVERAL)]
        return sorted([*options(group), *(name for kind, name, *_ in found if kind == group)])


@functools.cache
def every(group: str) -> dict[str, Any]:
    """All options of a group by name, small, as a run builds them; those of the examples too."""
    with registered([EXAMPLES]):
        if group == "task":
            tiny = ["experiment=train", *TINY]
            return {name: build(compose(EXAMPLES, *tiny, *chosen(group, name))).task for name in known(group)}
        overrides = [EXAMPLES, *chosen(group, *known(group))]
        experiment = "experiment=prune" if group == "recovery" else "experiment=train"
        found: dict[str, Any] = getattr(build(compose(experiment, *overrides)), group)
    return found


def run_of(experiment: str, cache: Path) -> Run:
    """The small run of an experiment that its tests share."""
    settings = RUNS.get(experiment, (*TINY, *TINY_SEQUENCES))
    return build(compose(*chosen("experiment", experiment), *settings, f"cache={cache}"))


def tables_in(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of a run as they are read back."""
    return {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}
