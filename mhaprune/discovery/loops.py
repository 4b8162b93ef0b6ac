"""Find heads that a layer computes in several calls of attention, as in a loop, and join them to one block.

Dimensions: B = batch, T = queries, H = heads, K = head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise, product

import torch
from torch import Tensor, nn

from mhaprune.discovery.found import MIXED, Found
from mhaprune.discovery.layouts import drawn
from mhaprune.discovery.per_head_tensors import is_sum
from mhaprune.hooks.blocks import Block, Rows, Source, Unsupported

OTHER_ORDER = "its heads are computed by several calls of attention, in another order than that in which W_O reads them"


def together(
    calls: Sequence[Found],
    x: Tensor,
    find_factor: Callable[[Found, Tensor, Sequence[Found]], None],
    find_numbers: Callable[[Found, Sequence[Tensor]], None] | None,
) -> None:
    """Join several `calls` in one module, or in its parts, whose heads one W_O reads in its input x.

    They may say parts of the same heads, which are added. Else, if W_O reads the heads of all calls in their order, the
    first call gets the factors of all, and each call the tensors that hold a part for each of them. The functions are
    those of a `Trace`.
    """
    first, *others = calls
    for found in others:
        found.beside = True
    columns = [each for found in calls for each in found.columns]
    if len({*chain(*columns)}) < sum(map(len, columns)):  # the same heads at other positions, or mixed ones
        if find_numbers is not None and _meet(calls, x):
            alike = len({found.columns for found in calls}) == 1 and first.heads > 1  # else they are heads of a loop
            summed = alike and _of_same_heads(calls, x)
            for found in calls:
                found.unusable = "" if summed else MIXED
                found.part, found.of_parts = summed and found is not first, summed
            if summed:
                find_numbers(first, [torch.stack([x[..., list(each)] for each in first.columns], dim=1)])
        return
    if len({found.module for found in calls}) > 1:
        return
    if any(found.unusable for found in calls) or columns != sorted(columns) or len({*map(len, columns)}) != 1:
        return
    whole = replace(first, heads=len(columns), rows={**first.rows}, numbers=[], inputs=[])
    find_factor(whole, x, calls)
    first.factor = whole.factor
    for found in others:
        found.factor = None
    if find_numbers is None:
        return
    parts = [found.computed for found in calls]
    alike = all(len({of_call.shape for of_call in each}) == 1 for each in zip(*parts, strict=False))
    made = [torch.cat(each, dim=1) for each in zip(*parts, strict=False)] if alike else []
    find_numbers(whole, [*made, torch.stack([x[..., list(each)] for each in columns], dim=1)])
    more = {name: rows for name, rows in whole.rows.items() if name not in first.rows and isinstance(rows, Rows)}
    ends = accumulate((found.heads for found in calls), initial=0)
    for found, (begin, end) in zip(calls, pairwise(ends), strict=True):
        found.numbers, found.inputs, found.gated = whole.numbers, whole.inputs, whole.gated
        found.rows |= {name: replace(rows, heads=rows.heads[begin:end]) for name, rows in more.items()}


def _of_same_heads(calls: Sequence[Found], x: Tensor) -> bool:
    """Return whether W_O reads in x the sum of what the heads say in several calls, each with weights of its own, and
    nothing else. The first call gets the rows that make the queries, keys and values of all."""
    first, *others = calls
    contexts = [found.context for found in calls if found.context is not None]
    if summed := is_sum(x[..., [*chain(*first.columns)]], contexts):
        return False
    first.bent = summed is None
    for found in others:
        for name, rows in found.rows.items():
            if isinstance(rows, Rows) and rows not in first.rows.values():
                first.rows[f"{name} of {rows.path}, again"] = rows
    return True


def _meet(calls: Sequence[Found], x: Tensor) -> bool:
    """Return whether several calls reach one column of x at one position, the first or the last, as behind a norm over
    all heads. Calls for some of the positions each do not meet."""
    contexts = [found.context for found in calls if found.context is not None]
    for place, columns in product(x.flatten(0, -2)[[0, -1]], {tuple(chain(*found.columns)) for found in calls}):
        part = place[list(columns)]
        read = torch.autograd.grad((part * drawn(part)).sum(), contexts, retain_graph=True, allow_unused=True)
        if sum(each is not None and bool(each.any()) for each in read) > 1:
            return True
    return False


def of_call(block: Block | None, found: Sequence[Found], module: nn.Module, heads: int) -> Block | None:
    """Return the block of the next `heads` of a block that the module computes in several calls, of which some were
    `found`; another block as it is."""
    if block is None or not block.in_calls:
        return block
    begin = sum(each.heads for each in found if each.module is module and each.out is None)
    made_by = []
    for source in block.made_by:
        rows = tuple(source.rows.heads[n] for n in source.of[begin : begin + heads])
        made_by.append(replace(source, rows=replace(source.rows, heads=rows), of=tuple(range(len(rows)))))
    return replace(block, columns=block.columns[begin : begin + heads], made_by=tuple(made_by))


def joined(one: Block, other: Block) -> Block:
    """Return the block of the heads of two calls of attention in one module, such as those of a loop over heads, or
    near and far ones, which one W_O reads."""
    columns = one.columns + other.columns
    if len({*map(len, columns)}) > 1:
        raise Unsupported(f"{one.path or 'model'}: {one.out} reads heads of several widths")
    order = sorted(range(len(columns)), key=columns.__getitem__)
    made_by = []
    for role, path in dict.fromkeys((source.role, source.rows.path) for source in one.made_by + other.made_by):
        rows = [*one.rows_by_unit(role, path), *other.rows_by_unit(role, path)]
        rows = [rows[n] for n in order]
        parts = rows if () in rows else [*dict.fromkeys(rows)]  # heads may share keys and values
        of = range(len(rows)) if () in rows else map(parts.index, rows)
        made_by.append(Source(Rows(path, tuple(parts)), tuple(of), role))
    return replace(
        one,
        columns=tuple(columns[n] for n in order),
        made_by=tuple(made_by),
        names=tuple(range(len(columns))),
        attends=False,
        numbers=one.numbers if one.numbers == other.numbers else (),
        numbers_of_keys=(),
        inputs=one.inputs if one.inputs == other.inputs else (),
        why_not=one.why_not or other.why_not or ("" if [*columns] == sorted(columns) else OTHER_ORDER),
    )
