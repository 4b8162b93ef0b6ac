"""Scores that are found by training gates."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import HeadId
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import PAD, Examples
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune_literature.gate_training import GatesOfSize
from mhaprune_literature.hard_concrete import LOGIT_BOUND, HardConcrete, probability_open, stretched
from mhaprune_literature.mattr import Mattr
from mhaprune_literature.subset import Subset, relaxed_top_k
from support.composing import every
from support.games import Game, numbered
from support.models import judged
from support.sizes import slow

PLANTED = ("encoder_self.1.2", "decoder_self.0.1", "cross.1.0")


@pytest.fixture
def planted(model: Seq2Seq, splits: Splits) -> tuple[Seq2Seq, Examples]:
    """A model that needs three known heads: the others write next to nothing, and its own answers are the task."""
    with torch.no_grad():
        for block, sublayer in model.attention_sublayers().items():
            columns = sublayer.attention.out_proj.weight.unflatten(1, (3, 4))
            for head in range(3):
                columns[:, head] *= 4.0 if str(HeadId(*block, head)) in PLANTED else 0.01
        examples = Examples(splits.train.source[:128], splits.train.target[:128])
        answers = model.call(examples)[..., 3:].argmax(-1) + 3
    return model, Examples(examples.source, answers.masked_fill(examples.target == PAD, PAD))


FAST = {"keep": 3, "steps": 100, "batch_size": 8}


@pytest.mark.parametrize("scorer", [HardConcrete(**FAST), Subset(**FAST), Ablation()], ids=repr)
def test_planted_heads_are_found_and_exactly_so_many_kept(planted: tuple[Seq2Seq, Examples], scorer: Scorer) -> None:
    model, examples = planted
    scores = scorer(model, examples, seed=0)
    (mask,) = OneShot()(judged(model, scores.values[0]), [len(model.grid) - 3])
    assert {str(head) for head in mask.kept} == set(PLANTED)
    if isinstance(scorer, HardConcrete):
        assert (scores.values[0] > 0.5).sum() == 3


WORTHS = torch.logspace(-3, 0.5, 18, dtype=torch.double)[[(5 * n + 2) % 18 for n in range(18)]]
"""Nats that each of 18 heads is worth, from 0.001 to 3; no two alike."""


def worth_game(worths_N: Tensor, seen: list[Tensor] | None = None) -> Game:
    """Every head is worth so many nats whatever the others do; the gates of every step are written to `seen`."""

    def loss(number: Tensor, gates: Tensor) -> Tensor:
        if seen is not None:
            seen.append(gates.detach().clone())
        return ((1 - gates) * worths_N).sum(dim=1)

    return Game(len(worths_N), loss)


@pytest.mark.parametrize("keep", [3, 12, *slow(2, 6, 9)])
def test_the_heads_of_most_worth_are_kept_and_about_so_many(keep: int) -> None:
    """By hard concrete; by subset heads of much worth."""
    examples, best = numbered(range(1, 129)), WORTHS.argsort(descending=True)[:keep]
    values = HardConcrete(keep=keep)(worth_game(WORTHS), examples, seed=0).values[0]
    order = values.argsort(descending=True)
    assert set(order[:keep].tolist()) == set(best.tolist())
    assert values[order[keep - 1]] - values[order[keep]] > 0.01
    assert abs(int((values > 0.5).sum()) - keep) <= 1
    assert float(values.sum()) == pytest.approx(keep, abs=1)
    values = Subset(keep=keep)(worth_game(WORTHS), examples, seed=0).values[0]
    order = values.argsort(descending=True)
    assert values[order[keep - 1]] - values[order[keep]] > 1e-3
    assert WORTHS[order[:keep]].sum() > 0.95 * WORTHS[best].sum()


@pytest.mark.parametrize("keep", [6, 12])
def test_the_budget_of_hard_concrete_is_the_expected_number_of_open_gates(keep: int) -> None:
    """Heads of no worth stay undecided, all alike, so that only the penalty says how open they are. It is least with
    one gate fewer than wanted."""
    values = HardConcrete(keep=keep)(worth_game(torch.zeros(18).double()), numbered(range(1, 65)), seed=0).values[0]
    assert float(values.std()) < 1e-6
    assert keep - 1.2 < float(values.sum()) < keep


def test_logits_stay_within_their_bound() -> None:
    """Heads of much worth and of none would go far beyond it."""
    worths = torch.tensor([9.0, 8.0, -8.0, -9.0]).double()
    values = HardConcrete(keep=2)(worth_game(worths), numbered(range(1, 33)), seed=0).values[0]
    lowest, highest = probability_open(torch.tensor([-LOGIT_BOUND, LOGIT_BOUND], dtype=torch.double))
    torch.testing.assert_close(values[:2], highest.expand(2))
    assert (values < highest + 1e-9).all()
    assert (values > lowest - 1e-9).all()
    logits = Bounded(keep=2, steps=30)(worth_game(worths), numbered(range(1, 33)), seed=0).values[0]
    assert logits.tolist() == [1.5, 1.5, -1.5, -1.5]


class Bounded(GatesOfSize):
    """The sigmoid of each logit."""

    bound = 1.5

    def sample(self, logits_N: Tensor, batch: int, share: float, draw: torch.Generator) -> Tensor:
        return logits_N.sigmoid().expand(batch, -1)


def test_the_temperature_of_subset_falls_log_linearly() -> None:
    """Gates of equal logits are as far from 0 and 1 as a relaxed choice at that temperature is."""
    seen: list[Tensor] = []
    scorer = Subset(keep=4, steps=3, batch_size=4000, learning_rate=1e-9, start_temperature=2.0, end_temperature=0.02)
    scorer(worth_game(WORTHS[:12], seen), numbered(range(1, 4001)), seed=0)
    for gates, temperature in zip(seen, (2.0, 0.2, 0.02), strict=True):
        torch.testing.assert_close(gates.sum(dim=1), torch.full((4000,), 4.0).double())
        noise = -torch.empty(4000, 12, dtype=torch.double).exponential_().log()
        expected = relaxed_top_k(noise, 4, temperature)
        softness = float((gates * (1 - gates)).mean())
        assert softness == pytest.approx(float((expected * (1 - expected)).mean()), rel=0.1)


def test_a_step_takes_a_batch_or_what_there_is(planted: tuple[Seq2Seq, Examples]) -> None:
    model, examples = planted
    for scorer in (HardConcrete(steps=3), Subset(steps=3)):
        scores = scorer(model, examples, seed=0)
        assert scores.forward_passes == scores.backward_passes == 3 * 32 / len(examples)
        few = scorer(model, examples[:24], seed=0)
        assert few.forward_passes == few.backward_passes == 3


def test_the_relaxed_top_k_sums_to_k_and_hardens() -> None:
    logits = torch.stack([torch.randperm(12) for _ in range(5)]).double()
    for temperature in (10.0, 1.0, 0.1, 0.01):
        gates = relaxed_top_k(logits, 4, temperature)
        torch.testing.assert_close(gates.sum(-1), torch.full((5,), 4.0).double())
        assert gates.isfinite().all()
    chosen = logits.argsort(descending=True)[:, :4]
    torch.testing.assert_close(gates.gather(1, chosen), torch.ones(5, 4).double(), rtol=0, atol=0.05)


def test_the_probability_of_an_open_gate_is_that_of_its_draws() -> None:
    logits = torch.tensor([-2.0, -0.5, 0.0, 1.0]).double()
    u = torch.rand(200_000, 4, dtype=torch.double)
    gates = stretched((u.log() - (1 - u).log() + logits) * 3)
    torch.testing.assert_close((gates > 0).double().mean(0), probability_open(logits), rtol=0, atol=0.005)
    assert ((gates >= 0) & (gates <= 1)).all()


def test_a_number_of_heads_and_a_temperature_that_cannot_be_are_refused(model: Seq2Seq, splits: Splits) -> None:
    with pytest.raises(ValueError, match="end_temperature=2.0: must be at most start_temperature=1.0"):
        Subset(end_temperature=2.0)
    with pytest.raises(ValueError, match="end_temperature=3: must be at most start_temperature=2"):
        Mattr(start_temperature=2, end_temperature=3)
    for scorer in every("scorer").values():
        if isinstance(scorer, Budgeted):
            with pytest.raises(ValueError, match="keep=19: of 18 heads these are 19, allowed are 1 to 18"):
                scorer.keeping(19)(model, splits.score, seed=0)
            with pytest.raises(ValueError, match="keep=1.5: a share must be above 0.0 and at most 1.0, a number of"):
                replace(scorer, keep=1.5)
            with pytest.raises(ValueError, match="keep=0: a share must be above 0.0"):
                scorer.keeping(0)
            with pytest.raises(ValueError, match="keep=0.02: of 18 heads these are 0, allowed are 1 to 18"):
                replace(scorer, keep=0.02).check(18, gated=True)
            assert scorer.keeping(7) == replace(scorer, keep=7)
