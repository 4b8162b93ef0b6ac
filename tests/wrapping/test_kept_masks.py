"""Measurements of many masks that are kept: for all that decides them."""

from pathlib import Path

import torch

from mhaprune import losses
from mhaprune.front.heads import wrap
from mhaprune.measure.outcomes import all_open
from support.classifier import Classifier, batches


def test_what_replaces_heads_is_kept_for_the_block_that_it_replaces(tmp_path: Path) -> None:
    """The last mask closes nothing, so its outcome does not say which block was replaced."""
    torch.manual_seed(0)
    model, cache = Classifier().double(), str(tmp_path)
    plain, keeping = (wrap(model, losses.classification, score=batches(1), cache=c).subject for c in (None, cache))
    split = wrap(model, losses.classification, score=batches(1)).splits["score"]
    gates_MN = all_open(plain, 10)
    gates_MN[:-1] = 0.0
    first, second = plain.grid.blocks
    own = plain.head_outputs(split)[first]
    with torch.no_grad():
        for fallback in ({first: own}, {second: own}):
            expected, found = (each.evaluate_masks(split, gates_MN, fallback).loss for each in (plain, keeping))
            torch.testing.assert_close(found, expected)
