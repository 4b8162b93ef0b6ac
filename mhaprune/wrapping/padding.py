"""The mask that says which rows of a module are padding, found by two passes.

A batch may hold several masks, and modules that none of them is for: an image encoder beside a text encoder, a decoder
beside an encoder. Neither lengths nor names tell which is which. So the tokens in the padding of one mask are replaced
by others. Rows that belong to this padding then change, and no other row does, because nothing attends to it. In a
model that does attend to padding, this is so in its first layer, and the next layers are like the first.

Dimensions: B = batch, T = positions.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.heads import BlockId
from mhaprune.hooks.blocks import Block, shared_words
from mhaprune.hooks.pytree import tensors_in
from mhaprune.subjects.batches import LABELS, MASK, Batches
from mhaprune.subjects.gated_model import GatedModel

SAME = 1e-5
"""The largest change of a row, as a share of the largest number, that may be rounding."""


def masks_in(batch: Batches) -> list[str]:
    """Return the names of the masks (B, T) of a batch that hold padding."""
    fields = batch.fields.items()
    return [name for name, x in fields if name.endswith(MASK) and _is_mask(x) and bool((x == 0).any())]


def masks_of_modules(subject: GatedModel, batch: Batches) -> dict[str, str | None]:
    """Return, by the path of a module, the name of the mask of its rows; "" if no mask is for them, None if that cannot
    be told. The modules are all maps that read units, those that make keys for other positions, and "", the output."""
    before, changed = rows_of(subject, batch), dict[str, dict[str, Tensor]]()
    for name in masks_in(batch):
        try:
            after = rows_of(subject, other) if (other := with_other_padding(batch, name)) is not None else {}
        except Exception:  # of a model that may be anybody's, and may want other tokens there
            after = {}
        changed[name] = dict(_changed(before, after))
    found = {path: _mask_of(path, len(x[0]), batch, changed) for path, x in before.items()}
    for path in [path for path, mask in found.items() if mask is None]:
        like = [
            block.out for block in subject.blocks if found.get(block.out) is not None and shared_words(path, block.out)
        ]
        found[path] = found[max(like, key=lambda other: shared_words(path, other))] if like else None
    return found


def with_other_padding(batch: Batches, name: str) -> Batches | None:
    """Return the batch with real tokens in the padding of a mask; None if nothing in the batch belongs to it."""
    real = batch.fields[name] != 0
    kind, others = name.removesuffix(MASK), [n.removesuffix(MASK) for n in batch.fields if n.endswith(MASK)]
    own = [n for n, x in batch.fields.items() if _belongs(n, x, kind, others) and x.shape[:2] == real.shape]
    whole = [n for n in own if not batch.fields[n].is_floating_point()]
    rows, positions = torch.arange(len(real)), torch.arange(real.shape[1]).expand(real.shape)
    first = positions.masked_fill(~real.cpu(), real.shape[1]).amin(dim=1).clamp_max(real.shape[1] - 1)
    last = positions.masked_fill(~real.cpu(), 0).amax(dim=1)
    moved = list[str]()

    def change(field: str, x: Tensor) -> Tensor:
        if field not in (whole or own):
            return x
        one, other = (x[rows, at][:, None].expand_as(x) for at in (first, last))
        new = torch.where(x == one, other, one)
        hidden = ~real.view(*real.shape, *[1] * (x.dim() - 2))
        moved.extend([field] * bool(((new != x) & hidden).any()))
        return torch.where(hidden, new, x)

    changed = batch._changed(change)
    return changed if moved else None


def rows_of(subject: GatedModel, batch: Batches) -> dict[str, Tensor]:
    """Return the rows (B, T, ...) of modules in one pass, by their paths. Those of a map that reads units are what the
    queries are made of: the input of their linear map or, if it is not called, of the module."""
    found: dict[str, Tensor] = {}
    units: dict[str, dict[str, Tensor]] = {block.out: {} for block in subject.blocks}

    def rows(x: Tensor, batch_dim: int) -> Tensor:
        return x.detach().transpose(0, batch_dim).reshape(len(batch), -1, x.shape[-1])

    def keeping(block: Block, kind: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, named: Any, *output: Any) -> None:
            x = next(tensors_in(output or (inputs, named)), None)
            if x is not None and x.dim() > 2 and x.shape[:-1].numel() % len(batch) == 0:
                units[block.out].setdefault(kind, rows(x, block.batch_dim))

        return keep

    def seen(name: BlockId, x: Tensor) -> None:
        units[subject.by_name[name].out].setdefault("units", rows(x, 0))

    with torch.no_grad(), ExitStack() as stack:
        for block in subject.blocks:
            keys = block.source("key") if block.cross else None
            for path, kind in (
                (block.made_by[0].rows.path if block.made_by else "", "queries"),
                (block.path, "module"),
            ):
                hook = subject.module.get_submodule(path).register_forward_pre_hook(
                    keeping(block, kind), with_kwargs=True
                )
                stack.callback(hook.remove)
            if keys is not None:
                module = subject.module.get_submodule(keys.rows.path)
                hook = module.register_forward_hook(keeping(block, keys.rows.path), with_kwargs=True)
                stack.callback(hook.remove)
        output = subject.run_gated(batch, seen=seen)
    for block in subject.blocks:
        kinds = units[block.out]
        own = [x for kind in ("queries", "module") if (x := kinds.get(kind)) is not None]
        fitting = (x for x in own if "units" in kinds and x.shape[1] == kinds["units"].shape[1])
        if (x := next(fitting, kinds.get("units"))) is not None:
            found[block.out] = x
        found |= {kind: x for kind, x in kinds.items() if kind not in ("queries", "module", "units")}
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    for x in [logits] if isinstance(logits, Tensor) else tensors_in(output):
        if x.dim() == 3 and len(x) == len(batch):
            found.setdefault("", x)
    return found


def _belongs(name: str, x: Any, kind: str, others: list[str]) -> bool:
    """Return whether a field of a batch is what the mask with the beginning `kind` is about."""
    if not isinstance(x, Tensor) or x.dim() < 2 or "mask" in name or name == LABELS:
        return False
    return name.startswith(kind) and not any(name.startswith(other) for other in others if len(other) > len(kind))


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for path, x in before.items():
        if path in after and after[path].shape == x.shape:
            yield path, (after[path] - x).abs().amax(dim=-1) > SAME * x.abs().amax()


def _mask_of(path: str, length: int, batch: Batches, changed: Mapping[str, Mapping[str, Tensor]]) -> str | None:
    untouched = True
    for name, rows in changed.items():
        if path not in rows:
            untouched = False
        elif rows[path].any():
            untouched = False
            real = (batch.fields[name] != 0).to(rows[path].device)
            if real.shape[1] == length and not (rows[path] & real).any():
                return name
    return "" if untouched else None


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 2
