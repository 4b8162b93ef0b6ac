"""Arguments of the command line that are not allowed, and Hydra's messages about them as one line each: key, value and
what is allowed."""

import difflib
import glob
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mhaprune.settings.options import did_you_mean
from mhaprune.settings.plugins import conf_folder, how_to_install

FLAGS = ("cfg", "package", "shell-completion", "info")
"""Options of Hydra that take a value, see --hydra-help."""
BARE = ("help", "hydra-help", "version", "resolve", "run", "multirun", *FLAGS)
KNOWN = (*(f"--{name}" for name in BARE), "-h", "-c", "-p", "-sc", "-i", "-m")
FOREIGN = {
    r"--?(config-\w+|c[pnd])\b": "settings come from conf/ and from plugins, write plugins=[PACKAGE]",
    r"hydra\.searchpath\b": "settings come from conf/ and from plugins, write plugins=[PACKAGE]",
    r"--experimental-rerun\b": "a run is repeated by its command, see its report.html",
    r"hydra[./]callbacks\b|hydra\b.*_target_": "names code to run, which no setting may",
}
"""Patterns of arguments that could run foreign code, each with the reason for the error message."""
MEANT = {
    "to Integer": "must be a whole number",
    "to Float": "must be a number",
    "is not Optional": "must not be null",
    "with ListConfig": "must be a list in brackets",
}
"""Parts of Hydra's messages about wrong values, and the words that replace them."""
EXTENDED = ("scorer", "task", "schedule", "recovery", "experiment")
"""The groups to which users can add options of their own."""


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError for an argument that looks like an option of another program, and for a `FOREIGN` argument.

    Options must be written in full: Hydra would also accept abbreviations. A setting may be given once: Hydra would
    take the last one without a word.
    """
    check_once(arguments)
    for argument in arguments:
        for pattern, why in FOREIGN.items():
            if re.match(pattern, argument.lstrip("+~")):
                raise ValueError(f"{argument}: not allowed, {why}")
        option, equals, _ = argument.partition("=")
        if not option:
            raise ValueError(f"{argument}: names no setting, must read KEY=VALUE, for example seed=1")
        if not argument.startswith("-") or (option in KNOWN and (not equals or option[2:] in FLAGS)):
            continue
        if option in KNOWN:
            raise ValueError(f"{argument}: {option} takes no value, write {option}")
        if equals:
            raise ValueError(f"{argument}: settings have no dashes, write {argument.lstrip('-')}")
        raise ValueError(f"{argument}: no such option, allowed are --{', --'.join(BARE)}")


def check_once(arguments: Sequence[str]) -> None:
    """Raise ValueError for a setting that is given twice."""
    by_key: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if equals and not key.startswith("-"):
            by_key.setdefault(key.lstrip("+~"), []).append(argument)
    for key, given in by_key.items():
        if len(given) > 1:
            raise ValueError(f"{' '.join(given)}: {key} is given {len(given)} times, must be given once")


def unreadable(argument: str, before: str) -> str:
    """Return an error message for an argument that cannot be parsed. `before` is the previous argument."""
    example = "must read KEY=VALUE, for example seed=1"
    if re.match(r"[\w./@+~]+==", argument):
        return f"{argument}: has one = too many, {example}"
    if "=" in argument:
        return (
            f"{argument}: cannot be read; brackets and quotes must close, and a text with signs stands in quotes,"
            " KEY='...'"
        )
    hint = ""
    if before.startswith("example=") and '"' not in before:
        hint = f'blanks stand in quotes, example="{before.partition("=")[2]} {argument} ..."; '
    elif options := [path.parent.name for path in conf_folder().glob(f"*/{glob.escape(argument)}.yaml")]:
        hint = f"did you mean {options[0]}={argument}? "
    return f"{argument}: is no setting, {hint}it {example}"


def composition_error(text: str, arguments: Sequence[str], composed: Callable[[], Mapping[str, Any]]) -> str | None:
    """Turn Hydra's long error message about an argument into one line; None for an error that is not known here.

    `composed` returns the config with the options of the command line chosen, but no other settings.
    """
    if "Config group override must be" in text:
        groups = [argument for argument in arguments if (conf_folder() / argument.partition("=")[0]).is_dir()]
        given = max(groups, key=lambda argument: argument.endswith("=null"))
        return f"{given}: must name one of {', '.join(_options(given.partition('=')[0]))}"
    if found := re.search(r"(?:Could not (?:load|find)|In '.*?': Could not find) '(hydra/[\w/]+?)/(.+?)'", text):
        return _plug_in_of_hydra(found[1], found[2])
    if found := re.search(r"Could not (?:load|find) '(.+)/(.*?)'", text):
        if command := how_to_install(found[2]):
            return f"{found[1]}={found[2]}: {command}"
        hint = did_you_mean(found[2], _options(found[1]))
        meant = hint.startswith("did you") or any(argument.startswith("plugins=") for argument in arguments)
        own = "; one of your own needs plugins=[PACKAGE]" if found[1] in EXTENDED and not meant else ""
        return f"{found[1]}={found[2]}: no such option, {hint}{own}"
    if found := re.search(r"(\S+) appears more than once in the final defaults list", text):
        return f"+{found[1]}: is set already, write {found[1]}=NAME, without the +"
    if found := re.search(r"Ambiguous value for argument '(.+?)'", text):
        key, _, values = found[1].partition("=")
        ways = f"a list stands in brackets, {key}=[{values}], and a text in quotes"
        return f"{found[1]}: commas ask for a sweep, which needs -m; {ways}"
    if "RangeSweep" in text:
        given = next((argument for argument in arguments if "range(" in argument), "range")
        return f"{given}: a range stands alone, further values are written out, for example 0,1,2"
    if "arg 3 must not be zero" in text:
        given = next((argument for argument in arguments if "range(" in argument), "range")
        return f"{given}: has a step of 0, must be range(START,STOP,STEP)"
    if "does not support sweep type" in text:
        given = next((argument for argument in arguments if "interval(" in argument), "interval")
        key = given.partition("=")[0]
        return f"{given}: names no values, write {key}=1,2,4, or let another hydra/sweeper choose them, such as optuna"
    if found := re.search(r"Could not override '(.+?)'", text):
        return _unknown_key(found[1], arguments, composed())
    if found := re.search(r"Error merging override (.+)\n(.+)", text):
        words = [meant for part, meant in MEANT.items() if part in found[2]]
        return f"{found[1]}: {words[0] if words else found[2]}"
    if found := re.search(r"Interpolation key '(.+?)' not found|Unsupported interpolation type (\w+)", text):
        name = found[1] or found[2]
        given = next((argument for argument in arguments if f"${{{name}" in argument), f"${{{name}}}")
        return f"{given}: there is no setting {name}, {did_you_mean(name, composed())}"
    return None


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def _plug_in_of_hydra(group: str, name: str) -> str:
    for option in _options("launch"):
        text = (conf_folder() / "launch" / f"{option}.yaml").read_text()
        extra = re.search(r"^# Needs the extra: (.+)$", text, re.MULTILINE)
        if extra and f"override /{group}: {name}\n" in text:
            return f"launch={option}: is not installed: {extra[1]}"
    return f"{group}={name}: no such option, allowed is basic; other plug-ins of Hydra must be installed first"


def _unknown_key(key: str, arguments: Sequence[str], composed: Mapping[str, Any]) -> str:
    given = next((argument for argument in arguments if argument.startswith(f"{key}=")), key)
    if key.startswith("hydra."):
        return f"{given}: no such key, --cfg hydra shows those that there are"
    node: Any = composed
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(node, Mapping) or node.get(parent) is None:
            close = difflib.get_close_matches(parent, map(str, node) if isinstance(node, Mapping) else (), n=1)
            hint = f"did you mean {close[0]}? " if close and close[0] != parent else ""
            return f"{given}: {parent} is not among the options chosen here, {hint}--help lists all of them"
        node = node[parent]
    allowed = [str(name) for name in node if name != "_target_"] if isinstance(node, Mapping) else []
    return f"{given}: no such key, {did_you_mean(last, allowed)}"
