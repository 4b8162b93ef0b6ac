"""A pretrained model is trained on: against a loop of plain torch, and without waking what was removed."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.api.wrap import Heads, wrap
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import Diverged, measure
from mhaprune.subjects.batches import Batches
from mhaprune.training.fine_tuning import FINE_TUNING, PlainTraining
from mhaprune.wrapping.wrapped_model import WrappedModel
from support.classifier import Classifier, batches, classifier

SPLITS: dict[str, Any] = {name: batches(3, seed) for seed, name in enumerate(("score", "choose", "report"))}
RECIPE = PlainTraining(steps=7, batch_size=4, learning_rate=0.01, warmup_steps=2, weight_decay=0.3, decay="linear")


@cache
def heads() -> Heads:
    return wrap(classifier(), losses.classification, **SPLITS)


def left(*gone: int) -> WrappedModel:
    grid = heads().grid
    return heads().subject.without(HeadMask(grid, frozenset(grid.heads[i] for i in gone)))


def trained(recipe: PlainTraining, model: WrappedModel, data: Batches | None = None, **more: Any) -> pd.DataFrame:
    splits = heads().splits
    return recipe(model, data or splits["score"], splits["choose"], None, 3, **more)


def test_it_is_clipped_adamw_down_the_mean_loss_of_the_examples() -> None:
    ours = left(0, 5)
    twin: Any = copy.deepcopy(ours.model).train()
    history = trained(RECIPE, ours)
    optimiser = torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.3)
    drawn = heads().splits["score"].shuffled_batches(4, torch.Generator().manual_seed(3), 8)
    factors = (1 / 2, 1, 1, 0.8, 0.6, 0.4, 0.2)
    for factor, batch in zip(factors, drawn, strict=False):
        optimiser.param_groups[0]["lr"] = 0.01 * factor
        optimiser.zero_grad()
        fields = batch.as_given()
        loss = nn.functional.cross_entropy(twin(**fields)["logits"], fields["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimiser.step()
    for (name, one), other in zip(ours.module.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert list(history["step"]) == [0, 7]
    assert list(history)[:3] == ["step", "seconds", "loss"]
    assert history["valid_quality"].between(0, 1).all()


def test_frozen_weights_stay_and_without_others_it_is_refused() -> None:
    model = left(0)
    model.model.get_submodule("output").requires_grad_(False)
    before = copy.deepcopy(dict(model.model.named_parameters()))
    trained(RECIPE, model)
    same = {name for name, weight in model.model.named_parameters() if torch.equal(weight, before[name])}
    assert same == {"output.weight", "output.bias"}
    model.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^recovery=fine_tune: none of the model's weights asks for a gradient"):
        trained(RECIPE, model)


def test_a_rate_that_is_too_high_is_named() -> None:
    with pytest.raises(
        Diverged, match="learning_rate=1e\\+30: the loss is nan for 18 of 18 examples by step 1, quality had reached 0"
    ):
        trained(PlainTraining(steps=9, learning_rate=1e30, weight_decay=0.0, evaluate_every=1), left(0))


@pytest.mark.slow
def test_what_it_learns_from_is_the_train_split() -> None:
    """Others than the scored examples, if there are any: their labels decide, those of the score split do not."""

    def fitted(score_labels: int, train: Any) -> list[torch.Tensor]:
        score = [{**batch, "labels": (batch["labels"] + score_labels) % 3} for batch in batches(2)]
        found = wrap(classifier(), losses.classification, score=score, choose=batches(2, 1), report=score, train=train)
        mask = HeadMask(found.grid, frozenset(found.grid.heads[:2]))
        return list(found.without(mask, fine_tune=3).module.state_dict().values())

    def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, one, other))

    own = batches(2, 7)
    assert equal(fitted(0, own), fitted(1, own))
    assert not equal(fitted(0, None), fitted(1, None))
    assert not equal(fitted(0, own), fitted(0, batches(2, 8)))


class Answer(dict[str, Tensor]):
    """An output as transformers makes it."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


class Answers(Classifier):
    def forward(self, *given: Any, **named: Any) -> dict[str, Tensor]:
        return Answer(super().forward(*given, **named))


class Regression(Answers):
    """One number per example, of which a softmax says nothing."""

    def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
        return logits[:, :1]


@pytest.mark.parametrize("kind", [Answers, Classifier, Regression])
def test_distillation_asks_for_what_the_dense_model_says(kind: type[Classifier]) -> None:
    """For logits by the divergence, for other outputs by the squared difference."""
    torch.manual_seed(0)
    data = batches(2)
    loss = (lambda said, batch: said["logits"].square().mean(dim=1)) if kind is Regression else losses.classification
    whole = wrap(kind(), loss, score=data, choose=data)
    mask = whole.mask(keep=3, by="magnitude")
    left, batch = whole.without(mask), whole.splits["score"][:4]
    own = measure(left, batch).loss.mean()
    p, q = (each.predict(batch)["logits"].softmax(dim=-1) for each in (whole.subject, left))
    apart = (p * (p / q).log()).sum(dim=-1).mean()
    if kind is not Answers:
        a, b = (each.predict(batch)["logits"] for each in (whole.subject, left))
        apart = (a - b).square().mean() / a.square().mean()
    objective = FINE_TUNING.distil(left, batch, whole.subject, 0.3)
    torch.testing.assert_close(objective, 0.7 * own.to(objective) + 0.3 * apart)
    how: dict[str, Any] = {"steps": 40, "learning_rate": 1e-2, "batch_size": 4, "distillation": 1.0}
    tuned = whole.without(mask, fine_tune=how)
    after = FINE_TUNING.distil(tuned, batch, whole.subject, 1.0)
    assert after < FINE_TUNING.distil(left, batch, whole.subject, 1.0) / 2


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_layer_without_heads_stays_silent(name: str) -> None:
    """A head had to stay in its weights. Neither a refit nor a training may listen to it."""
    pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    from tiny_families import heads_of

    found = heads_of(name)
    block = found.grid.blocks[0]
    mask = HeadMask(found.grid, frozenset(head for head in found.grid if head.block == block))
    model = found.without(mask, refit=True)
    replace(FINE_TUNING, steps=3)(model, found.splits["score"], found.splits["choose"], None, 0)
    emptied = model.blocks[0]
    out: Any = model.model.get_submodule(emptied.out)
    columns_DW = out.weight if isinstance(out, nn.Linear) else out.weight.mT
    assert emptied.heads == 0
    assert columns_DW.shape[1] == emptied.silent > 0
    assert not columns_DW.any()
    assert not torch.equal(out.bias, found.subject.model.get_submodule(emptied.out).bias)
