"""Budgets in time, with a clock that counts weights: how many units go is then known."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.api import promise
from mhaprune.api.promise import SHARES
from mhaprune.api.wrap import Heads
from mhaprune.heads import HeadMask
from mhaprune.measure.accuracy import choose_columns
from mhaprune.measure.outcomes import measure
from mhaprune.pruning.plans import Plan
from mhaprune.schedules.one_shot import OneShot
from mhaprune.tables import CHOOSE_DROP, CHOOSE_EXAMPLES, CHOOSE_MOST
from support.classifier import Classifier, batches, classifier

FIXED = 3.0
"""Milliseconds of the part of the model that stays."""


NOISE = {"is": 1.01}
"""The third quartile of the dense model's time over itself."""


def milliseconds(heads: Heads, mask: HeadMask) -> float:
    """A unit with an odd number takes 2 ms, the others 1 ms."""
    return FIXED + sum(1.0 + head.head % 2 for head in mask.kept)


@pytest.fixture(scope="module")
def proven() -> Heads:
    return mhaprune.wrap(classifier(), losses.classification, score=batches(2), choose=batches(6, 1))


@pytest.fixture
def heads(proven: Heads, monkeypatch: pytest.MonkeyPatch) -> Heads:
    """Without what other tests have noted."""
    wrapped = replace(proven)

    def timed(subject: Any, plans: Sequence[Plan], batch: Any, rounds: int) -> pd.DataFrame:
        dense = milliseconds(wrapped, HeadMask(wrapped.grid))
        times = {plan.scorer: milliseconds(wrapped, plan.mask) for plan in plans} | {"dense": dense}
        ends = {name: (dense / ms, dense / ms) for name, ms in times.items()} | {"pruned": (1.0, 2.0)}
        times, ends = times | {"dense again": dense}, ends | {"dense again": (1 / NOISE["is"], NOISE["is"])}
        columns = ["scorer", "latency_ms", "speedup", "speedup_q1", "speedup_q3"]
        return pd.DataFrame([(name, ms, dense / ms, *ends[name]) for name, ms in times.items()], columns=columns)

    monkeypatch.setattr(promise, "time_removed", timed)
    return wrapped


@pytest.mark.parametrize("faster", [1.15, 1.25, 1.5, 2.0, 3.0])
def test_as_many_units_go_as_the_time_needs(heads: Heads, faster: float) -> None:
    """Whole units: no model of the order is closer."""
    order = [float(n) for n in range(8)]
    dense = milliseconds(heads, HeadMask(heads.grid))
    mask = heads.mask(faster=faster, by=order)
    cuts = [HeadMask(heads.grid).without(*list(heads.grid)[:n]) for n in range(9)]
    assert mask in cuts
    missed = {cut: abs(milliseconds(heads, cut) * faster / dense - 1) for cut in cuts}
    assert missed[mask] == min(missed.values())
    row = heads.promises.iloc[-1]
    assert row[["promised_ms", "measured_ms", "dense_ms"]].tolist() == [
        dense / faster,
        milliseconds(heads, mask),
        dense,
    ]
    assert row["units_kept"] == len(mask.kept)
    assert [row["speedup"], row["speedup_q1"], row["speedup_q3"]] == [dense / milliseconds(heads, mask), 1.0, 2.0]


def test_a_site_is_timed_once_and_the_same_budget_gives_the_same_mask(heads: Heads) -> None:
    assert heads.mask(ms=9.0, by="ablation") == heads.mask(ms=9.0, by="ablation")
    assert heads.promises["promised"].tolist() == ["ms=9"] * 2
    assert len(heads.promised.times) == 1
    dense, cost = promise.unit_costs(heads, 1)
    assert dense == 15
    assert cost.tolist() == [1.5] * 8, "half of the units of each block, one of each kind, in equal parts"


def test_the_fastest_model_within_a_loss_is_the_last_that_passes_one_after_the_other(heads: Heads) -> None:
    order = [float(n) for n in range(8)]
    masks = heads.masks(SHARES, by=order, of="time")
    assert [len(mask.kept) for mask in masks] == sorted((len(mask.kept) for mask in masks), reverse=True)
    choose = heads.splits["choose"]
    dense = measure(heads.subject, choose)
    found = [choose_columns(measure(heads.subject.without(mask), choose), dense, choose) for mask in masks]
    drops = [drop[CHOOSE_MOST] for drop in found]
    for within in (0.2, 0.5, max(drops[:3]) + 1e-9):
        passing = next((n for n, drop in enumerate(drops) if drop > within), len(drops))
        small = heads.prune(within=within, by=order) if passing else None
        kept = sum(layer.num_heads for layer in small.attention) if small is not None else 0  # type: ignore[union-attr]
        assert kept == (len(masks[passing - 1].kept) if passing else 0)
    assert found[0][CHOOSE_DROP] < drops[0]
    for within in (0.0, (found[0][CHOOSE_DROP] + drops[0]) / 2):  # lost as observed, but not surely
        with pytest.raises(ValueError, match=r"^within=[\d.]+: not met, with 7 of 8 heads, the most that was tried"):
            heads.prune(within=within, by=order)
    with pytest.raises(ValueError, match="within=0.1: says how many heads stay, leave keep=, mask= and budgets out"):
        heads.prune(keep=0.5, within=0.1)


def test_units_that_cannot_be_removed_stay_and_cost_next_to_nothing(heads: Heads) -> None:
    stays = heads.grid.blocks[0]
    stuck = replace(heads, proven=heads.proven._replace(stuck={stays: "it is so"}))
    mask = stuck.mask(faster=1.5, by=[float(n) for n in range(8)])
    assert {head.block for head in mask.removed} == {heads.grid.blocks[1]}
    with pytest.raises(
        ValueError, match="^faster=3: cannot be met, without the 4 heads that can go the model is 1.67 t"
    ):
        stuck.mask(faster=3.0, by=[float(n) for n in range(8)])


def test_the_costs_are_kept_in_the_cache_of_the_user(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [mhaprune.wrap(classifier(), losses.classification, score=batches(2), cache=tmp_path) for _ in range(2)]
    dense, cost = promise.unit_costs(made[0], 1)
    monkeypatch.setattr(promise, "time_removed", None)  # which may not be called again
    again, same = promise.unit_costs(made[1], 1)
    assert dense == again
    assert torch.equal(cost, same)
    assert bool((cost > 0).all())


def test_a_time_that_cannot_be_is_refused_and_one_that_is_kept_anyway_removes_nothing(
    heads: Heads, caplog: Any
) -> None:
    with pytest.raises(
        ValueError, match="^faster=9: cannot be met, without the 8 heads that can go the model is 5.00 t"
    ):
        heads.mask(faster=9.0)
    assert heads.mask(ms=100.0) == HeadMask(heads.grid)
    assert "ms=100: the whole model takes 15 ms, so nothing is removed" in caplog.text
    for wrong, message in (
        ({"faster": 1.5, "keep": 0.5}, "faster=1.5: says how many units stay, leave keep= out"),
        ({"faster": 1.5, "ms": 2.0}, "faster=1.5, ms=2: says how many units stay, leave ms= out"),
        ({"ms": 2.0, "even": True}, "ms=2: says how many units stay, leave even= out"),
        ({"batch_size": 8}, "batch_size=8: needs faster=, ms= or of="),
        ({"faster": 1.0}, "faster=1.0: must be above 1"),
        ({"ms": -1.0}, "ms=-1.0: must be above 0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            heads.mask(**wrong)


def shared(heads: Heads, model: Any) -> bool:
    """Whether a model has weights of the wrapped one."""
    return model.embedding.weight is heads.subject.model.embedding.weight


def test_what_within_chose_is_timed_and_said_to_be_no_faster(
    heads: Heads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    order = [float(n) for n in range(8)]
    assert not shared(heads, heads.prune(within=1.0, by=order))
    assert shared(heads, heads.prune(within=1.0, by=order, copy=False))
    assert not caplog.text
    row = heads.promises.iloc[-1]
    kept = HeadMask(heads.grid).without(*list(heads.grid)[: 8 - row["units_kept"]])
    assert (row["promised"], row["measured_ms"], row["dense_ms"]) == ("within=1", milliseconds(heads, kept), 15.0)
    assert row["promised_ms"] != row["promised_ms"], "no time was asked for"
    monkeypatch.setattr(promise, "_timed", lambda *_: [15.0, 20.0, 0.75, 0.7, 0.8])
    heads.prune(within=1.0, by=order)
    said = rf"within=1: the model with {row['units_kept']} of 8 heads takes 20 ms for one example, the whole model 15"
    assert said in caplog.text


@pytest.mark.slow
def test_a_promise_is_kept_on_this_machine() -> None:
    """Of a model that is large enough to be timed; within the quartiles of its own noise, or 5 %."""
    heads = mhaprune.wrap(Classifier(384).eval(), losses.classification, score=batches(2), units=("head",))
    heads.mask(faster=1.2, by="random", batch_size=6)
    row = heads.promises.iloc[0]
    noise = (row["speedup_q3"] - row["speedup_q1"]) / row["speedup"]
    assert abs(row["measured_ms"] / row["promised_ms"] - 1) < max(0.05, noise)


def test_a_search_begins_with_few_units_if_their_times_are_noise(
    heads: Heads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(NOISE, "is", 3.0)
    tried: list[int] = []
    timed = promise._timed

    def counted(heads: Heads, mask: HeadMask, batch_size: int) -> list[float]:
        tried.append(len(mask.removed))
        return timed(heads, mask, batch_size)

    monkeypatch.setattr(promise, "_timed", counted)
    heads.mask(faster=1.25, by=[float(n) for n in range(8)])
    assert tried[0] == 1
    assert "half of the units of attention save less time than timing varies" in caplog.text


def test_the_batch_that_was_timed_is_noted_and_is_none_larger_than_yours(heads: Heads) -> None:
    heads.mask(faster=1.25, by=[float(n) for n in range(8)], batch_size=64)
    assert heads.promises["batch_size"].tolist() == [6], "each batch has six examples"


def test_few_examples_to_choose_by_are_named(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    unsure = {CHOOSE_MOST: float("nan"), CHOOSE_DROP: 0.0, CHOOSE_EXAMPLES: 36}
    monkeypatch.setattr(promise, "choose_columns", lambda *_: unsure)
    message = (
        r"^choose: 36 examples are too few to say at 95 % confidence how much of accuracy is lost, within= needs more$"
    )
    with pytest.raises(ValueError, match=message):
        heads.prune(within=0.5, by="gate_output")


def test_a_schedule_keeps_its_least_heads_beside_those_that_cannot_be_removed(heads: Heads) -> None:
    stays, other = heads.grid.blocks
    stuck = replace(heads, proven=heads.proven._replace(stuck={stays: "it is so"}))
    order = [float(n) for n in range(8)]
    assert len(stuck.mask(5, by=order, schedule=OneShot(keep_at_least=1)).kept) == 5
    with pytest.raises(ValueError, match="^keep=4: keeps 4 heads, but 5 must stay"):
        stuck.mask(4, by=order, schedule=OneShot(keep_at_least=1))
    assert {head.block for head in stuck.mask(4, by=order).removed} == {other}
    assert [len(mask.kept) for mask in stuck.masks([6, 5], by=order)] == [6, 5]
    with pytest.raises(ValueError, match="^keep=3: keeps 3 heads, but 4 must stay"):
        stuck.masks([6, 3], by=order)
