"""Scores that compare every example with a corrupt counterpart."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mhaprune
from mhaprune import losses
from mhaprune.front.heads import Heads
from mhaprune.scorers.attribution_patching import AttributionPatching
from support.classifier import batches, classifier

MODEL = classifier()
CLEAN = batches(3)


def changed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with another first token, which the class depends on; the label stays."""
    ids = given["input_ids"].clone()
    ids[:, 0] = ids[:, 0] % 10 + 1
    return given | {"input_ids": ids}


CORRUPT = [changed(batch) for batch in CLEAN]


def wrapped(corrupt: Any = CORRUPT, **given: Any) -> Heads:
    return mhaprune.wrap(MODEL, losses.classification, score=CLEAN, corrupt=corrupt, **given)


@torch.no_grad()
def by_hand(layer: int, heads: list[int]) -> list[float]:
    """The rise of the loss of every example with these heads as they are on the counterparts."""
    rises, out = list[float](), MODEL.attention[layer].out_proj
    for clean, corrupt in zip(CLEAN, CORRUPT, strict=True):
        seen: list[Tensor] = []
        remember = out.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0]))
        MODEL(**corrupt)
        remember.remove()

        def patch(module: Any, inputs: Any, other: Tensor = seen[0]) -> Any:
            x = inputs[0].clone()
            for head in heads:
                x[..., 4 * head : 4 * head + 4] = other[..., 4 * head : 4 * head + 4]
            return (x, *inputs[1:])

        before = torch.nn.functional.cross_entropy(MODEL(**clean)["logits"], clean["labels"], reduction="none")
        hook = out.register_forward_pre_hook(patch)
        after = torch.nn.functional.cross_entropy(MODEL(**clean)["logits"], clean["labels"], reduction="none")
        hook.remove()
        rises += (after - before).tolist()
    return rises


def test_patching_is_the_loss_with_the_outputs_of_the_counterpart_at_every_width() -> None:
    for row in wrapped().score("patching").to_dict("records"):
        rises = torch.tensor(by_hand(row["layer"], [row["head"]]))
        assert row["score"] == pytest.approx(float(rises.mean()), abs=1e-5)
        assert row["stderr"] == pytest.approx(float(rises.std() / len(rises) ** 0.5), rel=1e-3)


def test_the_estimate_points_the_same_way() -> None:
    exact, estimate = (wrapped().score(by)["score"] for by in ("patching", "attribution_patching"))
    assert exact.corr(estimate) > 0.95


def test_with_many_steps_the_estimates_add_up_to_all_heads_together() -> None:
    heads = mhaprune.wrap(MODEL, losses.classification, score=CLEAN[:1], corrupt=CORRUPT[:1])
    estimate, many = (heads.score(by)["score"].sum() for by in ("attribution_patching", STEPS))
    subject, score = heads.subject, heads.splits.score
    with torch.no_grad():
        closed, fallback = torch.zeros(len(subject.grid)), subject.head_outputs(score.counterpart())
        rises = subject.evaluate(score, closed, fallback).loss - subject.evaluate(score).loss
    assert many == pytest.approx(float(rises.mean()), rel=0.02)
    assert estimate != pytest.approx(many, rel=0.02)


STEPS = AttributionPatching(steps=200)


def test_pairs_that_cannot_be_are_refused_in_one_line() -> None:
    for corrupt, message in (
        (CORRUPT[:2], "12 examples cannot be paired with the 18 of score, must have"),
        ([*CORRUPT[:2], changed(batches(4)[3])], r"has batches of other shapes than score \(7 and 6 columns\)"),
        ([*CORRUPT[:2], CLEAN[2]], "6 examples are equal to their counterparts, must differ"),
    ):
        with pytest.raises(ValueError, match=rf"^corrupt: {message}[^\n]*$"):
            wrapped(corrupt)
    with pytest.raises(ValueError, match=r"^scorer=patching: needs a corrupt counterpart of every example[^\n]*$"):
        wrapped(None).score("patching")


def test_the_model_and_the_loss_do_not_see_the_counterparts() -> None:
    with_pairs, alone = wrapped(), wrapped(None)
    assert with_pairs.score("ablation").equals(
        alone.score("ablation").assign(seconds=with_pairs.score("ablation")["seconds"])
    )
