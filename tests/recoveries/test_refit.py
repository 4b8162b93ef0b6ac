"""A refit against plain twins, on models that have learnt nothing; float64, so that equal means equal."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune.data import Splits
from mhaprune.heads import HeadId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import PAD, Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import output_difference
from mhaprune.recoveries.base import recover
from mhaprune.recoveries.fine_tune import FineTune
from mhaprune.recoveries.refit import Refit
from mhaprune.recoveries.refitting import ENOUGH, correct, ridges
from mhaprune.subject import LastMap
from support.models import decoded_plainly, gated_model, study_with
from support.sizes import slow

RAGGED = ["encoder_self.0.0", "decoder_self.0.1", "decoder_self.0.2", "cross.0.0", *(f"cross.1.{n}" for n in range(3))]
GONE = {"ragged": RAGGED, "decoder only": ["decoder_self.1.0"], "all": None}


@pytest.fixture(scope="module")
def study(task: Sort, splits: Splits) -> Study:
    """Of a model that answers with several symbols, some answers shorter than others."""
    dense = gated_model(task)
    with torch.no_grad():
        dense.output.bias[:4] += torch.tensor([-100.0, -100.0, -1.0, -1.0]).double()
    return study_with(dense, splits)


def without(model: Seq2Seq, names: Sequence[str] | None) -> Seq2Seq:
    """None removes all heads."""
    heads = model.grid.heads if names is None else map(HeadId.parse, names)
    return model.without(HeadMask(model.grid, frozenset(heads)))


@pytest.fixture(params=GONE)
def left(request: pytest.FixtureRequest, study: Study) -> Seq2Seq:
    return without(study.subject, GONE[request.param])


def recovered(recovery: Any, study: Study, left: Seq2Seq) -> Seq2Seq:
    model: Seq2Seq = recovery(study, left, 0, None, lambda state: None)[0]
    return model


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def answered(dense: Seq2Seq, source: Tensor) -> Examples:
    """The sources with the answers of the dense model, in one batch, by another way than the one under test."""
    answers = decoded_plainly(dense, source, dense.config.max_length)
    lengths = (answers != PAD).sum(dim=1)
    assert 0 < lengths.min() < lengths.max(), "the fixture must give answers of several lengths"
    return Examples(source, answers)[:]


def written(each: LastMap, read_TW: Tensor) -> Tensor:
    return F.linear(read_TW, each.weight, each.bias)


def walked(
    dense: Seq2Seq, old: Seq2Seq, new: Seq2Seq, batch: Examples
) -> list[tuple[LastMap, LastMap, Tensor, Tensor]]:
    """For every sublayer: the new map, the old one, what the new one reads, and what it lacks with the dense model's
    stream after it, beside the new model's stream before it."""
    found = []
    for taught, before, mine in zip(*(model.last_maps([batch]) for model in (dense, old, new)), strict=True):
        ((read, after),), ((_, wanted),) = mine.parts, taught.parts
        found.append((mine, before, read, wanted - (after - written(mine, read))))
    return found


@torch.no_grad()
def test_every_map_is_least_squares_on_the_streams_that_the_maps_before_it_left(study: Study, left: Seq2Seq) -> None:
    """In one batch, by torch.linalg.lstsq, with a row for every weight that the ridge holds. So the error on what it
    saw is never larger than before."""
    ridge, better = 0.01, 0
    new = recovered(Refit(ridge=ridge), study, left)
    batch = answered(study.subject, study.splits.train.source)
    for mine, old, read, wanted in walked(study.subject, left, new, batch):
        width = read.shape[1]
        strength = (ridge * read.square().sum() / max(1, width)).sqrt()
        rows = torch.eye(width + 1).double()[:-1] * strength
        inputs = torch.cat([torch.cat([read, read.new_ones(len(read), 1)], dim=1), rows])
        solution = torch.linalg.lstsq(inputs, torch.cat([wanted, strength * old.weight.T])).solution
        torch.testing.assert_close(mine.weight.T, solution[:-1], msg=mine.name)
        torch.testing.assert_close(mine.bias, solution[-1], msg=mine.name)
        if width == 0:
            torch.testing.assert_close(mine.bias, wanted.mean(dim=0))
        before, after = ((wanted - written(one, read)).square().sum() for one in (old, mine))
        assert after <= before * (1 + 1e-9) + 1e-20, mine.name
        better += int(after < 0.99 * before)
    assert better, "the fixture must have lost something"


@torch.no_grad()
def test_a_model_that_lost_nothing_is_not_changed(study: Study, batch: Examples) -> None:
    """With live gates and with folded ones."""
    for left in (study.subject, without(study.subject, ())):
        new = recovered(Refit(), study, left)
        assert output_difference(new, study.subject, batch) < 1e-9


@torch.no_grad()
def test_a_learned_gate_stays_where_it_is_and_the_map_behind_it_is_fitted(study: Study) -> None:
    """A live gate scales what W_O reads, so it must count in the fit: closing a head of a gated model is removal."""
    gated = copy.deepcopy(study.subject)
    for sublayer in gated.attention_sublayers().values():
        sublayer.attention.head_mask[0] = 0.0
    first = [head for head in gated.grid if head.head == 0]
    removed = study.subject.without(HeadMask(gated.grid, frozenset(first)))
    masked, cut = (recovered(Refit(ridge=0.0), study, left) for left in (gated, removed))
    assert masked.learned_gates() is not None
    assert output_difference(masked, cut, study.splits.report) < 1e-6


def test_no_target_and_no_other_split_is_read(study: Study) -> None:
    left, train = without(study.subject, RAGGED), study.splits.train
    unlabelled = Examples(train.source, torch.full_like(train.target, -1))
    blind = replace(study, splits=Splits(train=unlabelled))
    first = recovered(Refit(), study, left)
    assert same(first, recovered(Refit(), blind, left))
    others = replace(study, splits=Splits(train=Examples(train.source.roll(1, 0)[:100], train.target)))
    assert not same(first, recovered(Refit(), others, left)), "it does read the sources"


def test_only_attention_is_fitted_where_that_is_said(study: Study) -> None:
    left = without(study.subject, RAGGED)

    def changed_by(recovery: Refit) -> set[str]:
        new, old = recovered(recovery, study, left).state_dict(), left.state_dict()
        return {name for name, value in new.items() if not torch.equal(value, old[name])}

    changed, both = changed_by(Refit(feed_forward=False)), changed_by(Refit())
    assert changed
    assert all(".out_proj." in name for name in changed)
    assert {name for name in both if ".feed_forward.4." in name} == both - changed != set()


@pytest.mark.parametrize("ridge", [1e-3, *slow(0.0)])
def test_few_examples_are_enough_for_some_change_and_are_said_once(
    study: Study, ridge: float, caplog: pytest.LogCaptureFixture
) -> None:
    fresh, left = replace(study), without(study.subject, RAGGED)
    recovered(Refit(), fresh, left)
    assert not caplog.messages, "enough examples are not remarked on"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            new = recovered(Refit(examples=2, ridge=ridge), fresh, left)
    (line,) = caplog.messages
    assert line.startswith("refit: ")
    assert "tokens are fewer than the 16 inputs of a map" in line
    assert "\n" not in line
    assert all(value.isfinite().all() for value in new.state_dict().values())
    assert not same(new, left)


@pytest.mark.parametrize("broken", ["dense", "left"])
def test_states_that_are_not_finite_are_said_in_a_line_and_leave_the_model_as_it_was(study: Study, broken: str) -> None:
    models = {"dense": copy.deepcopy(study.subject), "left": without(study.subject, RAGGED)}
    with torch.no_grad():
        models[broken].encoder[1].feed_forward[1].weight[0] = torch.inf
    dense = study_with(models["dense"], study.splits)
    done = recover(Refit(), dense, models["left"])
    assert done.note == "diverged, so it is as it was: the states of encoder.1.feed_forward.4 are not finite"
    assert same(done.model, models["left"])
    assert done.history.empty


def test_fine_tuning_can_start_from_it(study: Study) -> None:
    left = without(study.subject, RAGGED)
    both = recovered(FineTune(steps=2, start=Refit()), study, left)
    assert same(both, recovered(FineTune(steps=2), study, recovered(Refit(), study, left)))
    assert not same(both, recovered(FineTune(steps=2), study, left))
    longer = FineTune(steps=2, start=FineTune(steps=3))
    assert longer.extra_steps == 5


def test_it_is_done_anew_rather_than_kept_in_a_cache(study: Study) -> None:
    left = without(study.subject, RAGGED)

    def refuse(kind: str, what: Any, make: Any) -> Any:
        raise AssertionError("it takes a second")

    found = recover(Refit(), replace(study, remember=refuse), left)
    assert same(found.model, recovered(Refit(), study, left))
    assert found.history.empty
    with pytest.raises(AssertionError, match="takes a second"):
        recover(FineTune(steps=1), replace(study, remember=refuse), left)


def test_ridges_compete_where_a_map_has_few_tokens_for_its_inputs() -> None:
    assert ridges(1e-3, ENOUGH * 10, 10) == [1e-3]
    several = ridges(1e-3, ENOUGH * 10 - 1, 10)
    assert several[0] == 1e-3
    assert len(several) > 1
    assert sorted(set(several)) == several
    assert set(ridges(0.0, 1, 10)) == {0.0}


def problem(tokens: int, inputs: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, 3).double()
    read = torch.randn(tokens, inputs).double() * torch.arange(1, inputs + 1) + 2.0
    return linear, read, torch.randn(tokens, 3).double() + 5.0


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@torch.no_grad()
def test_fewer_tokens_than_inputs_leave_the_rest_as_it_was(ridge: float) -> None:
    linear, read, wanted = problem(3, 8)
    before = linear.weight.clone()
    correct(linear.weight, linear.bias, [(read, wanted - linear(read))], ridge)
    change = linear.weight - before
    assert 0 < change.abs().max() < 10
    unseen = torch.linalg.svd(torch.cat([read, torch.ones(3, 1).double()], dim=1)).Vh[3:, :-1]
    assert unseen.abs().max() > 0.1
    if ridge == 0:
        torch.testing.assert_close(linear(read), wanted)
    assert torch.linalg.matrix_rank(change) <= 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [6, 7, 9])
@torch.no_grad()
def test_few_tokens_and_many_give_the_ridge_regression_of_the_formula(tokens: int, bias: bool) -> None:
    """By least squares with the ridge as further rows, which holds on both sides of as many tokens as inputs."""
    linear, read, wanted = problem(tokens, 7)
    before, missing = linear.weight.clone(), wanted - linear(read)
    level = (0.1 * read.square().sum() / 7).sqrt()
    columns = torch.cat([read, torch.ones(tokens, int(bias)).double()], dim=1)
    rows = torch.cat([level * torch.eye(7).double(), torch.zeros(7, int(bias)).double()], dim=1)
    parts = torch.linalg.lstsq(torch.cat([columns, rows]), torch.cat([missing, torch.zeros(7, 3).double()])).solution
    expected = linear.bias + parts[7] if bias else linear.bias
    correct(linear.weight, linear.bias if bias else None, [(read[:2], missing[:2]), (read[2:], missing[2:])], 0.1)
    torch.testing.assert_close(linear.weight - before, parts[:7].T)
    torch.testing.assert_close(linear.bias, nn.Parameter(expected))


@torch.no_grad()
def test_few_tokens_of_nothing_give_the_bias_alone() -> None:
    """As of a feed-forward part that is dead."""
    weight, bias, missing = torch.zeros(4, 8).double(), torch.zeros(4).double(), torch.randn(3, 4).double()
    correct(weight, bias, [(torch.zeros(3, 8).double(), missing)], 1e-3)
    assert not weight.any()
    torch.testing.assert_close(bias, missing.mean(dim=0))


@pytest.mark.parametrize(("inputs", "ridges"), [(60, [1e-3, 100.0]), (8, [1e-3, 1.0, 100.0])])
@torch.no_grad()
def test_of_several_ridges_the_one_that_holds_on_parts_that_are_held_out_is_taken(
    inputs: int, ridges: list[float]
) -> None:
    """With more inputs than tokens and with fewer. Noise is best left alone, and what is so in all parts followed."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(inputs, 3, generator=draw).double()
    for noise, expected in ((100.0, 100.0), (0.0, 1e-3)):
        read = [torch.randn(10, inputs, generator=draw).double() for _ in range(5)]
        parts = [(A, A @ truth + noise * torch.randn(10, 3, generator=draw).double()) for A in read]
        chosen, told = (torch.zeros(3, inputs).double() for _ in range(2))
        correct(chosen, torch.zeros(3).double(), parts, ridges)
        correct(told, torch.zeros(3).double(), parts, expected)
        torch.testing.assert_close(chosen, told)


@torch.no_grad()
def test_with_nothing_to_choose_by_the_largest_ridge_is_taken() -> None:
    _, read, missing = problem(20, 4)
    weights = [torch.zeros(3, 4).double() for _ in range(2)]
    for weight, ridge in zip(weights, ([1e-3, 10.0], 10.0), strict=True):
        correct(weight, None, [(read, missing)], ridge)
    torch.testing.assert_close(*weights)
