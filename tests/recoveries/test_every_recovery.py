"""What must hold for every recovery of conf/recovery, a new one too."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch

from mhaprune.data import Splits
from mhaprune.heads import Block, HeadMask, Site
from mhaprune.model.transformer import Seq2Seq
from mhaprune.recoveries.base import HISTORY, Recovery, RecoveryContext, State, recover
from mhaprune.storage.store import fingerprint
from mhaprune.tasks.sort import Sort
from support.composing import every
from support.models import gated_model, lesson_of
from support.sizes import options


@pytest.fixture(params=options("recovery"))
def recovery(request: pytest.FixtureRequest) -> Recovery:
    found = every("recovery")[request.param]
    assert isinstance(found, Recovery)
    return found


@pytest.fixture(scope="module")
def lesson(task: Sort, splits: Splits) -> RecoveryContext:
    return lesson_of(gated_model(task).float(), splits)


@pytest.fixture(scope="module")
def left(lesson: RecoveryContext) -> Seq2Seq:
    """Of ragged blocks, one of them empty."""
    grid = lesson.dense.grid
    gone = [head for head in grid if head.block == Block(Site.CROSS, 1)]
    return lesson.dense.without(HeadMask(grid, frozenset([grid.heads[0], *gone])))


def weights(model: Seq2Seq) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def trained(recovery: Recovery, lesson: RecoveryContext) -> int:
    """For how many steps; 0 for a recovery that trains nothing."""
    return lesson.training.steps + lesson.extra_steps if recovery.control else recovery.extra_steps


def recovered(
    recovery: Recovery, lesson: RecoveryContext, left: Seq2Seq, draw: int = 0
) -> tuple[Seq2Seq, pd.DataFrame]:
    return recovery(lesson, left, draw, None, lambda state: None)


def test_a_recovered_model_of_the_same_shape_comes_back_and_what_is_left_stays(
    recovery: Recovery, lesson: RecoveryContext, left: Seq2Seq
) -> None:
    before, dense = weights(left), weights(lesson.dense)
    model, history = recovered(recovery, lesson, left)
    assert same(weights(left), before)
    assert same(weights(lesson.dense), dense)
    assert not same(weights(model), before)
    assert model.grid.sizes == left.grid.sizes
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in before.items()
    }, "so that it can be kept in place of what is left"
    assert list(history)[: len(HISTORY)] == HISTORY
    assert len(history) > 0 or not trained(recovery, lesson)
    assert max(history["step"], default=0) == trained(recovery, lesson)
    assert history["loss"].iloc[1:].gt(0).all()


def test_the_same_call_gives_the_same_bits_and_another_draw_does_not(
    recovery: Recovery, lesson: RecoveryContext, left: Seq2Seq
) -> None:
    first, again = (weights(recovered(recovery, lesson, left)[0]) for _ in range(2))
    assert same(first, again)
    for draw in range(1, recovery.draws):
        assert not same(first, weights(recovered(recovery, lesson, left, draw)[0]))


def test_what_was_interrupted_ends_in_the_same_bits(recovery: Recovery, lesson: RecoveryContext, left: Seq2Seq) -> None:
    states: list[State] = []
    whole, history = recovery(lesson, left, 0, None, lambda state: states.append(copy.deepcopy(state)))
    assert bool(states) == bool(trained(recovery, lesson)), "training saves its state on the way"
    resumed, again = recovery(lesson, left, 0, states[0] if states else None, lambda state: None)
    assert same(weights(whole), weights(resumed))
    pd.testing.assert_frame_equal(*(table.drop(columns="seconds") for table in (history, again)))


def test_a_control_keeps_nothing_but_the_shape_and_others_are_decided_by_the_weights(
    recovery: Recovery, lesson: RecoveryContext, left: Seq2Seq
) -> None:
    other = copy.deepcopy(left)
    with torch.no_grad():
        other.output.bias += 0.5
    starts = [fingerprint(recovery.starts_from(lesson, one)) for one in (left, other)]
    ends = [weights(recovered(recovery, lesson, one)[0]) for one in (left, other)]
    assert (starts[0] == starts[1]) == same(*ends) == recovery.control
    smaller = left.without(HeadMask(left.grid, frozenset(left.grid.heads[:1])))
    assert fingerprint(recovery.starts_from(lesson, smaller)) != starts[0]


def test_a_control_trains_as_long_as_the_longest(recovery: Recovery, lesson: RecoveryContext, left: Seq2Seq) -> None:
    longer = replace(lesson, extra_steps=lesson.extra_steps + 1)
    _, history = recovered(recovery, lesson, left)
    _, other = recovered(recovery, longer, left)
    assert (max(other["step"], default=0) == max(history["step"], default=0) + 1) == recovery.control
    differ = fingerprint(recovery.starts_from(lesson, left)) != fingerprint(recovery.starts_from(longer, left))
    assert differ == recovery.control


def test_what_is_kept_in_the_cache_is_the_model(recovery: Recovery, lesson: RecoveryContext, left: Seq2Seq) -> None:
    asked: list[dict[str, Any]] = []

    def remember(kind: str, what: dict[str, Any], make: Any) -> dict[str, Any]:
        asked.append(what)
        return dict(make(None, lambda state: None))

    model, history = recovered(recovery, lesson, left)
    kept = recover(recovery, lesson, left, 0, remember)
    assert same(weights(kept.model), weights(model))
    assert kept.model.grid == left.grid, "heads keep their names"
    kept_history, history = (table.drop(columns="seconds") for table in (kept.history, history))
    pd.testing.assert_frame_equal(kept_history, history, check_dtype=len(history) > 0)
    assert kept.note == ""
    json.dumps(asked)  # plain values
