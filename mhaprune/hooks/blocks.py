"""The units of any model, such as the heads of its attention layers, described by the linear modules around them.

Dimensions: H = query heads of a block, K = head_dim, N = all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, takewhile
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.heads import BlockId, HeadGrid, HeadId
from mhaprune.hooks.pytree import is_convolution, is_linear

ROLES = ("query", "key", "value")


class Unsupported(ValueError):
    """A model whose heads cannot be gated or removed: the message names the module and the reason."""


@dataclass(frozen=True)
class Rows:
    """The output features of the linear module at `path` that belong to each head.

    For queries, keys and values from one module, whose outputs stand side by side, there is `Rows.part`.
    """

    path: str
    heads: tuple[tuple[int, ...], ...]

    @classmethod
    def part(cls, path: str, part: int, of: int, heads: int, head_dim: int) -> Rows:
        """Return the rows of one of several equal parts: part 0 of 3 makes the queries.

        >>> Rows.part("qkv", 1, of=3, heads=2, head_dim=2).heads
        ((4, 5), (6, 7))
        """
        if not 0 <= part < of:
            raise ValueError(f"part={part}: must be from 0 to {of - 1}")
        start = part * heads * head_dim
        return cls(path, tuple(tuple(start + row for row in head) for head in neighbours(heads * head_dim, heads)))


@dataclass(frozen=True)
class Source:
    """The linear outputs that make a part of every unit: unit n needs the rows `rows.heads[of[n]]`."""

    rows: Rows
    of: tuple[int, ...]
    """For each unit the number of its part. Query heads that share keys have the same number."""
    role: str = ""
    """`query`, `key` or `value`, if it is one of them."""

    def without(self, kept: Sequence[int], staying: Sequence[int], place: Callable[[int], int]) -> Source:
        """Return the source of the units `kept`, where the parts of the units `staying` stay. `place` returns the new
        number of a row."""
        parts = sorted({self.of[n] for n in staying})
        rows = tuple(tuple(place(row) for row in self.rows.heads[part]) for part in parts)
        number = {part: n for n, part in enumerate(parts)}
        return replace(self, rows=replace(self.rows, heads=rows), of=tuple(number[self.of[n]] for n in kept))

    def joined(self, sets: Sequence[Sequence[int]]) -> Source:
        """Return the source in which each of these sets of units is one unit. Units of a set may share parts."""
        parts = [dict.fromkeys(self.of[n] for n in units) for units in sets]
        rows = tuple(tuple(row for part in each for row in self.rows.heads[part]) for each in parts)
        return replace(self, rows=replace(self.rows, heads=rows), of=tuple(range(len(sets))))


TWO_STAY = "must keep two heads, as where calls make tensors for all of them"


@dataclass(frozen=True)
class Block:
    """Units that one linear map reads: unit n is the columns `columns[n]` of the map `out`.

    A unit is anything that can be gated and removed, such as a head. A hook on `out` gates the units and captures their
    outputs. A removal cuts these columns, and the rows of the linear maps that make the unit.
    """

    path: str
    """The path of the module in the model that computes the units and is proved alone."""
    out: str
    """The path of the linear map that reads the units: W_O for heads."""
    columns: tuple[tuple[int, ...], ...]
    """The input columns of `out` that read each unit."""
    made_by: tuple[Source, ...] = ()
    """The rows of linear maps that make the units."""
    kind: Literal["head", "neuron", "layer"] = "head"
    attends: bool = True
    """True if the units have attention weights."""
    names: tuple[int, ...] = ()
    """The number of each unit in the model before any removal."""
    counts: Sequence[str] = ()
    """See `AttentionBlock.counts`."""
    numbers: tuple[tuple[str, int], ...] = ()
    """The parameters and buffers that hold a number for each unit, by their path in the model. Each is given with the
    dimension of the units, counted from the last, which is -1."""
    numbers_of_keys: tuple[tuple[str, int], ...] = ()
    """In the same way, those that hold a number for each key-value head, if units share these."""
    inputs: tuple[tuple[int | str, int], ...] = ()
    """The arguments of the module that hold a number for each unit, such as a position bias, by their place or name;
    each with the dimension of the units."""
    why_not: str = ""
    """The reason why units of this block cannot be removed; empty if they can. They can be gated in any case."""
    cross: bool = False
    """True for cross-attention: queries and keys come from two inputs, each with its own padding."""
    translated: bool = False
    """True if the sizes that the code of the module names must be translated in each call, see `Sizes`."""
    as_written: bool = False
    """True if a removal leaves the attributes of the module as they are."""
    meets: bool = False
    """True if tensors that calls make for all heads, such as slopes, meet those of the heads that are left, of which
    there must be two: one would be repeated for all."""
    hollow: bool = False
    """True if the only unit of the block can go as a whole: its values become vectors of width 0, which its code joins
    with those of other blocks. One row of its queries and keys stays."""
    silent: int = 0
    """The number of input columns of `out`, from the first on, that belong to a silent unit: one that had to stay in a
    layer without units. These columns are zero, and stay zero in training."""
    calls: int = 1
    """The number of times that one pass calls the module, or rather all maps that read its units."""
    call: int | None = None
    """The number of the call whose units these are; None for the units in all calls."""
    gate_at: str = ""
    """The path of the module around `out` whose input is gated, if `out` is not all that reads the units."""
    gated_by_layer: bool = False
    """True if the layer itself multiplies the output of each head by a learned number, before W_O reads it. A removal
    may change this number, as it does after a softmax over the heads; W_O then makes up for it."""
    scaled: tuple[float, ...] = ()
    """The numbers by which the last removal multiplied the columns of each unit in `out`, to make up for this, in
    float64."""
    also: tuple[str, ...] = ()
    """The paths of more linear maps that read the units, by the same columns at other positions, as in joint attention
    of two streams."""
    flat: bool = False
    """True if the module computes the heads of several blocks, each with a W_O of its own: then its attributes, its
    arguments and the attention weights that it shows are not those of this block."""
    batch_dim: int = 0
    """The dimension of examples in the input of `out`: 1 for a layer that puts positions before examples, 2 for one
    that puts rows and columns before them."""

    def source(self, role: str) -> Source | None:
        """Return the source of a role; None if it is not known."""
        return next((source for source in self.made_by if source.role == role), None)

    def rows_of(self, path: str) -> Iterator[int]:
        """Yield the rows of a linear map that make units."""
        for source in self.made_by:
            if source.rows.path == path:
                yield from chain(*source.rows.heads)

    def rows_by_unit(self, role: str, path: str) -> list[tuple[int, ...]]:
        """Return the rows of a linear map that make this part of each unit; none if the map makes no such part."""
        rows = [
            [each.rows.heads[n] for n in each.of]
            for each in self.made_by
            if (each.role, each.rows.path) == (role, path)
        ]
        return rows[0] if rows else [()] * self.heads

    def meeting(self) -> Block:
        """Return the block whose code is left as it is written, see `meets`."""
        why_not = self.why_not if self.heads > 2 else self.why_not or TWO_STAY
        return replace(self, translated=True, as_written=True, meets=True, why_not=why_not)

    @property
    def heads(self) -> int:
        """The number of units."""
        return len(self.columns)

    @property
    def of_kv(self) -> tuple[int, ...]:
        """For each unit, the number of the key-value head that it reads."""
        keys = self.source("key")
        return tuple(range(self.heads)) if keys is None else keys.of

    @property
    def in_calls(self) -> bool:
        """True if the module computes the heads in several calls of attention, as in a loop."""
        return self.kind == "head" and not self.attends and not self.flat

    @property
    def noted(self) -> str:
        """The path under which a removal is noted: one module may hold several blocks."""
        return self.path if self.kind == "head" and not self.flat else self.out

    @property
    def gated(self) -> str:
        """The path of the module whose input is gated."""
        return self.gate_at or self.out

    @property
    def readers(self) -> tuple[str, ...]:
        """The paths of all modules whose input is gated."""
        return self.gated, *self.also

    @property
    def outs(self) -> tuple[str, ...]:
        """The paths of all linear maps that read the units."""
        return self.out, *self.also

    @property
    def owner(self) -> str:
        """The path of the module that holds W_O; of the layer itself for a `MultiHeadAttention`."""
        return self.out.rpartition(".")[0]

    @property
    def head_dim(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    @cached_property
    def owners(self) -> Tensor:
        """(W,): for each input column of `out` the number of its unit, or the number of units for a column of none."""
        owners = torch.full((1 + int(self.order.max()) if len(self.order) else 0,), len(self.columns))
        owners[self.order] = torch.arange(len(self.columns)).repeat_interleave(self.head_dim)
        return owners

    @cached_property
    def order(self) -> Tensor:
        """(H·K,): the input columns of `out`, sorted by unit."""
        return torch.tensor([column for unit in self.columns for column in unit], dtype=torch.long)

    @cached_property
    def straight(self) -> bool:
        """True if the columns are sorted by unit already."""
        return self.order.tolist() == list(range(len(self.order)))

    def __hash__(self) -> int:
        return hash((self.path, self.out, self.columns, self.names))

    def __deepcopy__(self, memo: object) -> Block:
        return self  # it never changes


@dataclass(frozen=True)
class AttentionBlock:
    """One attention layer, named by hand: its output projection W_O, and where its queries, keys and values are made.

    `AttentionBlock("layers.0.attention", out="out_proj", heads=8)` is enough for gates and scores, if each head has as
    many neighbouring columns as any other. With `query`, `key` and `value`, the names of linear modules or `Rows` of
    them, heads can be removed too. All names but `path` are relative to it, or else to the model.

    >>> made_by = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    >>> blocks = [mhaprune.AttentionBlock(f"attention.{i}", out="out_proj", heads=4, **made_by) for i in range(2)]
    >>> mhaprune.wrap(model, losses.classification, score=batches, blocks=blocks)
    8 heads in 2 blocks, all with an effect, all removable
    """

    path: str
    """The path of the attention module in the model."""
    out: str
    """The output projection W_O of the attention module, by its name."""
    heads: int
    """The number of query heads H."""
    query: str | Rows | None = None
    """The name of the linear module that makes the queries. The rows of a head lie side by side."""
    key: str | Rows | None = None
    """The name of the linear module that makes the keys. If there are fewer key heads than query heads, each key head
    serves the same number of query heads.
    """
    value: str | Rows | None = None
    """The name of the linear module that makes the values. It has as many heads as the module of the keys."""
    counts: Sequence[str] = ()
    """Names of attributes of the module that hold the number of heads, or the total width of all heads. The usual names
    need not be given. `config.NAME` is for a layer that reads its sizes from its config, `..NAME` for an attribute of
    the module around it."""

    def completed(self, model: nn.Module) -> Block:
        """Return the block with all that is read from the model. Raises `Unsupported` if the attention module in the
        model does not fit the given fields."""
        width = weight_of(self._module(model, self.out)).shape[1]
        if self.heads < 1 or width % self.heads:
            raise Unsupported(
                f"blocks: {self.path} with heads={self.heads}: must divide the {width} input columns of {self.out}"
            )
        K, made_by = width // self.heads, list[Source]()
        for role, given in (("query", self.query), ("key", self.key), ("value", self.value)):
            if given is not None:
                path = given if isinstance(given, str) else given.path
                made = len(weight_of(self._module(model, path)))
                by_head = neighbours(made, made // K) if isinstance(given, str) else given.heads
                whole = all(len(head) == K and min(head) >= 0 and max(head) < made for head in by_head)
                fits = self.heads == len(by_head) if role == "query" else by_head and self.heads % len(by_head) == 0
                if not whole or not fits or (isinstance(given, str) and made % K):
                    raise Unsupported(
                        f"blocks: {self.path}: {path} makes {made} features, of which {role} must take {K} for each of"
                        f" {self.heads} heads" + ("" if role == "query" else ", or of as many as divide it")
                    )
                of = tuple(n * len(by_head) // self.heads for n in range(self.heads))
                made_by.append(Source(Rows(self._full(model, path), by_head), of, role))
        missing = [role for role in ROLES if role not in {source.role for source in made_by}]
        return Block(
            self.path,
            self._full(model, self.out),
            neighbours(width, self.heads),
            tuple(made_by),
            names=tuple(range(self.heads)),
            counts=self.counts,
            why_not=f"it is given without {', '.join(missing)}" if missing else "",
        )

    def _full(self, model: nn.Module, name: str) -> str:
        inside = f"{self.path}.{name}" if self.path else name
        paths = {path for path, _ in model.named_modules()}
        return name if name in paths and inside not in paths else inside

    def _module(self, model: nn.Module, name: str) -> nn.Module:
        try:
            module = model.get_submodule(path := self._full(model, name))
        except AttributeError:
            raise Unsupported(f"blocks: the model has no module {path}") from None
        if not is_linear(module):
            raise Unsupported(f"blocks: {path} is a {type(module).__name__}, must be a linear module")
        return module


def block_of(layer: MultiHeadAttention, path: str, called: str | None = None, **facts: Any) -> Block:
    """Return the block that describes the `MultiHeadAttention` at `path`. `called` is the path of the module whose call
    computes the attention. By default it is `path` too."""
    H, columns = layer.num_heads, neighbours(layer.num_heads * layer.head_dim, layer.num_heads)
    made_by = tuple(Source(Rows(f"{path}.{role[0]}_proj", columns), tuple(range(H)), role) for role in ROLES)
    facts = {"names": tuple(range(H)), **facts}
    return Block(called or path, f"{path}.out_proj", columns, made_by, **facts)


def neighbours(width: int, heads: int) -> tuple[tuple[int, ...], ...]:
    """Return the columns of each head, for heads of equal width that lie side by side."""
    K = width // heads if heads else 0
    return tuple(tuple(range(h * K, (h + 1) * K)) for h in range(heads))


def within(path: str, other: str) -> bool:
    """Return whether a module is another one or inside of it, by their paths."""
    return not other or path == other or path.startswith(f"{other}.")


def shared_words(path: str, other: str) -> int:
    """Return how many words two paths share from their beginning."""
    words = zip(path.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], words))


def around(path: str, *others: str) -> str:
    """Return the path of the smallest module in which all of these are, or that is them all."""
    return ".".join(path.split(".")[: min((shared_words(path, other) for other in others), default=None)])


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight of a linear module as (outputs, inputs). It shares the storage of the module. The inputs of a
    convolution are those at all places of its kernel."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if is_convolution(module):
        return weight.flatten(1)
    return weight if isinstance(module, nn.Linear) else weight.mT


@torch.no_grad()
def effective_weight(module: nn.Module, like: Tensor) -> Tensor:
    """Return the weight (outputs, inputs) of a module that computes a linear map of its input, read off the map itself.
    `like` is a weight of this shape."""
    width = like.shape[1]
    made: Tensor = module(torch.eye(width, device=like.device, dtype=like.dtype)) - module(like.new_zeros(1, width))
    return made.mT


def name_blocks(paths: Sequence[str]) -> list[BlockId]:
    """Name attention modules: return a site and a layer for each of these paths.

    The site is the words of the path, without numbers and without the words that all paths share. The layer is the
    number that differs between the paths of one site, or the only number of its only path.
    `model.decoder.layers.3.self_attn` is layer 3 of the site `decoder.self_attn`. If several numbers differ, or none,
    the paths of a site are counted from 0.
    """
    split = [path.split(".") if path else [] for path in paths]
    sites = _sites([[part for part in parts if not part.isdecimal()] for parts in split])
    blocks: list[BlockId] = []
    for site, parts in zip(sites, split, strict=True):
        rivals = [other for other, of in zip(split, sites, strict=True) if of == site]
        numbers = [[int(part) for part in other if part.isdecimal()] for other in rivals]
        varying = [i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
        own = [int(part) for part in parts if part.isdecimal()]
        if len(varying) == 1:
            layer = own[varying[0]]
        elif len(rivals) == len(own) == 1:
            layer = own[0]
        else:
            layer = sum(block.site == site for block in blocks)
        blocks.append(BlockId(site, layer))
    return blocks


def _sites(words: Sequence[Sequence[str]]) -> list[str]:
    """Return a site for each path: the words of the path that not all paths share. If all paths have the same words,
    return the last words."""
    shared = set.intersection(*map(set, words)) if words else set()
    short = [".".join(word for word in each if word not in shared) for each in words]
    whole = [".".join(each) or "attention" for each in words]
    if len(set(whole)) == 1 and words[0]:
        last = 2 if words[0][-1] == "self" else 1
        return [".".join(each[-last:]) or "layer" for each in words]
    return short if all(short) and len(set(short)) == len(set(whole)) else whole


def grid_of(names: Sequence[BlockId], blocks: Sequence[Block]) -> HeadGrid:
    """Return the grid of the heads of these blocks."""
    return _grid(tuple(names), tuple(tuple(block.names) for block in blocks))


@lru_cache(maxsize=64)
def _grid(names: tuple[BlockId, ...], numbers: tuple[tuple[int, ...], ...]) -> HeadGrid:
    heads = [HeadId(*name, number) for name, each in zip(names, numbers, strict=True) for number in each]
    return HeadGrid(names, tuple(heads))
