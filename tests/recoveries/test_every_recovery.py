"""What must hold for every recovery of conf/recovery, a new one too."""

import copy
import json
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch

from mhaprune.data import Splits
from mhaprune.heads import BlockId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sort import Sort
from mhaprune.recoveries.base import HISTORY, Recovery, State, recover
from mhaprune.storage.store import fingerprint
from support.composing import every
from support.models import gated_model, study_with
from support.sizes import options


@pytest.fixture(scope="module", params=options("recovery"))
def recovery(request: pytest.FixtureRequest) -> Recovery:
    found = every("recovery")[request.param]
    assert isinstance(found, Recovery)
    return found


@pytest.fixture(scope="module")
def study(task: Sort, splits: Splits) -> Study:
    return study_with(gated_model(task).float(), splits)


@pytest.fixture(scope="module")
def left(study: Study) -> Seq2Seq:
    """Of ragged blocks, one of them empty."""
    grid = study.subject.grid
    gone = [head for head in grid if head.block == BlockId(Site.CROSS, 1)]
    return study.subject.without(HeadMask(grid, frozenset([grid.heads[0], *gone])))


def weights(model: Seq2Seq) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def trained(recovery: Recovery, study: Study) -> int:
    """For how many steps; 0 for a recovery that trains nothing."""
    return study.training.steps + study.extra_steps if recovery.control else recovery.extra_steps


def recovered(recovery: Recovery, study: Study, left: Seq2Seq, draw: int = 0) -> tuple[Seq2Seq, pd.DataFrame]:
    return recovery(study, left, draw, None, lambda state: None)


Done = tuple[dict[str, torch.Tensor], pd.DataFrame]


@pytest.fixture(scope="module")
def done(recovery: Recovery, study: Study, left: Seq2Seq) -> Done:
    """The recovered weights, and the history of their training."""
    torch.set_num_threads(1)
    model, history = recovered(recovery, study, left)
    return weights(model), history


def test_the_same_bits_come_back_in_the_same_shape_and_what_is_left_stays(
    recovery: Recovery, study: Study, left: Seq2Seq, done: Done
) -> None:
    before, dense = weights(left), weights(study.subject)
    model, history = recovered(recovery, study, left)
    assert same(weights(left), before)
    assert same(weights(study.subject), dense)
    assert same(weights(model), done[0])
    assert not same(weights(model), before)
    assert model.grid.sizes == left.grid.sizes
    assert [value.shape for value in done[0].values()] == [value.shape for value in before.values()]
    assert list(history)[: len(HISTORY)] == HISTORY
    assert len(history) > 0 or not trained(recovery, study)
    assert max(history["step"], default=0) == trained(recovery, study)
    assert history["loss"].iloc[1:].gt(0).all()
    for draw in range(1, recovery.draws):
        assert not same(done[0], weights(recovered(recovery, study, left, draw)[0]))


def test_what_was_interrupted_ends_in_the_same_bits(
    recovery: Recovery, study: Study, left: Seq2Seq, done: Done
) -> None:
    states: list[State] = []
    recovery(study, left, 0, None, lambda state: states.append(copy.deepcopy(state)))
    assert bool(states) == bool(trained(recovery, study)), "training saves its state on the way"
    resumed, again = recovery(study, left, 0, states[0] if states else None, lambda state: None)
    assert same(done[0], weights(resumed))
    pd.testing.assert_frame_equal(*(table.drop(columns="seconds") for table in (done[1], again)))


def test_a_control_keeps_nothing_but_the_shape_and_others_are_decided_by_the_weights(
    recovery: Recovery, study: Study, left: Seq2Seq, done: Done
) -> None:
    other = copy.deepcopy(left)
    with torch.no_grad():
        other.output.bias += 0.5
    starts = [fingerprint(recovery.starts_from(study, one)) for one in (left, other)]
    end = weights(recovered(recovery, study, other)[0])
    assert (starts[0] == starts[1]) == same(done[0], end) == recovery.control
    smaller = left.without(HeadMask(left.grid, frozenset(left.grid.heads[:1])))
    assert fingerprint(recovery.starts_from(study, smaller)) != starts[0]


def test_a_control_trains_as_long_as_the_longest(recovery: Recovery, study: Study, left: Seq2Seq, done: Done) -> None:
    longer = replace(study, extra_steps=study.extra_steps + 1)
    _, history = recovered(recovery, longer, left)
    assert (max(history["step"], default=0) == max(done[1]["step"], default=0) + 1) == recovery.control
    differ = fingerprint(recovery.starts_from(study, left)) != fingerprint(recovery.starts_from(longer, left))
    assert differ == recovery.control


def test_what_is_kept_in_the_cache_is_the_model(recovery: Recovery, study: Study, left: Seq2Seq, done: Done) -> None:
    asked: list[dict[str, Any]] = []

    def remember(kind: str, what: dict[str, Any], make: Any) -> dict[str, Any]:
        asked.append(what)
        return dict(make(None, lambda state: None))

    kept = recover(recovery, replace(study, remember=remember), left)
    assert same(weights(kept.model), done[0])
    assert kept.model.grid == left.grid, "heads keep their names"
    kept_history, history = (table.drop(columns="seconds") for table in (kept.history, done[1]))
    pd.testing.assert_frame_equal(kept_history, history, check_dtype=len(history) > 0)
    assert kept.note == ""
    json.dumps(asked)  # plain values
