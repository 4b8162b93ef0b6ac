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
from mhaprune.hooks.blocks import ROLES, TWO_STAY, Block, Unsupported, around, block_of, weight_of
from mhaprune.surgery.copying import copied
from mhaprune.surgery.counts import attributes_around, attributes_left, counted, shares_its_bias
from mhaprune.surgery.handed_weights import ATTRIBUTES
from mhaprune.surgery.own_keys import shares_evenly, with_own_keys
from mhaprune.surgery.record import Cut
from mhaprune.surgery.reshaping import KEPT_IN, keep_numbers, tables, tie, ties
from mhaprune.surgery.resizing import has_sizes, resize
from mhaprune.surgery.torch_attention import TorchAttention


class Removal(NamedTuple):
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
    tied, cut = ties(model), Cut()
    left: list[Block] = []
    removals: list[Removal] = []
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
            if block.meets and len(keep) < 2:
                raise MustKeep(f"{block.path}: {TWO_STAY}")
            if not shares_evenly(model, block, keep):
                block = with_own_keys(model, block)
            removals.append(Removal(len(left), block, list(keep), _staying(model, block, keep)))
            left.append(block)
    _renumber(model, removals)
    rows, columns = _rows_to_drop(removals), _columns_to_drop(removals)
    of_place = {removal.place: removal for removal in removals}
    for n, block in enumerate(left):  # another block may share maps with one that loses heads
        every = list(range(block.heads))
        left[n] = _block_without(of_place.get(n, Removal(n, block, every, every)), rows, columns)
    widths = _resize_maps(model, rows, columns, cut)
    for removal in removals:
        _silence(model, removal, columns, cut)
        _cut_numbers(model, removal, blocks[removal.place], cut)
        _note_counts(model, removal, cut)
        if removal.block.translated:
            _note_sizes(model, removal, widths, blocks, cut)
    for path, part in model.named_modules() if cut.heads else ():
        if "called_maps" in vars(part):
            cut.set(path, {name: getattr(part, name) for name in ATTRIBUTES})
    if not shared:
        _keep_ties(model, tied)
    if cut.heads:
        cut.leave_in(model)
    return model, left


def _resize_maps(
    model: nn.Module, rows: Mapping[str, set[int]], columns: Mapping[str, Sequence[int]], cut: Cut
) -> dict[str, tuple[int, int]]:
    """Drop these rows and columns of linear modules, in place. Return the number of rows of each before and after."""
    widths: dict[str, tuple[int, int]] = {}
    for path, gone in rows.items():
        module: Any = model.get_submodule(path)
        width = len(weight_of(module))
        resize(module, rows=[row for row in range(width) if row not in gone])
        cut.shapes[path] = list(module.weight.shape)
        widths[path] = (width, width - len(gone))
    for path, unread in columns.items():
        out: Any = model.get_submodule(path)
        lost = {*unread}
        resize(out, columns=[column for column in range(weight_of(out).shape[1]) if column not in lost])
        cut.shapes[path] = list(out.weight.shape)
    return widths


def _silence(model: nn.Module, removal: Removal, columns: Mapping[str, Sequence[int]], cut: Cut) -> None:
    """Let W_O read nothing of a head that stays in a block without heads, in place."""
    if removal.keep or not removal.stay:
        return
    block = removal.block
    for path in block.outs:
        if block.columns[0][0] - bisect_left(columns[path], block.columns[0][0]) > 0:
            raise MustKeep(f"{block.path}: must keep a head, because {path} reads others before its heads")
        weight_of(model.get_submodule(path)).data[:, : len(block.columns[0])] = 0
        cut.set(path, {"silent_columns": len(block.columns[0])})


def _cut_numbers(model: nn.Module, removal: Removal, before: Block, cut: Cut) -> None:
    """Cut the tensors with a part for each head or key-value head, in place. `before` is the block as it was before its
    heads got keys of their own."""
    block, stay = removal.block, removal.stay
    for path, dim, of in _numbers(model, block):
        places, parts = sorted({of[h] for h in stay}), len({*of})
        numbers = keep_numbers(model, path, places, dim, parts)
        cut.shapes[path] = list(numbers.shape)
        if not isinstance(numbers, nn.Parameter):
            first = before.of_kv if (path, dim) in block.numbers_of_keys else of
            _note_places(model, path, dim, len({*first}), [first[of.index(part)] for part in places], cut)
        holder = path.rpartition(".")[0]
        if block.kind == "neuron" or has_sizes(model.get_submodule(holder)):
            _set_sizes(model, holder, counted(block, stay)[parts < block.heads], cut)


def _note_counts(model: nn.Module, removal: Removal, cut: Cut) -> None:
    """Note which heads are left, and the attributes that count them."""
    _, block, keep, stay = removal
    cut.heads[block.noted] = [block.names[h] for h in keep]
    attention = model.get_submodule(block.path)
    cut.set(block.noted if block.kind == "neuron" else block.path, attributes_left(attention, block, stay))
    for path, values in attributes_around(model, block, stay).items():
        cut.set(path, values)


def _note_sizes(
    model: nn.Module, removal: Removal, widths: Mapping[str, tuple[int, int]], blocks: Sequence[Block], cut: Cut
) -> None:
    """Note the sizes that the code of a layer names, with those that take their place, see `tables`."""
    block = removal.block
    made = [widths[source.rows.path] for source in block.made_by if source.role]
    holder = around(block.path, *block.outs)
    if block.meets:
        whole = getattr(model.get_submodule(holder), "kept_of_all", range(block.heads))
        cut.set(holder, {"kept_of_all": [whole[h] for h in removal.stay]})
    before = cut.attributes.get(holder, {}).get("sizes_of_heads")
    before = getattr(model.get_submodule(holder), "sizes_of_heads", []) if before is None else before
    others = (each for n, each in enumerate(blocks) if n != removal.place)
    beside = [each for each in others if around(each.path, *each.outs) == holder]
    cut.set(holder, {"sizes_of_heads": tables(before, block, removal.stay, made, beside)})


def _renumber(model: Any, cut: Sequence[Removal]) -> None:
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
    parameters = dict(model.named_parameters())
    for path, _, of in _numbers(model, block) if block.heads else ():
        if path in parameters:
            users = Counter(of)
            held += torch.tensor([parameters[path].numel() / len(users) / users[part] for part in of])
    return held if block.call is None else held / block.calls


def _numbers(model: nn.Module, block: Block) -> Iterator[tuple[str, int, Sequence[int]]]:
    """Yield the path of each tensor that holds a number for each unit or key-value head, the dimension of these, and
    for each unit the place of its number."""
    if not shares_its_bias(model.get_submodule(block.path)):
        yield from ((path, dim, range(block.heads)) for path, dim in block.numbers)
        yield from ((path, dim, block.of_kv) for path, dim in block.numbers_of_keys)


def _keep_ties(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Make parameters that were one before a removal one again. Raises `Unsupported` if they differ now."""
    for names in tied:
        first, *others = map(model.get_parameter, names)
        for name, other in zip(names[1:], others, strict=True):
            if other is not first and not (other.shape == first.shape and torch.equal(other, first)):
                raise Unsupported(f"{names[0]} and {name}: are one weight, remove the same heads from both")
    tie(model, tied)


def _staying(model: nn.Module, block: Block, keep: Sequence[int]) -> list[int]:
    """Return the units that weights are kept for. A block without heads has one silent head, which outputs only zeros
    and does not count as a head; only a layer of ours, or a hollow one, can be empty."""
    return list(keep) or ([] if block.hollow or isinstance(model.get_submodule(block.out), Projection) else [0])


def _block_without(removal: Removal, dropped: Mapping[str, set[int]], unread: Mapping[str, Sequence[int]]) -> Block:
    """Return a block as it is when only some of its heads are left, and these rows and columns of linear modules are
    dropped."""
    _, block, keep, stay = removal
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


def _columns_to_drop(removals: Sequence[Removal]) -> dict[str, list[int]]:
    """Return the columns that read removed heads, in order, by the path of the linear module."""
    drop: dict[str, set[int]] = {}
    for _, block, _, stay in removals:
        gone = {column for h in range(block.heads) if h not in {*stay} for column in block.columns[h]}
        for path in block.outs:
            drop.setdefault(path, set()).update(gone)
    return {path: sorted(gone) for path, gone in drop.items()}


def _rows_to_drop(removals: Sequence[Removal]) -> dict[str, set[int]]:
    """Return the rows that belong to removed heads, by the path of the linear module."""
    drop: dict[str, set[int]] = {}
    for _, block, _, stay in removals:
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
    cut.set(path, {name: now[value] for name, value in sizes.items() if value in now})


def _note_places(model: nn.Module, path: str, dim: int, parts: int, now: Sequence[int], cut: Cut) -> None:
    """Note what is left of a tensor with so many parts, see `KEPT_IN`, beside what an earlier removal has noted."""
    owner, _, name = path.rpartition(".")
    noted, name = Cut.of(model) or Cut(), f"{KEPT_IN}.{name}"
    before = noted.attributes.get(owner, {}).get(name) or (dim, parts, *range(parts))
    if path not in noted.shapes or name in noted.attributes.get(owner, {}):  # else by an earlier version
        cut.set(owner, {name: [*before[:2], *(before[2 + part] for part in now)]})
