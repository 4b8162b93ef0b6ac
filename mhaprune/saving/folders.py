"""Save and load pruned models as folders.

If every layer has lost equally many heads, and the config can say so, the folder is a plain one of transformers. For
ragged layers, `config.mhaprune` holds the shapes of the weights. `load_folder` reads them; for users without mhaprune,
`save_folder` adds Python code to the folder that does. Of other models the removal is written.
"""

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pandas as pd
import torch
import yaml
from torch import nn

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.heads import HeadMask
from mhaprune.hooks.blocks import Unsupported
from mhaprune.measure.outcomes import check_weights_finite
from mhaprune.saving.hf_folder import (
    FEWER,
    difference_when_read,
    native_class,
    quiet,
    saves_with_code,
    write_plain,
    write_with_code,
)
from mhaprune.saving.model_card import CARD, LOST, complete_card, write_card
from mhaprune.saving.removal_file import REMOVAL, load_removal, save_removal
from mhaprune.settings.ranges import Ge, Within
from mhaprune.settings.refusals import foreign, quoted
from mhaprune.storage.seals import checksum_of
from mhaprune.storage.store import make_folder, write_json
from mhaprune.surgery.bare_weights import as_written
from mhaprune.surgery.copying import copied
from mhaprune.surgery.counts import COUNTS
from mhaprune.surgery.record import Cut, pretrained_in
from mhaprune.surgery.reshaping import shrink
from mhaprune.surgery.torch_attention import TorchAttention
from mhaprune.tables import by_block

WIDTH_OF_HEAD = ("head_dim", "d_kv", "kv_channels", "attention_head_dim")
"""Keys of a config that hold the width of a head, so that the number of heads may change."""


FEED_FORWARD = ("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim")
"""Keys of a config that hold the number of neurons of a feed-forward layer; None where it follows from another."""
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers")
HEADS = (*COUNTS, "num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads")
DROPPED = ("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "embedding_dropout")
PROBABILITIES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attn_pdrop", "resid_pdrop", "embd_pdrop")
ALLOWED: dict[str, Any] = {
    **dict.fromkeys(LAYERS, Within(0, 1000)),
    **dict.fromkeys(HEADS, Ge(0)),
    **dict.fromkeys((*DROPPED, *PROBABILITIES), Within(0, 1)),
}
"""Allowed ranges of numbers in a config, by their keys."""
IMPLEMENTATIONS = {None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm"}
"""The implementations of attention and experts that are code of torch and transformers."""
ADAPTER = "adapter_config.json"
CHECKSUMS = "checksums.json"
"""The name of the file that holds a checksum of every other file but the model card, which people edit."""


def save_folder(
    model: nn.Module,
    path: str | Path,
    tokenizer: Any = None,
    table: pd.DataFrame | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a pruned model into a folder, and its tokenizer, or anything else with `save_pretrained`, if it is given.
    `table` is shown in the model card, the README of the folder, whose front matter has `about`.

    A model of transformers is read by its `AutoModel...` class, also if mhaprune is not installed:
    `AutoModelFor....from_pretrained(path, trust_remote_code=True)`. `trust_remote_code` is not needed if the config
    alone describes the shapes. Adapters of peft are merged first. A model that has all its weights in one of
    transformers and knows how to save itself, as a SentenceTransformer, does so around it. The folder is read again. If
    this is not the model, and for any other, a file of the removal is written, see `save_removal`.
    """
    if not str(path):
        raise ValueError('path="": must name a folder')
    with foreign(f"about={about}: must be texts, numbers and lists of them"):
        yaml.safe_dump(dict(about or {}))
    folder = make_folder("path", Path(path))
    if links := [each.name for each in folder.iterdir() if each.is_symlink()]:
        raise ValueError(f"path={path}: {links[0]!r} is a link, through which nothing is written")
    refuse_adapter("path", folder)
    if hasattr(model, "merge_and_unload"):
        model = cast("Any", copied(model)).merge_and_unload()
    model = as_written(model)
    _, part = pretrained_in(model)
    own = any(isinstance(module, TorchAttention | MultiHeadAttention) for module in model.modules())
    within_part = {id(weight) for weight in part.parameters()} if part is not None else set()
    saves = part is model or (
        hasattr(model, "save_pretrained") and all(id(weight) in within_part for weight in model.parameters())
    )
    plain = not own and saves and native_class(part) is not None and "mhaprune" not in vars(model)
    if plain and _writes(model, part, folder):
        (folder / REMOVAL).unlink(missing_ok=True)
    else:
        save_removal(model, folder)
        write_card(model, folder, f"mhaprune.load(folder, model={type(model).__name__}(...))")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    complete_card(folder, about or {}, table, tokenizer is not None)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in (CHECKSUMS, CARD))
    write_json(folder / CHECKSUMS, {path.name: checksum_of(path) for path in files})


def _writes(model: Any, part: Any, folder: Path) -> bool:
    """Write a model by `save_pretrained` of the model of transformers that is, or is in, it. Return whether this reads
    it again; if not, remove what was written, and warn."""
    if part is not model:
        model.save_pretrained(str(folder))
    before = {path.name for path in folder.iterdir()}
    code = (write_plain if Cut.of(part) is None else write_with_code)(part, folder)
    if not (why_not := difference_when_read(part, folder, code)):
        return True
    for path in list(folder.iterdir()):
        if path.is_file() and (path.name not in before or path.name in ("config.json", "model.safetensors")):
            path.unlink()
    warnings.warn(
        f"path={folder}: transformers alone cannot read this {type(part).__name__} ({why_not}), so it is written as"
        " weights for a model that your code builds: mhaprune.load(path, model=...)",
        stacklevel=2,
    )
    return False


def tell(before: Any, smaller: Any, mask: HeadMask, then: Sequence[str]) -> None:
    """Leave in the model of a smaller subject, for its card, what it has lost; `then` says how it was recovered."""
    gone = by_block(head for head in mask.grid if head in mask.removed)
    text = f"{len(mask.removed)} of {len(mask.grid)} {before.counted}: {gone}"
    if before.window is not None:
        text += f" (they still see the first {before.window[0]} tokens and the last {before.window[1]})"
    lost = [*vars(before.module).get(LOST, []), *[", then ".join([text, *then])] * bool(mask.removed)]
    for module in (smaller.module, pretrained_in(smaller.module)[1] or smaller.module):
        vars(module)[LOST] = lost


def _check(folder: Path) -> None:
    """Raise `Unsupported`, one line, if a file has changed since `save_folder` wrote it. transformers would not notice
    the change."""
    if not (folder / CHECKSUMS).exists():  # written by save_pretrained alone
        return
    with foreign(f"{folder}: damaged, {CHECKSUMS} does not fit"):
        noted = dict(json.loads((folder / CHECKSUMS).read_text()))
        changed = [name for name in noted if checksum_of(folder / Path(name).name) != noted[name]]
    if changed:
        raise Unsupported(
            f"{folder}: damaged, {quoted(changed)} changed since it was saved; if you changed it yourself, remove"
            f" {CHECKSUMS}"
        )


def check_folder(path: Path) -> None:
    """Raise ValueError for a folder that holds a pipe or the like, which would block a reader."""
    if found := sorted(each.name for each in path.iterdir() if not (each.is_file() or each.is_dir())):
        raise ValueError(f"{path}: {quoted(found[:1])} is no regular file")


def check_index(path: Path) -> None:
    """Raise ValueError for a list of weights that leads out of the folder."""
    for file in path.glob("*.index.json"):
        with foreign(f"{path}: {file.name} cannot be read"):
            names = set(dict(json.loads(file.read_text())["weight_map"]).values())
        if outside := [name for name in names if Path(str(name)).name != name]:
            raise ValueError(f"{path}: {file.name} names {quoted(outside)}, must name files of this folder")


def refuse_adapter(key: str, folder: Path) -> None:
    """Raise ValueError for a folder with an adapter: transformers would load its base model from elsewhere."""
    if (folder / ADAPTER).exists():
        raise ValueError(f"{key}={folder}: holds {ADAPTER}, must have no adapter; merge it into its model with peft")


def check_config(config: Any, trust_remote_code: bool = False) -> None:
    """Raise ValueError for numbers with which a model takes hours to build, or fails at its first call, and for an
    implementation that is code of somebody else, such as a kernel of a hub, unless `trust_remote_code`."""
    for name, value in () if trust_remote_code else _implementations(config):
        if value not in IMPLEMENTATIONS:
            raise ValueError(
                f"{name}={quoted([value])}: may be code of somebody else, must be"
                f" {', '.join(sorted(filter(None, IMPLEMENTATIONS)))}, unless code in the folder is trusted"
            )
    for name, value in vars(config).items():
        for word, allowed in ALLOWED.items():
            if word in name and isinstance(value, int | float) and value not in allowed:
                raise ValueError(f"{name}={value}: must be {allowed}")


def _implementations(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the implementations that a config and those in it name, each with its key."""
    inside = vars(config) if hasattr(config, "to_dict") else config if isinstance(config, Mapping) else {}
    for key, value in inside.items():
        of_all = str(key).removesuffix("_internal").endswith("_implementation")
        yield from _implementations(value, str(key) if of_all else name)
        if (of_all or name) and not isinstance(value, Mapping):
            yield name or str(key), value


def config_in(path: Path | str, **options: Any) -> Any:
    """Return the config in a folder. That of a folder with code of `save_folder` is read without this code."""
    import transformers

    file = Path(path, "config.json")
    noted = json.loads(file.read_text()) if file.is_file() else {}
    named = str(noted.get("model_type")).removesuffix(FEWER)
    of_ours = str(noted.get("model_type")) != named
    kind = getattr(getattr(transformers, str((noted.get("architectures") or [""])[0]), None), "config_class", None)
    if of_ours and kind is None:
        kind = transformers.CONFIG_MAPPING[named]
    if kind is None or named != kind.model_type or ("auto_map" in noted and not of_ours):
        return transformers.AutoConfig.from_pretrained(path, **options)
    content, _ = kind.get_config_dict(path, **options)  # which knows how transformers writes Infinity
    return kind.from_dict(content | {"model_type": kind.model_type})


def class_in(folder: Path | str, config: Any, auto: str) -> Any:
    """Return the class in the folder's own code for an `AutoModel...` class, or None. It runs that code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    named = getattr(config, "auto_map", None) or {}
    return get_class_from_dynamic_module(named[auto], folder) if auto in named else None


def load_folder(
    path: Path, trust_remote_code: bool = False, model: nn.Module | None = None, **options: Any
) -> nn.Module:
    """Load a model that `save_folder` or `save_pretrained` wrote, pruned or not. Raises ValueError, one line, for
    anything else, and for weights that are missing, unexpected or of another shape.

    `trust_remote_code` allows Python code in the folder to run. Folders written by `save_folder` do not need it.
    `model` is for a removal file, see `load_removal`.
    """
    if (path / REMOVAL).exists():
        check_folder(path)
        _check(path)
        return load_removal(path, model)
    if model is not None:
        raise ValueError(f"model={type(model).__name__}: is for a folder with {REMOVAL}, {path} has none")
    try:
        import transformers
    except ImportError:
        raise Unsupported(f"{path}: is a model of transformers, install it: pip install 'mhaprune[hf]'") from None
    check_folder(path)
    check_index(path)
    _check(path)
    refuse_adapter("path", path)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code} | options
    with foreign(f"{path}: its config.json cannot be read", "mhaprune.load(..., trust_remote_code=True)"):
        named = json.loads((path / "config.json").read_text()).get("architectures") or [None]
        with quiet(progress=True):  # transformers prints names of a folder as they are
            config = config_in(path, **options)
        check_config(config, trust_remote_code)
        kind: Any = getattr(transformers, str(named[0]), None)
        if kind is None and trust_remote_code:
            autos = [auto for auto in getattr(config, "auto_map", None) or {} if auto.startswith("AutoModel")]
            kinds = [class_in(path, config, auto) for auto in autos]
            kind = next((each for each in kinds if each.__name__ == named[0]), None)
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not known:
        raise ValueError(f"{path}: its architecture {quoted(named[:1])} is none that transformers has")
    with foreign(f"{path}: cannot be loaded"), shrinking(kind), quiet(progress=True):
        model, found = kind.from_pretrained(path, config=config, output_loading_info=True, **options)
    for what, names in found.items():
        if names:
            raise ValueError(f"{path}: damaged, {what.replace('_', ' ')}: {quoted(sorted(map(str, names)))}")
    assert isinstance(model, nn.Module)
    with foreign(f"{path}: damaged"):
        check_weights_finite(model)
    return model


@contextmanager
def shrinking(kind: Any) -> Iterator[None]:
    """Give models of this class, while this lasts, the shapes that their config names.

    A subclass would not work: transformers renames weights by the class, and would silently initialise some of them.
    """
    build = kind.__init__

    def init(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        build(self, config, *arguments, **named)
        cut = Cut.of(self) if type(self) is kind else None
        if cut is not None:
            shrink(self, cut.shapes, cut.attributes)
            saves_with_code(self)

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = build


def make_plain(model: nn.Module) -> bool:
    """Write the numbers of heads and neurons into the config of a pruned model, if they alone describe its shapes; else
    change nothing.

    This is tested: a model built from the new config, on the meta device, must have exactly the shapes of this one. A
    config without a width of heads gets one: many models read `head_dim`, the others fail the test.
    """
    _, part = pretrained_in(model)
    cut = None if part is None else Cut.of(part)
    more = {"inputs_of_heads", "streams"}  # which no config of transformers can say
    if cut is None or native_class(part) is None or any(more & each.keys() for each in cut.attributes.values()):
        return False
    state = part.state_dict()
    if not all(name in state or f"{name}.weight" in state for name in cut.shapes):
        return False  # a number per head that is not saved would be that of another head
    model, config = part, part.config
    attention = [path for path in cut.heads if path not in cut.shapes]
    groups = {cut.attributes.get(path, {}).get("num_key_value_groups", 1) for path in attention}
    sizes = {len(cut.heads[path]) for path in attention}
    widths = {len(left) for path, left in cut.heads.items() if path in cut.shapes}
    if len(sizes) > 1 or len(groups) > 1 or len(widths) > 1 or 0 in sizes | widths:
        return False
    plain = copy.deepcopy(config)
    for name in ("mhaprune", "auto_map"):
        if hasattr(plain, name):
            delattr(plain, name)
    now = {name: width for width in widths for name in FEED_FORWARD}
    for size, group in zip(sizes, groups, strict=True):
        now |= dict.fromkeys(COUNTS, size) | {"num_key_value_heads": size // group}
    for name, count in now.items():
        if isinstance(getattr(plain, name, None), int) or (name in FEED_FORWARD and hasattr(plain, name)):
            setattr(plain, name, count)
    try:
        if not any(getattr(config, name, None) for name in WIDTH_OF_HEAD):
            plain.head_dim = config.hidden_size // config.num_attention_heads
        with torch.device("meta"):
            same = type(model)(plain)
        with TemporaryDirectory() as place:  # some configs want features that are divisible by the number of heads
            plain.save_pretrained(place)
    except Exception:  # of a class that may be anybody's
        return False
    if _sizes(model) != _sizes(same):
        return False
    vars(part).pop("save_pretrained", None)
    vars(config).clear()  # in place, because all parts of the model hold it
    vars(config).update(vars(plain))
    return True


def _sizes(model: nn.Module) -> dict[str, Any]:
    """Return the shapes of all weights and buffers, and all numbers of all modules, such as factors of scores."""
    shapes = {name: value.shape for name, value in (*model.state_dict().items(), *model.named_buffers())}
    parts = ((path, *item) for path, module in model.named_modules() for item in vars(module).items())
    numbers = {f"{path}.{name}": value for path, name, value in parts if isinstance(value, float)}
    return shapes | numbers
