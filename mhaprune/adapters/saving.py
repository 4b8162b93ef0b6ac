"""Pruned models of transformers as folders: written by their own `save_pretrained`, read back here.

Where every layer has lost as many heads as any other, and the config has a place for that, the folder is a plain one
that transformers reads. Where it is ragged, `config.mhaprune` says which shapes the weights have.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mhaprune.adapters.blocks import Unsupported
from mhaprune.adapters.removal import COUNTS, Cut, shrink

KV_COUNTS = ("num_key_value_heads",)
WIDTH_OF_HEAD = ("head_dim", "d_kv", "kv_channels", "attention_head_dim")
"""The keys of a config that hold how wide a head is, so that their number may change."""


def is_folder_of_transformers(path: Path) -> bool:
    """Whether it looks like what `save_pretrained` writes."""
    return path.is_dir() and (path / "config.json").exists()


def load_folder(path: Path, **options: Any) -> nn.Module:
    """A model that `save_pretrained` wrote, pruned or not. Raises `Unsupported`, one line, for anything else, and for
    weights that are missing, unexpected or of another shape."""
    try:
        import transformers
    except ImportError:
        raise Unsupported(f"{path}: is a model of transformers, install it: pip install 'mhaprune[hf]'") from None
    try:
        named = json.loads((path / "config.json").read_text()).get("architectures") or [None]
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise Unsupported(f"{path}: its config.json cannot be read ({str(error).splitlines()[0]})") from None
    kind = getattr(transformers, str(named[0]), None)
    if kind is None:
        raise Unsupported(f"{path}: its architecture {named[0]} is none that transformers has")
    with _shrinking(kind):
        try:
            model, found = kind.from_pretrained(path, config=config, output_loading_info=True, **options)
        except (OSError, RuntimeError, ValueError) as error:
            raise Unsupported(f"{path}: cannot be loaded ({str(error).splitlines()[0]})") from None
    for what, names in found.items():
        if names:
            raise Unsupported(f"{path}: damaged, {what.replace('_', ' ')}: {', '.join(sorted(map(str, names))[:3])}")
    assert isinstance(model, nn.Module)
    return model


@contextmanager
def _shrinking(kind: Any) -> Iterator[None]:
    """Models of this very class are built with the shapes that their config names.

    No subclass will do: transformers renames weights by the class, and would fill some of them afresh without a word.
    """
    build = kind.__init__

    def init(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        build(self, config, *arguments, **named)
        cut = Cut.of(self) if type(self) is kind else None
        if cut is not None:
            shrink(self, cut)

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = build


def make_plain(model: nn.Module) -> bool:
    """Say in the config of a pruned model how many heads it has, if that is all there is to say; else change nothing.

    It is tried: a model built from such a config, without memory, must have exactly the shapes of this one.
    """
    cut, config = Cut.of(model), getattr(model, "config", None)
    if cut is None or config is None or not any(getattr(config, name, None) for name in WIDTH_OF_HEAD):
        return False
    counts = {name: new for attributes in cut.attributes.values() for name, new in attributes.items() if name in COUNTS}
    groups = {attributes.get("num_key_value_groups", 1) for attributes in cut.attributes.values()}
    sizes = {len(heads) for heads in cut.heads.values()}
    if len(sizes) != 1 or len(groups) != 1 or not sizes - {0}:
        return False
    (size,), (group,) = sizes, groups
    plain = copy.deepcopy(config)
    del plain.mhaprune
    for name in (*COUNTS, *counts):
        if isinstance(getattr(plain, name, None), int):
            setattr(plain, name, size)
    for name in KV_COUNTS:
        if isinstance(getattr(plain, name, None), int):
            setattr(plain, name, size // group)
    try:
        with torch.device("meta"):
            same = type(model)(plain)
    except (ValueError, TypeError, RuntimeError):
        return False
    ours = {name: value.shape for name, value in model.state_dict().items()}
    if ours != {name: value.shape for name, value in same.state_dict().items()}:
        return False
    model.config = plain
    return True
