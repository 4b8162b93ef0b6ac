"""Scorers that are asked for a number of heads: trained gates and racing."""

from __future__ import annotations

import pytest
import torch

from mhaprune.data import PAD, Examples
from mhaprune.heads import HeadId
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Budgeted, Scorer
from mhaprune.scorers.hard_concrete import HardConcrete, probability_open, stretched
from mhaprune.scorers.racing import Racing
from mhaprune.scorers.subset import Subset, relaxed_top_k
from mhaprune.tasks.base import Splits
from mhaprune.transformer import Seq2Seq

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
        answers = model.logits(examples)[..., 3:].argmax(-1) + 3
    return model, Examples(examples.source, answers.masked_fill(examples.target == PAD, PAD))


@pytest.mark.parametrize(
    "scorer",
    [
        HardConcrete(keep=3),
        Subset(keep=3),
        Subset(keep=3 / 18),
        Racing(keep=3, first=16),
        Ablation(),
    ],
    ids=repr,
)
def test_planted_heads_are_found_and_exactly_so_many_kept(planted: tuple[Seq2Seq, Examples], scorer: Scorer) -> None:
    model, examples = planted
    scores = scorer(model, examples, seed=0)
    (mask,) = OneShot()(model, lambda subject: scores.values[0], [len(model.grid) - 3])
    assert {str(head) for head in mask.kept} == set(PLANTED)
    if isinstance(scorer, HardConcrete):
        assert (scores.values[0] > 0.5).sum() == 3


def test_the_model_is_not_trained(planted: tuple[Seq2Seq, Examples]) -> None:
    model, examples = planted
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for scorer in (HardConcrete(steps=3), Subset(steps=3)):
        scores = scorer(model, examples, seed=0)
        assert scores.forward_passes == scores.backward_passes == 3 * 32 / len(examples)
        few = scorer(model, examples[:24], seed=0)  # a batch takes what there is
        assert few.forward_passes == few.backward_passes == 3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


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


def test_racing_removes_what_ablation_removes_for_less(planted: tuple[Seq2Seq, Examples]) -> None:
    model, examples = planted
    full = Ablation()(model, examples, seed=0)
    for keep in (1, 2, 3):
        race = Racing(keep=keep, first=16)(model, examples, seed=0)
        assert (
            race.values[0]
            .argsort(descending=True)[:keep]
            .sort()
            .values.equal(full.values[0].argsort(descending=True)[:keep].sort().values)
        )
        assert race.forward_passes < full.forward_passes / 2


@pytest.mark.parametrize("keep", [1, 5, 18])
def test_racing_to_the_end_is_ablation(model: Seq2Seq, splits: Splits, keep: int) -> None:
    """Where nothing settles early, the scores are those of all examples."""
    race = Racing(keep=keep, first=len(splits.score))(model, splits.score, seed=0)
    full = Ablation()(model, splits.score, seed=0)
    torch.testing.assert_close(race.values, full.values)
    assert race.forward_passes == full.forward_passes


@pytest.mark.parametrize("kind", [HardConcrete, Subset, Racing])
def test_a_number_of_heads_that_cannot_be_is_refused(model: Seq2Seq, splits: Splits, kind: type[Budgeted]) -> None:
    with pytest.raises(ValueError, match="keep=19: of 18 heads these are 19, allowed are 1 to 18"):
        kind(keep=19)(model, splits.score, seed=0)
    with pytest.raises(ValueError, match="keep=1.5: a share must be above 0.0 and at most 1.0, a number"):
        kind(keep=1.5)
    with pytest.raises(ValueError, match="keep=0: a share must be above 0.0"):
        kind(keep=0)
    with pytest.raises(ValueError, match="keep=0.02: of 18 heads these are 0, allowed are 1 to 18"):
        kind(keep=0.02).check(18, gated=True)
    assert kind().keeping(7) == kind(keep=7)
