"""A user's batches as examples that can be selected, sorted and run together.

Dimensions: E = examples, B = batch, T = positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.hooks.pytree import tensors_in

MASK = "attention_mask"
IGNORED = -100
"""The value of labels that losses ignore."""
DENSE = "dense output"
"""The name of the field that holds the dense model's output, for a loss to read. No argument can have this name."""
LABELS = "labels"
CORRUPT = "corrupt "
"""The begin of the names of the values of the corrupt counterparts."""

Column = Tensor | list[Any]
"""One entry per example."""


class Parts(tuple[Any, ...]):
    """A batch that is a tuple, and the dense model's output for this batch."""

    dense: Tensor | None

    def __new__(cls, values: Iterable[Any], dense: Tensor | None) -> Parts:
        parts = super().__new__(cls, values)
        parts.dense = dense
        return parts


@dataclass(frozen=True, eq=False)
class Kind:
    """Examples that can be computed in one pass: their tensors have the same shapes, and the rest of their batches is
    equal."""

    fields: Mapping[str, Column]
    """The tensors and lists by name, with one entry per example."""
    constants: Mapping[str, Any]
    """The other values of a batch, which belong to all of its examples."""

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """The shapes and types of one example's tensors."""
        return {
            name: (value.shape[1:], value.dtype) if isinstance(value, Tensor) else list
            for name, value in self.fields.items()
        }

    @cached_property
    def width(self) -> int:
        """The number of columns of the first field that has columns."""
        tensors = (value for value in self.fields.values() if isinstance(value, Tensor) and value.dim() > 1)
        return next((value.shape[1] for value in tensors), 1)

    def fits(self, other: Kind) -> bool:
        """Return whether examples of both can share a pass."""
        alike = self.shapes == other.shapes and self.constants.keys() == other.constants.keys()
        return alike and all(_equal(value, other.constants[name]) for name, value in self.constants.items())

    @property
    def parts(self) -> tuple[Mapping[str, Column], Mapping[str, Any]]:
        """The fields and the constants."""
        return self.fields, self.constants

    def equal_to(self, other: Kind) -> int:
        """Return how many examples have the same values in `other`, in the same row."""
        alike = all(_equal(x, other.constants.get(name)) for name, x in self.constants.items())
        same = [torch.full((len(self),), alike)]
        for name, x in self.fields.items():
            y: Any = other.fields[name]
            rows = (x == y).reshape(len(x), -1).all(dim=1).cpu() if isinstance(x, Tensor) else map(_equal, x, y)
            same.append(torch.as_tensor(list(rows)))
        return int(torch.stack(same).all(dim=0).sum())

    def select(self, rows: Tensor) -> Kind:
        """Return the examples in these rows."""
        fields: dict[str, Column] = {}
        for name, value in self.fields.items():
            fields[name] = value[rows.to(value.device)] if isinstance(value, Tensor) else [value[n] for n in rows]
        return Kind(fields, self.constants)

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> Kind:
        """Return the examples with every tensor changed by a function of its name and itself."""
        fields = {name: change(name, x) if isinstance(x, Tensor) else x for name, x in self.fields.items()}
        return Kind(fields, self.constants)

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))


@dataclass(frozen=True, eq=False)
class Batches(Data):
    """The examples of a list of batches.

    A batch is a dict, a tuple or a single tensor. Its tensors, and lists of the same length, have one row per example;
    any other value belongs to the batch as a whole. A tuple is (inputs ..., target), as a loader of torch makes it. No
    pass holds more examples than the largest batch.

    Nothing is padded here: only examples of one `Kind` share a pass, so every example is computed at the width and with
    the values of its own batch.
    """

    kinds: tuple[Kind, ...]
    at: Tensor
    """(E, 2): the kind of each example, and its row there."""
    names: tuple[str, ...]
    """The names of the parts of a batch, in the user's order."""
    form: type
    """The type of a batch of the user: dict, tuple or Tensor."""
    largest: int = sys.maxsize
    """The number of examples of the largest batch."""

    @classmethod
    def of(cls, batches: Any, name: str) -> Batches:
        """Return the `Batches` of a split that the user gave. Raises ValueError, which names the split, for anything
        that cannot be read as batches."""
        if isinstance(batches, Batches):
            return batches
        if isinstance(batches, Mapping | Tensor):
            batches = [batches]
        once = isinstance(batches, Iterator)
        if not isinstance(batches, Iterable):
            raise ValueError(f"{name}: is a {type(batches).__name__}, must be a list of batches or a DataLoader")
        batches = list(batches)
        given = [_as_dict(batch, name) for batch in batches]
        if not given:
            hint = "; an iterator can be read only once, so give each split its own" if once else ""
            raise ValueError(f"{name}: holds no batches, must be a list of them{hint}")
        form = dict if isinstance(batches[0], Mapping) else tuple if isinstance(batches[0], tuple | list) else Tensor
        kinds = [_kind_of(batch, name) for batch in given]
        tensors = [{key for key, value in kind.fields.items() if isinstance(value, Tensor)} for kind in kinds]
        if any(keys != tensors[0] for keys in tensors) or not tensors[0]:
            has = ", ".join(key for key in given[0] if key in tensors[0]) or "none"
            raise ValueError(f"{name}: every batch must have the same tensors, one or more; the first has {has}")
        return cls._grouped(kinds, tuple(given[0]), form, max(map(len, kinds)))

    @classmethod
    def _grouped(cls, pieces: Sequence[Kind], names: tuple[str, ...], form: type, largest: int) -> Batches:
        """Put pieces that fit each other together."""
        groups: list[list[Kind]] = []
        at = []
        for piece in pieces:
            number = next((n for n, group in enumerate(groups) if group[0].fits(piece)), len(groups))
            if number == len(groups):
                groups.append([])
            start = sum(map(len, groups[number]))
            groups[number].append(piece)
            at.append(torch.stack([torch.full((len(piece),), number), torch.arange(start, start + len(piece))], dim=1))
        kinds = tuple(
            Kind(
                {name: _joined([piece.fields[name] for piece in group]) for name in group[0].fields}, group[0].constants
            )
            for group in groups
        )
        return cls(kinds, torch.cat(at), names, form, largest)

    @classmethod
    def extremes(cls, splits: Sequence[Batches]) -> Batches:
        """Return a batch of the largest size with the longest example of all splits, and the shortest one. Only if
        these two cannot share a pass, the shortest one is apart."""
        size = max(split.largest for split in splits)
        found = [
            (width, length, s, e)
            for s, split in enumerate(splits)
            for e, (width, length) in enumerate(zip(split.widths().tolist(), split.lengths().tolist(), strict=True))
        ]
        *_, of_longest, longest = max(found, key=lambda each: each[:2])
        *_, of_shortest, shortest = min(found, key=lambda each: each[:2])
        split = splits[of_longest]
        beside = (split.at[:, 0] == split.at[longest, 0]).nonzero().flatten().tolist()
        batch = split[torch.tensor([longest, *(e for e in beside if e != longest)][:size])].whole
        alone = splits[of_shortest][torch.tensor([shortest])].whole
        if batch.fits(alone) and (of_shortest, shortest) != (of_longest, longest):
            batch = batch.select(torch.arange(min(len(batch), max(1, size - 1))))
        pieces = [batch] if (of_shortest, shortest) == (of_longest, longest) else [batch, alone]
        return cls._grouped(pieces, split.names, split.form, size)

    @classmethod
    def fullest(cls, splits: Sequence[Batches]) -> Batches:
        """Return the batch with the most tokens that a pass over one of the splits holds."""
        found = [split[at] for split in splits for at in split.passes(split.by_length(), split.largest)]
        return max(found, key=lambda batch: int(batch.lengths().sum()))

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, index: slice | Tensor) -> Self:
        return replace(self, at=self.at[index.cpu() if isinstance(index, Tensor) else index])

    @cached_property
    def whole(self) -> Kind:
        """The examples as one `Kind`. Raises ValueError for examples that cannot share a pass."""
        numbers = self.at[:, 0].unique().tolist() or [0]
        if len(numbers) > 1:
            raise ValueError("examples: differ in their shapes or in the rest of their batches, and share no pass")
        kind, rows = self.kinds[numbers[0]], self.at[:, 1]
        return kind if torch.equal(rows, torch.arange(len(kind))) else kind.select(rows)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The tensors and lists by name, (E, ...) each, of examples that can share a pass."""
        return self.whole.fields

    def widths(self) -> Tensor:
        """Return the number of columns of each example, padding included, (E,)."""
        return torch.tensor([kind.width for kind in self.kinds])[self.at[:, 0]]

    def lengths(self) -> Tensor:
        """Return the number of tokens of each example, (E,), from the attention mask. Without a mask, count the columns
        of the first field."""
        counts = []
        for kind in self.kinds:
            mask = kind.fields.get(MASK)
            counts.append(torch.full((len(kind),), kind.width))
            if isinstance(mask, Tensor) and mask.dim() == 2:
                counts[-1] = (mask != 0).sum(dim=1).cpu()
        starts = torch.tensor([0, *map(len, counts)]).cumsum(dim=0)
        return torch.cat(counts)[starts[self.at[:, 0]] + self.at[:, 1]]

    def by_length(self) -> Tensor:
        return (self.widths() * len(self.kinds) + self.at[:, 0]).argsort(stable=True)

    def first(self, number: int) -> Self:
        """Return this number of examples of the first kind that has as many; else those of the largest kind."""
        counts = self.at[:, 0].bincount()
        kind = int((counts >= number).int().argmax() if (counts >= number).any() else counts.argmax())
        return self[(self.at[:, 0] == kind).nonzero().flatten()[:number]]

    def passes(self, order: Tensor, wanted: int) -> Iterator[Tensor]:
        yield from self._same_kind(order, self.rows(wanted))

    def _same_kind(self, order: Tensor, rows: int) -> Iterator[Tensor]:
        _, counts = self.at[order.cpu(), 0].unique_consecutive(return_counts=True)
        for part in order.split(counts.tolist()):
            yield from part.split(rows)

    def shuffled_batches(
        self, batch_size: int, order: torch.Generator, sorted_batches: int = 1, skip: int = 0
    ) -> Iterator[Self]:
        """Yield batches without end, each of one kind: every epoch is a new permutation."""
        while True:
            epoch = torch.randperm(len(self), generator=order)
            batches = list(self._same_kind(epoch[self.at[epoch, 0].argsort(stable=True)], batch_size))
            if len(self.kinds) > 1:
                batches = [batches[i] for i in torch.randperm(len(batches), generator=order)]
            yield from (self[at] for at in batches[skip:])
            skip = max(0, skip - len(batches))

    def tensors(self) -> Mapping[str, Tensor]:
        found = {f"{n}.{name}": x for n, kind in enumerate(self.kinds) for name, x in kind.fields.items()}
        return {"at": self.at} | {name: x for name, x in found.items() if isinstance(x, Tensor)}

    @property
    def device(self) -> torch.device:
        return next(x.device for x in self.kinds[0].fields.values() if isinstance(x, Tensor))

    def converted(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the examples on `device`, with the floating-point inputs in the precision `dtype`. Targets, and what
        the dense model said, keep theirs."""
        targets = {DENSE, LABELS, self.names[-1] if self.form is tuple and len(self.names) > 1 else ""}

        def moved(name: str, x: Tensor) -> Tensor:
            is_input = x.is_floating_point() and name.removeprefix(CORRUPT) not in targets
            return x.to(device, dtype if is_input else x.dtype)

        return self._changed(moved)

    def on_cpu(self) -> Self:
        """Return the examples on the CPU."""
        return self._changed(lambda name, x: x.cpu())

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        if len(self.at[:, 0].unique()) > 1:
            return replace(self, kinds=tuple(kind.changed(change) for kind in self.kinds))
        rows = torch.arange(len(self))
        at = torch.stack([torch.zeros_like(rows), rows], dim=1)
        return replace(self, kinds=(self.whole.changed(change),), at=at)

    def rows(self, wanted: int) -> int:
        return min(wanted, self.largest)

    def with_dense(self, outputs: Tensor) -> Self:
        """Return the examples with the dense model's output for each, (E, ...), for a loss to compare with."""
        kinds = []
        for number, kind in enumerate(self.kinds):
            mine = self.at[:, 0] == number
            dense = outputs.new_zeros(len(kind), *outputs.shape[1:])
            dense[self.at[mine, 1].to(outputs.device)] = outputs[mine.to(outputs.device)]
            kinds.append(Kind({**kind.fields, DENSE: dense}, kind.constants))
        return replace(self, kinds=tuple(kinds))

    def with_corrupt(self, batches: Any) -> Self:
        """Return the examples with their corrupt counterparts, each with all values of its own batch. Raises ValueError
        for what cannot be paired."""
        given = Batches.of(batches, "corrupt")
        if len(given) != len(self):
            raise ValueError(
                f"corrupt: {len(given)} examples cannot be paired with the {len(self)} of score, must have the same"
                " number of examples in every batch, and the same shapes"
            )
        which, places = torch.cat([self.at[:, :1], given.at[:, :1]], dim=1).unique(dim=0, return_inverse=True)
        kinds, at = [], torch.zeros_like(self.at)
        for number, (at_own, at_given) in enumerate(which.tolist()):
            here = places == number
            own = self.kinds[at_own].select(self.at[here, 1])
            other = given.kinds[at_given].select(given.at[here, 1])
            if own.shapes != other.shapes:
                columns = f"{other.width} and {own.width} columns"
                raise ValueError(f"corrupt: has batches of other shapes than score ({columns}), must have the same")
            if same := own.equal_to(other):
                raise ValueError(f"corrupt: {same} examples are equal to their counterparts, must differ from them")
            both = zip(own.parts, other.parts, strict=True)
            kinds.append(Kind(*({**mine, **{CORRUPT + n: x for n, x in theirs.items()}} for mine, theirs in both)))
            at[here] = torch.stack([torch.full((len(own),), number), torch.arange(len(own))], dim=1)
        return replace(self, kinds=tuple(kinds), at=at)

    def counterpart(self) -> Self:
        if not any(name.startswith(CORRUPT) for name in self.kinds[0].fields):
            return super().counterpart()
        kinds = []
        for kind in self.kinds:
            parts = (
                {n.removeprefix(CORRUPT): x for n, x in part.items() if n.startswith(CORRUPT)} for part in kind.parts
            )
            kinds.append(Kind(*parts))
        return replace(self, kinds=tuple(kinds))

    def as_given(self) -> Any:
        """Return a batch in the user's own form, for the user's functions."""
        dense = self.fields.get(DENSE)
        values = self.arguments()
        if self.form is dict:
            return values if dense is None else {**values, DENSE: dense}
        if dense is None and self.form is Tensor:
            return values
        return Parts(values if self.form is tuple else (values,), dense)

    def arguments(self) -> Any:
        """Return the input of the model: the batch without the fields that only the loss reads."""
        known = {name: x for part in self.whole.parts for name, x in part.items() if not name.startswith(CORRUPT)}
        values = {name: known[name] for name in (*self.names, *sorted({*known} - {*self.names, DENSE}))}
        if self.form is dict:
            return values
        return tuple(values.values()) if self.form is tuple else next(iter(values.values()))

    @property
    def mask(self) -> Tensor | None:
        """The attention mask (B, T), if it is in the batch and some of its positions are padding."""
        mask = self.fields.get(MASK)
        return mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 0).any()) else None

    def of_decoder(self, length: int) -> Tensor:
        """Return a mask (B, T) of the positions of a decoder that are no padding: by its own mask, or by the labels,
        which are -100 at padding. Without these, a decoder reads all positions."""
        for name, padding in ((f"decoder_{MASK}", 0), (LABELS, IGNORED)):
            given = self.fields.get(name)
            if isinstance(given, Tensor) and given.shape == (len(self), length):
                return given != padding
        return self.all_real(length)

    def all_real(self, length: int) -> Tensor:
        """Return a mask (B, T) without padding."""
        return torch.ones(len(self), length, dtype=torch.bool, device=self.device)


def _as_dict(batch: Any, name: str) -> dict[str, Any]:
    """Return the parts of a batch by name, or by number. Raises ValueError, which names the split, for no batch."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        return {"0": batch}
    if isinstance(batch, tuple | list):
        return {str(i): value for i, value in enumerate(batch)}
    raise ValueError(f"{name}: a batch is a {type(batch).__name__}, must be a dict, a tuple or a tensor")


def _kind_of(batch: Mapping[str, Any], name: str) -> Kind:
    """Return one batch. Raises ValueError for tensors that do not have one row per example."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
    rows = {len(value) if value.dim() else None for value in tensors.values()}
    if tensors and (len(rows) != 1 or None in rows):
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in tensors.items())
        raise ValueError(f"{name}: every tensor of a batch must have a row per example, here are {shapes}")
    if rows == {0}:
        raise ValueError(f"{name}: a batch holds no example, must hold one or more")
    for key, value in batch.items():
        if key not in tensors and next(tensors_in(value), None) is not None:
            raise ValueError(
                f"{name}: {key} is a {type(value).__name__} with tensors in it, must be a tensor; give each of them a"
                " name of its own, and call=lambda model, batch: ... puts them together"
            )
        if key == DENSE or str(key).startswith(CORRUPT):
            raise ValueError(f"{name}: {key!r} is a name that mhaprune uses itself, must be another")
    lists = {key: value for key, value in batch.items() if isinstance(value, list) and {len(value)} == rows}
    fields = {key: value for key, value in batch.items() if key in tensors or key in lists}
    return Kind(fields, {key: value for key, value in batch.items() if key not in fields})


def _joined(columns: Sequence[Any]) -> Column:
    if len(columns) == 1:
        return columns[0]
    return (
        torch.cat(list(columns)) if isinstance(columns[0], Tensor) else [each for column in columns for each in column]
    )


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values of batches are equal; False where that cannot be told."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # of a class that may be anybody's
        return False
