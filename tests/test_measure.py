"""What is measured of a model, and the intervals that go with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mhaprune.data import Examples, Splits
from mhaprune.measure.columns import accuracy_columns, choose_columns
from mhaprune.measure.outcomes import greedy_disagreements, mean_outputs, measure
from mhaprune.model.transformer import Seq2Seq
from mhaprune.statistics.intervals import mean_interval, paired_interval, share_interval, wilson_interval
from mhaprune.wrapping.losses import LossAndQuality


def test_measure_is_a_loop_over_single_examples_in_their_order(model: Seq2Seq, splits: Splits) -> None:
    examples, gates = splits.score, torch.rand(len(model.grid))
    outcome = measure(model, examples, gates, batch_size=5)
    for e in range(len(examples)):
        one = examples[e : e + 1]
        logits = model.run_gated(one, gates)[0]
        torch.testing.assert_close(outcome.loss[e], F.cross_entropy(logits, one.target[0]))
        right = logits.argmax(-1) == one.target[0]
        assert outcome.token_accuracy[e].item() == pytest.approx(right.double().mean().item())
        assert outcome.quality[e].item() == right.all().item()


def test_exact_match_is_that_of_greedy_decoding(model: Seq2Seq, splits: Splits) -> None:
    """Also where the model is right: targets that are its own answers, as they are and with one token changed."""
    with torch.no_grad():
        model.output.bias[:3] = -100.0  # symbols only, so that every answer is as long as the others
    own = Examples(splits.score.source, model.decode_greedily(splits.score.source, 6))
    assert len(own.target.unique(dim=0)) > 1
    assert measure(model, own).quality.all()
    changed = own.target.clone()
    changed[::2, 3] = (changed[::2, 3] - 2) % 5 + 3
    mixed = Examples(own.source, changed)
    assert measure(model, mixed).quality.sum() == len(own) // 2
    for examples in (own, mixed, splits.score):
        assert greedy_disagreements(model, examples) == 0


def test_disagreements_are_counted(model: Seq2Seq, splits: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seq2Seq, "predict", lambda self, batch: batch.target)
    wrong = int((measure(model, splits.score).quality == 0).sum())
    assert wrong > 0
    assert greedy_disagreements(model, splits.score) == wrong


def test_mean_outputs_leave_padding_out(model: Seq2Seq, splits: Splits) -> None:
    means = torch.cat([mean_HTK.squeeze(1) for mean_HTK in mean_outputs(model, splits.score, batch_size=7).values()])
    sums = torch.zeros_like(means)
    tokens = torch.zeros(len(model.grid), 1)
    for e in range(len(splits.score)):
        contexts = list(model.head_outputs(splits.score[e : e + 1]).values())
        sums += torch.cat([context[0].sum(1) for context in contexts])
        tokens += torch.cat([torch.full((context.shape[1], 1), context.shape[2]) for context in contexts])
    torch.testing.assert_close(means, sums / tokens)


IntervalOf = Callable[[np.ndarray], tuple[float, float]]


def judged(quality_E: np.ndarray) -> LossAndQuality:
    return LossAndQuality(torch.ones(len(quality_E)), torch.from_numpy(quality_E))


@pytest.mark.parametrize(("binary", "interval"), [(True, wilson_interval), (False, share_interval)])
def test_answers_and_shares_have_intervals_of_their_own(binary: bool, interval: IntervalOf) -> None:
    loss_E, quality_E = np.random.default_rng(0).random((2, 40))
    quality_E = (quality_E < 0.9).astype(float) if binary else quality_E
    columns = accuracy_columns(LossAndQuality(torch.from_numpy(loss_E), torch.from_numpy(quality_E)))
    assert (columns["loss"], columns["quality"]) == pytest.approx((loss_E.mean(), quality_E.mean()))
    assert (columns["loss_low"], columns["loss_high"]) == mean_interval(loss_E)
    assert (columns["quality_low"], columns["quality_high"]) == interval(quality_E)


def test_the_loss_of_pairs_has_the_interval_of_its_kind() -> None:
    draw = np.random.default_rng(0)
    dense_E, left_E = draw.random((2, 40))
    columns = choose_columns(judged(left_E), judged(dense_E))
    assert (columns["choose_drop_low"], columns["choose_drop_high"]) == mean_interval(dense_E - left_E)
    dense_E, left_E = (dense_E < 0.9).astype(float), (left_E < 0.8).astype(float)
    columns = choose_columns(judged(left_E), judged(dense_E))
    assert (columns["choose_drop_low"], columns["choose_drop_high"]) == paired_interval(dense_E, left_E)
