"""Settings as YAML with a comment above each: its meaning, its unit, and the allowed values.

The comments are made from the docstrings and ranges in the dataclasses.
"""

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import yaml

from mhaprune.settings.options import dataclasses_in
from mhaprune.settings.plugins import find_class
from mhaprune.settings.ranges import expected

WIDTH = 100
"""Largest width of a comment line, in columns."""
RUN = ("mhaprune.lab.runs.run.Run", "mhaprune.lab.runs.sweep_settings.SweepSettings")
"""The classes whose fields are the top-level settings."""


def explained(text: str) -> str:
    """Return the YAML with comments; it loads to the same values."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return text
    own = _target(root)
    above = dict(_comments(root, [own] if own is not None else [] if text.startswith("# @package") else RUN))
    lines = []
    for i, line in enumerate(text.splitlines()):
        margin = line[: len(line) - len(line.lstrip())] + "# "
        how: dict[str, Any] = {"initial_indent": margin, "subsequent_indent": margin, "break_on_hyphens": False}
        lines += [*textwrap.wrap(above.get(i, ""), WIDTH, **how), line]
    return "".join(f"{line}\n" for line in lines)


def about(target: str) -> str:
    """Return the first paragraph of the docstring of a class; empty for a class that is not found."""
    return " ".join((inspect.getdoc(find_class(object, target)) or "").split("\n\n")[0].split())


def about_fields(target: str) -> dict[str, str]:
    """Return meaning and range of each field of a dataclass; an empty dict for a class that is not found."""
    cls = find_class(object, target)
    if cls is None:
        return {}
    kinds, docs = typing.get_type_hints(cls, include_extras=True), dict[str, str]()
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(base):
            docs |= _field_docs(base)
    return {field.name: f"{docs.get(field.name, '')} {_range(kinds[field.name])}".strip() for field in fields(cls)}


def _field_docs(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a class, from its source."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        node.target.id: " ".join(inspect.cleandoc(after.value.value).split())
        for node, after in pairwise(tree.body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }


def _range(kind: Any) -> str:
    """Return the allowed values of a field in words; empty if the value is itself an option with settings of its
    own."""
    parts = typing.get_args(kind) if typing.get_origin(kind) is dict else [kind]
    return "" if any(dataclasses_in(part) for part in parts) else f"Allowed: {expected(kind)}."


def _target(node: yaml.Node) -> str | None:
    """Return the name of the class that a mapping describes; None if there is none."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == "_target_":
            return str(value.value)
    return None


def _comments(root: yaml.MappingNode, targets: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield line numbers, each with the comment above the line."""
    known = {name: text for target in targets for name, text in about_fields(target).items()}
    for key, value in root.value:
        target = _target(value)
        said = [known.get(key.value, ""), about(target) if target is not None else ""]
        yield key.start_mark.line, " ".join(filter(None, said))
        if isinstance(value, yaml.MappingNode):
            yield from _comments(value, () if target is None else (target,))
