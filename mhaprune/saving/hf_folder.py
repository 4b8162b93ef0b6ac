"""Write models of transformers whose layers differ in their heads, with the Python code that reads them again.

A pruned model writes itself so: `save_pretrained`, as a Trainer calls it, is `write_with_code`.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.hooks import windows
from mhaprune.saving.model_card import write_card
from mhaprune.storage.store import write_bytes, write_json
from mhaprune.surgery import reshaping
from mhaprune.surgery.record import before_saving

CODE = "modeling_mhaprune"
"""The name of the Python module in a folder."""
FEWER = "_with_fewer_heads"
"""The end of `model_type` in the config of a folder with code. transformers knows no such model, so it asks for
trust_remote_code=True instead of complaining about sizes."""
FUTURE = "from __future__ import annotations\n"
CLASS = '''

import transformers


class {config}(transformers.{config}):
    model_type = "{kind}"


class {name}(transformers.{name}):
    """A {name} that has lost attention heads: `config.mhaprune` says which shapes are left."""

    config_class = {config}

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        if noted := getattr(config, "mhaprune", None):
            shrink(self, noted["shapes"], noted["attributes"])

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: buffers that are not saved are filled as those of a {name}."""
        return False
'''


def saves_with_code(model: Any) -> None:
    """Make `save_pretrained` of a model write the code too."""
    model.save_pretrained = partial(write_with_code, model)


before_saving.append(saves_with_code)


def write_with_code(model: Any, folder: str | Path, *arguments: Any, **named: Any) -> str:
    """Write a model by its class, with the code that gives it its shapes. Return this code; "" if this process is not
    the one that writes. A README of somebody else stays."""
    native: Any = native_class(model)
    if native is None:
        raise ValueError(
            f"{type(model).__name__}: is no class of transformers, save it with mhaprune.save(model, path)"
        )
    # Code of one's own gets its weights by the names that they have in memory.
    named |= {"save_original_format": False}
    type(model).save_pretrained(model, folder, *arguments, **named)
    path, name, config = Path(folder), native.__name__, native.config_class
    if not (path / "config.json").exists():
        return ""
    autos = automatic(native) or ["AutoModel"]
    kind = f"{config.model_type}{FEWER}"
    classes = dict.fromkeys(autos, f"{CODE}.{name}") | {"AutoConfig": f"{CODE}.{config.__name__}"}
    content = json.loads((path / "config.json").read_text())
    write_json(path / "config.json", content | {"model_type": kind, "auto_map": classes})
    code = FUTURE + alone(windows) + alone(reshaping) + CLASS.format(name=name, config=config.__name__, kind=kind)
    write_bytes(path / f"{CODE}.py", code.encode())
    write_card(model, path, f"{min(autos, key=len)}.from_pretrained(folder, trust_remote_code=True)")
    return code


def alone(module: ModuleType) -> str:
    """Return the code of a module without imports of mhaprune, for a file that holds several."""
    source = inspect.getsource(module)
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if f"{node.module}.".startswith(("mhaprune.", "__future__."))]
    left_out = {line for node in ours for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(source.splitlines(keepends=True), 1)
    return "".join(line for number, line in lines if number not in left_out)


def write_plain(model: Any, folder: Path) -> str:
    """Write a model by its class alone, and remove what an earlier `write_with_code` left in the folder. Code that a
    config names, but that did not make this model, is named no more. Return "", the code that was written."""
    native: Any = native_class(model)
    type(model).save_pretrained(model, folder)
    content = json.loads((folder / "config.json").read_text())
    of_ours = str(content.get("model_type")).endswith(FEWER)  # a class in a folder's code that is no longer needed
    if of_ours or (type(model) is native and "auto_map" in content):
        content = {name: value for name, value in content.items() if name != "auto_map"}
        write_json(folder / "config.json", content | {"model_type": native.config_class.model_type})
    if "auto_map" not in content:
        (folder / f"{CODE}.py").unlink(missing_ok=True)
        write_card(model, folder, f"{min(automatic(native) or ['AutoModel'], key=len)}.from_pretrained(folder)")
    return ""


def difference_when_read(model: Any, folder: Path, code: str) -> str:
    """Read a folder as transformers alone reads it, with the code that was written into it just now, and no other.
    Return how this differs from the model; "" if it does not."""
    native: Any = native_class(model)
    try:
        with quiet(), torch.random.fork_rng(), _class_in(code, native) as kind:
            read = kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of code that may be anybody's
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    parts = (each.named_modules() for each in (model, read))
    streams = [{path: part.streams for path, part in each if getattr(part, "streams", None)} for each in parts]
    if streams[0] != streams[1]:
        return "its heads do not stream"
    expected, found = _tensors(model), _tensors(read)
    if odd := sorted(expected.keys() ^ found.keys()):
        return f"{odd[0]} is in one of them only"
    equal = {name: _equal(tensor, found[name]) for name, tensor in expected.items()}
    return next((f"{name} is another" for name, same in equal.items() if not same), "")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights and buffers, but not the frequencies of rotary positions, which change with what a model
    reads."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in tensors if not name.endswith("inv_freq")}


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a.cpu() == b.cpu()) | (a.isnan().cpu() & b.isnan().cpu())).all())


@contextmanager
def _class_in(code: str, native: type) -> Iterator[Any]:
    """Yield the class of the model in our code; without code, the class of transformers."""
    if not code:
        yield native
        return
    module = ModuleType("mhaprune_folder")
    sys.modules[module.__name__] = module
    try:
        exec(compile(code, f"{CODE}.py", "exec"), vars(module))
        yield vars(module)[native.__name__]
    finally:
        del sys.modules[module.__name__]


@contextmanager
def quiet(progress: bool = False) -> Iterator[None]:
    """Show no warnings of transformers while the context lasts, and no progress unless it is wanted."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if not progress:
        logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def native_class(model: nn.Module) -> type | None:
    """Return the transformers class of a model, also if the model was loaded with code from its folder; None for a
    class of one's own."""
    native = getattr(sys.modules.get("transformers"), type(model).__name__, None)
    return native if isinstance(native, type) and isinstance(model, native) else None


def automatic(kind: Any) -> list[str]:
    """Return the names of the `AutoModel...` classes that make this class from its config."""
    from transformers.models.auto import modeling_auto

    names = []
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", {}) if name.startswith("AutoModel") else {}
        made = mapping.get(kind.config_class, ())
        if kind in (made if isinstance(made, tuple) else (made,)):
            names.append(name)
    return names
