from __future__ import annotations

import pytest
import torch

from conftest import run_script, script
from mhaprune.measure import gate_gradients
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.taylor import Taylor
from mhaprune.tasks.base import Splits

mistakes = script("mistakes")


def test_the_right_way_and_the_batch_are_those_of_the_scorer(model: Seq2Seq, splits: Splits) -> None:
    examples = splits.train[:64]
    gradients = gate_gradients(model, examples)
    right = Taylor(level="example")(model, examples, 0).values[0]
    torch.testing.assert_close(mistakes.per_example(gradients, model.grid), right)
    batches = Taylor(level="batch", batch_size=32)(model, examples, 0).values[0]
    torch.testing.assert_close(mistakes.per_batch(gradients, model.grid), batches)
    whole = Taylor(level="batch", batch_size=64)(model, examples, 0).values[0]
    torch.testing.assert_close(mistakes.whole_split(gradients, model.grid), whole)


def test_what_is_not_set_to_zero_is_what_autograd_adds_up(model: Seq2Seq, splits: Splits) -> None:
    """A loop as people write it, and forget `mask.grad.zero_()`."""
    examples = splits.train[:64]
    for batch_size, mistake in ((32, mistakes.not_zeroed), (1, mistakes.not_zeroed_per_example)):
        mask = torch.ones(len(model.grid), dtype=torch.double, requires_grad=True)
        importance = torch.zeros(len(model.grid), dtype=torch.double)
        for batch in examples.batches(batch_size):
            model.evaluate(batch, mask).loss.sum().backward()
            assert mask.grad is not None
            importance += mask.grad.abs()
        torch.testing.assert_close(mistake(gate_gradients(model, examples), model.grid), importance)


def test_every_block_weighs_the_same_once_normalised(model: Seq2Seq, splits: Splits) -> None:
    scores = mistakes.normalised_by_layer(gate_gradients(model, splits.score), model.grid)
    for scores_H in model.grid.split(scores).values():
        assert float(scores_H.norm()) == pytest.approx(1.0)


def test_bad_input_is_refused_in_one_line() -> None:
    assert "error: task=nosuch: no such option, allowed are copy" in run_script("mistakes.py", "nosuch").stderr
    assert "--seeds=1: an interval over models needs 2 or more" in run_script("mistakes.py", "--seeds", "1").stderr
