"""Settings as YAML with a comment above each: what it means, in which unit, and which values it takes.

The comments are the docstrings and the ranges of the dataclasses themselves.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import yaml

from mhaprune.settings.sources import Sources

WIDTH = 100
"""Columns of a line of comment."""
RUN = ("mhaprune.running.Run", "mhaprune.settings.sweep.SweepSettings")
"""What the settings at the top are fields of."""
NO_SWEEP: Mapping[str, str] = MappingProxyType({})


def explained(text: str, packages: Iterable[str] = ("mhaprune",), varying: Mapping[str, str] = NO_SWEEP) -> str:
    """The YAML with comments, which loads to the same values.

    Only classes of these packages are looked up. `varying` holds what keys of a sweep may be, by their whole names.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return text
    part = re.match(r"# @package ([\w.]+)\n", text)
    own = _target(root)
    targets = (own,) if own is not None else () if part else RUN
    above = dict(_comments(root, part[1] if part else "", targets, Sources(frozenset(packages)), varying))
    return "".join(
        f"{out}\n" for i, line in enumerate(text.splitlines()) for out in [*_wrapped(above.get(i, ""), line), line]
    )


def _wrapped(comment: str, line: str) -> list[str]:
    margin = line[: len(line) - len(line.lstrip())] + "# "
    return textwrap.wrap(comment, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


def _target(node: yaml.Node) -> str | None:
    """The class that a mapping describes; None for settings of no class."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == "_target_":
            return str(value.value)
    return None


def _comments(
    root: yaml.MappingNode, path: str, targets: Iterable[str], sources: Sources, varying: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """The number of a line and what is to be said above it."""
    known = {name: setting for target in targets for name, setting in sources.settings(target).items()}
    for key, value in root.value:
        name, target = f"{path}.{key.value}".lstrip("."), _target(value)
        said = [known[key.value].text] if key.value in known else []
        said += [sources.about(target)] if target is not None else []
        said += [f"In this sweep: {varying[name]}."] if name in varying else []
        yield key.start_mark.line, " ".join(filter(None, said))
        if isinstance(value, yaml.MappingNode):
            yield from _comments(value, name, () if target is None else (target,), sources, varying)
