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
from itertools import accumulate
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
)
from mhaprune.hooks.pytree import is_convolution, is_linear
from mhaprune.surgery.copying import copied
from mhaprune.surgery.counts import attributes_around, attributes_left, count_own_keys, counted, shares_its_bias
from mhaprune.surgery.handed_weights import ATTRIBUTES
from mhaprune.surgery.record import Cut
from mhaprune.surgery.reshaping import KEPT_IN, keep_numbers, store, tables, tie, ties
from mhaprune.surgery.torch_attention import TorchAttention


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
    for number, block, keep, stay in generic:
        for path in block.outs:
            if stay and not keep:
                if block.columns[0][0] - bisect_left(unread[path], block.columns[0][0]) > 0:
                    raise MustKeep(f"{block.path}: must keep a head, because {path} reads others before its heads")
                weight_of(model.get_submodule(path)).data[:, : len(block.columns[0])] = 0
                cut.attributes[path] = {"silent_columns": len(block.columns[0])}
        attention: Any = model.get_submodule(block.path)
        for path, dim, of in _numbers(model, block):
            places, parts = sorted({of[h] for h in stay}), len({*of})
            numbers = keep_numbers(model, path, places, dim, parts)
            cut.shapes[path] = list(numbers.shape)
            if not isinstance(numbers, nn.Parameter):
                of_keys = (path, dim) in block.numbers_of_keys
                first = blocks[number].of_kv if of_keys else of  # before `with_own_keys`
                _note_places(model, path, dim, len({*first}), [first[of.index(part)] for part in places], cut)
            holder = path.rpartition(".")[0]
            if block.kind == "neuron" or _has_sizes(model.get_submodule(holder)):
                _set_sizes(model, holder, counted(block, stay)[parts < block.heads], cut)
        cut.heads[block.noted] = [block.names[h] for h in keep]
        place = block.noted if block.kind == "neuron" else block.path
        cut.attributes[place] = cut.attributes.get(place, {}) | attributes_left(attention, block, stay)
        for path, values in attributes_around(model, block, stay).items():
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
    parameters = dict(model.named_parameters())
    for path, _, of in _numbers(model, block) if block.heads else ():
        if path in parameters:
            users = Counter(of)
            held += torch.tensor([parameters[path].numel() / len(users) / users[part] for part in of])
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
    as it is then. Raises `Unsupported` if the rows of a group do not follow those of another."""
    H, G, K = block.heads, len(set(block.of_kv)), 0
    made_by = list(block.made_by)
    for path in dict.fromkeys(source.rows.path for source in made_by if source.role in ROLES[1:]):
        beside = [n for n, source in enumerate(made_by) if source.rows.path == path]
        shared = [n for n in beside if made_by[n].role in ROLES[1:]]
        # Keys or values alone; both of each group side by side; or the queries of a group with them.
        ways = [[n] for n in shared], [shared], [beside]
        way = next((way for way in ways if all(_by_group(block, made_by, n) for n in way)), None)
        if way is None:
            raise Unsupported(
                f"{path} makes the keys and values of a group between rows of others, so single heads of a group cannot"
                " have their own"
            )
        for together in way:
            rows = _by_group(block, made_by, together)
            of_head = [_of_head(made_by, together, h) for h in range(H)]
            module, first, end = model.get_submodule(path), rows[0], rows[-1] + 1
            copies, K = [row for each in of_head for row in each], len(made_by[shared[-1]].rows.heads[0])
            resize(module, rows=[*range(first), *copies, *range(end, len(weight_of(module)))])
            begins = accumulate(map(len, of_head), initial=first)
            places = [
                {row: begin + n for n, row in enumerate(each)} for begin, each in zip(begins, of_head, strict=False)
            ]
            for n in beside:
                source = made_by[n]
                if n in together:
                    own = [tuple(at[row] for row in source.rows.heads[source.of[h]]) for h, at in enumerate(places)]
                    made_by[n] = Source(Rows(path, tuple(own)), tuple(range(H)), source.role)
                else:
                    more = len(copies) - len(rows)
                    moved = tuple(tuple(row + more * (row > first) for row in part) for part in source.rows.heads)
                    made_by[n] = replace(source, rows=replace(source.rows, heads=moved))
    for path, dim in block.numbers_of_keys:
        keep_numbers(model, path, block.of_kv, dim, G)
    for holder in {model.get_submodule(path.rpartition(".")[0]) for path, _ in block.numbers_of_keys}:
        for name, value in [*vars(holder).items()] if _has_sizes(holder) else ():
            setattr(holder, name, value // G * H if type(value) is int and value in (G, G * K) else value)
    count_own_keys(model, block)
    return replace(block, made_by=tuple(made_by))


def _of_head(made_by: Sequence[Source], together: Sequence[int], h: int) -> list[int]:
    return sorted(row for n in together for row in made_by[n].rows.heads[made_by[n].of[h]])


def _by_group(block: Block, made_by: Sequence[Source], together: Sequence[int]) -> list[int]:
    """Return the rows of these sources, if those of one key-value group follow those of another; else none."""
    of_groups = [[h for h in range(block.heads) if block.of_kv[h] == g] for g in dict.fromkeys(block.of_kv)]
    rows = [
        row for heads in of_groups for row in sorted({row for h in heads for row in _of_head(made_by, together, h)})
    ]
    return rows if rows == [*range(rows[0], rows[0] + len(rows))] else []


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


def _has_sizes(module: nn.Module) -> bool:
    """Return whether a module of torch with tensors for each head has attributes that count them, such as a norm."""
    return type(module).__module__.startswith("torch.nn") and not is_linear(module)


def _set_sizes(model: nn.Module, path: str, now: Mapping[int, int], cut: Cut) -> None:
    """Note the new sizes of a module with a part for each unit, such as the groups of a convolution by channel."""
    sizes = {name: value for name, value in vars(model.get_submodule(path)).items() if type(value) is int}
    cut.attributes.setdefault(path, {}).update({name: now[value] for name, value in sizes.items() if value in now})


def _note_places(model: nn.Module, path: str, dim: int, parts: int, now: Sequence[int], cut: Cut) -> None:
    """Note what is left of a tensor with so many parts, see `KEPT_IN`, beside what an earlier removal has noted."""
    owner, _, name = path.rpartition(".")
    noted, name = Cut.of(model) or Cut(), f"{KEPT_IN}.{name}"
    before = noted.attributes.get(owner, {}).get(name) or (dim, parts, *range(parts))
    if path not in noted.shapes or name in noted.attributes.get(owner, {}):  # else by an earlier version
        cut.attributes.setdefault(owner, {})[name] = [*before[:2], *(before[2 + part] for part in now)]
