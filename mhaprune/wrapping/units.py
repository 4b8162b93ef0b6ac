"""Other units than heads: key-value groups or whole blocks, which are closed and removed together; and single calls of
a layer that is called several times, which are closed apart.

Dimensions: H = heads of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from mhaprune.heads import BlockId, HeadId, HeadMask
from mhaprune.subject import AttentionMap
from mhaprune.wrapping.batches import Batches
from mhaprune.wrapping.blocks import Block, Unsupported
from mhaprune.wrapping.wrapped import WrappedModel


@dataclass(frozen=True, eq=False)
class UnitModel(WrappedModel):
    """A wrapped model whose heads are sets of heads of another one. A set has the name of its first head.

    Each set is described as one wide head, so gates, outputs and weights of a set need no code of their own. Only a
    removal is made head by head.
    """

    single: WrappedModel = field(kw_only=True)
    """The model with its single heads."""
    unit: str = field(kw_only=True)

    @property
    def counted(self) -> str:
        return {"group": "key-value groups", "block": "attention layers", "call": "heads of single calls"}[self.unit]

    def with_module(self, module: Any, blocks: Sequence[Block]) -> Self:
        return replace(super().with_module(module, blocks), single=self.single.with_module(module, self.single.blocks))

    def without(self, mask: HeadMask, shared: bool = False) -> Any:
        single = self.single.changed(run=self.run)  # which `changed` may have replaced
        smaller = single.without(self.mask_of_heads(mask), shared)
        return _call_by_call(smaller) if self.unit == "call" else _with_sets(smaller, self.unit)

    def cache_bytes(self, batch_size: int, length: int) -> int:
        return self.single.cache_bytes(batch_size, length)

    def mask_of_heads(self, mask: HeadMask) -> HeadMask:
        """Return a mask of units as a mask of the single heads. Raises `Unsupported` for heads that lose only some of
        their calls."""
        if self.unit == "call":
            return self._with_all_calls(mask)
        grid, removed = self.single.grid, set()
        for name, block in self.single.by_name.items():
            heads = [grid.heads[n] for n in grid.positions(name)]
            sets = zip(self.grid.positions(name), members(block, self.unit), strict=True)
            removed |= {heads[h] for n, each in sets for h in each if self.grid.heads[n] in mask.removed}
        return HeadMask(grid, frozenset(removed))

    def _with_all_calls(self, mask: HeadMask) -> HeadMask:
        gone: set[HeadId] = set()
        for head in self.single.grid:
            calls = [each for each in self.grid if (each.site.partition("@")[0], *each[1:]) == head]
            if stay := [each for each in calls if each not in mask.removed]:
                if len(stay) < len(calls):
                    raise Unsupported(
                        f"a removal takes a head out of all calls of its layer, and {stay[0]} stays; single calls can"
                        " be closed, with closed() or evaluate()"
                    )
            else:
                gone.add(head)
        return HeadMask(self.single.grid, frozenset(gone))

    def attention_maps(self, batch: Batches) -> dict[BlockId, AttentionMap]:
        if self.unit == "call":
            return super().attention_maps(batch)
        raise ValueError(f"needs the attention weights of single heads, not of a {self.unit}; leave it out")


def in_units(subject: WrappedModel, unit: str) -> WrappedModel:
    """Return the subject with one head per unit.

    A "group" is the heads that share keys and values. If all heads of every block do, each head is a group of its own.
    A "block" is an attention layer. A "call" is one head in one call of a layer that a pass calls several times, named
    as in `layer.3.0@2`. Raises `Unsupported` for groups of different sizes in one block.
    """
    single = subject.single if isinstance(subject, UnitModel) else subject
    if unit == "call":
        return single if all(block.calls == 1 for block in single.blocks) else _call_by_call(single)
    all_shared = all(len(set(block.of_kv)) <= 1 for block in single.blocks)
    return single if unit == "head" or (unit == "group" and all_shared) else _with_sets(single, unit)


def _with_sets(single: WrappedModel, unit: str) -> UnitModel:
    blocks, idle = [], set()
    for name, block in single.by_name.items():
        sets = members(block, unit)
        if len({len(each) for each in sets}) > 1:
            sizes = ", ".join(str(len(each)) for each in sets)
            raise Unsupported(f"unit={unit}: the groups of {block.path} have {sizes} heads, must have equally many")
        blocks.append(_wide(block, sets))
        heads = [single.grid.heads[n] for n in single.grid.positions(name)]
        idle |= {heads[each[0]] for each in sets if all(heads[h] in single.without_effect for h in each)}
    return _unit_model(single, unit, blocks=tuple(blocks), without_effect=frozenset(idle), without_gradient=frozenset())


def _call_by_call(single: WrappedModel) -> UnitModel:
    """Return the subject with a block for each call of a layer."""
    pairs = [
        (BlockId(f"{name.site}@{call}", name.layer), replace(block, call=call)) if block.calls > 1 else (name, block)
        for name, block in single.by_name.items()
        for call in range(block.calls)
    ]
    names, blocks = zip(*pairs, strict=True)
    known: dict[str, Any] = {name: getattr(single, name) for name in ("without_effect", "without_gradient")}
    for name, heads in known.items():
        known[name] = frozenset(
            HeadId(block.site, block.layer, head.head)
            for block in names
            for head in heads
            if head.block == BlockId(block.site.partition("@")[0], block.layer)
        )
    return _unit_model(single, "call", names=names, blocks=blocks, **known)


def _unit_model(single: WrappedModel, unit: str, **changed: Any) -> UnitModel:
    parts = {each.name: getattr(single, each.name) for each in fields(single) if each.init and each.name != "_known"}
    return UnitModel(**(parts | changed), single=single, unit=unit)


def members(block: Block, unit: str) -> list[list[int]]:
    """Return the heads of each unit of a block, by their positions in the block."""
    if unit == "block":
        return [list(range(block.heads))] if block.heads else []
    return [[h for h in range(block.heads) if block.of_kv[h] == group] for group in sorted(set(block.of_kv))]


def _wide(block: Block, sets: Sequence[Sequence[int]]) -> Block:
    """Return the block with each of these sets of heads as one wide head."""
    return replace(
        block,
        names=tuple(block.names[heads[0]] for heads in sets),
        columns=tuple(tuple(column for h in heads for column in block.columns[h]) for heads in sets),
        made_by=tuple(source.joined(sets) for source in block.made_by),
    )
