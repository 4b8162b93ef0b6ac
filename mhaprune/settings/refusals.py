"""Errors as a user should read them: one line with the key, its value and what is allowed."""

import difflib
import errno
import pickle
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mhaprune.settings.plugins import PACKAGE

BROUGHT = ("task", "model", "gate", "training")
"""The settings of a run that a saved model brings with it."""


class RunFailed(BaseException):
    """Carries the failure of a run past Hydra, which reports every `Exception` in its own words."""


def one_line(error: BaseException) -> str:
    """Any error in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; what was trained is kept, the same command goes on from there"
    if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOSPC):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}; hydra.run.dir and cache must name folders that can be written"
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return text
    return f"{type(error).__name__}: {text}{_place(error)} (HYDRA_FULL_ERROR=1 shows all)"


@contextmanager
def foreign(where: str, code: str = "") -> Iterator[None]:
    """Turn any error into a ValueError, one line that begins with `where`: what others made may raise anything.

    `code` is the setting that lets transformers run Python code of a folder.
    """
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        if "trust_remote_code" in text:
            text = f"it names Python code to run, auto_map, which only {code} allows"
        elif "weights_only" in text or isinstance(error, pickle.UnpicklingError):  # torch advises to run its code
            text = "its weights hold something else than plain content"
        elif not isinstance(error, ValueError):
            text = f"{type(error).__name__}: {text}"
        raise ValueError(f"{where}, {text}") from None


def _place(error: BaseException) -> str:
    """Return the line that raised an error, or that called the library that did: `, in my_heads/loud.py line 17`."""
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if PACKAGE in path.parents or not any(library in path.parents for library in libraries):
            return f", in {'/'.join(path.parts[-2:])} line {frame.lineno}"
    return ""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return what is allowed and, if one of it is close to what was given, that first."""
    names = list(allowed)
    close = [name for name in names if given and name.startswith(given)] or difflib.get_close_matches(given, names, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}allowed are {', '.join(names) or 'none'}"


FLAGS = ("cfg", "package", "shell-completion", "info")
"""What may follow two dashes with a value, see --hydra-help."""
SHORT = ("h", "c", "p", "sc", "i", "m")
BARE = ("help", "hydra-help", "version", "resolve", "run", "multirun", *FLAGS)
FOREIGN = {
    r"--?(config-\w+|c[pnd])\b": "settings come from conf/ and from plugins, write plugins=[PACKAGE]",
    r"hydra\.searchpath\b": "settings come from conf/ and from plugins, write plugins=[PACKAGE]",
    r"--experimental-rerun\b": "a run is repeated by its command, see its report.html",
    r"hydra[./]callbacks\b|hydra\b.*_target_": "names code to run, which no setting may",
}
"""Arguments that could bring in code of others, and what is said about them."""


MEANT = {
    "to Integer": "must be a whole number",
    "to Float": "must be a number",
    "is not Optional": "must not be null",
    "with ListConfig": "must be a list in brackets",
}
"""Words of Hydra about a value that does not fit, and the words that replace them."""


EXTENDED = ("scorer", "task", "schedule", "recovery", "experiment")
"""The groups of options to which users add their own."""


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError for a setting that is written like an option of other programs, and for what is `FOREIGN`.

    Options are known by their whole names: Hydra would take an abbreviation too.
    """
    for argument in arguments:
        for pattern, why in FOREIGN.items():
            if re.match(pattern, argument.lstrip("+~")):
                raise ValueError(f"{argument}: not allowed, {why}")
        option, equals, _ = argument.partition("=")
        if not option:
            raise ValueError(f"{argument}: names no setting, must read KEY=VALUE, for example seed=1")
        if equals and option.startswith("-") and option.lstrip("-") in {*BARE, *SHORT} - set(FLAGS):
            raise ValueError(f"{argument}: {option} takes no value, write {option}")
        if argument.startswith("-") and option.lstrip("-") not in (FLAGS if equals else (*BARE, *SHORT)):
            if equals:
                raise ValueError(f"{argument}: settings have no dashes, write {argument.lstrip('-')}")
            raise ValueError(f"{argument}: no such option, allowed are --{', --'.join(BARE)}")


def unreadable(argument: str, conf: Path, before: str = "") -> str:
    """Why an argument cannot be parsed, and how it must read. `before` is the argument before it."""
    if re.match(r"[\w./@+~]+==", argument):
        return f"{argument}: has one = too many, must read KEY=VALUE, for example seed=1"
    if "=" not in argument:
        options = {path.stem: f"{path.parent.name}={path.stem}" for path in conf.glob("*/*.yaml")}
        hint = f"did you mean {options[argument]}? " if argument in options else ""
        if before.startswith("example=") and '"' not in before:
            hint = f'blanks stand in quotes, {before.partition("=")[0]}="{before.partition("=")[2]} {argument} ..."; '
        return f"{argument}: is no setting, {hint}it must read KEY=VALUE, for example seed=1"
    return (
        f"{argument}: cannot be read; brackets and quotes must close, and a text with signs stands in quotes, KEY='...'"
    )


def composition_error(
    text: str, arguments: Sequence[str], conf: Path, composed: Callable[[], Mapping[str, Any]]
) -> str | None:
    """Return in one line what Hydra says about an argument in several; None for another error.

    `composed` returns the config with the options of the command line chosen, but none of its settings.
    """
    if "Config group override must be" in text:
        given = next((argument for argument in arguments if (conf / argument.partition("=")[0]).is_dir()), "a group")
        given = next((a for a in arguments if (conf / a.partition("=")[0]).is_dir() and a.endswith("=null")), given)
        options = sorted(path.stem for path in (conf / given.partition("=")[0]).glob("*.yaml"))
        return f"{given}: must name one of {', '.join(options)}"
    if found := re.search(r"(?:Could not (?:load|find)|In '.*?': Could not find) '(hydra/[\w/]+?)/(.+?)'", text):
        return _plug_in_of_hydra(found[1], found[2], conf)
    if found := re.search(r"Could not (?:load|find) '(.+)/(.*?)'", text):
        options = sorted(path.stem for path in (conf / found[1]).glob("*.yaml"))
        hint = did_you_mean(found[2], options)
        meant = hint.startswith("did you") or any(argument.startswith("plugins=") for argument in arguments)
        own = "; one of your own needs plugins=[PACKAGE]" if found[1] in EXTENDED and not meant else ""
        return f"{found[1]}={found[2]}: no such option, {hint}{own}"
    if found := re.search(r"Ambiguous value for argument '(.+?)'", text):
        key, _, values = found[1].partition("=")
        ways = f"a list stands in brackets, {key}=[{values}], and a text in quotes"
        return f"{found[1]}: commas ask for a sweep, which needs -m; {ways}"
    if found := re.search(r"Could not override '(.+?)'", text):
        return _unknown_key(found[1], arguments, composed())
    if found := re.search(r"Error merging override (.+)\n(.+)", text):
        words = [meant for part, meant in MEANT.items() if part in found[2]]
        return f"{found[1]}: {words[0] if words else found[2]}"
    if found := re.search(r"Unsupported interpolation type (\S+)|raised while resolving interpolation: (.+)", text):
        key = re.search(r"full_key: (\S+)", text)
        start = f"{key[1]}=" if key else f"${{{found[1]}"
        given = next((argument for argument in arguments if argument.lstrip("+").startswith(start)), start)
        why = found[2] or f"there is no resolver {found[1]}"
        return f"{given}: {why}; allowed are a value, or the name of another setting, ${{SETTING}}"
    if found := re.search(r"Interpolation key '(.+?)' not found", text):
        given = next((argument for argument in arguments if f"${{{found[1]}}}" in argument), f"${{{found[1]}}}")
        return f"{given}: there is no setting {found[1]}, {did_you_mean(found[1], composed())}"
    return None


def _plug_in_of_hydra(group: str, name: str, conf: Path) -> str:
    for option in sorted((conf / "launch").glob("*.yaml")):
        text = option.read_text()
        extra = re.search(r"^# Needs the extra: (.+)$", text, re.MULTILINE)
        if extra and f"override /{group}: {name}\n" in text:
            return f"launch={option.stem}: is not installed: {extra[1]}"
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
