"""A user's batches as examples that can be selected, sorted and run together.

Dimensions: E = examples, B = batch, T = positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Self

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.subjects.stacks import CORRUPT, DENSE, Stack, is_by_kind, joined, read_batches, tensor_names
from mhaprune.tables import ALL_KINDS

MASK = "attention_mask"
IGNORED = -100
"""The value of labels that losses ignore."""
LABELS = "labels"
MAIN = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features", "decoder_input_ids")
"""The names of the arguments that models of transformers read (`main_input_name`)."""


class Parts(tuple[Any, ...]):
    """A batch that is a tuple, and the dense model's output for this batch."""

    dense: Tensor | None

    def __new__(cls, values: Iterable[Any], dense: Tensor | None) -> Parts:
        parts = super().__new__(cls, values)
        parts.dense = dense
        return parts


@dataclass(frozen=True, eq=False)
class Batches(Data):
    """The examples of a list of batches.

    A batch is a dict, a tuple or a single tensor. Its tensors, and lists of the same length, have one row per example;
    any other value belongs to the batch as a whole. A tuple is (inputs ..., target), as a loader of torch makes it. No
    pass holds more examples than the largest batch.

    Nothing is padded here: only examples of one `Stack` share a pass, so every example is computed at the width and
    with the values of its own batch.
    """

    stacks: tuple[Stack, ...]
    at: Tensor
    """(E, 3): the stack of each example, its row there, and the number of its kind."""
    names: tuple[str, ...]
    """The names of the parts of a batch, in the user's order."""
    form: type
    """The type of a batch of the user: dict, tuple or Tensor."""
    largest: int = sys.maxsize
    """The number of examples of the largest batch."""
    kind_names: tuple[str, ...] = ()
    """The names of the kinds of examples; none if the user told none apart."""

    @classmethod
    def of(cls, batches: Any, name: str) -> Batches:
        """Return the `Batches` of a split that the user gave: batches, or a dict of batches by the name of their kind.
        Raises ValueError, which names the split, for anything that cannot be read as batches."""
        if isinstance(batches, Batches):
            return batches
        by_kind = dict(batches) if is_by_kind(batches) else {None: batches}
        if wrong := [kind for kind in by_kind if kind in ("", ALL_KINDS) or not isinstance(kind, str | None)]:
            raise ValueError(
                f"{name}={wrong[0]!r}: the name of a kind must be a text, and neither empty nor {ALL_KINDS}"
            )
        read = {kind: read_batches(part, f"{name}={kind}" if kind else name) for kind, part in by_kind.items()}
        (_, (first, names, form)), *others = read.items()
        for kind, (own, _, its_form) in others:
            if (tensor_names(own[0]), its_form) != (tensor_names(first[0]), form):
                has = ", ".join(sorted(tensor_names(first[0])))
                raise ValueError(f"{name}={kind}: must have batches like those of {next(iter(read))}, with {has}")
        pieces = [(stack, number) for number, (own, _, _) in enumerate(read.values()) for stack in own]
        found = cls._grouped(pieces, names, form, max(len(stack) for stack, _ in pieces))
        found = replace(found, kind_names=tuple(kind for kind in by_kind if kind))
        found.check_kinds(name)
        return found

    @classmethod
    def _grouped(cls, pieces: Sequence[tuple[Stack, int]], names: tuple[str, ...], form: type, largest: int) -> Batches:
        """Put pieces that fit each other together. Each comes with the number of its kind."""
        groups: list[list[Stack]] = []
        at = []
        for piece, kind in pieces:
            number = next((n for n, group in enumerate(groups) if group[0].fits(piece)), len(groups))
            if number == len(groups):
                groups.append([])
            start, rows = sum(map(len, groups[number])), torch.arange(len(piece))
            groups[number].append(piece)
            at.append(torch.stack([torch.full_like(rows, number), start + rows, torch.full_like(rows, kind)], dim=1))
        stacks = tuple(
            Stack(
                {name: joined([piece.fields[name] for piece in group]) for name in group[0].fields}, group[0].constants
            )
            for group in groups
        )
        return cls(stacks, torch.cat(at), names, form, largest)

    def by_kind(self) -> dict[str, Tensor]:
        return {name: (self.at[:, 2] == n).nonzero().flatten() for n, name in enumerate(self.kind_names)}

    def check_kinds(self, name: str) -> None:
        """Raise ValueError, which names the split, for a kind of one example, and for an example of two kinds."""
        first: dict[bytes, str] = {}
        for kind, rows in self.by_kind().items():
            if len(rows) < 2:
                raise ValueError(f"{name}={kind}: has one example, a kind must have 2 or more")
            for example in self[rows].digests():
                if (other := first.setdefault(example, kind)) != kind:
                    raise ValueError(f"{name}={kind}: an example is one of {other} too, kinds must share none")

    def digests(self) -> list[bytes]:
        """Return bytes for each example that are the same for equal inputs, whatever the padding and the type of whole
        numbers. Labels do not count, as far as they can be told: of a tuple the last part, `labels`, and where
        transformers name what is read, everything else."""
        targets = {MASK, LABELS, self.names[-1] if self.form is tuple and len(self.names) > 1 else ""}
        main = [name for name in self.names if name in MAIN] or [name for name in self.names if name not in targets]
        found = []
        for stack, row in self.at[:, :2].tolist():
            (fields, constants), digest = self.stacks[stack].parts, sha256()
            mask = fields.get(MASK)
            for name in main:
                own: Any = fields[name][row] if name in fields else constants.get(name)
                if isinstance(own, Tensor):
                    own = own.detach().cpu()
                    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1:] == own.shape[:1]:
                        own = own[mask[row].cpu() != 0]
                    own = own.double() if own.is_floating_point() else own.long()
                    digest.update(own.numpy().tobytes())
                    own = tuple(own.shape)
                digest.update(repr((name, own)).encode())
            found.append(digest.digest())
        return found

    @classmethod
    def extremes(cls, splits: Sequence[Batches]) -> Batches:
        """Return a batch of the largest size with the longest example of all splits, and the shortest one. Only if
        these two cannot share a pass, the shortest one is apart. If each is alone then, two that share one follow."""
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
        if size > 1 and len(batch) == 1 and not (len(pieces) > 1 and batch.fits(alone)):
            of_stacks = [(each, each.at[:, 0] == n) for each in splits for n in each.at[:, 0].unique()]
            pairs = [each[there.nonzero().flatten()[:2]].whole for each, there in of_stacks if there.sum() > 1]
            pieces += [max(pairs, key=lambda pair: pair.width)] if pairs else []
        return cls._grouped([(piece, 0) for piece in pieces], split.names, split.form, size)

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
    def whole(self) -> Stack:
        """The examples as one `Stack`. Raises ValueError for examples that cannot share a pass."""
        numbers = self.at[:, 0].unique().tolist() or [0]
        if len(numbers) > 1:
            raise ValueError("examples: differ in their shapes or in the rest of their batches, and share no pass")
        stack, rows = self.stacks[numbers[0]], self.at[:, 1]
        return stack if torch.equal(rows, torch.arange(len(stack))) else stack.select(rows)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The tensors and lists by name, (E, ...) each, of examples that can share a pass."""
        return self.whole.fields

    def widths(self) -> Tensor:
        """Return the number of columns of each example, padding included, (E,)."""
        return torch.tensor([stack.width for stack in self.stacks])[self.at[:, 0]]

    def lengths(self) -> Tensor:
        """Return the number of tokens of each example, (E,), from the attention mask. Without a mask, count the columns
        of the first field."""
        counts = []
        for stack in self.stacks:
            mask = stack.fields.get(MASK)
            counts.append(torch.full((len(stack),), stack.width))
            if isinstance(mask, Tensor) and mask.dim() == 2:
                counts[-1] = (mask != 0).sum(dim=1).cpu()
        starts = torch.tensor([0, *map(len, counts)]).cumsum(dim=0)
        return torch.cat(counts)[starts[self.at[:, 0]] + self.at[:, 1]]

    def by_length(self) -> Tensor:
        return (self.widths() * len(self.stacks) + self.at[:, 0]).argsort(stable=True)

    def first(self, number: int) -> Self:
        """Return this number of examples of the first stack that has as many; else those of the largest stack."""
        counts = self.at[:, 0].bincount()
        stack = int((counts >= number).int().argmax() if (counts >= number).any() else counts.argmax())
        return self[(self.at[:, 0] == stack).nonzero().flatten()[:number]]

    def passes(self, order: Tensor, wanted: int) -> Iterator[Tensor]:
        yield from self._same_stack(order, self.rows(wanted))

    def _same_stack(self, order: Tensor, rows: int) -> Iterator[Tensor]:
        _, counts = self.at[order.cpu(), 0].unique_consecutive(return_counts=True)
        for part in order.split(counts.tolist()):
            yield from part.split(rows)

    def shuffled_batches(
        self, batch_size: int, order: torch.Generator, sorted_batches: int = 1, skip: int = 0
    ) -> Iterator[Self]:
        """Yield batches without end, each of one stack: every epoch is a new permutation."""
        while True:
            epoch = torch.randperm(len(self), generator=order)
            batches = list(self._same_stack(epoch[self.at[epoch, 0].argsort(stable=True)], batch_size))
            if len(self.stacks) > 1:
                batches = [batches[i] for i in torch.randperm(len(batches), generator=order)]
            yield from (self[at] for at in batches[skip:])
            skip = max(0, skip - len(batches))

    def tensors(self) -> Mapping[str, Tensor]:
        found = {f"{n}.{name}": x for n, stack in enumerate(self.stacks) for name, x in stack.fields.items()}
        return {"at": self.at} | {name: x for name, x in found.items() if isinstance(x, Tensor)}

    @property
    def device(self) -> torch.device:
        return next(x.device for x in self.stacks[0].fields.values() if isinstance(x, Tensor))

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
            return replace(self, stacks=tuple(stack.changed(change) for stack in self.stacks))
        rows = torch.arange(len(self))
        at = torch.stack([torch.zeros_like(rows), rows, self.at[:, 2]], dim=1)
        return replace(self, stacks=(self.whole.changed(change),), at=at)

    def rows(self, wanted: int) -> int:
        return min(wanted, self.largest)

    def with_dense(self, outputs: Tensor) -> Self:
        """Return the examples with the dense model's output for each, (E, ...), for a loss to compare with."""
        stacks = []
        for number, stack in enumerate(self.stacks):
            mine = self.at[:, 0] == number
            dense = outputs.new_zeros(len(stack), *outputs.shape[1:])
            dense[self.at[mine, 1].to(outputs.device)] = outputs[mine.to(outputs.device)]
            stacks.append(Stack({**stack.fields, DENSE: dense}, stack.constants))
        return replace(self, stacks=tuple(stacks))

    def with_corrupt(self, batches: Any) -> Self:
        """Return the examples with their corrupt counterparts, each with all values of its own batch. Raises ValueError
        for what cannot be paired."""
        given = Batches.of(batches, "corrupt")
        if len(given) != len(self):
            raise ValueError(
                f"corrupt: {len(given)} examples cannot be paired with the {len(self)} of score, must have the same"
                " number of examples in every batch, and the same shapes"
            )
        if given.kind_names != self.kind_names or not torch.equal(given.at[:, 2], self.at[:, 2]):
            raise ValueError("corrupt: must have the kinds of score, each with as many examples")
        which, places = torch.cat([self.at[:, :1], given.at[:, :1]], dim=1).unique(dim=0, return_inverse=True)
        stacks, at = [], self.at.clone()
        for number, (at_own, at_given) in enumerate(which.tolist()):
            here = places == number
            own = self.stacks[at_own].select(self.at[here, 1])
            other = given.stacks[at_given].select(given.at[here, 1])
            if own.shapes != other.shapes:
                columns = f"{other.width} and {own.width} columns"
                raise ValueError(f"corrupt: has batches of other shapes than score ({columns}), must have the same")
            if same := own.equal_to(other):
                raise ValueError(f"corrupt: {same} examples are equal to their counterparts, must differ from them")
            both = zip(own.parts, other.parts, strict=True)
            stacks.append(Stack(*({**mine, **{CORRUPT + n: x for n, x in theirs.items()}} for mine, theirs in both)))
            at[here, :2] = torch.stack([torch.full((len(own),), number), torch.arange(len(own))], dim=1)
        return replace(self, stacks=tuple(stacks), at=at)

    def counterpart(self) -> Self:
        if not any(name.startswith(CORRUPT) for name in self.stacks[0].fields):
            return super().counterpart()
        stacks = []
        for stack in self.stacks:
            parts = (
                {n.removeprefix(CORRUPT): x for n, x in part.items() if n.startswith(CORRUPT)} for part in stack.parts
            )
            stacks.append(Stack(*parts))
        return replace(self, stacks=tuple(stacks))

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
