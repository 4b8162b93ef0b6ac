"""What is measured of a model, the intervals that go with it, and its time."""

import random
import time
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import mhaprune
from mhaprune import losses
from mhaprune.data import Splits
from mhaprune.lab.experiments.answers import edits, symbol_errors
from mhaprune.lab.experiments.train import Train
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import BOS, PAD, Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.losses import LossAndQuality
from mhaprune.measure.accuracy import (
    accuracy_columns,
    calibration_columns,
    calibration_error,
    choose_columns,
)
from mhaprune.measure.outcomes import greedy_disagreements, mean_outputs, measure, relative_difference
from mhaprune.measure.times import COPIES, copies, device_name, in_turn, ratios
from mhaprune.statistics.intervals import mean_interval, paired_interval, share_interval, wilson_interval
from support.classifier import batches, classifier
from support.models import OF_ONE_KIND, gated_model


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


def test_exact_match_is_that_of_greedy_decoding(
    model: Seq2Seq, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model is right: targets that are its own answers, as they are and with one token changed. Where
    it is not so, the disagreements are counted."""
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

    monkeypatch.setattr(Seq2Seq, "predict", lambda self, batch: batch.target)
    wrong = int((measure(model, splits.score).quality == 0).sum())
    assert wrong > 0
    assert greedy_disagreements(model, splits.score) == wrong


@cache
def plain_edits(first: str, second: str) -> int:
    if not first or not second:
        return len(first) + len(second)
    if first[0] == second[0]:
        return plain_edits(first[1:], second[1:])
    return 1 + min(plain_edits(*pair) for pair in ((first[1:], second), (first, second[1:]), (first[1:], second[1:])))


def test_a_constant_in_the_outputs_hides_no_difference() -> None:
    outputs = torch.tensor([-1e9, -torch.inf, torch.nan, 2e6, 1e6, 0.5], dtype=torch.double)
    moved = outputs + torch.tensor([0, 0, 0, 2, 0, 1], dtype=torch.double)
    assert relative_difference(outputs, outputs) == 0
    assert relative_difference(outputs, moved) == pytest.approx(1)
    assert relative_difference(outputs[:5], moved[:5]) == pytest.approx(1e-6)
    assert not relative_difference(outputs, outputs.nan_to_num()) < torch.inf


def test_edits_are_the_fewest() -> None:
    draw = random.Random(0)
    for _ in range(200):
        first, second = ("".join(draw.choices("ab1", k=draw.randrange(7))) for _ in range(2))
        assert edits(first, second) == plain_edits(first, second)


def test_the_symbol_error_rate_counts_edits_of_the_whole_answers(
    model: Seq2Seq, task: Sort, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with one symbol left out, one put in twice or none changed; the interval is that of the bootstrap."""
    examples, counts = splits.report, []

    def predict(self: Seq2Seq, batch: Examples) -> torch.Tensor:
        answers = torch.zeros(len(batch), batch.target.shape[1] + 1, dtype=torch.long)
        for e, target in enumerate(batch.target.tolist()):
            right = [token for token in target if token > 2]
            kind = (sum(target) + len(right)) % 3
            said = [right[1:], [right[0], *right], right][kind]
            answers[e, : len(said) + 1] = torch.tensor([*said, 2])
            counts.append((int(kind < 2), len(right)))
        return answers

    monkeypatch.setattr(Seq2Seq, "predict", predict)
    values = symbol_errors(model, task, examples)
    errors, symbols = np.array(counts).T
    assert values.mean() == pytest.approx(errors.sum() / symbols.sum())
    draws = np.random.default_rng(0).integers(len(counts), size=(4000, len(counts)))
    spread = np.std(errors[draws].sum(axis=1) / symbols[draws].sum(axis=1))
    assert np.std(values) / len(values) ** 0.5 == pytest.approx(spread, rel=0.06)
    assert len(set(symbols)) > 1


def test_an_error_rate_without_an_interval_says_so() -> None:
    table = pd.DataFrame([{"heads": "cross.0.0", "quality": 0.998, "quality_low": 0.99, "quality_high": 1.0}])
    table = table.assign(token_accuracy=0.9997, symbol_error_rate=0.0003)
    for low, said in ((float("nan"), "too few errors for an interval"), (0.0001, "95 % interval 0.0 % to 0.1 %")):
        rates = table.assign(symbol_error_rate_low=low, symbol_error_rate_high=0.001)
        assert list(Train.say({"accuracy": rates}))[1] == (
            f"The symbol error rate is <0.1 % ({said}): edits per symbol of the right answers."
        )


def test_mean_outputs_leave_padding_out(model: Seq2Seq, splits: Splits) -> None:
    means = torch.cat([mean_HTK.squeeze(1) for mean_HTK in mean_outputs(model, splits.score, batch_size=7).values()])
    sums = torch.zeros_like(means)
    tokens = torch.zeros(len(model.grid), 1)
    for e in range(len(splits.score)):
        contexts = list(model.head_outputs(splits.score[e : e + 1]).values())
        sums += torch.cat([context[0].sum(1) for context in contexts])
        tokens += torch.cat([torch.full((context.shape[1], 1), context.shape[2]) for context in contexts])
    torch.testing.assert_close(means, sums / tokens)


def judged(quality_E: np.ndarray) -> LossAndQuality:
    return LossAndQuality(torch.ones(len(quality_E)), torch.from_numpy(quality_E))


@pytest.mark.parametrize("binary", [True, False])
def test_answers_and_shares_have_intervals_of_their_own(binary: bool) -> None:
    """Alone, and as what a model has less than the dense one."""
    loss_E, dense_E, left_E = np.random.default_rng(0).random((3, 40))
    of_one, of_both = share_interval, lambda dense_E, left_E: mean_interval(dense_E - left_E)
    if binary:
        dense_E, left_E = (dense_E < 0.9).astype(float), (left_E < 0.8).astype(float)
        of_one, of_both = wilson_interval, paired_interval
    columns = accuracy_columns(LossAndQuality(torch.from_numpy(loss_E), torch.from_numpy(dense_E)))
    assert (columns["loss"], columns["quality"]) == pytest.approx((loss_E.mean(), dense_E.mean()))
    assert (columns["loss_low"], columns["loss_high"]) == mean_interval(loss_E)
    assert (columns["quality_low"], columns["quality_high"]) == of_one(dense_E)
    columns = choose_columns(judged(left_E), judged(dense_E), OF_ONE_KIND)
    assert (columns["choose_drop_low"], columns["choose_drop_high"]) == of_both(dense_E, left_E)


def test_a_round_makes_every_call_once_and_none_always_follows_the_same() -> None:
    made: list[str] = []
    times = in_turn({name: (lambda n=name: made.append(n)) for name in "abcdef"}, rounds=30, warmup=2)
    assert len(times) == 30
    assert list(times) == list("abcdef")
    rounds = [made[i : i + 6] for i in range(0, 6 * 32, 6)]
    assert all(sorted(one) == list("abcdef") for one in rounds)
    after_a = Counter(second for first, second in pairwise(made) if first == "a")
    assert max(after_a.values()) < 12


def test_milliseconds_are_milliseconds_and_ratios_are_taken_round_by_round() -> None:
    """A machine twice as slow in one round slows both: the ratio does not see it."""
    times = in_turn({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.008)}, rounds=5)
    assert 2 <= times["short"].median() < 6
    assert 2 < ratios(times, "long", "short")["ratio"] <= 4.2
    result = ratios(pd.DataFrame({"ours": [1.0, 2.0, 1.0], "peer": [2.0, 4.0, 2.0]}), "ours", "peer")
    assert result["ratio"] == result["q1"] == result["q3"] == pytest.approx(0.5)


class Event:
    """A CUDA event for a machine without a GPU: it is there as soon as it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at

    def elapsed_time(self, end: Any) -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the GPU that is not there."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    return asked


def test_on_a_gpu_its_own_events_tell_the_time(gpu: list[str]) -> None:
    times = in_turn({"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.008)}, 3, device="cuda")
    assert 2 <= times["short"].median() < 6
    assert 8 <= times["long"].median() < 14
    assert gpu == ["synchronize"] * 10, "before every call, those of the warm-up included"
    assert device_name("cuda") == "name of cuda"


def test_copies_are_made_among_each_other() -> None:
    made: list[str] = []
    models = copies({name: lambda n=name: made.append(n) or f"{n}{len(made)}" for name in "abc"})
    assert {name: len(set(own)) for name, own in models.items()} == dict.fromkeys("abc", COPIES)
    rounds = [made[i : i + 3] for i in range(0, 3 * COPIES, 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len({"".join(one) for one in rounds}) > 1


@torch.no_grad()
def test_the_confidence_in_an_answer_is_its_probability(task: Sort, splits: Splits) -> None:
    """The product along the model's own answer, right or wrong, by hand."""
    model = gated_model(task)
    model.output.bias[:2] -= 100  # it writes neither padding nor begin
    batch = splits.report
    found, own = model.confidence(batch, model.evaluate(batch)), model.answered(batch)
    assert found.std() > 1e-4
    assert model.evaluate(own).quality.all()
    torch.testing.assert_close(model.confidence(own, model.evaluate(own)), found)
    assert not (own.target[:, : batch.target.shape[1]] == batch.target[:, : own.target.shape[1]]).all()
    for b, answer in enumerate(own.target):
        written, probability = [BOS], 1.0
        for token in answer[answer != PAD].tolist():
            logits = model(batch.source[b : b + 1], torch.tensor([written]))
            probability *= logits[0, -1].softmax(dim=-1)[token].item()
            assert logits[0, -1].argmax() == token
            written.append(token)
        assert found[b].item() == pytest.approx(probability, rel=1e-4)


def test_a_classifier_is_as_sure_as_its_largest_probability() -> None:
    few = {name: batches(2, seed) for seed, name in enumerate(("score", "choose", "report"))}
    few["report"].reverse()  # the longer texts come first, and are measured last
    heads = mhaprune.wrap(classifier(), losses.classification, **few)
    report = heads.splits["report"]
    outcome = measure(heads.subject, report)
    columns = calibration_columns(heads.subject, report, outcome)
    sure = [heads.subject.model(**one)["logits"].softmax(1).max(1).values for one in few["report"]]
    assert columns["confidence"] == pytest.approx(torch.cat(sure).mean().item(), rel=1e-5)
    found = heads.subject.confidence(report, outcome)
    torch.testing.assert_close(found, torch.cat(sure).detach(), msg="each in the place of its example")
    confidence = torch.cat(sure).double().detach().numpy()
    assert columns["ece"] == pytest.approx(calibration_error(confidence, outcome.quality.double().numpy()))
    by_loss = mhaprune.wrap(classifier(), losses.classification, quality=losses.classification, **few)
    assert calibration_columns(by_loss.subject, by_loss.splits["report"], outcome) == {}


def test_the_calibration_error_is_the_sum_over_bins() -> None:
    rng = np.random.default_rng(0)
    confidence = np.append(rng.uniform(size=200), [0.0, 1.0])
    right = (rng.uniform(size=202) < confidence**2).astype(float)
    expected = 0.0
    for b in range(15):
        inside = (confidence >= b / 15) & ((confidence < (b + 1) / 15) | (b == 14))
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert calibration_error(confidence, right) == pytest.approx(expected)
    assert calibration_error(right, right) == 0
    assert calibration_error(np.array([0.95, 1.0]), np.array([1, 0])) == pytest.approx(0.475), "1.0 is in the last bin"
