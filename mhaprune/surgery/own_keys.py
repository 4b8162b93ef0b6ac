"""Keys and values of their own for heads that shared them, where those that are left no longer share them in the order
that the code of their layer repeats them in.

Dimensions: H = query heads of a block, G = key-value heads, K = width of a group's keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import nn

from mhaprune.hooks.blocks import ROLES, Block, Rows, Source, Unsupported, weight_of
from mhaprune.surgery.counts import count_own_keys
from mhaprune.surgery.reshaping import keep_numbers
from mhaprune.surgery.resizing import has_sizes, resize


def shares_evenly(model: nn.Module, block: Block, keep: Sequence[int]) -> bool:
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
        for name, value in [*vars(holder).items()] if has_sizes(holder) else ():
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
