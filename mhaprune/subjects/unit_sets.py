"""Other units than heads: key-value groups or whole blocks, which are closed and removed together; and single calls of
a layer that is called several times, which are closed apart.

A set of heads is described as one wide head, so its gates, outputs and weights need no code of their own.

Dimensions: H = heads of a block.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mhaprune.heads import BlockId, HeadGrid, HeadId, HeadMask
from mhaprune.hooks.blocks import Block, Unsupported

COUNTED = {
    "group": "key-value groups",
    "block": "attention layers",
    "call": "heads of single calls",
}
"""The word for several units of each kind."""


def sets_of(block: Block, unit: str) -> list[list[int]]:
    """Return the heads of each set of a block, by their positions in the block. Raises `Unsupported` for sets of
    different sizes."""
    if unit == "block":
        return [list(range(block.heads))] if block.heads else []
    sets = [[h for h in range(block.heads) if block.of_kv[h] == group] for group in sorted(set(block.of_kv))]
    if len({len(heads) for heads in sets}) > 1:
        sizes = ", ".join(str(len(heads)) for heads in sets)
        raise Unsupported(f"unit={unit}: the groups of {block.path} have {sizes} heads, must have equally many")
    return sets


def wide(block: Block, sets: Sequence[Sequence[int]]) -> Block:
    """Return the block with each of these sets of heads as one wide head, which has the name of the first."""
    return replace(
        block,
        names=tuple(block.names[heads[0]] for heads in sets),
        columns=tuple(tuple(column for h in heads for column in block.columns[h]) for heads in sets),
        made_by=tuple(source.joined(sets) for source in block.made_by),
    )


def calls_of(blocks: Mapping[BlockId, Block]) -> Iterator[tuple[BlockId, Block]]:
    """Yield a block for each call of a layer, with its name."""
    for name, block in blocks.items():
        if block.calls == 1:
            yield name, block
            continue
        for call in range(block.calls):
            yield BlockId(f"{name.site}@{call}", name.layer), replace(block, call=call)


def of_all_calls(head: HeadId) -> HeadId:
    """Return the name of a head without the number of the call."""
    return head._replace(site=head.site.partition("@")[0])


def with_all_calls(mask: HeadMask, grid: HeadGrid) -> HeadMask:
    """Return a mask of heads of single calls as a mask of the heads of `grid`. Raises `Unsupported` for heads that lose
    only some of their calls."""
    stay = {of_all_calls(head): head for head in mask.kept}
    gone = frozenset(of_all_calls(head) for head in mask.removed)
    for head in grid:
        if head in gone and head in stay:
            raise Unsupported(
                f"a removal takes a head out of all calls of its layer, and {stay[head]} stays; single calls can be"
                " closed, with closed() or evaluate()"
            )
    return HeadMask(grid, gone)
