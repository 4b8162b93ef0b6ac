"""A description of a function changes with all that decides what it computes, or there is none."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mhaprune.storage.functions import Undescribed, described

LIMITS = {"constant": 1, "inner": {"a": [1]}}


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """A module of the user's own, which holds another."""
    (tmp_path / "my_part.py").write_text("LIMIT = 1\n")
    code = "import my_part\nLIMIT = 1\nOTHER = 1\ndef capped(x): return x * LIMIT\nclass Kind:\n    cap = 1\n"
    (tmp_path / "my_helpers.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import my_helpers  # type: ignore[import-not-found]

    yield my_helpers
    for name in ("my_helpers", "my_part"):
        sys.modules.pop(name, None)


HELPERS: dict[str, Any] = {}
ORDERED = {"a": 1, "b": 2}


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [1]

    def forward(self, x: Any) -> Any:
        return x * self.weights[0]


HELD = Held()


class Table(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return LIMITS["constant"]  # type: ignore[return-value]


TABLE = Table()


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cap", torch.ones(1), persistent=False)


BUFFERED = Buffered()


def losses_of(mine: ModuleType) -> dict[str, tuple[Callable[..., Any], Callable[[], Any]]]:
    """Losses, each with a change of what it computes."""
    cell = [1]

    def by_import(x: Any) -> Any:
        from my_helpers import LIMIT

        return x * LIMIT

    def change(name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(mine, name, value)

    def own(a: Any, b: Any) -> Any:
        return a - b

    def other(b: Any, a: Any) -> Any:
        return b - a

    HELPERS["minus"] = own
    return {
        "names of arguments": (lambda x: HELPERS["minus"](a=x, b=1), lambda: HELPERS.update(minus=other)),
        "list of a module": (HELD, lambda: HELD.weights.append(2)),
        "hook of a module": (HELD, lambda: HELD.register_forward_hook(lambda *_: None)),
        "order of a dict": (lambda x: next(iter(ORDERED.values())) * x, lambda: ORDERED.update(a=ORDERED.pop("a"))),
        "lambda": (lambda x: (lambda y: y * LIMITS["constant"])(x), lambda: LIMITS.update(constant=2)),
        "generator": (lambda x: sum(y * LIMITS["constant"] for y in x), lambda: LIMITS.update(constant=3)),
        "nested": (lambda x: [[y * LIMITS["inner"]["a"][0] for y in z] for z in x], lambda: LIMITS.update(inner=2)),
        "constant of a module": (lambda x: x * mine.LIMIT, change("LIMIT", 2)),
        "function of a module": (lambda x: mine.capped(x), change("LIMIT", 3)),
        "class of a module": (lambda x: x * mine.Kind.cap, lambda: setattr(mine.Kind, "cap", 2)),
        "module in a module": (lambda x: x * mine.my_part.LIMIT, lambda: setattr(mine.my_part, "LIMIT", 2)),
        "import inside": (by_import, change("LIMIT", 4)),
        "closure": (lambda x: x * cell[0], lambda: cell.append(2)),
        "method of a dict": ((lambda x, table=TABLE: table[x]), lambda: LIMITS.update(constant=7)),
        "buffer": (lambda x: x * BUFFERED.cap, lambda: BUFFERED.cap.mul_(2)),
    }


def test_a_description_follows_all_that_decides(mine: ModuleType) -> None:
    for name, (loss, change) in losses_of(mine).items():
        before = described(loss)
        assert described(loss) == before, name
        change()
        assert described(loss) != before, name


def test_what_no_function_names_does_not_count(mine: ModuleType) -> None:
    def loss(x: Any) -> Any:
        return mine.capped(x) + torch.ones(1)

    before = described(loss)
    mine.OTHER = 2
    assert described(loss) == before


def test_what_cannot_be_followed_has_no_description(mine: ModuleType) -> None:
    import os

    for loss in (
        lambda x: getattr(mine, x),
        lambda x: x * float(os.environ["LIMIT"]),
        lambda x: Path(open(x).name),  # noqa: SIM115
        lambda x: x * Slots.one.cap,
        lambda x: globals()["LIMITS"],
        lambda x: np.load(x),
        lambda x: x @ SPARSE,
        lambda x: sys.modules["my_helpers"].LIMIT,
    ):
        with pytest.raises(Undescribed):
            described(loss)


SPARSE = torch.eye(2).to_sparse()


class Slots:
    __slots__ = ("cap",)
    one: Any


Slots.one = Slots()


def test_many_functions_that_share_a_value_are_described_once() -> None:
    shared: Any = [1]
    for _ in range(60):
        shared = [shared, shared]
    assert len(str(described(lambda x: shared))) < 10_000
