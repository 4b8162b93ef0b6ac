"""Gate heads and read their outputs during one call, by hooks on the output projections.

Dimensions: B = batch, T = positions, H = heads of a block, K = head_dim, W = inputs of the output projection, N = all
heads.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import scaled
from mhaprune.heads import BlockId
from mhaprune.hooks.attention_calls import Window, attention_in_window
from mhaprune.hooks.blocks import Block, Unsupported
from mhaprune.hooks.pytree import features_dim

Seen = Callable[[BlockId, Tensor], None]
"""A function that receives the input of an output projection, with the name of the block."""


@contextmanager
def hooked(
    model: nn.Module,
    blocks: Mapping[BlockId, Block],
    batch_size: int,
    gates: Mapping[BlockId, Tensor] | None = None,
    fallback: Mapping[BlockId, Tensor] | None = None,
    seen: Seen | None = None,
    window: Window | None = None,
) -> Iterator[Counter[BlockId]]:
    """While the context lasts, multiply the output of every head by its gate. Gates are (H,), (B, H) or (B, H, T) for
    each block. If a pass calls a block several times, T runs over the positions of all calls, one call after the other.

    `fallback` replaces the output of a closed head, (B, H, T, K) or broadcastable to it. With a `window`, this is what
    the head computes if it sees only a window of the tokens. `seen` receives each input of an output projection, before
    any gate. Yields a counter of the calls of each block's output projection, so that the caller can tell whether a
    gate was applied.
    """
    calls = Counter[BlockId]()
    starts = Counter[BlockId]()
    given = (gates or {}).items() if window is not None and fallback is None else ()
    near = {name for name, gate in given if name in blocks and (gate.requires_grad or bool((gate != 1).any()))}

    def hook(
        name: BlockId, block: Block, features: int
    ) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            x, *own = inputs  # W_O of a layer of ours is also given the scale of its learned gates
            number = calls[name] % block.calls
            calls[name] += 1
            if block.call not in (None, number):
                return None
            x = x.movedim(features, -1).transpose(0, block.batch_dim)
            if seen is not None:
                seen(name, x)
            if gates is None or name not in gates:
                return None
            positions, several = x.shape[:-1].numel() // batch_size, block.calls > 1 and block.call is None
            start = 0 if number == 0 else starts[name]
            starts[name] = start + positions

            def here(values: Tensor, dim: int) -> Tensor:
                return values.narrow(dim, start, positions) if several and values.shape[dim] > 1 else values

            scale = gates[name].to(x)
            scale = spread(here(scale, 2) if scale.dim() == 3 else scale, block, x, batch_size)
            if name in near:
                instead = through_window(outputs, block, x)
            elif fallback is not None and name in fallback:
                instead = side_by_side(here(fallback[name].to(x), -2), block, x, batch_size)
            else:
                scale = scale.expand(x.shape) if scale.dim() == 1 and features != -1 else scale
                scale = scale.transpose(0, block.batch_dim).movedim(-1, features) if scale.dim() > 1 else scale
                return scaled(inputs, scale)
            return ((instead + scale * (x - instead)).transpose(0, block.batch_dim).movedim(-1, features), *own)

        return before

    with ExitStack() as stack:
        outputs: Mapping[str, tuple[Tensor, Tensor]] = {}
        if window is not None and near:
            outputs = stack.enter_context(attention_in_window(model, [blocks[name].path for name in near], window))
        for name, block in blocks.items() if gates is not None or seen is not None else ():
            for path, out in zip(block.readers, block.outs, strict=True):
                before = hook(name, block, features_dim(model.get_submodule(out)))
                stack.callback(model.get_submodule(path).register_forward_pre_hook(before).remove)
        yield calls


def through_window(outputs: Mapping[str, tuple[Tensor, Tensor]], block: Block, x: Tensor) -> Tensor:
    """Return what the input x of an output projection is if all heads see only the window. Raises `Unsupported` if x is
    not just the outputs of the heads side by side."""
    found = [each.transpose(1, 2).flatten(2) for each in outputs.get(block.path, ())]
    if not found or block.calls > 1 or found[0].shape != x.shape or not torch.equal(found[0], x):
        raise Unsupported(
            f"{block.path}: its heads cannot have a window, because {block.out} does not read just what one attention"
            " call computes"
        )
    return found[1]


def spread(gates: Tensor, block: Block, x: Tensor, batch_size: int) -> Tensor:
    """Return gates (H,), (B, H) or (B, H, T) repeated for every column of x, to be multiplied with it."""
    by_head = gates.mT if gates.dim() == 3 else gates
    owners = block.owners.to(x.device)
    if len(owners) < x.shape[-1]:  # columns at the end that read no head
        owners = torch.cat([owners, owners.new_full((x.shape[-1] - len(owners),), block.heads)])
    scale = torch.cat([by_head, by_head.new_ones(*by_head.shape[:-1], 1)], dim=-1)[..., owners]
    if gates.dim() == 1:
        return scale
    if gates.dim() == 3:
        return scale.reshape(*x.shape[:-1], -1)
    rows = scale.repeat_interleave(len(x) // batch_size, 0)  # windows, or tokens one after the other
    return rows.reshape(len(x), *[1] * (x.dim() - 2), x.shape[-1])


def head_by_head(x: Tensor, block: Block, batch_size: int) -> Tensor:
    """Return the input of an output projection, (B, T, W), head by head: (B, H, T, K)."""
    columns = x if block.straight and x.shape[-1] == len(block.order) else x[..., block.order.to(x.device)]
    head_dim = columns.shape[-1] // block.heads if block.heads else 0
    positions = x.shape[:-1].numel() // batch_size  # not -1: x may have no columns
    return columns.reshape(batch_size, positions, block.heads, head_dim).transpose(1, 2)


def side_by_side(context_BHTK: Tensor, block: Block, x: Tensor, batch_size: int) -> Tensor:
    """Undo `head_by_head`: return the heads in the shape of x. Columns of no head keep the values of x."""
    head_dim = len(block.order) // block.heads if block.heads else 0
    shape = (batch_size, block.heads, x.shape[:-1].numel() // batch_size, head_dim)
    columns = context_BHTK.expand(shape).transpose(1, 2).flatten(2).reshape(*x.shape[:-1], -1)
    if block.straight and x.shape[-1] == len(block.order):
        return columns
    return x.index_copy(-1, block.order.to(x.device), columns)
