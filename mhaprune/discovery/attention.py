"""Find the blocks of heads of a model: what a trace of one call shows, block by block."""

import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from mhaprune.discovery.found import CALLED_FOR_OTHERS, SUM, Found, completed, made_of
from mhaprune.discovery.hints import nothing_found, why_uncut
from mhaprune.discovery.layouts import above, handed_on, probe
from mhaprune.discovery.loops import joined
from mhaprune.discovery.per_head_tensors import differs, made_in_calls
from mhaprune.discovery.trace import Trace
from mhaprune.hooks.blocks import ROLES, Block, Rows, Source, Unsupported, around, within
from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.surgery.record import Cut


def discover(call: ModelCall) -> tuple[list[Block], list[str]]:
    """Return the blocks of a model in the order in which a call runs them, and the paths of modules that attend in a
    way in which no heads are found. Raises `Unsupported`, naming module and reason, if there is no block.

    Attention is found if it calls `F.scaled_dot_product_attention` or the attention interface of transformers, if it is
    two matrix products with a softmax between them, or another function that makes weights of 0 and more, or if it is a
    `MultiHeadAttention`.
    """
    trace, model = traced(call), call.model
    weights = trace.unexplained
    if weights:  # perhaps by weights of linear modules that are not called
        trace = traced(call, weights=True)
    for seen in () if trace.whole else (probe, above):
        before, trace = trace, traced(call, seen=seen, weights=weights, before=trace)
        completed(trace.found, before.found)
        if trace.whole:
            break
    if any(found.bent for found in trace.found):
        refuse_sums(call, trace.found)
    blocks: dict[str, Block] = {}
    scored_by: dict[str, set[str]] = {}
    noted = Cut.of(model) or Cut()
    holders = holders_of(trace)
    for found in trace.found:
        if found.part:
            continue
        path = trace.paths[found.module]
        others = [module for module in (found.out, *found.also) if module in trace.of_others]
        if others and not found.unusable:
            found.unusable = CALLED_FOR_OTHERS.format(trace.paths[others[0]])
        if found.out is None or found.unusable:
            trace.overlooked[path] = trace.overlooked.get(path) or found.unusable
            continue
        block = block_of_call(trace, found, holders[path])
        scored_by.setdefault(place := block.noted, set()).update(found.scored_by)
        if (again := blocks.get(place)) is None:
            blocks[place] = block
        elif again.out == block.out and {*again.order.tolist()}.isdisjoint(block.order.tolist()):
            blocks[place] = joined(again, block)
        else:  # of a shared layer, which is called again: the same heads
            noted_in = ("numbers", "numbers_of_keys", "inputs")
            of_calls: Any = {
                name: tuple(dict.fromkeys(getattr(again, name) + getattr(block, name))) for name in noted_in
            }
            calls = again.calls + (0 if found.beside else block.calls)
            blocks[place] = replace(again, calls=calls, **of_calls)
    for block in [*blocks.values()]:  # layers that have one W_O, each with heads of its own
        twice = [each for each in blocks.values() if each.out == block.out and {*each.columns} & {*block.columns}]
        if len(twice) > 1:
            trace.overlooked |= {each.path: CALLED_FOR_OTHERS.format(block.out) for each in twice}
            blocks = {name: each for name, each in blocks.items() if each not in twice}
    for place, reason in handed_on(blocks, scored_by).items():
        blocks[place] = replace(blocks[place], why_not=blocks[place].why_not or reason)
    for place, block in blocks.items():
        made = [path for path, _ in block.numbers + block.numbers_of_keys if made_in_calls(call, path)]
        numbers = tuple(each for each in block.numbers if each[0] not in made)
        if made and (block.flat or numbers + block.numbers_of_keys):
            why = f"{made[0]} is made in calls or by eval(), for all its heads"
            blocks[place] = replace(block, why_not=block.why_not or why)
        elif made:  # so it stays, and heads that are left read their parts, see `Sizes`
            blocks[place] = replace(block, numbers=()).meeting()
        alike = next(each for each in blocks.values() if each.path == block.path)
        if block.flat and block.head_dim != alike.head_dim:
            blocks[place] = replace(block, why_not=block.why_not or f"{alike.out} reads heads of another width there")
    known = {block.path for block in blocks.values()}
    overlooked = {path: why for path, why in trace.overlooked.items() if not any(within(path, each) for each in known)}
    if not blocks:
        unusable = ((path, why) for path, why in overlooked.items() if why)
        for path, why in unusable:
            raise Unsupported(f"{path or 'model'} ({type(model.get_submodule(path)).__name__}): {why}")
        raise Unsupported(nothing_found(model, trace.read, overlooked))
    found_blocks = [as_named(block, noted) for block in blocks.values()]
    return found_blocks, [*(path or type(model).__name__ for path in overlooked), *trace.beside]


def block_of_call(trace: Trace, found: Found, beside: Mapping[str, str]) -> Block:
    """Return the block of a call of attention. `beside` has the smallest module around each W_O of the module that
    attends, see `holders_of`."""
    heads, path = tuple(range(found.heads)), trace.paths[found.module]
    for name, rows in found.rows.items():
        of = found.of_kv if name in ROLES[1:] else heads
        if isinstance(rows, Rows) and max(of, default=-1) >= len(rows.heads):
            found.rows[name] = f"made once for several heads by {rows.path}"
    sources = {name: rows for name, rows in found.rows.items() if isinstance(rows, Rows)}
    names = [*(role for role in ROLES if role in sources), *sorted({*sources} - {*ROLES})]
    made_by = tuple(
        Source(sources[name], found.of_kv if name in ROLES[1:] else heads, name if name in ROLES else "")
        for name in names
    )
    why_not = (f"its {'factor' if n == 'gate' else n} is {r}" for n, r in found.rows.items() if isinstance(r, str))
    out = trace.paths[cast("nn.Module", found.out)]
    flat = len({*beside.values()}) < len(beside)
    block = Block(
        path if flat or len(beside) == 1 else beside[out],
        out,
        found.columns,
        made_by,
        names=heads,
        attends=not found.of_parts,
        numbers=tuple(found.numbers),
        numbers_of_keys=tuple(found.numbers_of_keys),
        inputs=tuple(found.inputs),
        why_not=next(why_not, "") or why_uncut(trace.model, [out, *(source.rows.path for source in made_by)]),
        cross=found.cross,
        gated_by_layer=found.gated,
        also=tuple(trace.paths[module] for module in found.also),
        calls=1 + len(found.also),
    )
    return as_flat(block) if flat else block


def traced(call: ModelCall, dropped: Set[int] = frozenset(), **how: Any) -> Trace:
    """Return what a call of the model shows, see `Trace`. The calls of attention with the numbers `dropped` have made
    weights that the module multiplies with its values again."""
    for numbers in (True, False):
        trace = Trace(call.model, dropped, **how)
        try:
            with call.at_rest(gradients=True), trace.watching(numbers):
                call()
            break
        except RuntimeError:  # of code that takes no gradients with respect to its own tensors
            if not numbers:
                raise
    more = {n for n, found in enumerate(trace.found) if found.weighs_again and found.out is None} - dropped
    return traced(call, dropped | more, **how) if more else trace


def refuse_sums(call: ModelCall, found: Sequence[Found]) -> None:
    """Make the heads unusable that W_O reads in a sum with other states, behind a norm or an activation. The states are
    left in a call in which all heads say 0. Biases times something, as behind a norm and a gate, are no states."""
    closed = None
    with suppress(Exception):  # of a model that may be anybody's, and never computes with heads that say nothing
        closed = traced(call, known=(), closed=True)
    if closed is None or [each.module for each in closed.found] != [each.module for each in found]:
        return
    states = closed.followed.states(closed.leaves)
    for each, silent in zip(found, closed.found, strict=True):
        if each.bent and silent.read is not None and silent.out is not None:
            layer = around(closed.paths[silent.module], closed.paths[silent.out])
            left = silent.read[..., [*chain(*each.columns)]]
            if made_of(left, states) and not _of_biases(left, closed.followed.biases_in(layer)):
                each.unusable = SUM


def _of_biases(x: Tensor, biases: Sequence[Tensor]) -> bool:
    """Return whether x is 0 where these biases are, and linear in them."""
    u = torch.ones_like(x, requires_grad=True)
    slopes = torch.autograd.grad(x, biases, u, create_graph=True, allow_unused=True) if biases else ()
    parts = [(slope * bias.detach()).sum() for slope, bias in zip(slopes, biases, strict=True) if slope is not None]
    if not parts:
        return False
    (of_biases,) = torch.autograd.grad(torch.stack(parts).sum(), u, retain_graph=True)
    return not differs(torch.stack([x.detach().flatten(), of_biases.flatten()]), x)


def factors_of_heads(call: ModelCall, blocks: Sequence[Block]) -> dict[str, Tensor]:
    """Return the factors by which the layers of these blocks multiply the outputs of their heads, (H,), by the path of
    W_O; see `Block.gated_by_layer`. They are NaN if they differ between calls of a layer."""
    trace = traced(call, known=blocks)
    factors: dict[str, Tensor] = {}
    for found in trace.found:
        if found.out is not None and found.factor is not None:
            first = factors.setdefault(trace.paths[found.out], found.factor)
            if first.shape != found.factor.shape or not torch.allclose(first, found.factor):
                factors[trace.paths[found.out]] = first * math.nan
    return factors


def as_named(block: Block, cut: Cut) -> Block:
    """Return the block with the names that its heads had before an earlier removal. A silent head does not count."""
    names = cut.heads.get(block.noted)
    if names is None or not block.heads:
        return block
    if not names:
        made_by = tuple(replace(source, of=()) for source in block.made_by)
        return replace(block, columns=(), made_by=made_by, names=(), silent=len(block.columns[0]))
    return replace(block, names=tuple(names))


def holders_of(trace: Trace) -> dict[str, dict[str, str]]:
    """Return for each module that computes attention, by its path, the smallest modules around each W_O and its maps of
    queries, keys and values that are called, by the path of W_O: layers may share the module."""
    called = {"", *(trace.paths[module] for module in trace.given)}
    holders: dict[str, dict[str, str]] = {}
    for found in trace.found:
        if found.out is not None and not found.unusable:
            out = trace.paths[found.out]
            path = around(out, *(rows.path for rows in found.rows.values() if isinstance(rows, Rows)))
            while path not in called:
                path = path.rpartition(".")[0]
            holders.setdefault(trace.paths[found.module], {})[out] = path
    return holders


def as_flat(block: Block) -> Block:
    """Return the block of a module that computes other heads too, see `Block.flat`. No attribute can count them."""
    why_not = block.why_not
    if block.inputs:
        why_not = why_not or f"{block.path} is given a part for each head, and computes the heads of other blocks too"
    return replace(block, flat=True, attends=False, translated=True, as_written=True, why_not=why_not)
