"""What must hold for every schedule of conf/schedule and of examples/literature, a new one too."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mhaprune.heads import BlockId, HeadId, HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.schedules.base import Evidence, Schedule, Stepwise
from mhaprune.subject import Subject
from support.composing import every, known


@pytest.fixture(params=known("schedule"))
def schedule(request: pytest.FixtureRequest) -> Schedule:
    found = every("schedule")[request.param]
    assert isinstance(found, Schedule)
    return found


class Worths:
    """Heads that are worth so much, and more where another one of their block is gone; it keeps what is asked."""

    def __init__(self, subject: Subject, seed: int = 0) -> None:
        self.subject, self.scored, self.measured, self.refitted = subject, list[Subject](), 0, 0
        draw = torch.Generator().manual_seed(seed)
        names = map(str, subject.grid)
        self.worth = dict(zip(names, torch.rand(len(subject.grid), generator=draw).tolist(), strict=True))

    def score(self, left: Subject) -> Tensor:
        self.scored.append(left)
        sizes = Counter(head.block for head in left.grid)
        return torch.tensor([self.worth[str(head)] / sizes[head.block] for head in left.grid]).double()

    def loss(self, masks: Sequence[HeadMask]) -> Tensor:
        self.measured += 1
        gone = [Counter(head.block for head in mask.removed) for mask in masks]
        pairs = zip(masks, gone, strict=True)
        return torch.tensor([sum(self.worth[str(h)] * n[h.block] for h in mask.removed) for mask, n in pairs]).double()

    def gradients(self) -> Tensor:
        """As many examples as heads; a head that is worth more moves its example more."""
        self.measured += 1
        return torch.diag(torch.tensor([self.worth[str(head)] for head in self.subject.grid])).double()

    @property
    def judge(self) -> Evidence:
        return Evidence(self.subject, self.score, self.loss, None, self.gradients, lambda examples: Spared(self))


class Spared:
    """Refits that bring nothing back."""

    def __init__(self, worths: Worths) -> None:
        self.worths = worths

    def without(self, mask: HeadMask) -> Subject:
        self.worths.refitted += 1
        return self.worths.subject.without(mask)

    def loss(self, left: Subject) -> float:
        return float(self.worths.loss([HeadMask(self.worths.subject.grid, gone(self.worths.subject, left))]))

    def errors(self, left: Subject) -> Tensor:
        return torch.tensor([self.worths.worth[str(head)] for head in left.grid])


def gone(whole: Subject, left: Subject) -> frozenset[HeadId]:
    return frozenset(set(whole.grid) - set(left.grid))


def test_budgets_are_met_exactly_and_twice_the_same(model: Seq2Seq, schedule: Schedule) -> None:
    heads = [0, 1, 7, 17, len(model.grid)]
    masks = schedule(Worths(model).judge, heads)
    assert [len(mask.removed) for mask in masks] == heads
    assert all(mask.grid == model.grid for mask in masks)
    assert schedule(Worths(model).judge, heads) == masks
    assert schedule(Worths(model).judge, []) == []


def test_it_measures_what_it_says_and_no_more(model: Seq2Seq, schedule: Schedule) -> None:
    """`scoring` decides before a run which scorers are refused: a smaller model has no learned gates. Other heads go
    where others are worth least."""
    worths = Worths(model)
    schedule(worths.judge, [3, 9])
    smaller = [left for left in worths.scored if left is not model]
    looks = {"none": (False, False), "once": (True, False), "repeated": (True, True)}
    assert (bool(worths.scored), bool(smaller)) == looks[schedule.scoring]
    assert worths.scored or worths.measured, "it looks at something"
    assert schedule.removes == bool(smaller or worths.refitted)
    budgets = [6]
    first, other = (schedule(Worths(model, seed).judge, budgets) for seed in (0, 1))
    assert first != other


def test_the_smallest_model_is_one_that_it_can_leave(model: Seq2Seq, schedule: Schedule) -> None:
    careful = with_settings(schedule, keep_at_least=1)
    for one in (schedule, careful):
        most = len(one.smallest(model.grid).removed)
        (mask,) = one(Worths(model).judge, [most])
        assert len(mask.removed) == most
        with pytest.raises(ValueError, match=f"budgets={most + 1}: cannot be met, {18 - most} heads must stay"):
            one(Worths(model).judge, [0, most + 1])


def test_a_pruned_model_with_ragged_and_emptied_blocks_is_pruned_further(model: Seq2Seq, schedule: Schedule) -> None:
    gone = [head for head in model.grid if head.block == BlockId(Site.CROSS, 1)]
    left = model.without(HeadMask(model.grid, frozenset([model.grid.heads[0], *gone])))
    masks = schedule(replace(Worths(left).judge, whole=model.grid), [0, 5, 14])
    assert [len(mask.removed) for mask in masks] == [0, 5, 14]


def with_settings(schedule: Any, **how: Any) -> Any:
    """The schedule, or the one that it starts from, with other settings; one that has no such setting as it is."""
    if isinstance(schedule, Stepwise):
        return replace(schedule, **how)
    values = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    inner = {name: replace(value, **how) for name, value in values.items() if isinstance(value, Stepwise)}
    return replace(schedule, **inner)


def test_blocks_are_treated_alike_and_keep_what_they_must(model: Seq2Seq, schedule: Schedule) -> None:
    """Where the schedule has these settings."""
    alike, careful = with_settings(schedule, scope="per_block"), with_settings(schedule, keep_at_least=1)
    if alike == schedule:
        pytest.skip("it has no scope")
    for removed, mask in zip((6, 12), alike(Worths(model).judge, [6, 12]), strict=True):
        assert set(Counter(head.block for head in mask.removed).values()) == {removed // 6}
    assert len(careful.smallest(model.grid).removed) == 12
    (mask,) = careful(Worths(model).judge, [12])
    assert Counter(head.block for head in mask.kept) == dict.fromkeys(model.grid.blocks, 1)
