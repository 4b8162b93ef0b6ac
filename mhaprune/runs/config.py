"""From a config to a `Run`: checked, built, or refused in one clear line."""

import logging
from collections.abc import Mapping
from typing import Any, get_type_hints

from mhaprune.attention.gates import GateConfig
from mhaprune.experiments.base import Experiment
from mhaprune.model.checkpoint import SavedModel, load
from mhaprune.model.training import Training
from mhaprune.recoveries.base import Recovery
from mhaprune.runs.run import Run
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.settings import options
from mhaprune.settings.plugins import allow, find_class
from mhaprune.settings.sweep import SWEEP_SETTINGS, SweepSettings
from mhaprune.studies.pretrained import Pretrained
from mhaprune.studies.trained import parts_of
from mhaprune.tasks.base import Task

log = logging.getLogger(__name__)


def build(config: Mapping[str, Any]) -> Run:
    """The `Run` that a config of plain values describes; raises `ConfigError` for anything else.

    A `model_file` says itself what task it was trained on, and how; what the config says about that is not used. The
    dataclasses are constructed here, in the same recursion that checks them. So a config can name nothing outside this
    package and its plug-ins.
    """
    plugins = config.get("plugins", ())
    if isinstance(plugins, list | tuple) and all(isinstance(name, str) for name in plugins):
        allow(plugins)
    if isinstance(file := config.get("model_file"), str):
        config = _with_what_a_file_brings(config, load(file))
    if is_pretrained(config):
        config = {**config, **dict.fromkeys(ONLY_TRAINED_HERE)}
    sweep_settings(config)
    run = options.construct(Run, {name: value for name, value in config.items() if name not in SWEEP_SETTINGS})
    assert isinstance(run, Run)
    return run


def check(config: Mapping[str, Any], again: bool) -> Run | None:
    """Raise `ConfigError` for settings that `build` would refuse, else return its run. A pretrained model is not
    read `again`, which takes seconds."""
    if not again or not is_pretrained(config):
        return build(config)
    given = {name: value for name, value in config.items() if name not in (*SWEEP_SETTINGS, *ONLY_TRAINED_HERE)}
    for name, value in given.items():
        options.build(get_type_hints(Run)[name], value, name)
    return None


def sweep_settings(config: Mapping[str, Any]) -> SweepSettings:
    """Return the settings of a config that say how its runs are done."""
    found = options.construct(SweepSettings, {name: value for name, value in config.items() if name in SWEEP_SETTINGS})
    assert isinstance(found, SweepSettings)
    return found


ONLY_TRAINED_HERE = ("task", "training", "gate")
"""The settings of our own model that a pretrained model does not have."""


def is_pretrained(config: Mapping[str, Any]) -> bool:
    """Return whether `model` names a pretrained model."""
    settings = config.get("model")
    target = settings.get("_target_") if isinstance(settings, Mapping) else None
    return isinstance(target, str) and find_class(Pretrained, target) is not None


GROUPS: dict[str, type] = {
    "task": Task,
    "model": Pretrained,
    "gate": GateConfig,
    "training": Training,
    "scorer": Scorer,
    "schedule": Schedule,
    "recovery": Recovery,
    "experiment": Experiment,
}
"""The groups of options to which plug-ins add, with the class that their options are made from."""
SEVERAL = ("scorer", "schedule", "recovery")
"""The groups of which a run may have several options."""


def _with_what_a_file_brings(config: Mapping[str, Any], saved: SavedModel) -> dict[str, Any]:
    """The config with the file's task and model, without scorers that need the gates which a pruned model has lost."""
    parts_of(saved)
    scorers = config.get("scorer", {})
    if saved.settings["gate"] is None and isinstance(scorers, Mapping):
        targets = {
            name: settings.get("_target_") for name, settings in scorers.items() if isinstance(settings, Mapping)
        }
        classes = {name: find_class(Scorer, target) for name, target in targets.items() if isinstance(target, str)}
        dropped = [name for name, found in classes.items() if found is not None and found.needs_gates]
        kept = {name: settings for name, settings in scorers.items() if name not in dropped}
        if dropped and kept:
            log.warning("model_file has no learned gates, so scorer=[%s] is left out", ",".join(dropped))
            scorers = kept
    return {**config, "scorer": scorers, **saved.settings}
