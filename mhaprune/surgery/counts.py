"""The attributes of modules that count heads, or hold their width: which they are, and what they are after a removal.

Dimensions: H = query heads of a block, G = key-value heads, K = head_dim.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mhaprune.hooks.blocks import Block, around, within

COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
"""Names of attributes that hold the number of heads of a module, or of a model in its config."""
OWN_COUNTS = (*COUNTS, "h")
"""Those of modules, with that of the Annotated Transformer."""
WIDTHS = ("all_head_size", "split_size", "inner_dim", "hid_dim")
"""Names of attributes that hold the width of all heads together."""
MORE_COUNTS = (("head", "group"), ("head", "group", "embed", "hidden", "inner", "dim", "width"), ("",))
"""Lists of words, tried in this order. An attribute with one of them in its name may hold a number of heads, or their
width: at last any attribute."""
WIDTHS_OF_ONE = ("head_dim", "head_width", "head_size", "dim_head")
"""Parts of names of attributes that hold the width of one head, which stays."""


def attributes_left(attention: nn.Module, block: Block, keep: Sequence[int]) -> dict[str, Any]:
    """Return the attributes of an attention module that must change with its heads, with their new values."""
    if block.kind != "head" or block.hollow or block.flat:
        return {}
    H, K = block.heads, len(block.columns[0])
    of_kv = [block.of_kv[h] for h in keep]
    kv_left = sorted(set(of_kv))
    attributes: dict[str, Any] = {}
    heads, width = {H: len(keep)}, {H * K: len(keep) * K}
    usual = [name for name in OWN_COUNTS if name != "n_heads" or not shares_its_bias(attention)]
    for names, now in ((usual, heads), (WIDTHS, width), (("num_key_value_heads",), counted(block, keep)[1])):
        attributes |= {name: now[value] for name in names if (value := _number(attention, name)) in now}
    if not hasattr(attention, "num_key_value_groups"):
        attributes |= _of_groups(attention, H, len(set(block.of_kv)), len(kv_left), len(keep))
    counts = [(name, _left(attention, name, block, keep)) for name in block.counts]
    attributes |= {name: left for name, left in counts if left is not None}
    if block.as_written:
        attributes = {}
    if hasattr(attention, "num_key_value_groups"):
        group = len(of_kv) // len(kv_left)
        even = of_kv == [g for g in kv_left for _ in range(group)]
        attributes["num_key_value_groups"] = group if even else 1
        if not even or getattr(attention, "kept_of_kv", None):  # None where an earlier removal was uneven
            attributes["kept_of_kv"] = None if even else [kv_left.index(g) for g in of_kv]
    if streams := getattr(attention, "streams", None):
        attributes["streams"] = streams[:2] + [kv_left.index(kv) for kv in streams[2:] if kv in kv_left]
    if shares_its_bias(attention):
        before = getattr(attention, "kept_heads", range(H))
        attributes["kept_heads"] = [before[h] for h in keep]
    elif block.numbers or block.inputs or hasattr(attention, "kept_numbers"):
        before = getattr(attention, "kept_numbers", range(H))
        attributes["kept_numbers"] = [before[h] for h in keep]
        if block.inputs:
            attributes["inputs_of_heads"] = [each for pair in block.inputs for each in pair]
            attributes["all_heads"] = getattr(attention, "all_heads", H)
    return attributes


def attributes_around(model: nn.Module, block: Block, keep: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return the attributes of modules around an attention module that must change with its heads, by their path."""
    found = _in_einops(model, block, keep)
    if block.hollow:
        return found
    for path, holder in _holders(model, block).items():
        if path != block.path and not hasattr(holder, "num_key_value_groups"):
            G, left = len(set(block.of_kv)), len({block.of_kv[h] for h in keep})
            found.setdefault(path, {}).update(_of_groups(holder, block.heads, G, left, len(keep)))
    for path, name in _named(block):
        if path != block.path and (now := _left(model.get_submodule(path), name, block, keep)) is not None:
            found.setdefault(path, {})[name] = now
    return {path: values for path, values in found.items() if values}


def _in_einops(model: nn.Module, block: Block, keep: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return the lengths of axes in the layers of einops around a block that must change with its heads, by their
    path."""
    if block.kind != "head" or block.flat:
        return {}
    heads, of_keys = counted(block, keep)
    now = of_keys | heads
    start = around(block.path, block.out)
    found: dict[str, dict[str, int]] = {}
    for path, layer in model.get_submodule(start).named_modules(prefix=start):
        lengths = getattr(layer, "axes_lengths", None)
        if isinstance(lengths, dict):
            found[path] = {f"axes_lengths.{name}": now[n] for name, n in lengths.items() if now.get(n, n) != n}
    return {path: values for path, values in found.items() if values}


def with_more_counts(model: nn.Module, block: Block, words: Sequence[str]) -> Block:
    """Return the block with the names of more attributes that may count heads, or hold their width: those of its config
    and those that contain one of these words, also in the modules around it up to the one that holds W_O.

    By its value alone an integer can be taken for such a number by mistake, so this is for models that do not run
    otherwise, and the proofs decide.
    """
    attention, path, names, up = model.get_submodule(block.path), block.path, list[str](), ""
    while True:
        named = (name for name in _numbers_of(model.get_submodule(path)) if any(word in name for word in words))
        names += [up + name for name in named if not any(width in name for width in WIDTHS_OF_ONE)]
        if within(block.out, path):
            break
        path, up = path.rpartition(".")[0], f"..{up}"
    for inner, part in attention.named_modules():  # those that make a part of what the layer reads
        if inner and not type(part).__module__.startswith("torch."):
            names += [f"{inner}:{name}" for name in vars(part) if any(word in name for word in MORE_COUNTS[0])]
    of_config = (*COUNTS, "num_key_value_heads", "n_query_groups")
    config = [f"config.{name}" for name in of_config] if hasattr(attention, "config") else []
    return replace(block, counts=(*block.counts, *names, *config))


def _left(module: nn.Module, name: str, block: Block, keep: Sequence[int]) -> int | None:
    """Return what an attribute that counts heads, or their keys and values, is later; None for another number."""
    of_heads, of_keys = counted(block, keep)
    value = _number(module, name)
    if value is not None and _counts_sharers(name) and value * len(set(block.of_kv)) == block.heads:
        return None
    now = of_heads | of_keys if _counts_keys(name) else of_keys | of_heads
    return None if value is None else now.get(value)


def counted(block: Block, keep: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the numbers that count heads and their width, and those that count keys, with what they are later."""
    H, K, G, left = block.heads, block.head_dim, len(set(block.of_kv)), len({block.of_kv[h] for h in keep})
    return {H: len(keep), H * K: len(keep) * K}, {G: left, G * K: left * K}


def _counts_keys(name: str) -> bool:
    return "kv" in name or "key_value" in name


def _holders(model: nn.Module, block: Block) -> dict[str, nn.Module]:
    """Return the modules from that of a block up to the one that holds its W_O too, by their paths."""
    last, paths = around(block.path, *block.outs), [block.path]
    while paths[-1] != last:
        paths.append(paths[-1].rpartition(".")[0])
    return {path: model.get_submodule(path) for path in paths}


def count_own_keys(model: nn.Module, block: Block) -> None:
    """Let the attributes of a layer count keys and values for each head, in place, where heads shared them."""
    H, K, G = block.heads, block.head_dim, len(set(block.of_kv))
    for path, name in _named(block):
        value = _number(model.get_submodule(path), name)
        if _counts_sharers(name) and value is not None and value * G == H:
            continue
        if value in (G, G * K) and (_counts_keys(name) or value not in (H, H * K)):
            place, _, last = name.rpartition(".")
            owner: Any = model.get_submodule(path)
            if place:
                setattr(owner, place, copy.copy(getattr(owner, place)))
                owner = getattr(owner, place)
            setattr(owner, last, value // G * H)
    for holder in _holders(model, block).values():
        for name, now in _of_groups(holder, H, G, H).items():
            setattr(holder, name, now)


def _named(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the path of the module and the name of each attribute that a block says may count its heads: `name` of its
    own, `..name` of the module around it, `part:name` of one in it."""
    for name in block.counts:
        path, inner = block.path, name.rpartition(":")[0]
        if inner:
            path, name = f"{path}.{inner}" if path else inner, name.rpartition(":")[2]
        while name.startswith(".."):
            path, name = path.rpartition(".")[0], name[2:]
        yield path, name


def _of_groups(
    layer: nn.Module, heads: int, parts: int, parts_left: int, heads_left: int | None = None
) -> dict[str, int]:
    """Return the attributes of a layer that count the parts of keys and values, or the heads of a part, by their names
    and values, with what they are for `parts_left` and `heads_left`."""
    left = heads if heads_left is None else heads_left
    now = {}
    numbers = {name: value for name, value in vars(layer).items() if type(value) is int}
    of_keys = {value for name, value in numbers.items() if _counts_keys(name) and not _counts_sharers(name)}
    for name, value in numbers.items():
        of_part = value * parts == heads and parts_left  # the heads of a part, which may be as many as the parts
        groups = of_part and "group" in name and name.startswith(("num_", "n_")) and parts not in of_keys
        of_parts = "kv" in name or groups
        if of_parts and value == parts and not (of_part and _counts_sharers(name)):
            now[name] = parts_left
        elif any(word in name for word in ("rep", "group")) and of_part:
            now[name] = left // parts_left
    return now


def _counts_sharers(name: str) -> bool:
    """Return whether an attribute says by its name how many heads share a part, and not how many parts there are."""
    return "rep" in name or re.search(r"(^|_)per_(kv|key|group|q)", name) is not None


def shares_its_bias(attention: nn.Module) -> bool:
    """Return whether an attention module makes a position bias for other layers too, as that of T5 does. The bias stays
    that of all heads, and each layer takes its part of it."""
    return hasattr(attention, "has_relative_attention_bias")


def _number(attention: nn.Module, name: str) -> int | None:
    """Return an integer of a module, or of its config for `config.NAME`, or of another object among its attributes;
    None if there is none."""
    holder, _, last = name.rpartition(".")
    value = getattr(getattr(attention, holder, None) if holder else attention, last, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _numbers_of(module: nn.Module) -> Iterator[str]:
    """Yield the names of the attributes of a module, and of plain objects among them but its config."""
    for name, value in vars(module).items():
        yield name
        plain = hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value)
        if plain and name != "config":
            yield from (f"{name}.{inner}" for inner, number in vars(value).items() if type(number) is int)
