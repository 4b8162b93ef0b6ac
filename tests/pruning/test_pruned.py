from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.measure.outcomes import ProofFailed, gate_gradients, measure
from mhaprune.measure.times import COPIES
from mhaprune.pruning.plans import Plan, Search, choices, plans_of
from mhaprune.pruning.pruned import EquivalenceCheck, prune, smallest_effect, time_removed
from mhaprune.schedules.base import Evidence, Schedule
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Budgeted, Scores
from mhaprune.scorers.scoring import Scoring
from mhaprune.subject import Subject


def plans(model: Seq2Seq) -> list[Plan]:
    heads = model.grid.heads
    masks = [HeadMask(model.grid), HeadMask(model.grid).without(*heads[:4]), HeadMask(model.grid, frozenset(heads))]
    return [Plan(name, draw, "one_shot", mask) for name, draw in (("a", 0), ("b", 0), ("b", 1)) for mask in masks]


def test_a_row_per_plan_with_what_was_measured(model: Seq2Seq, splits: Splits) -> None:
    table, reported, difference = prune(model, plans(model), splits)
    assert difference < 1e-12
    assert set(reported) == {plan.mask for plan in plans(model)}
    assert list(table["heads_removed"]) == [0, 4, 18] * 3
    assert list(table["fraction_removed"]) == pytest.approx([0, 4 / 18, 1] * 3)
    assert table["removed"].iloc[1] == "encoder_self.0.0 encoder_self.0.1 encoder_self.0.2 encoder_self.1.0"
    masked = measure(model, splits.report, plans(model)[1].mask.gates())
    assert table["loss"].iloc[1] == pytest.approx(masked.loss.mean().item())
    chosen = measure(model, splits.choose, plans(model)[1].mask.gates())
    assert table["choose_loss"].iloc[1] == pytest.approx(chosen.loss.mean().item())
    assert table.loc[table["draw"] == 1, "choose_loss"].isna().all()
    assert table["parameters"].iloc[0] > table["parameters"].iloc[1] > table["parameters"].iloc[2]
    assert table["flops"].iloc[0] > table["flops"].iloc[1] > table["flops"].iloc[2]


@dataclass(frozen=True)
class Told(Budgeted):
    """Keeps the last heads, and writes down how many it was asked to keep."""

    family: ClassVar[str] = "none"
    asked: ClassVar[list[int]] = []

    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        keep = self.heads_to_keep(len(subject.grid))
        self.asked.append(keep)
        return Scores((torch.arange(len(subject.grid)) >= len(subject.grid) - keep).double()[None])


def test_a_scorer_that_wants_a_number_is_asked_once_for_each_that_leaves_a_choice(
    model: Seq2Seq, splits: Splits
) -> None:
    Told.asked.clear()
    budgets = [0, 4, 13, 18]
    made = plans_of(choices(Scoring(model, splits.score, 0), {"told": Told()}, OneShot(), budgets))
    assert Told.asked == [14, 5]
    assert {len(plan.mask.removed): plan.mask.removed for plan in made} == {
        n: frozenset(model.grid.heads[:n]) for n in (0, 4, 13, 18)
    }


@pytest.mark.usefixtures("bias_lost_with_the_heads")
def test_a_removal_that_is_not_the_mask_fails(model: Seq2Seq, splits: Splits) -> None:
    differ = "masked and removed differ by .* allowed is 1e-09; removed: encoder_self.0.0 .*"
    with pytest.raises(ProofFailed, match=differ):
        prune(model, plans(model), splits)


def test_the_largest_difference_is_that_of_all_masks_and_not_of_the_last(
    model: Seq2Seq, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    differences = iter([1e-12, 3e-11, 1e-15])
    monkeypatch.setattr(Seq2Seq, "removal_proof", lambda self, batch: lambda mask: next(differences))
    check = EquivalenceCheck(model, splits.report)
    for _ in range(3):
        check.prove(HeadMask(model.grid))
    assert check.worst == 3e-11


def test_a_mask_that_one_block_ignores_fails(model: Seq2Seq, splits: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smallest_effect(model, splits.report) > 1e-4
    plain = Seq2Seq.run_gated

    def deaf(self: Seq2Seq, batch: Examples, gates: Tensor | None = None, fallback: Tensor | None = None) -> Tensor:
        if gates is not None:
            gates = gates.clone()
            gates[..., 15:] = 1.0
        return plain(self, batch, gates, fallback)

    monkeypatch.setattr(Seq2Seq, "run_gated", deaf)
    with pytest.raises(ProofFailed, match="closing any head of block cross.1 changes no output"):
        smallest_effect(model, splits.report)


def test_neither_a_gate_that_training_has_closed_nor_an_encoder_that_nobody_reads_is_a_fault(
    model: Seq2Seq, splits: Splits
) -> None:
    for sublayer in model.attention_sublayers().values():
        with torch.no_grad():
            sublayer.attention.gate.logits.copy_(torch.tensor([60.0, -900.0, 0.0]))  # type: ignore[union-attr]
    assert smallest_effect(model, splits.report) > 0
    crosses = [head for head in model.grid if head.site == Site.CROSS]
    deaf = model.without(HeadMask(model.grid, frozenset(crosses)))
    assert smallest_effect(deaf, splits.report) > 0, "of the blocks that are read"
    one_left = model.without(HeadMask(model.grid, frozenset(crosses[1:])))
    assert smallest_effect(one_left, splits.report) > 0


def test_copies_of_each_model_are_timed_and_none_has_gates_left(
    model: Seq2Seq, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense model that computes its gates in every call would flatter every speed-up."""
    asked: list[Seq2Seq] = []
    monkeypatch.setattr(Seq2Seq, "predict", lambda self, batch: asked.append(self))
    time_removed(model, plans(model), splits.report[:4], rounds=2 * COPIES)
    assert model.learned_gates() is not None
    assert all(timed.learned_gates() is None for timed in asked)
    times = Counter(map(id, asked))
    assert set(times.values()) == {1 + 2}, "once to warm up, then in turn"
    shapes = Counter(timed.grid for timed in {id(timed): timed for timed in asked}.values())
    masks = dict.fromkeys(plan.mask for plan in plans(model))
    assert [shapes[mask.grid.without(mask.removed)] for mask in masks] == [2 * COPIES, COPIES, COPIES]


def test_every_plan_is_timed_against_the_dense_model(model: Seq2Seq, splits: Splits) -> None:
    latency = time_removed(model, plans(model)[:3], splits.report[:4], rounds=15)
    assert list(latency["scorer"]) == ["a", "a", "a", "dense", "dense again"]
    assert latency["speedup"].iloc[0] == latency["speedup"].iloc[3] == 1.0
    assert (latency["latency_ms"] > 0).all()
    dense = latency["latency_ms"].iloc[3]
    assert (latency["latency_ms"] * latency["speedup"]).tolist() == pytest.approx([dense] * 5), "they never disagree"
    assert (latency["speedup_q1"] <= latency["speedup"]).all()
    assert (latency["speedup"] <= latency["speedup_q3"]).all()
    assert latency["speedup"].iloc[2] > 1.0  # no head left


@dataclass(frozen=True)
class Curious(Schedule):
    """Reads all the evidence there is, and checks that it is of the score split."""

    splits: Splits

    @property
    def scoring(self) -> Literal["repeated"]:
        return "repeated"

    def smallest(self, grid: HeadGrid) -> HeadMask:
        return HeadMask(grid)

    def __call__(self, evidence: Evidence, budgets: Sequence[int]) -> list[HeadMask]:
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
    search(Curious(splits), [1])
    # Three masks, the gradients, and ablation of the 17 heads that are left with the pass that it is compared with.
    assert search.cost["forward_passes"] == 3 + 1 + 18
    assert search.cost["backward_passes"] == 1
    assert 0 < search.cost["seconds"] < 60
    assert scoring.cost([Ablation()])["forward_passes"] == 19


@dataclass(frozen=True)
class Refitting(Curious):
    """Asks for refits."""

    def __call__(self, evidence: Evidence, budgets: Sequence[int]) -> list[HeadMask]:
        evidence.refits(10)
        return []


def test_scores_and_refits_that_cannot_be_had_are_refused(model: Seq2Seq, splits: Splits) -> None:
    with pytest.raises(AssertionError, match="its `scoring` says none"):
        Search(Scoring(model, splits.score, 0))(Curious(splits), [1])
    with pytest.raises(ValueError, match="^score: one example; a schedule that refits needs 2 or more"):
        Search(Scoring(model, splits.score[:1], 0))(Refitting(splits), [])
