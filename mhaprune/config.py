"""From a composed config to a `Run`: checked, built, or refused in one clear line. The only module that knows Hydra."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mhaprune.collect import RUN, collect
from mhaprune.run import Run
from mhaprune.store import RunFolder

log = logging.getLogger(__name__)

OmegaConf.register_new_resolver("pid", os.getpid, use_cache=True, replace=True)


class ConfigError(ValueError):
    """A setting that cannot be: the message names its key, its value and what is allowed."""


def build(config: Mapping[str, Any]) -> Run:
    """The `Run` that a config describes, in plain values or as composed by Hydra; raises `ConfigError` for anything
    else."""
    values: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    run = _construct(Run, values, "")
    assert isinstance(run, Run)
    return run


def _build(kind: Any, value: Any, key: str) -> Any:
    """`value` as an instance of the type annotation `kind`, checked all the way down."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        plain = [k for k in arguments if not (isinstance(k, type) and dataclasses.is_dataclass(k))]
        nested = [k for k in arguments if k not in plain]
        if nested and isinstance(value, Mapping):
            return _build(nested[0], value, key)
        for one in plain:
            if _fits(one, value):
                return _build(one, value, key)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _plug_in(kind, value, key)
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(_build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {name: _build(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    elif _fits(kind, value):
        return float(value) if kind is float else value
    raise ConfigError(f"{key}={value!r}: must be {_expected(kind)}")


def _fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is types.NoneType:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    return get_origin(kind) is None and isinstance(value, (int, float) if kind is float else kind)


def _expected(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(one) for one in arguments)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"a list of {_expected(arguments[0])}"
    if origin is dict:
        return f"names with, each, {_expected(arguments[1])}"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", types.NoneType: "null"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _plug_in(base: type, value: Any, key: str) -> Any:
    """An instance of `base` or of the subclass of it that `_target_` names."""
    if not isinstance(value, Mapping) or not isinstance(value.get("_target_"), str):
        raise ConfigError(f"{key}={value!r}: must be settings with a _target_ that names a {base.__name__}")
    target = value["_target_"]
    module_name, _, class_name = target.rpartition(".")
    found: Any = None
    if module_name.startswith("mhaprune."):
        with suppress(ModuleNotFoundError):
            found = getattr(importlib.import_module(module_name), class_name, None)
    fits = isinstance(found, type) and issubclass(found, base) and not inspect.isabstract(found)
    if not fits or not found.__dataclass_params__.frozen:
        raise ConfigError(
            f"{key}._target_={target}: must name a frozen dataclass of mhaprune that is a {base.__name__}"
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
            raise ConfigError(f"{prefix}{name}: is missing, must be {_expected(kinds[name])}")
    try:
        return cls(**built)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error


def execute(config: DictConfig) -> None:
    """What `scripts/run.py` does in its output folder; the folder's status and log say how it ended."""
    folder = RunFolder(HydraConfig.get().runtime.output_dir)
    try:
        with folder.recorded():
            folder.note(kind=RUN, overrides=list(HydraConfig.get().overrides.task))
            lines = build(config)(folder)
    except BaseException as error:
        # Hydra's launchers lose a job's traceback, so its own log must have it; the terminal gets a line from `main`.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "failed", (), sys.exc_info()))
        if HydraConfig.get().mode == RunMode.RUN:
            raise RunFailed(error) from error
        raise
    for line in lines:
        log.info("%s", line)
    log.info("all of it is in %s, start with report.html", folder.path)


class RunFailed(BaseException):
    """Carries the failure of a single run past Hydra, which reports every `Exception` in its own words."""


class SweepFolder(Callback):
    """Remembers where a multirun puts its jobs: if one fails, Hydra does not call back at the end."""

    root: Path | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepFolder.root = Path(config.hydra.sweep.dir)


def main(script: Callable[[], None]) -> int:
    """Call a `hydra.main` function; gives the exit code. One line for an error, a traceback only with
    HYDRA_FULL_ERROR=1.

    After a multirun the tables of its jobs are combined in its folder, also when jobs failed or it was interrupted.
    """
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra hand its exceptions on instead of printing them
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failure: BaseException | None = None
    try:
        script()
    except RunFailed as error:
        failure = error.__cause__
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    if SweepFolder.root is not None:
        try:
            for line in collect([SweepFolder.root], SweepFolder.root, "Sweep"):
                print(line)
            print(f"all of it is in {SweepFolder.root}, start with report.html")
        except ValueError as error:
            failure = failure or error
    if failure is None:
        return 0
    if traceback_wanted:
        raise failure
    print(f"error: {one_line(failure)}", file=sys.stderr)
    return 130 if isinstance(failure, KeyboardInterrupt) else 1


def one_line(error: BaseException) -> str:
    """An error as a user should read it: key, value and what is allowed."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the same command goes on from what was cached"
    if isinstance(error, HydraException) and (composition := _composition_error(str(error))):
        return composition
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; hydra.run.dir and cache must name folders that can be written"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def _composition_error(text: str) -> str | None:
    """What Hydra says in several lines of a key or an option that there is not, in one; None if it speaks of other
    things."""
    if found := re.search(r"Could not (?:load|find) '(.+)/(.+?)'", text):
        options = sorted(path.stem for path in (_conf() / found[1]).glob("*.yaml"))
        return f"{found[1]}={found[2]}: no such option, allowed are {', '.join(options)}"
    if found := re.search(r"Could not override '(.+?)'", text):
        key = found[1]
        with hydra.initialize_config_dir(str(_conf()), version_base="1.3"):
            node: Any = hydra.compose("config")
        *parents, _ = key.split(".")
        for parent in parents:
            node = node[parent] if isinstance(node, DictConfig) and parent in node else node
        allowed = [str(name) for name in node if name != "_target_"]
        given = next((argument for argument in sys.argv if argument.startswith(f"{key}=")), key)
        return f"{given}: no such key, allowed are {', '.join(allowed)}"
    return None


def _conf() -> Path:
    return Path(sys.argv[0]).resolve().parents[1] / "conf"
