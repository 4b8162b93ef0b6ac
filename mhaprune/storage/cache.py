"""The cache of what took long, trained models first of all: looked up by content, so that no recipe is done twice."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from mhaprune.data import Data
from mhaprune.storage.locks import locked, read_bytes
from mhaprune.storage.seals import Damaged, opened, sealed
from mhaprune.storage.store import fingerprint, make_folder, write_bytes

log = logging.getLogger(__name__)

Make = Callable[[dict[str, Any] | None, Callable[[dict[str, Any]], None]], dict[str, Any]]
"""Computes a content from the state of an interrupted call, or None, and a function that saves such a state."""
Remember = Callable[[str, dict[str, Any], Make], dict[str, Any]]
"""Returns what was computed before for one model: its kind, what decides it beside the model, and how it is made."""


class Cache:
    """Files named after the recipe they were made by; each holds that recipe too, so that a foreign file is noticed.

    A folder that cannot be written serves as long as it holds what is wanted.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            make_folder("cache", self.folder)

    def get(
        self,
        kind: str,
        recipe: dict[str, Any],
        make: Make,
    ) -> dict[str, Any]:
        """What `make` gives, from the file where there is one.

        `make(state, save)` is called otherwise: `state` is what an interrupted call last gave to `save`, or None.
        Content is plain containers and tensors. A second process that wants the same recipe waits for the first.
        """
        path = self.folder / f"{kind}-{fingerprint(recipe)}.pt"
        partial = path.with_suffix(".partial.pt")
        with suppress(OSError, Damaged):  # what is wrong with it is said below, where it can be mended
            return _taken(kind, path, _load(path, recipe))
        make_folder("cache", self.folder)
        with locked(path.with_suffix(".lock")):
            if (already := _mended(path, recipe)) is not None:
                return _taken(kind, path, already)
            state = _mended(partial, recipe)
            if state is not None:
                log.info("%s: goes on from the interrupted one, %s", kind, partial)

            def save(state: dict[str, Any]) -> None:
                _keep(partial, recipe, state)

            start = time.monotonic()
            content = make(state, save)
            if _keep(path, recipe, content):
                log.info("%s: made in %.0f s and kept, %s", kind, time.monotonic() - start, path)
                partial.unlink(missing_ok=True)
            return content

    def about(self, model: dict[str, Any]) -> Remember:
        """Remembers what was computed for one model. These facts describe the model."""

        def remember(kind: str, what: dict[str, Any], make: Make) -> dict[str, Any]:
            return self.get(kind, model | what, make)

        return remember


def data_digest(examples: Data) -> str:
    """A fingerprint of what a model is trained on: the package that brings the data may change it."""
    every = examples.tensors().values()
    return fingerprint([[list(each.shape), sha256(each.cpu().numpy().tobytes()).hexdigest()] for each in every])


def weights_digest(model: nn.Module) -> str:
    """A fingerprint of a trained model: the same recipe may end in other bits on another machine."""
    return fingerprint([sha256(value.cpu().numpy().tobytes()).hexdigest() for value in model.state_dict().values()])


NOT_HASHED = {
    "mhaprune.storage.cache": "finds what was computed and computes nothing",
    "mhaprune.storage.store": "names and writes files",
    "mhaprune.interrupts": "decides when a training stops, not what it ends in",
    "mhaprune.progress": "says how far a loop is",
    "mhaprune.settings.ranges": "refuses settings; those that it lets pass are part of the recipe",
    "mhaprune.timing": "only tells the name of the device",
    "mhaprune.model.decoding": "decodes, which training does not",
}
"""Modules that others import and that decide no result of theirs, each with the reason."""


def source_digests(*modules: str) -> dict[str, str]:
    """The digests of the sources that decide a result: these modules and what they import, by the name of the module.

    Imports are followed within the packages of the modules, except those in `NOT_HASHED` and those for types only.
    """
    found: dict[str, str] = {}
    left = list(modules)
    while left:
        module = left.pop()
        if module not in found:
            found[module], imported = _source(module)
            left += [name for name in imported if name not in NOT_HASHED]
    return dict(sorted(found.items()))


def code_of(modules: Sequence[str]) -> dict[str, Any]:
    """What these modules do, as a status notes it: compared later it tells whether they still do the same."""
    return {"modules": list(modules), "digest": fingerprint(source_digests(*modules))}


@cache
def _source(module: str) -> tuple[str, tuple[str, ...]]:
    """The digest of what a module *does*, without comments and docstrings, and the modules of its package it imports.

    It is read once per process: it should be that of the code that runs, also when the file is edited during a sweep.
    """
    loaded = importlib.import_module(module)
    assert loaded.__file__ is not None
    tree = _without_docstrings(ast.parse(Path(loaded.__file__).read_text()))
    package = module.split(".")[0]
    imported: dict[str, None] = {}
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            imported |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), loaded.__package__ or "")
            parts = [f"{base}.{alias.name}" for alias in node.names]
            imported |= dict.fromkeys(part if part in sys.modules else base for part in parts)
    own = tuple(name for name in imported if name.split(".")[0] == package and name != package)
    return fingerprint(ast.dump(tree)), own


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements in a node and in these, but those that only a type checker sees. Expressions, which are most of a
    tree, hold none."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, name, None)
        for child in children if isinstance(children, list) else ():
            if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
                yield child
                yield from _statements(child)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in [tree, *_statements(tree)]:
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not _is_docstring(n)]  # type: ignore[attr-defined]
    return tree


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _taken(kind: str, path: Path, content: dict[str, Any]) -> dict[str, Any]:
    log.info("%s: taken from the cache, %s", kind, path)
    return content


def _keep(path: Path, recipe: dict[str, Any], content: dict[str, Any]) -> bool:
    """Write the file. Where there is no room for it the work that was done is not lost with it."""
    try:
        write_bytes(path, sealed({"recipe": recipe, "content": content}))
    except OSError as error:
        log.warning("%s: not kept (%s), so it will be made again", path, error.strerror)
        return False
    return True


def _load(path: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """The content of a file; raises Damaged unless it is whole and made by this recipe."""
    stored = opened(read_bytes(path))
    if not isinstance(stored, dict) or set(stored) != {"recipe", "content"} or stored["recipe"] != recipe:
        raise Damaged("made by another recipe")
    content: dict[str, Any] = stored["content"]
    return content


def _mended(path: Path, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """The content, or None where it is to be made: a damaged file is set aside, and said."""
    try:
        return _load(path, recipe)
    except FileNotFoundError:
        return None
    except (OSError, Damaged) as error:
        aside = path.with_suffix(".damaged")
        with suppress(OSError):  # a folder of that name: the new file takes the place of this one
            path.replace(aside)
        log.warning("cache file %s is damaged or foreign (%s): set aside as %s, made anew", path, error, aside.name)
        return None
