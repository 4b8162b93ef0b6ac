"""The switch by which tests draw figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Drawing:
    """Figures are most of the time of a small run, so in the tests none are drawn but where they are `wanted`."""

    wanted = False
    """By runs, and in what is collected from them."""
    collected = False
    """In what is collected only."""


@contextmanager
def drawing(**wanted: bool) -> Iterator[None]:
    """For fixtures whose runs should draw; a test says it by its marks `figures` and `collected_figures`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (wanted or {"wanted": True}).items():
            patch.setattr(Drawing, name, value)
        yield
