"""Names, order and masks of heads.

Dimensions: N = all heads of a model on one flat axis.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, NamedTuple

from mhaprune.moved import names_in

if TYPE_CHECKING:
    import torch
    from torch import Tensor

if not TYPE_CHECKING:  # else no name of this module would be checked
    __getattr__ = names_in("mhaprune.lab.model.sites", "Site", "NeuronSite", "SITES", "block_label")


def is_share(number: float | int) -> bool:
    """Return whether a number says a share: 1.0 is all of the heads, 1 is one of them. NumPy's numbers count too."""
    return not isinstance(number, Integral)


class BlockId(NamedTuple):
    """One layer of units, as an attention layer is of heads: a site and its number in the stack."""

    site: str
    layer: int

    def __str__(self) -> str:
        site, at, call = self.site.partition("@")
        return f"{site}.{self.layer}{at}{call}"


class HeadId(NamedTuple):
    """The name of one head. It stays with the head: removing others never renumbers it.

    Its text is `cross.0.3`. A site that ends in `@2` means the third call of a layer that a pass calls several times,
    and the text is then `cross.0.3@2`.
    """

    site: str
    layer: int
    head: int

    @property
    def block(self) -> BlockId:
        return BlockId(self.site, self.layer)

    def __str__(self) -> str:
        site, at, call = self.site.partition("@")
        return f"{site}.{self.layer}.{self.head}{at}{call}"

    @classmethod
    def parse(cls, text: str, sites: Container[str] | None = None) -> HeadId:
        """Read the name of a head, such as `cross.0.3`; a site may contain dots. Raises ValueError for any other text,
        and for a site that is not in `sites`."""
        name, at, call = text.partition("@")
        site, *numbers = name.rsplit(".", 2)
        if (
            not site
            or len(numbers) != 2
            or not all(number.isdecimal() for number in (*numbers, *([call] if at else ())))
        ):
            raise ValueError(f"head={text!r}: must read SITE.LAYER.HEAD, for example cross.0.3")
        if sites is not None and site not in sites:
            raise ValueError(f"head={text!r}: has an unknown site, must read SITE.LAYER.HEAD, for example cross.0.3")
        return cls(site + at + call, *map(int, numbers))


LISTED = 200
"""The largest number of heads that an error lists."""


@dataclass(frozen=True)
class HeadGrid:
    """The heads of one model in the order of the flat axis N, block by block.

    Blocks may have different numbers of heads, and a block may have none, because a removal can take any heads.
    """

    blocks: tuple[BlockId, ...]
    heads: tuple[HeadId, ...]

    def __post_init__(self) -> None:
        place = {block: n for n, block in enumerate(self.blocks)}
        places = [place.get(head.block, -1) for head in self.heads]
        if -1 in places or places != sorted(places) or len(set(self.heads)) != len(self.heads):
            raise ValueError("heads: must be distinct and stand block by block, in the order of blocks")

    @classmethod
    def full(cls, blocks: Iterable[BlockId], num_heads: int) -> HeadGrid:
        """Return the grid of an unpruned model: `num_heads` heads in each block."""
        blocks = tuple(blocks)
        return cls(blocks, tuple(HeadId(*block, head) for block in blocks for head in range(num_heads)))

    @cached_property
    def _position(self) -> dict[HeadId, int]:
        return {head: n for n, head in enumerate(self.heads)}

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of heads of each block, in the order of `blocks`."""
        sizes = Counter(head.block for head in self.heads)
        return tuple(sizes[block] for block in self.blocks)

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[HeadId]:
        return iter(self.heads)

    def __deepcopy__(self, memo: object) -> HeadGrid:
        return self  # it never changes, and a copied model would take a third longer

    def __contains__(self, head: object) -> bool:
        return head in self._position

    def index(self, head: HeadId) -> int:
        """Return the position of a head on N. Raises ValueError, listing heads, for an unknown head."""
        if head not in self._position:
            listed = ", ".join(map(str, self.heads[:LISTED])) + (
                f" and {len(self) - LISTED} more" if len(self) > LISTED else ""
            )
            raise ValueError(f"head={head}: no such head, the model has {listed or 'none'}")
        return self._position[head]

    def positions(self, block: BlockId) -> range:
        """The positions on N of the heads of a block."""
        start = sum(self.sizes[: self.blocks.index(block)])
        return range(start, start + self.sizes[self.blocks.index(block)])

    def split(self, values_N: Tensor) -> dict[BlockId, Tensor]:
        """Cut the last axis of a (..., N) tensor into one (..., H) piece per block."""
        if values_N.shape[-1] != len(self):
            raise ValueError(f"gates of shape {tuple(values_N.shape)}: the last axis must hold all {len(self)} heads")
        return dict(zip(self.blocks, values_N.split(self.sizes, dim=-1), strict=True))

    def without(self, heads: Iterable[HeadId]) -> HeadGrid:
        """Return the grid without these heads. Empty blocks stay."""
        gone = set(heads)
        return HeadGrid(self.blocks, tuple(head for head in self if head not in gone))


@dataclass(frozen=True)
class HeadMask:
    """An immutable set of removed heads on a grid."""

    grid: HeadGrid
    removed: frozenset[HeadId] = frozenset()

    def __post_init__(self) -> None:
        for head in self.removed - self.grid._position.keys():
            self.grid.index(head)  # which raises

    @property
    def kept(self) -> tuple[HeadId, ...]:
        return tuple(head for head in self.grid if head not in self.removed)

    def without(self, *heads: HeadId | str) -> HeadMask:
        """Return this mask with more heads removed. A head is a `HeadId` or its name as a text. Raises ValueError for a
        head that is not on the grid.

        >>> HeadMask(HeadGrid.full([BlockId("cross", 0)], 2)).without("cross.0.1").kept
        (HeadId(site='cross', layer=0, head=0),)
        """
        return HeadMask(self.grid, self.removed | {HeadId.parse(h) if isinstance(h, str) else h for h in heads})

    def to_json(self) -> str:
        """Return the names of the removed heads as a list in JSON."""
        return json.dumps([str(head) for head in self.grid if head in self.removed])

    def gates(self, device: torch.device | str | None = None) -> Tensor:
        """Return gates (N,): 1 for kept heads, 0 for removed ones."""
        import torch  # here, so that tables can be read without it

        return torch.tensor([float(head not in self.removed) for head in self.grid], device=device)
