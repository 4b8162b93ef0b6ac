"""What dataclasses say of their fields, read from their sources: to import them would import torch, which takes longer
than anybody who looks a setting up should wait.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import typing
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mhaprune.settings import ranges
from mhaprune.settings.ranges import expected


class Setting(NamedTuple):
    """A field, as its source has it."""

    doc: str
    allowed: str
    """Which values it takes; empty for what has settings of its own."""

    @property
    def text(self) -> str:
        return " ".join(filter(None, [self.doc, self.allowed and f"Allowed: {self.allowed}."]))


class Unknown(Exception):
    """A name in a type that stands for a class."""


class Module(NamedTuple):
    """What stands in a module by names."""

    classes: dict[str, ast.ClassDef]
    imported: dict[str, tuple[str, str]]
    """Modules and the names there."""
    values: dict[str, ast.expr]


class Sources(NamedTuple):
    """The sources of some packages; those of all others are not looked up."""

    packages: frozenset[str]

    def about(self, target: str) -> str:
        """The first paragraph of what the class MODULE.CLASS says of itself; empty where it is not found."""
        found = self._class(*_parted(target))
        doc = None if found is None else ast.get_docstring(found[1])
        return "" if doc is None else " ".join(doc.split("\n\n")[0].split())

    def settings(self, target: str) -> dict[str, Setting]:
        """The fields of a dataclass by name, those that it inherits first; none where it is not found."""
        found = self._class(*_parted(target))
        if found is None:
            return {}
        module, cls = found
        fields: dict[str, Setting] = {}
        for base in cls.bases:
            if isinstance(base, ast.Name):
                fields |= self.settings(self._base(module, cls, base.id))
        for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                fields[node.target.id] = Setting(_text(after), self._allowed(module, node.annotation))
        return fields

    def _class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """The class of that name as the module knows it, and the module that it stands in."""
        here = self._module(module)
        if here is None:
            return None
        if name in here.classes:
            return module, here.classes[name]
        return self._class(*here.imported[name]) if name in here.imported else None

    def _base(self, module: str, cls: ast.ClassDef, name: str) -> str:
        """MODULE.CLASS of a class that another is made from. It may have the name of that, and is then imported."""
        here = self._module(module)
        if name == cls.name and here is not None:
            return ".".join(here.imported.get(name, ("", "")))
        return f"{module}.{name}"

    def _module(self, name: str) -> Module | None:
        return _read(name) if name.partition(".")[0] in self.packages else None

    def _allowed(self, module: str, annotation: ast.expr) -> str:
        try:
            return expected(self._kind(module, annotation))
        except (Unknown, TypeError):  # TypeError: a name in quotes beside "|"
            return ""

    def _kind(self, module: str, annotation: ast.expr) -> Any:
        """What an annotation stands for. Its names are looked up in the source of the module."""
        names: Any = Names(self, module)
        return eval(compile(ast.Expression(annotation), module, "eval"), {"__builtins__": {}}, names)

    def value(self, module: str, name: str) -> Any:
        """What a name stands for in a type: types of Python, ranges, and names for these. Raises `Unknown`."""
        here = self._module(module)
        if here is not None and name in here.imported and here.imported[name][0] == ranges.__name__:
            return getattr(ranges, name)
        if here is not None and name in here.imported:
            where, original = here.imported[name]
            return getattr(typing, original) if where == "typing" else self.value(where, original)
        if here is not None and name in here.values:
            return self._kind(module, here.values[name])
        if here is None or name in here.classes or not hasattr(builtins, name):
            raise Unknown(name)
        return getattr(builtins, name)


class Names:
    """The names of a module, for the types in it: all of a mapping that `eval` asks for."""

    def __init__(self, sources: Sources, module: str) -> None:
        self.sources, self.module = sources, module

    def __getitem__(self, name: str) -> Any:
        return self.sources.value(self.module, name)


@cache
def _read(module: str) -> Module | None:
    """What stands in a module, which is not imported; None for one that is not there."""
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        base = Path(folder, *rest.split("."))
        for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
            if path.is_file():
                return _parsed(ast.parse(path.read_text()))
    return None


def _parsed(tree: ast.Module) -> Module:
    found = Module({}, {}, {})
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.imported.update({each.asname or each.name: (node.module, each.name) for each in node.names})
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.classes[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.values[node.targets[0].id] = node.value
    return found


def _parted(target: str) -> tuple[str, str]:
    module, _, name = target.rpartition(".")
    return module, name


def _text(node: ast.stmt | None) -> str:
    """A docstring in one line."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(inspect.cleandoc(node.value.value).split())
    return ""
