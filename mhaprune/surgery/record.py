"""Describe a removal of heads in plain values, and leave the description in the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from typing import Any

from torch import nn

from mhaprune.hooks.blocks import Unsupported, within
from mhaprune.surgery.handed_weights import call_maps
from mhaprune.surgery.reshaping import finish

before_saving: list[Callable[[Any], None]] = []
"""Functions that are called with a model of transformers that has lost heads. `saving` adds one that makes the model
save the code that reads it again; this room is below that one and cannot import it."""
VERSION = 1
"""The version of the note that a removal leaves in a config."""


@dataclass(frozen=True)
class Cut:
    """A description of a removal in plain values. A freshly built model can be cut to the same shapes by it."""

    shapes: dict[str, list[int]] = field(default_factory=dict)
    """The new shape of the weight of each linear module that was cut, and of each parameter with a number per head."""
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The attributes that were set, by the path of the module."""
    heads: dict[str, list[int]] = field(default_factory=dict)
    """The heads that are left in each attention module, by their numbers in the model before any removal."""
    version: int = VERSION
    """The version of this description."""

    @classmethod
    def of(cls, model: nn.Module) -> Cut | None:
        """Return the description of all removals that a model and its parts have had, read from the notes that
        `leave_in` made; None if there were none.

        Raises `Unsupported` if this version cannot read a description.
        """
        found = [cls.read(holder.mhaprune)._renamed(partial(_inside, path)) for path, holder in _notes(model)]
        return reduce(cls.then, found) if found else None

    @staticmethod
    def reshaped(model: nn.Module, gone: Collection[str], shapes: Mapping[str, list[int]]) -> None:
        """Let the notes in a model name parameters, with these shapes, in place of linear modules that are `gone`. All
        are given by path."""
        for path, holder in _notes(model):
            cut, inside = Cut.read(holder.mhaprune), len(path) + 1 if path else 0
            left = {name for name in (*cut.shapes, *cut.attributes) if _inside(path, name) not in gone}
            kept = {name: shape for name, shape in cut.shapes.items() if name in left}
            kept |= {name[inside:]: shape for name, shape in shapes.items() if within(name, path)}
            attributes = {name: each for name, each in cut.attributes.items() if name in left}
            holder.mhaprune = vars(Cut(kept, attributes, cut.heads))

    @classmethod
    def read(cls, noted: Any) -> Cut:
        """Return the description from plain values; raises as `of` does."""
        version = noted.get("version") if isinstance(noted, dict) else None
        if version != VERSION or set(noted) != {each.name for each in fields(cls)}:
            raise Unsupported(f"config.mhaprune: is of version {version}, this mhaprune reads {VERSION}")
        cut = cls(**noted)
        items = [item for each in cut.attributes.values() for item in each.items()]
        named = [value for name, value in items if value is not None and name != "inputs_of_heads"]
        numbers = [*named, *cut.shapes.values(), *cut.heads.values()]
        if not all(isinstance(n, int) for each in numbers for n in (each if isinstance(each, list) else [each])):
            raise Unsupported("config.mhaprune: must hold numbers")
        return cut

    def then(self, later: Cut) -> Cut:
        """Return this removal and a later one as one description."""
        attributes = {
            path: self.attributes.get(path, {}) | later.attributes.get(path, {})
            for path in {**self.attributes, **later.attributes}
        }
        return Cut(self.shapes | later.shapes, attributes, self.heads | later.heads)

    def set(self, path: str, attributes: dict[str, Any]) -> None:
        """Add attributes of the module at this path."""
        self.attributes[path] = self.attributes.get(path, {}) | attributes

    def leave_in(self, model: nn.Module) -> None:
        """Apply the attributes, and leave this description for `of`: in the config of transformers, which is saved with
        the weights, or on another model itself."""
        path, part = pretrained_in(model)
        total = (Cut.of(model) or Cut()).then(self)
        if part is None or not all(within(name, path) for name in (*total.shapes, *total.heads)):
            finish(model, self.attributes)
            for name, values in self.attributes.items():
                call_maps(model, name, values)
            model.mhaprune = vars(total)  # type: ignore[assignment]
            return
        inside = len(path) + 1 if path else 0
        finish(part, self._renamed(lambda name: name[inside:]).attributes)
        part.config.mhaprune = vars(total._renamed(lambda name: name[inside:]))
        for prepare in before_saving:
            prepare(part)

    def _renamed(self, name: Callable[[str], str]) -> Cut:
        """Return the description with other paths."""
        parts: Any = ({name(path): each for path, each in part.items()} for part in list(vars(self).values())[:3])
        return Cut(*parts)


def _notes(model: nn.Module) -> list[tuple[str, Any]]:
    """Return what holds notes of removals, the model, parts of it or their configs, each with the path of the part."""
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        config = module.config if isinstance(module, _pretrained_class()) else None
        holder: Any = module if vars(module).get("mhaprune") is not None else config
        if getattr(holder, "mhaprune", None) is not None and not any(within(path, outer) for outer, _ in found):
            found.append((path, holder))
    return found


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _pretrained_class() -> Any:
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())


def pretrained_in(model: nn.Module) -> tuple[str, Any]:
    """Return the path and the module of the model of transformers that a model is or holds; "" and None if it holds
    none, or more than one."""
    kind = _pretrained_class()
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        if isinstance(module, kind) and not any(within(path, outer) for outer, _ in found):
            found.append((path, module))
    return found[0] if len(found) == 1 else ("", None)
