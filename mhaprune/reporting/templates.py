"""HTML pages from the templates of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

NO_FILTERS: Mapping[str, Callable[..., Any]] = MappingProxyType({})


def fill(template: str, filters: Mapping[str, Callable[..., Any]] = NO_FILTERS, **values: Any) -> str:
    """The template of that name with these values, escaped; raises jinja2's UndefinedError for one that is missing."""
    loader = PackageLoader("mhaprune.reporting", ".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= filters
    return environment.get_template(f"{template}.html.jinja").render(**values)
