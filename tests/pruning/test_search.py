from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from mhaprune.data import Splits
from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.measure.outcomes import gate_gradients, measure
from mhaprune.model.transformer import Seq2Seq
from mhaprune.pruning.plans import Search
from mhaprune.schedules.base import Evidence, Schedule
from mhaprune.schedules.budgets import Budget, removing
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.scoring import Scoring


@dataclass(frozen=True)
class Curious(Schedule):
    """Reads all the evidence there is, and checks that it is of the score split."""

    splits: Splits

    @property
    def scoring(self) -> Literal["repeated"]:
        return "repeated"

    def smallest(self, grid: HeadGrid) -> HeadMask:
        return HeadMask(grid)

    def __call__(self, evidence: Evidence, budgets: Sequence[Budget]) -> list[HeadMask]:
        subject, score = evidence.subject, self.splits.score
        masks = [HeadMask(subject.grid).without(head) for head in subject.grid.heads[:3]]
        smaller = subject.without(masks[0])
        expected = [float(measure(subject.without(mask), score).loss.mean()) for mask in masks]
        assert evidence.loss(masks).tolist() == pytest.approx(expected)
        assert torch.equal(evidence.gradients(), gate_gradients(subject, score))
        for one in (subject, smaller, subject):
            torch.testing.assert_close(evidence.score(one), Ablation()(one, score, 0).values[0])
        return masks[:1] * len(budgets)


def test_a_search_counts_all_that_a_schedule_reads_but_the_score_of_the_whole_model(
    model: Seq2Seq, splits: Splits
) -> None:
    scoring = Scoring(model, splits.score, 0)
    search = Search(scoring, "ablation", Ablation())
    search(Curious(splits), removing([1], model.grid))
    # Three masks, the gradients, and ablation of the 17 heads that are left with the pass that it is compared with.
    assert search.cost["forward_passes"] == 3 + 1 + 18
    assert search.cost["backward_passes"] == 1
    assert 0 < search.cost["seconds"] < 60
    assert scoring.cost([Ablation()])["forward_passes"] == 19


def test_a_schedule_that_says_it_uses_no_score_is_given_none(model: Seq2Seq, splits: Splits) -> None:
    with pytest.raises(AssertionError, match="its `scoring` says none"):
        Search(Scoring(model, splits.score, 0))(Curious(splits), removing([1], model.grid))


@dataclass(frozen=True)
class Refitting(Curious):
    """Asks for refits."""

    def __call__(self, evidence: Evidence, budgets: Sequence[Budget]) -> list[HeadMask]:
        evidence.refits(10)
        return []


def test_refits_that_cannot_be_had_are_refused(model: Seq2Seq, splits: Splits) -> None:
    with pytest.raises(ValueError, match="^score: one example; a schedule that refits needs 2 or more"):
        Search(Scoring(model, splits.score[:1], 0))(Refitting(splits), [])
