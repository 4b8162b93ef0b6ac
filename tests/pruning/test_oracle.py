from collections import Counter
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mhaprune.attention.gates import Softmax
from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import AnswerOutcome, Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import measure, measure_removed
from mhaprune.pruning import oracle
from mhaprune.pruning.oracle import find_best
from mhaprune.storage.cache import Cache
from support.games import ONE, Game, numbered

Table = dict[tuple[int, ...], float]
ALL_SIX, NUMBER_2 = (0, 1, 2, 3, 4, 5), numbered(range(2, 3))


def table_game(num_heads: int, planted: Table) -> Game:
    """The loss of a set of removed heads is its example's number times what the table says, 1 where it says nothing."""

    def loss(number: Tensor, gates: Tensor) -> Tensor:
        removed = tuple((gates[0] == 0).nonzero().flatten().tolist())
        return number.double() * planted.get(removed, 1.0)

    return Game(num_heads, loss)


SWAPS: Table = {(0,): 0.1, (0, 1): 0.8, (1, 2): 0.5, (2, 3): 0.2, (0, 1, 2): 0.9}
"""Two exchanges lead from the pair that is found head by head to the best one, which is not next to it."""
BEAMS: Table = {(0,): 0.1, (3,): 0.2, (0, 1): 0.1, (3, 4): 0.2, (0, 1, 2): 0.3, (3, 4, 5): 0.1}
"""The best three heads are behind the second best head, and no exchange leads there from the best head."""
WINDING: Table = {(0,): 0.1, (0, 1): 0.1, (0, 1, 2): 0.8, (0, 2, 3): 0.5, (1, 2, 4): 0.3, (2, 4, 5): 0.1}
"""The best three heads are behind the best exchange of the first three, not behind the first that is better."""


@pytest.mark.parametrize("gain", [1e-2, 1e-6])
def test_an_exchange_is_made_for_the_smallest_gain(gain: float) -> None:
    game = table_game(6, {(0,): 0.1, (0, 1): 0.2, (1, 2): 0.2 - gain / 2, (2, 3): 0.2 - gain})
    found = find_best(game, ONE, [2], method="beam", beam_width=1)
    assert key(found.best(2, "loss")) == (2, 3)


@pytest.fixture
def small(task: Sort) -> Seq2Seq:
    """Six heads: 64 subsets."""
    config = Transformer(d_model=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8)
    return Seq2Seq(config, len(task.vocabulary), Softmax()).double()


def test_the_exact_oracle_is_a_plain_loop_over_all_subsets(small: Seq2Seq, splits: Splits) -> None:
    found = find_best(small, splits.choose, range(7))
    assert found.exact
    assert len(found.outcomes) == 64
    for k in range(7):
        losses = {}
        for heads in combinations(small.grid, k):
            mask = HeadMask(small.grid, frozenset(heads))
            outcome = measure(small.without(mask), splits.choose)
            losses[mask] = (float(outcome.loss.mean()), float(outcome.quality.mean()))
        best = found.best(k, "loss")
        assert best == min(losses, key=lambda mask: losses[mask][0])
        removed = tuple(sorted(small.grid.index(head) for head in best.removed))
        assert found.outcomes[removed][0] == pytest.approx(losses[best][0], rel=1e-9)
        most = max(accuracy for _, accuracy in losses.values())
        assert losses[found.best(k, "quality")][1] == most


def test_the_search_is_a_bound_and_takes_what_it_is_shown(model: Seq2Seq, splits: Splits) -> None:
    shown = HeadMask(model.grid, frozenset(model.grid.heads[3:6]))
    plain = find_best(model, splits.choose, [3], beam_width=1)
    wide = find_best(model, splits.choose, [3], beam_width=3, also=[shown])
    assert not plain.exact
    assert (3, 4, 5) in wide.outcomes
    assert wide.outcomes[key(wide.best(3, "loss"))][0] <= wide.outcomes[3, 4, 5][0]
    # No exchange of one removed head for a kept one is better than what the search ended in.
    best = plain.best(3, "loss")
    others = [HeadMask(model.grid, best.removed - {gone} | {kept}) for gone, kept in product(best.removed, best.kept)]
    losses = measure_removed(model, splits.choose, others).loss.mean(dim=1)
    assert (losses >= plain.outcomes[key(best)][0] - 1e-12).all()
    assert max(map(len, plain.outcomes)) == 3, "what no budget asks for is not searched"


def key(mask: HeadMask) -> tuple[int, ...]:
    return tuple(sorted(mask.grid.index(head) for head in mask.removed))


def removed_by(found: oracle.Oracle, removed: int) -> tuple[int, ...]:
    return key(found.best(removed, "loss"))


def test_swaps_go_on_for_as_long_as_they_lower_the_loss() -> None:
    found = find_best(table_game(4, SWAPS), ONE, [2], "beam", beam_width=1)
    assert removed_by(found, 2) == (2, 3)
    # Without a budget there the search has but its beam.
    assert removed_by(find_best(table_game(4, SWAPS), ONE, [1, 3], "beam", beam_width=1), 2) == (0, 1)


def test_a_wider_beam_keeps_what_is_not_yet_the_best() -> None:
    narrow, wide = (find_best(table_game(6, BEAMS), ONE, [3], "beam", beam_width=width) for width in (1, 2))
    assert removed_by(narrow, 3) == (0, 1, 2)
    assert (3, 4, 5) not in narrow.outcomes
    assert removed_by(wide, 3) == (3, 4, 5)


def test_every_subset_is_run_once() -> None:
    for method in ("exact", "beam"):
        game = table_game(6, BEAMS)
        found = find_best(game, ONE, [2, 3], method, beam_width=2)  # type: ignore[arg-type]
        assert game.runs == Counter(dict.fromkeys(found.outcomes, 1))
        assert all(outcome[0] == BEAMS.get(subset, 1.0) for subset, outcome in found.outcomes.items())


def test_the_cache_keeps_apart_what_was_searched_otherwise(tmp_path: Path) -> None:
    """On other or more examples, with another width, other budgets or another method."""
    game = table_game(6, WINDING)
    asked: list[tuple[Any, ...]] = [(examples, [3], "beam", 1) for examples in (ONE, NUMBER_2, numbered(range(1, 3)))]
    asked += [(ONE, [3], "beam", 2), (ONE, [1, 2], "beam", 1), (ONE, [3], "exact", 1)]
    found = [find_best(game, *each, remember=Cache(tmp_path).get).outcomes for each in asked]
    assert found == [find_best(game, *each).outcomes for each in asked]
    assert all(other != found[0] for other in found[1:])
    before = game.runs.total()
    assert found == [find_best(game, *each, remember=Cache(tmp_path).get).outcomes for each in asked]
    assert game.runs.total() == before


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(
    ("method", "at"), [("beam", (0,)), ("beam", (0, 2, 3)), ("beam", (2, 4, 5)), ("exact", (0, 1)), ("exact", ALL_SIX)]
)
def test_an_interrupted_search_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any, at: tuple[int, ...], at_once: int
) -> None:
    monkeypatch.setattr(oracle, "MASKS_AT_ONCE", at_once)
    game, plain = table_game(6, WINDING), oracle.measure_masks
    whole = find_best(game, ONE, [3], method, 1)
    runs: Counter[tuple[int, ...]] = Counter()

    def failing(subject: Game, examples: Examples, gates: Tensor) -> AnswerOutcome:
        subsets = [tuple((gates_N == 0).nonzero().flatten().tolist()) for gates_N in gates]
        if at in subsets and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        runs.update(subsets)
        return plain(subject, examples, gates)  # type: ignore[arg-type]

    interrupted: list[bool] = []
    monkeypatch.setattr(oracle, "measure_masks", failing)
    with pytest.raises(KeyboardInterrupt):
        find_best(game, ONE, [3], method, 1, remember=Cache(tmp_path).get)
    before = runs.total()
    resumed = find_best(game, ONE, [3], method, 1, remember=Cache(tmp_path).get)
    assert 0 < before < runs.total()
    assert resumed.outcomes == whole.outcomes
    assert runs == Counter(dict.fromkeys(whole.outcomes, 1))


def test_objectives_break_ties_by_the_other(small: Seq2Seq) -> None:
    outcomes = {(0,): (1.0, 0.5), (1,): (0.9, 0.5), (2,): (0.9, 0.4)}
    found = oracle.Oracle(small, outcomes, exact=True)
    assert found.best(1, "loss") == found.best(1, "quality") == HeadMask(small.grid).without(small.grid.heads[1])
