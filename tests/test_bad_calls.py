"""Calls from Python that cannot be: each ends in one line that names the argument."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mhaprune
from mhaprune import losses
from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.front.heads import Heads
from mhaprune.heads import HeadMask
from support.classifier import Classifier, batches, classifier


@pytest.fixture(scope="module")
def heads() -> Heads:
    return mhaprune.wrap(classifier(), losses.classification, score=batches(2), choose=batches(2), report=batches(2))


def wrap(**given: Any) -> Callable[[Heads], object]:
    usual: dict[str, Any] = {"model": Classifier(), "loss": losses.classification, "score": batches(1)}
    return lambda heads: mhaprune.wrap(**usual | given)


NAN = float("nan")
CALLS: dict[str, list[Callable[[Heads], object]]] = {
    "overrides": [lambda h: mhaprune.run(["experiment=ablate"]), lambda h: mhaprune.study(3)],  # type: ignore[arg-type]
    "folder": [lambda h: mhaprune.run("experiment=train", folder=3)],  # type: ignore[arg-type]
    "path": [
        lambda h: mhaprune.load(3),  # type: ignore[arg-type]
        lambda h: mhaprune.save(Classifier(), None),  # type: ignore[arg-type]
        lambda h: h.report("/no/such/folder/x.html"),
        lambda h: h.report(3),  # type: ignore[arg-type]
    ],
    "model": [
        wrap(model="bert"),
        wrap(model=None),
        wrap(model=nn.Identity(), score=[torch.ones(2, 3)]),
        lambda h: mhaprune.save("bert", "folder"),  # type: ignore[arg-type]
    ],
    "loss": [
        wrap(loss=None),
        wrap(loss=lambda output, batch: output["logits"]),
        wrap(loss=lambda output, batch: output["logits"].argmax(-1)),
        wrap(loss=lambda output, batch: torch.full((len(batch["labels"]),), NAN)),
    ],
    "quality": [
        wrap(quality=lambda output, batch: torch.full((len(batch["labels"]),), NAN)),
        wrap(quality=lambda output, batch: None),
    ],
    "score": [
        wrap(score=[]),
        wrap(score=[3]),
        wrap(score=[{"input_ids": [1, 2]}]),
        wrap(score=[{"input_ids": torch.zeros(0, 3, dtype=torch.long)}]),
        wrap(score=torch.utils.data.TensorDataset(torch.ones(3))),
        wrap(score=[{"words": torch.ones(2, 3)}]),
        wrap(score=[torch.full((2, 3), 10_000)]),
    ],
    "choose": [wrap(choose=[]), wrap(choose=7)],
    "blocks": [wrap(blocks=[]), wrap(blocks=["attention"]), wrap(blocks=3)],
    "call": [wrap(call="plainly")],
    "seed": [wrap(seed=-1), wrap(seed=0.5), wrap(seed="0")],
    "scorers": [lambda h: h.score(["ablation"]), lambda h: h.score(3)],  # type: ignore[arg-type]
    "scorer": [lambda h, name=name: h.score(name) for name in ("ablatoin", "gate", "lrp", "")],  # type: ignore[misc]
    "scorer/schedule=greedi: no such scorer or schedule, did you mean greedy": [lambda h: h.mask(by="greedi")],
    "keep": [
        lambda h: h.mask(True),
        lambda h: h.mask(-1),
        lambda h: h.speed(keep=[1.5]),
        lambda h: h.mask(NAN),
        lambda h: h.mask("half"),  # type: ignore[arg-type]
        lambda h: h.mask(1.5),
        lambda h: h.mask(9),
        lambda h: h.masks(0.5),  # type: ignore[arg-type]
        lambda h: h.prune(None),  # type: ignore[arg-type]
    ],
    "by": [
        lambda h: h.prune(by=np.zeros(8)),
        lambda h: h.prune(by={"attention.0.0": 1}),  # type: ignore[arg-type]
        lambda h: h.mask(by="one_shot"),
        lambda h: h.mask(by="greedy", rescore_every=2),
        lambda h: h.report(by=[3]),  # type: ignore[list-item]
    ],
    "rescore_every": [lambda h: h.mask(rescore_every=0), lambda h: h.mask(rescore_every=1.5)],  # type: ignore[arg-type]
    "refit": [lambda h: h.prune(refit="yes")],  # type: ignore[arg-type]
    "fine_tune": [lambda h: h.prune(fine_tune=-1), lambda h: h.prune(fine_tune=True)],
    "mask": [lambda h: h.without(None), lambda h: h.without(h.grid)],  # type: ignore[arg-type]
    "head": [
        lambda h: HeadMask(h.grid).without("attention"),
        lambda h: HeadMask(h.grid).without("attention.0.9"),
        lambda h: HeadMask(h.grid).without("other.0.0"),
    ],
    "budgets": [
        lambda h: h.report(budgets=[]),
        lambda h: h.report(budgets=[2.0]),
        lambda h: h.report(budgets="12"),  # type: ignore[arg-type]
    ],
    "tolerance": [lambda h: h.report(tolerance=-1), lambda h: h.report(tolerance=NAN)],
    "rounds": [lambda h: h.report(rounds=0), lambda h: h.speed(rounds=0)],
    "batch_sizes": [lambda h: h.speed(batch_sizes=0), lambda h: h.speed(batch_sizes=[])],
    "new_tokens": [lambda h: h.speed(new_tokens=0), lambda h: h.speed(new_tokens=2)],
    "num_heads": [lambda h: MultiHeadAttention(8, "4"), lambda h: MultiHeadAttention(8, 3)],  # type: ignore[arg-type]
    "embed_dim": [lambda h: MultiHeadAttention(0, 1), lambda h: MultiHeadAttention(8.0, 2)],  # type: ignore[arg-type]
}
EACH = [(name, call) for name, calls in CALLS.items() for call in calls]


@pytest.mark.parametrize(("name", "call"), EACH, ids=[f"{name}-{i}" for i, (name, _) in enumerate(EACH)])
def test_a_call_that_cannot_be_is_refused_in_one_line(
    name: str, call: Callable[[Heads], object], heads: Heads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    """A name that stands for a whole message must be found as it is."""
    with pytest.raises(ValueError, match=f"{name}\\b") as refused:
        call(heads)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())
