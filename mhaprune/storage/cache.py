"""The cache of slow results, such as trained models. The key of a result is all facts that decide it. So no result is
computed twice."""

import ast
import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.data import Data
from mhaprune.storage.locks import locked, read_bytes
from mhaprune.storage.seals import Damaged, opened, sealed
from mhaprune.storage.store import fingerprint, make_folder, write_bytes

log = logging.getLogger(__name__)

Make = Callable[[dict[str, Any] | None, Callable[[dict[str, Any]], None]], dict[str, Any]]
"""A function that computes a result. Its first argument is the state that an interrupted call saved, or None; its
second argument is a function that saves a state."""
Remember = Callable[[str, dict[str, Any], Make], dict[str, Any]]
"""A function that returns a cached result about one model. Its arguments are the kind of the result, the facts beside
the model that decide it, and a `Make`, which computes it if it is not cached."""


PACKAGE = Path(__file__).parents[1]
SLOW = 1.0
"""Seconds from which a result of `Cache.get_slow` is kept."""


class Cache:
    """Files named after the key that made them. They contain the key too, so that a foreign file is noticed.

    A read-only folder can still be used for reading.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            make_folder("cache", self.folder)

    def get(self, kind: str, key: dict[str, Any], make: Make) -> dict[str, Any]:
        """Return the result of `make`, from the file if there is one.

        Otherwise `make(state, save)` is called: `state` is the last one that an interrupted call passed to `save`, or
        None. A result or state consists of plain containers and tensors. A second process that wants the same key
        waits for the first.
        """
        path = self.folder / f"{kind}-{fingerprint(key)}.pt"
        partial = path.with_suffix(".partial.pt")
        with suppress(OSError, Damaged):  # a damaged file is handled below, under the lock
            return _from_cache(kind, path, _load(path, key))
        make_folder("cache", self.folder)
        with locked(path.with_suffix(".lock")):
            if (already := _load_or_set_aside(path, key)) is not None:
                return _from_cache(kind, path, already)
            state = _load_or_set_aside(partial, key)
            if state is not None:
                log.info("%s: goes on from the interrupted one, %s", kind, partial)

            def save(state: dict[str, Any]) -> None:
                _keep(partial, key, state)

            start = time.monotonic()
            content = make(state, save)
            if _keep(path, key, content):
                log.info("%s: made in %.0f s and kept, %s", kind, time.monotonic() - start, path)
                partial.unlink(missing_ok=True)
            return content

    def get_slow(self, kind: str, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `make`, from the file if there is one: for calls that are many, some of them short.

        Nothing waits for another process, and a result that took less than `SLOW` seconds is not kept.
        """
        path = self.folder / f"{kind}-{fingerprint(key)}.pt"
        if (already := _load_or_set_aside(path, key)) is not None:
            return already
        start = time.monotonic()
        content = make()
        if time.monotonic() - start >= SLOW:
            _keep(path, key, content)
        return content

    def about(self, model: dict[str, Any]) -> Remember:
        """Return a function that caches results about one model. `model` has the facts that identify it."""

        def remember(kind: str, what: dict[str, Any], make: Make) -> dict[str, Any]:
            return self.get(kind, model | what, make)

        return remember


def no_memory(kind: str, what: dict[str, Any], make: Make) -> dict[str, Any]:
    """Compute a result without a cache."""
    return make(None, lambda state: None)


def data_digest(examples: Data) -> str:
    """Return a fingerprint of examples. A fingerprint of their settings is not enough: a new version of the package
    that makes the data may make other examples."""
    return fingerprint([[list(each.shape), tensor_digest(each)] for each in examples.tensors().values()])


def weights_digest(model: nn.Module) -> str:
    """Return a fingerprint of the weights of a model. The key of the model is not enough, because it may give
    different bits on another machine."""
    return fingerprint([tensor_digest(value) for value in model.state_dict().values()])


def tensor_digest(tensor: Tensor) -> str:
    """Return a fingerprint of the bytes of a tensor."""
    return sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def code_digests(*modules: str) -> dict[str, str]:
    """Return, for each of these modules, a digest of the source files that decide what it computes: its own, and those
    of all modules that it imports, and so on. Of a plug-in, all files of its package count.

    Only imports at the top of a file are followed. One inside a function is for what is done with a result, such as
    saving it. Files are read once per process, so later edits do not change the digest of the running code.
    """
    own = {module for module in modules if module.startswith("mhaprune.")}
    packages = {module.split(".")[0] for module in modules} - {"mhaprune"}
    return {module: _digest_with_imports(module) for module in sorted(own)} | {each: _digest(each) for each in packages}


@cache
def _digest_with_imports(module: str) -> str:
    known, new = dict[str, str](), {module}
    while new:
        known |= {name: sha256(_source(name)).hexdigest() for name in new}
        new = {other for name in new for other in _imports(name)} - known.keys()
    return fingerprint(sorted(known.items()))


@cache
def _imports(module: str) -> set[str]:
    """Return the modules of this package that a module of it imports at its top."""
    found = set()
    for node in ast.parse(_source(module)).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {_module(f"{node.module}.{alias.name}") or node.module for alias in node.names}
    return {name for name in found if name.startswith("mhaprune.")}


@cache
def _source(module: str) -> bytes:
    return Path(str(importlib.util.find_spec(module).origin)).read_bytes()  # type: ignore[union-attr]


def _module(name: str) -> str | None:
    """Return the name if it is that of a module of this package."""
    return name if name.startswith("mhaprune.") and (PACKAGE / f"{name[9:].replace('.', '/')}.py").is_file() else None


def code_of(packages: Sequence[str]) -> dict[str, Any]:
    """Return the facts that identify the code of whole packages, for a status. Raises ImportError for a missing
    package."""
    return {"modules": list(packages), "digest": fingerprint([_digest(package) for package in packages])}


@cache
def _digest(room: str) -> str:
    package, _, part = room.partition(".")
    return fingerprint([each for each in _files(package) if not part or each[0].startswith((f"{part}.py", f"{part}/"))])


@cache
def _files(package: str) -> list[tuple[str, str]]:
    """Return the path in the package and the sha256 of every source file of a package or of a single module.

    YAML files in a package count too: they are the options of a plug-in.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"{package}: is not there")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = [
        (path.relative_to(folder), path)
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in (".py", ".yaml")
    ]
    if not folders and spec.origin is not None:
        paths = [(Path(package), Path(spec.origin))]
    return sorted((name.as_posix(), sha256(path.read_bytes()).hexdigest()) for name, path in paths)


def _from_cache(kind: str, path: Path, content: dict[str, Any]) -> dict[str, Any]:
    log.info("%s: taken from the cache, %s", kind, path)
    return content


def _keep(path: Path, key: dict[str, Any], content: dict[str, Any]) -> bool:
    """Write the file. If this fails, for example on a full disk, warn and return False; the result itself is not
    lost."""
    try:
        write_bytes(path, sealed({"key": key, "content": content}))
    except OSError as error:
        log.warning("%s: not kept (%s), so it will be made again", path, error.strerror)
        return False
    return True


def _load(path: Path, key: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file. Raises Damaged if the file has changed or was made by another key."""
    stored = opened(read_bytes(path))
    if not isinstance(stored, dict) or set(stored) != {"key", "content"} or stored["key"] != key:
        raise Damaged("made by another key")
    content: dict[str, Any] = stored["content"]
    return content


def _load_or_set_aside(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Return the content of the file; None if there is no file. A damaged file is renamed, with a warning, and None is
    returned."""
    try:
        return _load(path, key)
    except FileNotFoundError:
        return None
    except (OSError, Damaged) as error:
        aside = path.with_suffix(".damaged")
        with suppress(OSError):  # if `aside` is a folder: the new file replaces this one
            path.replace(aside)
        log.warning("cache file %s is damaged or foreign (%s): set aside as %s, made anew", path, error, aside.name)
        return None
