"""The cache of what took long, trained models first of all: looked up by content, so that no recipe is done twice."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import logging
import pickle
import time
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn

from mhaprune.data import Examples
from mhaprune.store import fingerprint, make_folder, write_bytes

log = logging.getLogger(__name__)


class Cache:
    """Files named after the recipe they were made by; each holds that recipe too, so that a foreign file is noticed."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = make_folder("cache", Path(folder))

    def get(
        self,
        kind: str,
        recipe: dict[str, Any],
        make: Callable[[dict[str, Any] | None, Callable[[dict[str, Any]], None]], dict[str, Any]],
    ) -> dict[str, Any]:
        """What `make` gives, from the file where there is one.

        `make(state, save)` is called otherwise: `state` is what an interrupted call last gave to `save`, or None.
        Content is plain containers and tensors. A second process that wants the same recipe waits for the first.
        """
        path = self.folder / f"{kind}-{fingerprint(recipe)}.pt"
        partial = path.with_suffix(".partial.pt")
        with FileLock(path.with_suffix(".lock")):
            content = _load(path, recipe)
            if content is not None:
                log.info("%s: taken from the cache, %s", kind, path)
                return content
            state = _load(partial, recipe)
            if state is not None:
                log.info("%s: goes on from the interrupted one, %s", kind, partial)
            start = time.monotonic()
            content = make(state, lambda state: _save(partial, recipe, state))
            _save(path, recipe, content)
            log.info("%s: made in %.0f s and kept, %s", kind, time.monotonic() - start, path)
            partial.unlink(missing_ok=True)
            return content


def data_digest(examples: Examples) -> str:
    """A fingerprint of what a model is trained on: the package that brings the data may change it."""
    both = examples.source, examples.target
    return fingerprint([[list(ids.shape), sha256(ids.cpu().numpy().tobytes()).hexdigest()] for ids in both])


def weights_digest(model: nn.Module) -> str:
    """A fingerprint of a trained model: the same recipe may end in other bits on another machine."""
    return fingerprint([sha256(value.cpu().numpy().tobytes()).hexdigest() for value in model.state_dict().values()])


@cache
def source_digest(module: str) -> str:
    """A fingerprint of what a module *does*: it changes with its code, not with its comments or docstrings.

    Read once per process, so that it is that of the code which runs, also when a file is edited during a sweep.
    """
    source = inspect.getsource(importlib.import_module(module))
    return fingerprint(ast.dump(_without_docstrings(ast.parse(source))))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not _is_docstring(n)]  # type: ignore[attr-defined]
    return tree


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _save(path: Path, recipe: dict[str, Any], content: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save({"recipe": recipe, "content": content}, buffer)
    write_bytes(path, buffer.getvalue())


def _load(path: Path, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """The content of a file that is whole and made by this recipe; any other file is set aside, and said."""
    if not path.exists():
        return None
    try:
        stored = torch.load(path, weights_only=True, map_location="cpu")
        if stored["recipe"] != recipe:
            raise ValueError("made by another recipe")
        content: dict[str, Any] = stored["content"]
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        reason = (str(error) or type(error).__name__).splitlines()[0]
        log.warning("cache file %s is damaged or foreign (%s): set aside as %s, made anew", path, reason, aside.name)
        return None
    return content
