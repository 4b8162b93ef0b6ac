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

from mhaprune.heads import BlockId
from mhaprune.wrapping.blocks import Block

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
) -> Iterator[Counter[BlockId]]:
    """While the context lasts, multiply the output of every head by its gate. Gates are (H,), (B, H) or (B, H, T) for
    each block. If a pass calls a block several times, T runs over the positions of all calls, one call after the other.

    `fallback` replaces the output of a closed head, (B, H, T, K) or broadcastable to it. `seen` receives each input of
    an output projection, before any gate. Yields a counter of the calls of each block's output projection, so that the
    caller can tell whether a gate was applied.
    """
    calls = Counter[BlockId]()
    starts = Counter[BlockId]()

    def hook(name: BlockId, block: Block) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            x, *own = inputs  # W_O of a layer of ours is also told how its learned gates scale its columns
            number = calls[name] % block.calls
            calls[name] += 1
            if block.call not in (None, number):
                return None
            x = x.transpose(0, block.batch_dim)
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
            if fallback is None or name not in fallback:
                scale = scale.transpose(0, block.batch_dim) if scale.dim() > 1 else scale
                return (inputs[0] * (own[0] * scale if own else scale),)
            instead = side_by_side(here(fallback[name].to(x), -2), block, x, batch_size)
            return ((instead + scale * (x - instead)).transpose(0, block.batch_dim), *own)

        return before

    with ExitStack() as stack:
        for name, block in blocks.items() if gates is not None or seen is not None else ():
            handle = model.get_submodule(block.out).register_forward_pre_hook(hook(name, block))
            stack.callback(handle.remove)
        yield calls


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
