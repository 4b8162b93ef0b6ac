"""Make heads stream: they see only a window of the tokens, in a model as it is used and saved.

Dimensions: H = query heads of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from mhaprune.hooks.attention_calls import Window
from mhaprune.hooks.blocks import Block, Unsupported
from mhaprune.surgery.copying import copied
from mhaprune.surgery.record import Cut, pretrained_in


def stream_heads(
    model: nn.Module, blocks: Sequence[Block], kept: Sequence[Sequence[int]], window: Window, shared: bool = False
) -> tuple[nn.Module, list[Block]]:
    """Return a copy of the model in which only the heads `kept` see all tokens, and the blocks of these heads.

    For the arguments see `remove_heads`. Raises `Unsupported` for layers whose attention cannot be replaced, and for a
    part of the heads that share keys and values.
    """
    tensors = (*model.parameters(), *model.buffers()) if shared else ()
    model = copied(model, {id(tensor): tensor for tensor in tensors})
    cut, left = Cut(), []
    for block, keep in zip(blocks, kept, strict=True):
        if len(keep) == block.heads:
            left.append(block)
            continue
        attention: Any = model.get_submodule(block.path)
        _check(model, attention, block)
        gone = {block.of_kv[h] for h in range(block.heads)} - {block.of_kv[h] for h in keep}
        if sum(kv in gone for kv in block.of_kv) != block.heads - len(keep):
            unit = "group" if len(set(block.of_kv)) > 1 else "block"
            raise Unsupported(
                f'{block.path}: its heads share keys and values, so they stream together; write heads.units("{unit}")'
            )
        before = getattr(attention, "streams", None) or list(window)
        if before[:2] != list(window):
            raise Unsupported(f"{block.path}: has heads that stream with a window of {before[:2]}, use the same one")
        cut.attributes[block.path] = {"streams": [*window, *sorted({*before[2:], *gone})]}
        cut.heads[block.path] = list(block.names)
        left.append(
            replace(
                block,
                names=tuple(block.names[h] for h in keep),
                columns=tuple(block.columns[h] for h in keep),
                made_by=tuple(source.without(keep, range(block.heads), lambda row: row) for source in block.made_by),
            )
        )
    if cut.attributes:
        cut.leave_in(model)
    return model, left


def for_streaming(model: nn.Module, block: Block) -> Block:
    """Return a block with the reason why its heads cannot stream, if they cannot."""
    try:
        _check(model, model.get_submodule(block.path), block)
    except Unsupported as error:
        return replace(block, why_not=str(error).removeprefix(f"{block.path}: "))
    return block


def _check(model: nn.Module, attention: Any, block: Block) -> None:
    """Raise `Unsupported` for a layer that cannot have heads that stream."""
    _, part = pretrained_in(model)
    config = getattr(attention, "config", None)
    kinds, number = getattr(config, "layer_types", None) or (), getattr(attention, "layer_idx", None)
    kind = kinds[number or 0] if kinds else "sliding"
    sliding = (
        getattr(attention, "sliding_window", getattr(config, "sliding_window", None)) if "sliding" in kind else None
    )
    if part is None or config is None or not isinstance(number, int):
        reason = "only attention of transformers can be given a window"
    elif getattr(part.config, "is_encoder_decoder", False) or block.cross or block.kind != "head":
        reason = "only a model that is a decoder alone can have heads with a window"
    elif sliding is not None or "chunk" in kind:
        reason = "has a window of its own"
    else:
        return
    raise Unsupported(f"{block.path}: {reason}")
