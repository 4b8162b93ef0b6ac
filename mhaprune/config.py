"""From a config to a `Run`: checked, built, or refused in one clear line."""

from __future__ import annotations

import dataclasses
import logging
import types
import typing
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

import torch

from mhaprune.model.checkpoint import SavedModel, load, restore
from mhaprune.model.gates import GateConfig
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.running import Run
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.settings.plugins import allow, allowed, find_class
from mhaprune.settings.ranges import expected, fits
from mhaprune.settings.refusals import foreign
from mhaprune.settings.sweep import SWEEP_SETTINGS, SweepSettings
from mhaprune.studies.study import ModelOfOthers
from mhaprune.tasks.base import Task
from mhaprune.training.loop import Training

log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """A setting that cannot be: the message names its key, its value and what is allowed."""


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
    if is_of_others(config):
        config = {**config, **dict.fromkeys(BROUGHT_BY_OTHERS)}
    sweep_settings(config)
    run = _construct(Run, {name: value for name, value in config.items() if name not in SWEEP_SETTINGS}, "")
    assert isinstance(run, Run)
    return run


def check(config: Mapping[str, Any], again: bool) -> Run | None:
    """Raise `ConfigError` for settings that `build` would refuse, else return its run. A model that others made is not
    read `again`, which takes seconds."""
    if not again or not is_of_others(config):
        return build(config)
    given = {name: value for name, value in config.items() if name not in (*SWEEP_SETTINGS, *BROUGHT_BY_OTHERS)}
    for name, value in given.items():
        _build(typing.get_type_hints(Run)[name], value, name)
    return None


def sweep_settings(config: Mapping[str, Any]) -> SweepSettings:
    """Return the settings of a config that say how its runs are done."""
    found = _construct(SweepSettings, {name: value for name, value in config.items() if name in SWEEP_SETTINGS}, "")
    assert isinstance(found, SweepSettings)
    return found


def restored(saved: SavedModel, device: torch.device | str = "cpu") -> tuple[Seq2Seq, Task]:
    """A saved model as a module, and the task that it was trained on."""
    parts = _parts(saved)
    task = parts["task"]
    return restore(saved, parts["model"], len(task.vocabulary), parts["gate"], str(device)), task


def _parts(saved: SavedModel) -> dict[str, Any]:
    """Build what a file was saved with. Raises ValueError that names the file."""
    with foreign(f"model_file={saved.path}: damaged"):
        return {name: _build(kind, saved.settings[name], name) for name, kind in BUILT_FROM.items()}


BROUGHT_BY_OTHERS = ("task", "training", "gate")
"""The settings of our own model that a model of others does not have."""


def is_of_others(config: Mapping[str, Any]) -> bool:
    """Whether the option of the group `model` is one that others made."""
    settings = config.get("model")
    target = settings.get("_target_") if isinstance(settings, Mapping) else None
    return isinstance(target, str) and find_class(ModelOfOthers, target) is not None


BUILT_FROM = {"task": Task, "model": Transformer, "gate": GateConfig | None, "training": Training}


def plug_in_of(group: str, name: str, settings: Mapping[str, Any]) -> Any:
    """The scorer or the schedule that the settings of an option describe."""
    return _plug_in({"scorer": Scorer, "schedule": Schedule}[group], settings, f"{group}.{name}")


def _with_what_a_file_brings(config: Mapping[str, Any], saved: SavedModel) -> dict[str, Any]:
    """The config with the file's task and model, without scorers that need the gates which a pruned model has lost."""
    _parts(saved)
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


def _build(kind: Any, value: Any, key: str) -> Any:
    """`value` as an instance of the type annotation `kind`, checked all the way down."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        plain = [k for k in arguments if not (isinstance(k, type) and dataclasses.is_dataclass(k))]
        nested = [k for k in arguments if k not in plain]
        if nested and isinstance(value, Mapping):
            target = value.get("_target_")
            suitable = [k for k in nested if isinstance(target, str) and find_class(k, target) is not None]
            return _build((suitable or nested)[0], value, key)
        for one in plain:
            if fits(one, value):
                return _build(one, value, key)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _plug_in(kind, value, key)
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {name: _build(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    elif fits(kind, value):
        return float(value) if kind is float else value
    raise ConfigError(f"{key}={value!r}: must be {expected(kind)}")


def _plug_in(base: type, value: Any, key: str) -> Any:
    """An instance of `base` or of the subclass of it that `_target_` names."""
    if key.endswith("._target_"):
        group = key.removesuffix("._target_")
        raise ConfigError(
            f"{key}={value!r}: stands one level too high, its YAML must begin with: # @package {group}.NAME"
        )
    if not isinstance(value, Mapping) or not isinstance(value.get("_target_"), str):
        raise ConfigError(f"{key}={value!r}: must be settings with a _target_ that names a {base.__name__}")
    target = value["_target_"]
    found = find_class(base, target)
    if found is None or not found.__dataclass_params__.frozen:
        raise ConfigError(
            f"{key}._target_={target}: must name a frozen dataclass of {' or '.join(allowed())} that is a"
            f" {base.__name__}; plugins=[PACKAGE] allows others"
        )
    return _construct(found, {name: item for name, item in value.items() if name != "_target_"}, key)


def _construct(cls: type, values: Mapping[str, Any], key: str) -> Any:
    kinds = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    prefix = f"{key}." if key else ""
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"{prefix}{name}={value!r}: no such setting, allowed are {', '.join(fields)}")
    built = {name: _build(kinds[name], value, prefix + name) for name, value in values.items()}
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if name not in built and no_default:
            raise ConfigError(f"{prefix}{name}: is missing, must be {expected(kinds[name])}")
    try:
        return cls(**built)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error
