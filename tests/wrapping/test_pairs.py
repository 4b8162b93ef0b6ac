"""Scores that compare every example with a corrupt counterpart."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads
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


class WithFlag(torch.nn.Module):
    """The classifier with a value beside the tensors, which belongs to the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, input_ids: Tensor, shift: int = 0, **others: Any) -> Any:
        return self.inner((input_ids + shift) % 10 + 1, torch.ones_like(input_ids))


def test_a_counterpart_runs_with_the_values_beside_its_own_tensors() -> None:
    """The values differ from batch to batch, and tensors may even be equal."""
    model = WithFlag().eval()
    by_flag = [batch | {"shift": n + 1} for n, batch in enumerate(CLEAN)]
    by_ids = [batch | {"input_ids": batch["input_ids"] + n + 2, "shift": -1} for n, batch in enumerate(CLEAN)]
    clean = [batch | {"shift": 0} for batch in CLEAN]
    tables = [
        mhaprune.wrap(model, losses.classification, score=clean, corrupt=corrupt).score("patching")["score"]
        for corrupt in (by_flag, by_ids)
    ]
    torch.testing.assert_close(*(torch.tensor(scores.to_numpy()) for scores in tables))
    assert tables[0].abs().max() > 0.01


class Drawn(torch.utils.data.Sampler[int]):
    """A sampler of one's own that draws the order."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(18).tolist())

    def __len__(self) -> int:
        return 18


@pytest.mark.parametrize("how", [{"shuffle": True}, {"sampler": Drawn()}])
@pytest.mark.parametrize("name", ["score", "corrupt"])
def test_loaders_in_a_random_order_are_not_paired(name: str, how: dict[str, Any]) -> None:
    ids = torch.cat([batch["input_ids"][:, :3] for batch in CLEAN])
    rows = [{"input_ids": row, "attention_mask": torch.ones(3), "labels": torch.tensor(0)} for row in ids]
    other = [row | {"input_ids": row["input_ids"] % 10 + 1} for row in rows]
    given: dict[str, Any] = {
        key: torch.utils.data.DataLoader(data, 6, **how if key == name else {})  # type: ignore[arg-type]
        for key, data in (("score", rows), ("corrupt", other))
    }
    with pytest.raises(ValueError, match=rf"^{name}: reads its examples in a random order[^\n]*$"):
        mhaprune.wrap(MODEL, losses.classification, **given)
    given[name] = torch.utils.data.DataLoader(rows if name == "score" else other, 6)  # type: ignore[arg-type]
    assert len(mhaprune.wrap(MODEL, losses.classification, **given).splits.score) == 18


@pytest.mark.parametrize("name", ["dense output", "corrupt x"])
def test_names_of_ours_are_refused_and_dense_is_a_name_like_any(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^score: '{name}' is a name that mhaprune uses itself[^\n]*$"):
        mhaprune.wrap(MODEL, losses.classification, score=[CLEAN[0] | {name: 1}])
    given = {key: [{key: batch["input_ids"]} for batch in CLEAN] for key in ("dense", "other")}
    scores = [
        mhaprune.wrap(
            MODEL,
            losses.Drift(lambda output, batch: output["logits"]),
            score=batches,
            call=lambda model, batch: model(*batch.values(), torch.ones_like(*batch.values())),
        ).score("ablation")["score"]
        for batches in given.values()
    ]
    assert scores[0].tolist() == scores[1].tolist()
