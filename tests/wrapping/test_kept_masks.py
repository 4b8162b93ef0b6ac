"""Measurements of many masks that are kept: for all that decides them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.api.wrap import wrap
from mhaprune.measure.outcomes import all_open
from mhaprune.storage import cache
from mhaprune.storage.functions import Undescribed, described
from support.classifier import Classifier, batches
from support.sizes import slow
from support.texts import Net, wrapped


def coarse(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A loss in which rounding does not show."""
    return nn.functional.cross_entropy(output["logits"], batch["labels"], reduction="none").float()


def test_what_replaces_heads_is_kept_for_the_block_that_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last mask closes nothing, so its outcome does not say which block was replaced."""
    monkeypatch.setattr("mhaprune.storage.cache.SLOW", 0.0)
    torch.manual_seed(0)
    model, folder = Classifier().double(), str(tmp_path)
    plain, keeping = (wrap(model, coarse, score=batches(1), cache=c).subject for c in (None, folder))
    split = wrap(model, coarse, score=batches(1)).splits["score"]
    gates_MN = all_open(plain, 10)
    gates_MN[:-1] = 0.0
    first, second = plain.grid.blocks
    own = plain.head_outputs(split)[first]
    with torch.no_grad():
        for fallback in ({first: own}, {second: own}):
            expected, found = (each.evaluate_masks(split, gates_MN, fallback).loss for each in (plain, keeping))
            torch.testing.assert_close(found, expected)


GLOBAL = 1.0


def clamped(kind: str, most: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A loss with a constant in one of the places where functions keep constants."""

    def default(output: Any, batch: Any, most: float = most) -> Tensor:
        return losses.classification(output, batch).clamp(max=most)

    class Attribute:
        def __init__(self) -> None:
            self.most = most

        def __call__(self, output: Any, batch: Any) -> Tensor:
            return default(output, batch, self.most)

    def with_global(output: Any, batch: Any) -> Tensor:
        return losses.classification(output, batch).clamp(max=GLOBAL)

    if kind == "global":
        monkeypatch.setitem(globals(), "GLOBAL", most)
    written = f"lambda output, batch: losses.classification(output, batch).clamp(max={most})"
    return {
        "literal": eval(written, {"losses": losses}),
        "closure": lambda output, batch: losses.classification(output, batch).clamp(max=most),
        "default": default,
        "partial": partial(default, most=most),
        "attribute": Attribute(),
        "global": with_global,
    }[kind]


@pytest.mark.parametrize("kind", ["literal", "closure", "attribute", *slow("default", "partial", "global")])
def test_a_store_answers_for_the_loss_that_it_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SLOW", 0.0)

    def scored(most: float, folder: Path | None) -> list[float]:
        heads = wrapped(Net(), loss=clamped(kind, most, monkeypatch), quality=losses.accuracy, cache=folder)
        found: list[float] = heads.score("ablation")["score"].tolist()
        return found

    known = described(clamped(kind, 0.5, monkeypatch))
    assert known != described(clamped(kind, 9.0, monkeypatch))
    assert scored(0.5, tmp_path) == scored(0.5, None) != scored(9.0, None)
    count = len(list(tmp_path.iterdir()))
    assert scored(9.0, tmp_path) == scored(9.0, None)
    assert len(list(tmp_path.iterdir())) == 2 * count
    scored(9.0, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 * count, "and for the same loss again"


def test_a_function_that_holds_what_cannot_be_read_is_not_described() -> None:
    lines = iter(["a"])
    with pytest.raises(Undescribed, match="a list_iterator"):
        described(lambda: lines)
    with pytest.raises(Undescribed, match="clamped, which reads what e[a-z]+ returns"):
        described(clamped)

    def again(n: int) -> int:
        return again(n - 1) if n else 0

    assert described(again) == described(again)
