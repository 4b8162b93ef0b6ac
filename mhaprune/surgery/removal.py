"""Remove heads from a pretrained model: cut rows and columns, then set the attributes that count heads.

Dimensions: H = query heads of a block, K = head_dim.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import MultiHeadAttention, Projection
from mhaprune.hooks.blocks import (
    ROLES,
    Block,
    Rows,
    Source,
    Unsupported,
    around,
    block_of,
    weight_of,
    within,
)
from mhaprune.hooks.pytree import is_convolution, is_linear
from mhaprune.surgery.copying import copied
from mhaprune.surgery.handed_weights import ATTRIBUTES
from mhaprune.surgery.record import Cut
from mhaprune.surgery.reshaping import keep_numbers, store, tables, tie, ties
from mhaprune.surgery.torch_attention import TorchAttention

COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
"""Names of attributes that hold the number of heads of a module."""
WIDTHS = ("all_head_size", "split_size", "inner_dim", "hid_dim")
"""Names of attributes that hold the width of all heads together."""
MORE_COUNTS = (("head", "group"), ("head", "group", "embed", "hidden", "inner", "dim", "width"))
"""Two lists of words. An attribute with one of them in its name may hold a number of heads, or their width. The first
list is tried first."""


WIDTHS_OF_ONE = ("head_dim", "head_width", "head_size", "dim_head")
"""Parts of names of attributes that hold the width of one head, which stays."""


class Loss(NamedTuple):
    """The removal of heads from a block."""

    place: int
    """The place of the block among all."""
    block: Block
    """The block as it was."""
    keep: list[int]
    """The heads that are left."""
    stay: list[int]
    """The heads whose weights stay; see `_staying`."""


class MustKeep(Unsupported):
    """A layer that cannot lose all of its heads, but some."""


def keep_heads(model: nn.Module, path: str, kept: Sequence[int]) -> None:
    """Remove the other heads of the `MultiHeadAttention` at `path`, in place; `kept` are positions in the layer."""
    layer: Any = model.get_submodule(path)
    layer.keep_heads(kept)
    parent = model.get_submodule(path.rpartition(".")[0])
    if isinstance(parent, TorchAttention):
        parent.names = tuple(parent.names[h] for h in kept)


def remove_heads(
    model: nn.Module, blocks: Sequence[Block], kept: Sequence[Sequence[int]], shared: bool = False
) -> tuple[nn.Module, list[Block]]:
    """Return a copy of the model with only the heads `kept`, and the blocks of this copy. If `shared`, weights that are
    not cut are those of the model.

    `kept` lists positions in each block. A layer that loses all heads keeps one silent head, because views with -1 and
    key-value caches need one. A `MultiHeadAttention`, or attention of torch.nn, can be without heads. Raises
    `Unsupported` where heads can be gated but not removed.
    """
    tensors = (*model.parameters(), *model.buffers()) if shared else ()
    model = copied(model, {id(tensor): tensor for tensor in tensors})
    tied = ties(model)
    left, cut = [], Cut()
    generic: list[Loss] = []
    for block, keep in zip(blocks, kept, strict=True):
        layer = model.get_submodule(block.owner)
        if len(keep) == block.heads and not (isinstance(layer, MultiHeadAttention) and layer.gate):
            left.append(block)
        elif block.why_not:
            raise Unsupported(f"{block.path}: its heads can be gated, not removed: {block.why_not}")
        elif isinstance(layer, MultiHeadAttention):
            keep_heads(model, block.owner, keep)
            names = tuple(block.names[h] for h in keep)
            left.append(block_of(layer, block.owner, block.path, cross=block.cross, names=names))
            cut.heads[block.owner] = list(names)
        else:
            if not _shares_evenly(model, block, keep):
                block = with_own_keys(model, block)
            generic.append(Loss(len(left), block, list(keep), _staying(model, block, keep)))
            left.append(block)  # see below
    _renumber(model, generic)
    dropped, unread = _rows_to_drop(generic), _columns_to_drop(generic)
    lost = {loss.place: loss for loss in generic}
    for n, block in enumerate(left):  # another block may share maps with one that loses heads
        every = list(range(block.heads))
        left[n] = _block_without(lost.get(n, Loss(n, block, every, every)), dropped, unread)
    widths: dict[str, tuple[int, int]] = {}
    for path, rows in dropped.items():
        module: Any = model.get_submodule(path)
        width = len(weight_of(module))
        resize(module, rows=[row for row in range(width) if row not in rows])
        cut.shapes[path] = list(module.weight.shape)
        widths[path] = (width, width - len(rows))
    for path, gone in unread.items():
        out: Any = model.get_submodule(path)
        lost_columns = {*gone}
        resize(out, columns=[column for column in range(weight_of(out).shape[1]) if column not in lost_columns])
        cut.shapes[path] = list(out.weight.shape)
    for _, block, keep, stay in generic:
        for path in block.outs:
            if stay and not keep:
                if block.columns[0][0] - bisect_left(unread[path], block.columns[0][0]) > 0:
                    raise MustKeep(f"{block.path}: must keep a head, because {path} reads others before its heads")
                weight_of(model.get_submodule(path)).data[:, : len(block.columns[0])] = 0
                cut.attributes[path] = {"silent_columns": len(block.columns[0])}
        attention: Any = model.get_submodule(block.path)
        for path, dim in () if _shares_its_bias(attention) else block.numbers:
            cut.shapes[path] = list(keep_numbers(model, path, stay, dim, block.heads).shape)
            holder = path.rpartition(".")[0]
            of_torch = type(model.get_submodule(holder)).__module__.startswith("torch.nn")
            if block.kind == "neuron" or (of_torch and not is_linear(model.get_submodule(holder))):  # such as a norm
                _set_sizes(model, holder, _counted(block, stay)[0], cut)
        cut.heads[block.noted] = [block.names[h] for h in keep]
        place = block.noted if block.kind == "neuron" else block.path
        cut.attributes[place] = cut.attributes.get(place, {}) | _attributes(attention, block, stay)
        for path, values in (_around(model, block, stay) | _in_einops(model, block, stay)).items():
            cut.attributes[path] = cut.attributes.get(path, {}) | values
        if block.translated:
            made = [widths[source.rows.path] for source in block.made_by if source.role]
            holder = around(block.path, *block.outs)
            before = cut.attributes.get(holder, {}).get("sizes_of_heads")
            before = getattr(model.get_submodule(holder), "sizes_of_heads", []) if before is None else before
            beside = [each for each in blocks if each is not block and around(each.path, *each.outs) == holder]
            cut.attributes.setdefault(holder, {})["sizes_of_heads"] = tables(before, block, stay, made, beside)
    for path, part in model.named_modules() if cut.heads else ():
        if "called_maps" in vars(part):
            cut.attributes[path] = cut.attributes.get(path, {}) | {name: getattr(part, name) for name in ATTRIBUTES}
    if not shared:
        _keep_ties(model, tied)
    if cut.heads:
        cut.noted(model)
    return model, left


def _renumber(model: Any, cut: Sequence[Loss]) -> None:
    """Let the `alignment_heads` of a Whisper, pairs of a layer of cross-attention and a head in it, name the same heads
    when others are gone; None if it has none of them left."""
    config: Any = copy.deepcopy(getattr(model, "generation_config", None))
    if listed := getattr(config, "alignment_heads", None):
        layers = {int(re.findall(r"\d+", block.path)[-1]): (keep, stay) for _, block, keep, stay in cut if block.cross}
        now = {layer: {h: stay.index(h) for h in keep} for layer, (keep, stay) in layers.items()}
        found = [[layer, now[layer].get(h) if layer in now else h] for layer, h in listed]
        config.alignment_heads = [pair for pair in found if pair[1] is not None] or None
        model.generation_config = config


def held_weights(model: nn.Module, block: Block) -> Tensor:
    """Return how many weights a removal of each unit takes from the model, (H,), biases included. Weights that several
    units share, or that one unit uses in several calls, count in equal parts."""
    per_column = sum(len(weight_of(model.get_submodule(path))) for path in block.outs)
    held = torch.full((block.heads,), float(block.head_dim * per_column))
    for source in block.made_by:
        module = model.get_submodule(source.rows.path)
        per_row = weight_of(module).shape[1] + (module.bias is not None)
        users = Counter(source.of)
        stays = block.hollow and source.role != ROLES[-1]  # one row, see `_rows_to_drop`
        held += torch.tensor([per_row * (len(source.rows.heads[part]) - stays) / users[part] for part in source.of])
    if block.heads and block.numbers and not _shares_its_bias(model.get_submodule(block.path)):
        parameters = dict(model.named_parameters())
        held += sum(parameters[path].numel() / block.heads for path, _ in block.numbers if path in parameters)
    return held if block.call is None else held / block.calls


def _shares_evenly(model: nn.Module, block: Block, keep: Sequence[int]) -> bool:
    """Return whether the heads `keep` of a layer that repeats keys and values by its own code share them in its order:
    neighbours, or one head after the other. True for a layer whose keys need no such order."""
    of, layer = block.of_kv, model.get_submodule(block.path)
    if len(set(of)) == block.heads or hasattr(layer, "num_key_value_groups") or not keep or block.kind != "head":
        return True
    parts = sorted({of[h] for h in keep})
    now, each = [parts.index(of[h]) for h in keep], len(keep) // len(parts)
    turns = len(set(of)) > 1 and of[0] != of[1]
    return len(now) == each * len(parts) and now == [n % len(parts) if turns else n // each for n in range(len(keep))]


def with_own_keys(model: Any, block: Block) -> Block:
    """Give each head of a layer keys and values of its own, copies of those that it shared, in place. Return the block
    as it is then. Raises `Unsupported` if their rows do not stand side by side."""
    H, G = block.heads, len(set(block.of_kv))
    made_by = list(block.made_by)
    for n in range(len(made_by)):
        if (source := made_by[n]).role in ROLES[1:]:
            path, parts = source.rows.path, source.rows.heads
            module, whole = model.get_submodule(path), sorted(row for part in parts for row in part)
            start, every = whole[0], len(weight_of(module))
            if whole != [*range(start, start + len(whole))]:
                raise Unsupported(
                    f"{path} makes the {source.role} of each group beside its queries, so single heads of a group"
                    " cannot have keys and values of their own"
                )
            copies = [row for part in source.of for row in parts[part]]
            rows = [*range(start), *copies, *(row for row in range(start, every) if row not in {*whole})]
            resize(module, rows=rows)
            more = len(copies) - len(whole)

            def later(other: Source, path: str = path, start: int = start, more: int = more) -> Source:
                moved = tuple(tuple(row + more * (row > start) for row in part) for part in other.rows.heads)
                return replace(other, rows=replace(other.rows, heads=moved)) if other.rows.path == path else other

            made_by = [other if m == n else later(other) for m, other in enumerate(made_by)]
            K = len(parts[0])
            own = tuple(tuple(range(start + h * K, start + (h + 1) * K)) for h in range(H))
            made_by[n] = Source(Rows(path, own), tuple(range(H)), source.role)
    K = block.head_dim
    for path, name in _named(block):
        value = _number(model.get_submodule(path), name)
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
    return replace(block, made_by=tuple(made_by))


def _holders(model: nn.Module, block: Block) -> dict[str, nn.Module]:
    """Return the modules from that of a block up to the one that holds its W_O too, by their paths."""
    last, paths = around(block.path, *block.outs), [block.path]
    while paths[-1] != last:
        paths.append(paths[-1].rpartition(".")[0])
    return {path: model.get_submodule(path) for path in paths}


def _named(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the path of the module and the name of each attribute that a block says may count its heads."""
    for name in block.counts:
        path = block.path
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
    for name, value in vars(layer).items():
        if type(value) is not int:
            continue
        of_part = value * parts == heads and parts_left  # the heads of a part, which may be as many as the parts
        if "kv" in name and value == parts and not (of_part and "rep" in name):
            now[name] = parts_left
        elif any(word in name for word in ("rep", "group")) and of_part:
            now[name] = left // parts_left
    return now


def _keep_ties(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Make parameters that were one before a removal one again. Raises `Unsupported` if they differ now."""
    for names in tied:
        first, *others = map(model.get_parameter, names)
        for name, other in zip(names[1:], others, strict=True):
            if other is not first and not (other.shape == first.shape and torch.equal(other, first)):
                raise Unsupported(f"{names[0]} and {name}: are one weight, remove the same heads from both")
    tie(model, tied)


def resize(module: Any, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None) -> None:
    """Keep only these outputs and inputs of a linear module, in place."""
    weight, bias = weight_of(module).detach(), None if module.bias is None else module.bias.detach()
    if rows is not None:
        index = torch.tensor(rows, dtype=torch.long, device=weight.device)
        weight, bias = weight[index], None if bias is None else bias[index]
    if columns is not None:
        weight = weight.index_select(1, torch.tensor(columns, dtype=torch.long, device=weight.device))
    as_stored = weight if isinstance(module, nn.Linear) else weight.mT
    if is_convolution(module):
        as_stored = weight.unflatten(1, (-1, *module.kernel_size))
    store(module, as_stored.contiguous(), bias)


def _staying(model: nn.Module, block: Block, keep: Sequence[int]) -> list[int]:
    """Return the units that weights are kept for. A block without heads has one silent head, which outputs only zeros
    and does not count as a head; only a layer of ours, or a hollow one, can be empty."""
    return list(keep) or ([] if block.hollow or isinstance(model.get_submodule(block.out), Projection) else [0])


def _block_without(loss: Loss, dropped: Mapping[str, set[int]], unread: Mapping[str, Sequence[int]]) -> Block:
    """Return a block as it is when only some of its heads are left, and these rows and columns of linear modules are
    dropped."""
    _, block, keep, stay = loss
    gone = {path: sorted(dropped.get(path, ())) for path in (source.rows.path for source in block.made_by)}
    columns = unread.get(block.out, ())
    if not columns and not any(gone.values()):
        return block

    def place(path: str, row: int) -> int:
        return row - bisect_left(gone[path], row)

    return replace(
        block,
        names=tuple(block.names[h] for h in keep),
        columns=tuple(tuple(c - bisect_left(columns, c) for c in block.columns[h]) for h in keep),
        made_by=tuple(source.without(keep, stay, partial(place, source.rows.path)) for source in block.made_by),
        silent=block.silent if len(keep) == block.heads else block.head_dim * (len(stay) - len(keep)),
    )


def _columns_to_drop(losses: Sequence[Loss]) -> dict[str, list[int]]:
    """Return the columns that read removed heads, in order, by the path of the linear module."""
    drop: dict[str, set[int]] = {}
    for _, block, _, stay in losses:
        gone = {column for h in range(block.heads) if h not in {*stay} for column in block.columns[h]}
        for path in block.outs:
            drop.setdefault(path, set()).update(gone)
    return {path: sorted(gone) for path, gone in drop.items()}


def _rows_to_drop(losses: Sequence[Loss]) -> dict[str, set[int]]:
    """Return the rows that belong to removed heads, by the path of the linear module."""
    drop: dict[str, set[int]] = {}
    for _, block, _, stay in losses:
        for source in block.made_by:
            staying = {source.of[h] for h in stay}
            gone = {row for n, part in enumerate(source.rows.heads) if n not in staying for row in part}
            if block.hollow and source.role != ROLES[-1]:
                gone -= {min(gone, default=0)}  # a product of vectors of width 0 has no scale
            drop.setdefault(source.rows.path, set()).update(gone)
    return drop


def _set_sizes(model: nn.Module, path: str, now: Mapping[int, int], cut: Cut) -> None:
    """Note the new sizes of a module with a part for each unit, such as the groups of a convolution by channel."""
    sizes = {name: value for name, value in vars(model.get_submodule(path)).items() if type(value) is int}
    cut.attributes[path] = {name: now[value] for name, value in sizes.items() if value in now}


def _attributes(attention: nn.Module, block: Block, keep: Sequence[int]) -> dict[str, Any]:
    """Return the attributes of an attention module that must change with its heads, with their new values."""
    if block.kind != "head" or block.hollow or block.flat:
        return {}
    H, K = block.heads, len(block.columns[0])
    of_kv = [block.of_kv[h] for h in keep]
    kv_left = sorted(set(of_kv))
    attributes: dict[str, Any] = {}
    heads, width = {H: len(keep)}, {H * K: len(keep) * K}
    usual = [name for name in COUNTS if name != "n_heads" or not _shares_its_bias(attention)]
    for names, now in ((usual, heads), (WIDTHS, width), (("num_key_value_heads",), _counted(block, keep)[1])):
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
    if _shares_its_bias(attention):
        before = getattr(attention, "kept_heads", range(H))
        attributes["kept_heads"] = [before[h] for h in keep]
    elif block.numbers or block.inputs or hasattr(attention, "kept_numbers"):
        before = getattr(attention, "kept_numbers", range(H))
        attributes["kept_numbers"] = [before[h] for h in keep]
        if block.inputs:
            attributes["inputs_of_heads"] = [each for pair in block.inputs for each in pair]
            attributes["all_heads"] = getattr(attention, "all_heads", H)
    return attributes


def _around(model: nn.Module, block: Block, keep: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return the attributes of modules around an attention module that must change with its heads, by their path."""
    found: dict[str, dict[str, int]] = {}
    if block.hollow:
        return found
    for path, holder in _holders(model, block).items():
        if path != block.path and not hasattr(holder, "num_key_value_groups"):
            G, left = len(set(block.of_kv)), len({block.of_kv[h] for h in keep})
            found[path] = _of_groups(holder, block.heads, G, left, len(keep))
    for path, name in _named(block):
        if path != block.path and (now := _left(model.get_submodule(path), name, block, keep)) is not None:
            found.setdefault(path, {})[name] = now
    return {path: values for path, values in found.items() if values}


def _left(module: nn.Module, name: str, block: Block, keep: Sequence[int]) -> int | None:
    """Return what an attribute that counts heads, or their keys and values, is later; None for another number."""
    of_heads, of_keys = _counted(block, keep)
    value = _number(module, name)
    now = of_heads | of_keys if _counts_keys(name) else of_keys | of_heads
    return None if value is None else now.get(value)


def _counts_keys(name: str) -> bool:
    return "kv" in name or "key_value" in name


def _counted(block: Block, keep: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the numbers that count heads and their width, and those that count keys, with what they are later."""
    H, K, G, left = block.heads, block.head_dim, len(set(block.of_kv)), len({block.of_kv[h] for h in keep})
    return {H: len(keep), H * K: len(keep) * K}, {G: left, G * K: left * K}


def _in_einops(model: nn.Module, block: Block, keep: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return the lengths of axes in the layers of einops around a block that must change with its heads, by their
    path."""
    if block.kind != "head" or block.flat:
        return {}
    heads, of_keys = _counted(block, keep)
    now = of_keys | heads
    start = around(block.path, block.out)
    found: dict[str, dict[str, int]] = {}
    for path, layer in model.get_submodule(start).named_modules(prefix=start):
        lengths = getattr(layer, "axes_lengths", None)
        if isinstance(lengths, dict):
            found[path] = {f"axes_lengths.{name}": now[n] for name, n in lengths.items() if now.get(n, n) != n}
    return {path: values for path, values in found.items() if values}


def _shares_its_bias(attention: nn.Module) -> bool:
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
    of_config = (*COUNTS, "num_key_value_heads", "n_query_groups")
    config = [f"config.{name}" for name in of_config] if hasattr(attention, "config") else []
    return replace(block, counts=(*block.counts, *names, *config))
