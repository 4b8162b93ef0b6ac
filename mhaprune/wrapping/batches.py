"""A user's batches as examples that can be selected, sorted and concatenated.

Dimensions: E = examples, B = batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import Data
from mhaprune.wrapping.on_demand import OnDemand, as_dict, readings

MASK = "attention_mask"
IGNORED = -100
"""The value of labels that losses ignore."""
DENSE = "dense"
"""The name of the field that holds the dense model's output, for a loss to read."""


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

    A batch is a dict, a tuple or a single tensor; every tensor has one row per example. A tuple is (inputs ...,
    target), as a loader of torch makes it. No pass holds more examples than the largest batch.

    Batches may differ in length. Then they must be dicts with an attention mask, and shorter ones are padded on the
    right. This padding changes no result: when examples are selected, a column of it is removed if it is padding for
    all of them. The user's own padding may be on either side.
    """

    fields: Mapping[str, Tensor]
    """The tensors by name, (E, ...) each. Those of a large loader are read when they are used."""
    widths: Mapping[str, Tensor]
    """(E,): for a field with columns, the number of columns that each example had before it was padded here."""
    constants: Mapping[str, Any]
    """The values in a batch that are not tensors. They are equal in all batches."""
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
        if (found := readings(batches, name)) is not None:
            empty, read, at = found
            seen = cls.of(empty, name)
            if len(seen) == len(at):  # else a row is no example of the dataset
                return replace(seen, fields=OnDemand(read, at, tuple(seen.fields)))
        if isinstance(batches, Mapping | Tensor):
            batches = [batches]
        once = isinstance(batches, Iterator)
        if not isinstance(batches, Iterable):
            raise ValueError(f"{name}: is a {type(batches).__name__}, must be a list of batches or a DataLoader")
        batches = list(batches)
        given = [as_dict(batch, name) for batch in batches]
        if not given:
            hint = "; an iterator can be read only once, so give each split its own" if once else ""
            raise ValueError(f"{name}: holds no batches, must be a list of them{hint}")
        form = dict if isinstance(batches[0], Mapping) else tuple if isinstance(batches[0], tuple | list) else Tensor
        parts = [{key: value for key, value in batch.items() if isinstance(value, Tensor)} for batch in given]
        if any(part.keys() != parts[0].keys() for part in parts) or not parts[0]:
            has = ", ".join(parts[0]) or "none"
            raise ValueError(f"{name}: every batch must have the same tensors, one or more; the first has {has}")
        for part in parts:
            rows = {len(value) if value.dim() else None for value in part.values()}
            if len(rows) != 1 or None in rows:
                shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in part.items())
                raise ValueError(f"{name}: every tensor of a batch must have a row per example, here are {shapes}")
            if rows == {0}:
                raise ValueError(f"{name}: a batch holds no example, must hold one or more")
        fields: dict[str, Tensor] = {}
        widths: dict[str, Tensor] = {}
        for key in parts[0]:
            values = [part[key] for part in parts]
            if values[0].dim() > 1:
                longest = max(value.shape[1] for value in values)
                uneven = any(value.shape[1] != longest for value in values)
                if uneven and not any(MASK in other for other in parts[0]):
                    raise ValueError(
                        f"{name}: batches differ in length ({key}) and have no {MASK}, so that padding cannot be told"
                    )
                widths[key] = torch.cat([torch.full((len(value),), value.shape[1]) for value in values])
                values = [_filled(value, longest, key) for value in values]
            fields[key] = torch.cat(values)
        largest = max(len(next(iter(part.values()))) for part in parts)
        return cls(fields, widths, {k: v for k, v in given[0].items() if k not in fields}, form, largest)

    def __len__(self) -> int:
        return len(self.fields.at if isinstance(self.fields, OnDemand) else next(iter(self.fields.values())))

    def __getitem__(self, index: slice | Tensor) -> Self:
        at = index.cpu() if isinstance(index, Tensor) else index
        widths = {key: width_E[at] for key, width_E in self.widths.items()}
        if isinstance(self.fields, OnDemand):
            return replace(self, fields=self.fields.select(at), widths=widths)
        fields = {key: value[index] for key, value in self.fields.items()}
        for key, width_E in widths.items():
            fields[key] = fields[key][:, : int(width_E.max()) if len(width_E) else 0]
        return replace(self, fields=fields, widths=widths)

    def lengths(self) -> Tensor:
        """Return the number of tokens of each example, (E,), from the attention mask. Without a mask, count the columns
        of the first field."""
        if MASK in self.fields and self[:1].fields[MASK].dim() == 2:
            return torch.cat([(part.fields[MASK] != 0).sum(dim=1).cpu() for part in self.batches(self.largest)])
        return next(iter(self.widths.values()), torch.ones(len(self), dtype=torch.long))

    def by_length(self) -> Tensor:
        widths = next(iter(self.widths.values()), self.lengths())  # only the padding that was added here can be removed
        return widths.argsort(stable=True).to(self.device)

    def tensors(self) -> Mapping[str, Tensor]:
        return self.fields

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if isinstance(self.fields, OnDemand) else next(iter(self.fields.values())).device

    def converted(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the examples on `device`, with floating-point tensors in the precision `dtype`."""
        fields = {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in self.fields.items()}
        return replace(self, fields=fields)

    def rows(self, wanted: int) -> int:
        return min(wanted, self.largest)

    def with_dense(self, outputs: Tensor) -> Self:
        """Return the examples with the dense model's output for each, (E, ...), for a loss to compare with."""
        if isinstance(self.fields, OnDemand):
            return replace(self, fields=self.fields.plus(DENSE, outputs))
        return replace(self, fields={**self.fields, DENSE: outputs})

    def as_given(self) -> Any:
        """Return a batch in the user's own form, for the user's functions."""
        values = {**self.fields, **self.constants}
        if self.form is dict:
            return values
        dense = values.pop(DENSE, None)
        return next(iter(values.values())) if self.form is Tensor and dense is None else Parts(values.values(), dense)

    def arguments(self) -> Any:
        """Return the input of the model: the batch without the fields that only the loss reads."""
        values = {key: value for key, value in {**self.fields, **self.constants}.items() if key != DENSE}
        if self.form is dict:
            return values
        return tuple(values.values()) if self.form is not Tensor else next(iter(values.values()))

    def valid(self, length: int, of_decoder: bool) -> Tensor:
        """Return a mask (B, T) that is True at real positions and False on padding.

        It is the attention mask in the batch, if that has this length; otherwise all positions are real. For a decoder
        it is the decoder's mask, or is made from the labels, which are -100 at padding.
        """
        for name in (f"decoder_{MASK}", "labels") if of_decoder else (MASK,):
            mask = self.fields.get(name)
            if mask is not None and mask.shape == (len(self), length):
                return mask != (IGNORED if name == "labels" else 0)
        return torch.ones(len(self), length, dtype=torch.bool, device=self.device)


def _filled(value: Tensor, longest: int, key: str) -> Tensor:
    """Pad a tensor (E, columns, ...) to `longest` columns. Labels are padded with `IGNORED`, all other fields with
    zeros."""
    missing = longest - value.shape[1]
    if not missing:
        return value
    padding = [0, 0] * (value.dim() - 2) + [0, missing]
    return F.pad(value, padding, value=IGNORED if "labels" in key else 0)
