"""The options of this package allowed."""

import pytest

from mhaprune.settings import plugins
from support.fixtures import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_allowed", {"mhaprune", "mhaprune_models"})
