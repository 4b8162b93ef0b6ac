"""Options: make an instance of an option's class from plain values, or raise an error of one line.

An option is a frozen dataclass with its own defaults. A YAML file of `conf/` names the class under `_target_`, and may
set some of its fields. It can also start from another option of its group, as the scorer `taylor_batch` does.
"""

import dataclasses
import difflib
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml

from mhaprune.settings.plugins import allowed, conf_folder, find_class, how_to_install, modules
from mhaprune.settings.ranges import Checked, expected, fits

Settings = dict[str, Any]
Made = TypeVar("Made", bound=Checked)


class ConfigError(ValueError):
    """A setting that is not allowed: the message names its key, its value and what is allowed."""


def option(name: str, groups: Mapping[str, type]) -> Any:
    """Return the named option of one of these groups, also of a plug-in. `groups` maps each group to the class of its
    options.

    Raises ValueError for an unknown name, with the nearest known one.
    """
    files = {path.stem: path for group in groups for path in sorted((conf_folder() / group).glob("*.yaml"))}
    if name in files:
        group = files[name].parent.name
        return build(groups[group], settings_of(group, name), f"{group}.{name}")
    found = (each for package in allowed() if package != "mhaprune" for each in options_of(package, groups, ()))
    others: dict[str, tuple[str, Settings]] = {}
    others |= {other: (group, content.get(group, content)) for group, other, _, content in found if group in groups}
    if name not in others:
        kinds = " or ".join(groups)
        if command := how_to_install(name):
            raise ValueError(f"{'/'.join(groups)}={name}: {command}")
        raise ValueError(f"{'/'.join(groups)}={name}: no such {kinds}, {did_you_mean(name, [*files, *others])}")
    group, settings = others[name]
    return build(groups[group], settings, f"{group}.{name}")


def settings_of(group: str, name: str) -> Settings:
    """Return the settings in the YAML of an option, added to the settings of the option that it starts from."""
    path = conf_folder() / group / f"{name}.yaml"
    if not path.exists():
        raise ConfigError(f"{group}={name}: no such option to start from")
    content = yaml.safe_load(path.read_text()) or {}
    return _with_start(content.get(group, content), partial(settings_of, group))


def _with_start(settings: Settings, find: Callable[[str], Settings]) -> Settings:
    """Return these settings, added to those of the options that they start from. `find` returns them by name."""
    start: Settings = {}
    for entry in settings.get("defaults", ()):
        if isinstance(entry, str) and entry != "_self_":
            start = _merged(start, find(entry.partition("@")[0]))
    return _merged(start, {name: value for name, value in settings.items() if name != "defaults"})


def _merged(settings: Settings, changes: Settings) -> Settings:
    """Return the settings with these changes. A mapping is changed key by key, as Hydra does it."""
    merged = dict(settings)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(settings.get(name), dict)
        merged[name] = _merged(settings[name], value) if both else value
    return merged


def options_of(
    package: str, groups: Mapping[str, type], several: Iterable[str]
) -> Iterator[tuple[str, str, str | None, Settings]]:
    """Find the options of a plug-in.

    Each option is a class, or a YAML in the folder `conf` of the plug-in; a YAML with the name of a class replaces it.
    Yield its group, its name, the place of its settings in the config (None: the name of the group), and its settings,
    with defaults for fields that are left out. `groups` maps each group to the class of its options; a run may have
    more than one option of the groups `several`.
    """
    found: dict[tuple[str, str], tuple[str | None, Settings]] = {}
    for module in modules(package):
        for cls in vars(module).values():
            if (group := _group_of(cls, module.__name__, groups)) is not None:
                name = _snake(cls.__name__)
                place = f"{group}.{name}" if group in several else None
                found[group, name] = place, {"_target_": f"{module.__name__}.{cls.__name__}"}
    for folder in getattr(importlib.import_module(package), "__path__", ()):
        for path in sorted(Path(folder, "conf").glob("*/*.yaml")):
            text = path.read_text()
            header = re.match(r"# @package ([\w.]+)\n", text)
            found[path.parent.name, path.stem] = header and header[1], yaml.safe_load(text) or {}

    def filled(group: str, name: str) -> Settings:
        if (group, name) not in found:
            return settings_of(group, name)
        _, content = found[group, name]
        if group not in groups:
            return content
        nested = group in content and "_target_" not in content
        own = content[group] if nested else content
        if all(isinstance(entry, str) for entry in own.get("defaults", ())):  # others choose options: left to Hydra
            own = _with_start(own, partial(filled, group))
        if "_target_" in own:
            own = completed(groups[group], own, f"{group}.{name}")
        return content | {group: own} if nested else own

    for (group, name), (place, _) in found.items():
        yield group, name, place, filled(group, name)


def _group_of(cls: object, module: str, groups: Mapping[str, type]) -> str | None:
    """Return the group that the option `cls` belongs to; None if `cls` is no option or is not defined in `module`."""
    if not (isinstance(cls, type) and cls.__module__ == module and is_dataclass(cls)) or inspect.isabstract(cls):
        return None
    return next((group for group, base in groups.items() if issubclass(cls, base)), None)


def build(kind: Any, value: Any, key: str) -> Any:
    """Return `value` as an instance of the type annotation `kind`, with everything in it checked."""
    origin, arguments, bases = get_origin(kind), get_args(kind), dataclasses_in(kind)
    if bases and (isinstance(value, Mapping) or bases == [kind]):
        return construct(class_of(bases, value, key), _without_target(value), key)
    if origin in (Union, types.UnionType):
        for one in arguments:
            if one not in bases and fits(one, value):
                return build(one, value, key)
    elif origin is tuple and isinstance(value, list | tuple):
        return tuple(build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, Mapping):
        return {name: build(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    elif fits(kind, value):
        return float(value) if kind is float else value
    raise ConfigError(f"{key}={value!r}: must be {expected(kind)}")


def construct(cls: type[Made], values: Mapping[str, Any], key: str = "") -> Made:
    """Return an instance of a dataclass with these values. Fields without a value keep their defaults."""
    prefix = f"{key}." if key else ""
    kinds = fields_of(cls, values, key)
    built = {name: build(kinds[name], value, prefix + name) for name, value in values.items()}
    for field in dataclasses.fields(cls):
        if field.name not in built and default_of(field) is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{field.name}: is missing, must be {expected(kinds[field.name])}")
    try:
        return cls(**built)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{prefix}{error}") from error


def class_of(bases: Sequence[type], value: Any, key: str) -> Any:
    """Return the class that settings name under `_target_`: one of `bases`, or a subclass."""
    if key.endswith("._target_"):
        group = key.removesuffix("._target_")
        raise ConfigError(
            f"{key}={value!r}: stands one level too high, its YAML must begin with: # @package {group}.NAME"
        )
    target, base = value.get("_target_") if isinstance(value, Mapping) else None, bases[0]
    if not isinstance(target, str):
        raise ConfigError(f"{key}={value!r}: must be settings with a _target_ that names a {base.__name__}")
    found = next(filter(None, (find_class(one, target) for one in bases)), None)
    if found is None or not found.__dataclass_params__.frozen:
        raise ConfigError(
            f"{key}._target_={target}: must name a frozen dataclass of {' or '.join(allowed())} that is a"
            f" {base.__name__}; plugins=[PACKAGE] allows others"
        )
    return found


def fields_of(cls: type, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the fields of a dataclass with their types. Raises `ConfigError` if a name in `values` is not a field."""
    kinds = _types(cls)
    for name in values:
        if name not in kinds:
            prefix = f"{key}." if key else ""
            raise ConfigError(f"{prefix}{name}={values[name]!r}: no such setting, allowed are {', '.join(kinds)}")
    return kinds


@cache
def _types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def completed(base: type, value: Mapping[str, Any], key: str) -> Settings:
    """Return the settings of an option; a field without a setting gets its default."""
    cls, given = class_of([base], value, key), _without_target(value)
    fields_of(cls, given, key)
    defaults = {field.name: describe(default_of(field)) for field in dataclasses.fields(cls)}
    there = {name: default for name, default in defaults.items() if default is not dataclasses.MISSING}
    return {"_target_": value["_target_"], **there, **given}


def dataclasses_in(kind: Any) -> list[type]:
    """Return the dataclasses among the types that an annotation allows."""
    union = get_origin(kind) in (Union, types.UnionType)
    return [one for one in (get_args(kind) if union else [kind]) if isinstance(one, type) and is_dataclass(one)]


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, or `dataclasses.MISSING`."""
    if field.default_factory is not dataclasses.MISSING:
        factory: Callable[[], Any] = field.default_factory
        return factory()
    return field.default


def describe(value: Any, named: Callable[[object], str] | None = None) -> Any:
    """Return a configured object as plain values, with its class under `_target_`, so that `build` can read it.

    The function `named`, if given, makes the text under `_target_` from the object.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name), named) for field in dataclasses.fields(value)}
        return {"_target_": (named or target)(value), **fields}
    if isinstance(value, Mapping):
        return {key: describe(item, named) for key, item in value.items()}
    return [describe(item, named) for item in value] if isinstance(value, list | tuple) else value


def target(value: object) -> str:
    """Return MODULE.CLASS of a configured object: the text under `_target_` in a config."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def short_target(value: object) -> str:
    """Return PACKAGE.CLASS, which does not change if the class moves to another module."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__qualname__}"


def modules_of(value: object) -> list[str]:
    """Return the names of the modules that define the classes of a configured object and its parts."""
    return sorted(set(re.findall(r'"_target_": "([^"]+)\.\w+"', json.dumps(describe(value)))))


def option_name(value: object) -> str:
    """Return the name of the option of a configured object: `RunningSum` is `running_sum`; `none` for None."""
    return "none" if value is None else _snake(type(value).__name__)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return the allowed names in words. If one of them is close to the given name, it stands first: "did you mean
    ...?"."""
    names = list(allowed)
    close = [name for name in names if given and name.startswith(given)] or difflib.get_close_matches(given, names, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}allowed are {', '.join(names) or 'none'}"


def _without_target(value: Mapping[str, Any]) -> Settings:
    return {name: item for name, item in value.items() if name != "_target_"}
