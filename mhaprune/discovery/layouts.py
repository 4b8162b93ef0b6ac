"""Read from gradients which rows of linear modules make each head, and which columns of W_O read it.

Dimensions: B = batch, T = positions, H = heads, K = width of a head, W = outputs or inputs of a linear module.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn

from mhaprune.hooks.blocks import ROLES, Block, Rows, neighbours

NOTHING = "made by no linear module"
LORA = "adapted by LoRA; call merge_and_unload() on the model first"
Leaves = Sequence[tuple[nn.Module, Tensor]]
"""Linear modules with their outputs, which are leaves of the graph."""


def reached(number: Tensor, leaves: Leaves) -> list[tuple[nn.Module, Tensor, Tensor]]:
    """Return the leaves that a number depends on, each with its module before it and its gradient after it."""
    if not number.requires_grad:  # as where a part of the model runs without gradients
        return []
    tensors = [leaf for _, leaf in leaves] or [number]
    gradients = torch.autograd.grad(number, tensors, retain_graph=True, allow_unused=True)
    pairs = zip(leaves, gradients, strict=False)
    return [(module, leaf, gradient) for (module, leaf), gradient in pairs if gradient is not None]


def features_of(gradient: Tensor) -> list[int]:
    """Return the features, which are the last dimension, for which a gradient is not 0 everywhere."""
    found: list[int] = (
        gradient.reshape(math.prod(gradient.shape[:-1]), gradient.shape[-1]).any(dim=0).nonzero().flatten().tolist()
    )
    return found


def rows_read(part: Tensor, leaves: Leaves) -> dict[int, tuple[int, ...]]:
    """Return the rows of linear modules that a tensor depends on, by the number of the module among the leaves."""
    weights = drawn(part) + 0.5  # without them, parts could cancel
    numbers = {id(leaf): n for n, (_, leaf) in enumerate(leaves)}
    found = {
        numbers[id(leaf)]: tuple(features_of(gradient)) for _, leaf, gradient in reached((part * weights).sum(), leaves)
    }
    return {n: rows for n, rows in found.items() if rows}


def rows_of_heads(
    heads: Tensor, leaves: Leaves, paths: Mapping[nn.Module, str], repeated: bool = False
) -> tuple[list[Rows] | str, bool]:
    """Return the linear modules that made these heads, (B, heads, T, K), with the rows of each head; or the reason why
    there are none. The second value is False if a head has fewer rows than others, or than its width.

    Rows that every head reads belong to none: they stay. If there are no others, they are those of one head, as in
    multi-query attention (Shazeer 2019). So it is with the rotary part of the keys in multi-head latent
    attention (DeepSeek-V2, 2024). If heads may be `repeated`, several of them may have the same rows.
    """
    weights = drawn(heads) + 0.5  # without them, parts could cancel
    made = reached((heads * weights).sum(), leaves) if heads.requires_grad else []
    rows: dict[str, list[tuple[int, ...]]] = {}
    for h in range(heads.shape[1]) if made else ():
        for module, _, gradient in reached((heads[:, h] * weights[:, h]).sum(), [each[:2] for each in made]):
            rows.setdefault(paths[module], [()] * heads.shape[1])[h] = tuple(features_of(gradient))
    rows = {path: each for path, each in rows.items() if any(each)}
    if not rows:
        return NOTHING, True
    if any("lora_" in path for path in rows):
        return LORA, True
    widths = [sum(map(len, of_head)) for of_head in zip(*rows.values(), strict=True)]
    whole = len(set(widths)) == 1 and widths[0] >= heads.shape[-1]
    own = {path: _without_shared(each) for path, each in rows.items()}
    own = {path: each for path, each in own.items() if any(each)}
    if not own and len(rows) == 1 and widths[0] <= heads.shape[-1]:
        return [Rows(path, (each[0],)) for path, each in rows.items()], whole
    own = own or rows
    for path, each in own.items():
        if len({row for head in each for row in head}) != sum(map(len, each)):
            parts = set(each)
            shared = 1 < len(parts) < len(each)
            if repeated and shared and len(set().union(*parts)) == sum(map(len, parts)) and () not in parts:
                continue
            how = f"made once for several heads by {path}" if shared else f"mixed from the heads of {path} (a norm?)"
            return how, whole
        if len(set(map(len, each))) > 1:
            return f"made of unequal numbers of rows of {', '.join(own)}", whole
    return [Rows(path, tuple(each)) for path, each in own.items()], whole


def handed_on(blocks: Mapping[str, Block], scored_by: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the keys of blocks whose heads are made also by rows that make the heads of another block, as values or
    scores that a layer adds to those of the next; each with the reason why they cannot be removed. `scored_by` holds
    the linear modules that the scores of a block are made by."""
    users: dict[str, dict[str, Block]] = {}
    for block in blocks.values():
        for source in block.made_by:
            users.setdefault(source.rows.path, {})[block.noted] = block
    found: dict[str, str] = {}
    for path, of in users.items():
        rows = [row for block in of.values() if block.flat for row in {*block.rows_of(path)}]
        again = len({*rows}) < len(rows) or any(source.role == "" for block in of.values() for source in block.made_by)
        if len(of) > 1 and again:
            found |= dict.fromkeys(of, f"{path} makes heads of {' and of '.join(of)}, which could only go together")
    for path, before in ((path, before) for path in blocks for before in blocks if before != path):
        own, theirs = ({source.rows.path for source in blocks[each].made_by if source.role} for each in (path, before))
        if added := (theirs - own).intersection(scored_by[path]):
            reason = f"{min(added)} makes scores of {before} and of {path}, whose heads could only go together"
            found |= dict.fromkeys((before, path), reason)
    return found


def without_repeats(rows: dict[str, Rows | str]) -> list[int]:
    """If a layer itself repeats keys and values for several heads, leave one part of each in these `rows`, which are
    named by their roles. Return the number of the part that each head reads; an empty list if nothing is repeated."""
    found = {
        name: made.heads for name in ROLES[1:] if isinstance(made := rows.get(name), Rows) and len({*made.heads}) > 1
    }
    if len(found) < 2 or all(len({*heads}) == len(heads) for heads in found.values()):
        return []
    of, other = ([[*dict.fromkeys(heads)].index(head) for head in heads] for heads in found.values())
    for name, heads in found.items():
        parts = tuple(dict.fromkeys(heads))
        made = cast("Rows", rows[name])
        rows[name] = replace(made, heads=parts) if of == other else "not shared by the same heads as the other part"
    return of if of == other else []


def _without_shared(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    shared = reduce(set.intersection, map(set, rows), set(rows[0]))
    return [tuple(row for row in head if row not in shared) for head in rows]


def columns_of_heads(
    x: Tensor, leaf: Tensor, heads_last: bool, known: Sequence[Sequence[int]] = ()
) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Return, for each head, the columns of x that depend on it, found by a gradient for each column, with those that
    are `known`. `leaf` holds the outputs of the heads, (B, H, T, K), or (B, T, H, K) if `heads_last`. The second value
    is as in `rows_of_heads`."""
    H, K = leaf.shape[2 if heads_last else 1], leaf.shape[-1]
    said = leaf.detach() if heads_last else leaf.detach().transpose(1, 2)
    if x.shape[-1] == H * K and torch.equal(x.detach().flatten(), said.flatten()):
        return neighbours(x.shape[-1], H), True
    of_head: list[set[int]] = [{*each} for each in known] if len(known) == H else [set() for _ in range(H)]
    other, weights = (0, 1, 3) if heads_last else (0, 2, 3), drawn(x[..., 0]) + 0.5  # sums are alike after a norm
    for column in range(x.shape[-1]):
        (gradient,) = torch.autograd.grad((x[..., column] * weights).sum(), leaf, retain_graph=True)
        for h in gradient.abs().sum(other).nonzero().flatten().tolist():
            of_head[h].add(column)
    found, widths = tuple(map(tuple, map(sorted, of_head))), set(map(len, of_head))
    side_by_side = neighbours(x.shape[-1], H)
    if () in found and any(found) and all(each in ((), side) for each, side in zip(found, side_by_side, strict=True)):
        return side_by_side, True  # heads whose gate is 0 now
    return found, len(widths) == 1 and min(widths) >= K


def probe(x: Tensor) -> Tensor:
    """Return numbers of the same size, none of them 0, with signs like the fields of a chessboard. An activation is
    then nowhere flat for all positions."""
    places = [torch.arange(size, device=x.device) for size in x.shape]
    black = torch.stack(torch.meshgrid(*places, indexing="ij")).sum(dim=0) % 2 == 0
    size = x.abs() + x.abs().mean().clamp(min=1e-3) * (0.5 + drawn(x))
    return torch.where(black, size, -size)


def above(x: Tensor) -> Tensor:
    """Return the same numbers without a sign, for a call with one position, where an activation may be flat below 0."""
    return probe(x).abs()


def drawn(x: Tensor) -> Tensor:
    """Return random numbers from 0 to 1 of the same size. The numbers that the model draws stay what they are."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
