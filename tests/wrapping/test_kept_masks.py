"""Measurements of many masks that are kept: for all that decides them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mhaprune.front.heads import wrap
from mhaprune.measure.outcomes import all_open
from support.classifier import Classifier, batches


def coarse(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """A loss in which rounding does not show."""
    return nn.functional.cross_entropy(output["logits"], batch["labels"], reduction="none").float()


def test_what_replaces_heads_is_kept_for_the_block_that_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last mask closes nothing, so its outcome does not say which block was replaced."""
    monkeypatch.setattr("mhaprune.storage.cache.SLOW", 0.0)
    torch.manual_seed(0)
    model, cache = Classifier().double(), str(tmp_path)
    plain, keeping = (wrap(model, coarse, score=batches(1), cache=c).subject for c in (None, cache))
    split = wrap(model, coarse, score=batches(1)).splits["score"]
    gates_MN = all_open(plain, 10)
    gates_MN[:-1] = 0.0
    first, second = plain.grid.blocks
    own = plain.head_outputs(split)[first]
    with torch.no_grad():
        for fallback in ({first: own}, {second: own}):
            expected, found = (each.evaluate_masks(split, gates_MN, fallback).loss for each in (plain, keeping))
            torch.testing.assert_close(found, expected)
