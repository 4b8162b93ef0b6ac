"""The tiny model of the tests of mhaprune, and the options of this package allowed."""

import pytest

from mhaprune.settings import plugins
from support.fixtures import model, one_thread, splits, task

__all__ = ["model", "one_thread", "splits", "task"]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_allowed", {"mhaprune", "mhaprune_literature"})
