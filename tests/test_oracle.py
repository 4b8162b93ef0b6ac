from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from mhaprune import oracle
from mhaprune.cache import Cache
from mhaprune.gates import Softmax
from mhaprune.heads import HeadMask
from mhaprune.measure import measure
from mhaprune.oracle import find_best
from mhaprune.scoring import Make
from mhaprune.tasks.base import Splits
from mhaprune.tasks.sort import Sort
from mhaprune.transformer import Seq2Seq, Transformer


@pytest.fixture
def small(task: Sort) -> Seq2Seq:
    """Six heads: 64 subsets."""
    config = Transformer(d_model=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8)
    return config(len(task.vocabulary), Softmax()).double()


def test_the_exact_oracle_is_a_plain_loop_over_all_subsets(small: Seq2Seq, splits: Splits) -> None:
    found = find_best(small, splits.choose, range(7))
    assert found.exact
    assert len(found.outcomes) == 64
    for k in range(7):
        losses = {}
        for heads in combinations(small.grid, k):
            mask = HeadMask(small.grid, frozenset(heads))
            outcome = measure(small.without(mask), splits.choose)
            losses[mask] = (float(outcome.loss.mean()), float(outcome.sequence_accuracy.mean()))
        best = found.best(k, "loss")
        assert best == min(losses, key=lambda mask: losses[mask][0])
        removed = tuple(sorted(small.grid.index(head) for head in best.removed))
        assert found.outcomes[removed][0] == pytest.approx(losses[best][0], rel=1e-9)
        most = max(accuracy for _, accuracy in losses.values())
        assert losses[found.best(k, "sequence_accuracy")][1] == most


def test_the_search_is_a_bound_and_takes_what_it_is_shown(model: Seq2Seq, splits: Splits) -> None:
    shown = HeadMask(model.grid, frozenset(model.grid.heads[3:8]))
    plain = find_best(model, splits.choose, [5], beam_width=1)
    wide = find_best(model, splits.choose, [5], beam_width=6, also=[shown])
    assert not plain.exact
    assert (3, 4, 5, 6, 7) in wide.outcomes
    assert wide.outcomes[key(wide.best(5, "loss"))][0] <= wide.outcomes[3, 4, 5, 6, 7][0]
    # No exchange of one removed head for a kept one is better than what the search ended in.
    best = plain.best(5, "loss")
    for gone in best.removed:
        for kept in best.kept:
            other = HeadMask(model.grid, best.removed - {gone} | {kept})
            loss = float(measure(model, splits.choose, other.gates().double()).loss.mean())
            assert loss >= plain.outcomes[key(best)][0] - 1e-12


def key(mask: HeadMask) -> tuple[int, ...]:
    return tuple(sorted(mask.grid.index(head) for head in mask.removed))


def test_a_search_over_all_subsets_finds_the_exact_ones(small: Seq2Seq, splits: Splits) -> None:
    exact = find_best(small, splits.choose, range(7), "exact")
    search = find_best(small, splits.choose, range(7), "beam", beam_width=64)
    assert [search.best(k, "loss") for k in range(7)] == [exact.best(k, "loss") for k in range(7)]


def test_too_many_subsets_are_refused(model: Seq2Seq, splits: Splits) -> None:
    message = r"experiment.oracle=exact: 18 heads have 262144 subsets, exact takes up to 16 heads, auto and beam any"
    with pytest.raises(ValueError, match=message):
        find_best(model, splits.choose, [1], "exact")


@pytest.mark.parametrize("method", ["exact", "beam"])
def test_an_interrupted_search_goes_on_where_it_was(
    small: Seq2Seq, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    monkeypatch.setattr(oracle, "MASKS_AT_ONCE", 4)
    monkeypatch.setattr(oracle, "SAVE_EVERY", 1)
    cache = Cache(tmp_path)

    def remember(kind: str, what: dict[str, Any], make: Make) -> dict[str, Any]:
        return cache.get(kind, what, make)

    plain, calls = oracle.measure_masks, []

    def failing(*arguments: Any) -> Any:
        calls.append(len(arguments[2]))
        if len(calls) == 6:
            raise KeyboardInterrupt
        return plain(*arguments)

    whole = find_best(small, splits.choose, [2, 3], method, 3)
    monkeypatch.setattr(oracle, "measure_masks", failing)
    with pytest.raises(KeyboardInterrupt):
        find_best(small, splits.choose, [2, 3], method, 3, remember=remember)
    before = sum(calls[:5])
    calls[:] = [0] * 6
    resumed = find_best(small, splits.choose, [2, 3], method, 3, remember=remember)
    assert sum(calls) == len(whole.outcomes) - before
    assert resumed.outcomes == whole.outcomes
    calls.clear()
    assert find_best(small, splits.choose, [2, 3], method, 3, remember=remember).outcomes == whole.outcomes
    assert not calls


def test_objectives_break_ties_by_the_other(small: Seq2Seq) -> None:
    outcomes = {(0,): (1.0, 0.0, 0.5), (1,): (0.9, 0.0, 0.5), (2,): (0.9, 0.0, 0.4)}
    found = oracle.Oracle(small, outcomes, exact=True)
    assert (
        found.best(1, "loss") == found.best(1, "sequence_accuracy") == HeadMask(small.grid).without(small.grid.heads[1])
    )
