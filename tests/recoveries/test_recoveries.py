"""Recoveries against plain twins, on a model that has learnt nothing."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from mhaprune.data import Splits
from mhaprune.heads import HeadId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.training import cross_entropy
from mhaprune.lab.tasks.sequences import PAD
from mhaprune.lab.tasks.sort import Sort
from mhaprune.recoveries.base import Recovery, recover
from mhaprune.recoveries.fine_tune import FineTune
from mhaprune.recoveries.from_scratch import FromScratch
from mhaprune.recoveries.refit import Refit
from mhaprune.storage.cache import weights_digest
from support.models import gated_model, study_with


@pytest.fixture(scope="module")
def study(task: Sort, splits: Splits) -> Study:
    return study_with(gated_model(task).float(), splits)


def without(model: Seq2Seq, *names: str) -> Seq2Seq:
    return model.without(HeadMask(model.grid, frozenset(map(HeadId.parse, names))))


@torch.no_grad()
def test_distillation_asks_for_the_teachers_probabilities(study: Study, splits: Splits) -> None:
    batch = splits.report[:8]
    teacher, model = study.subject, without(study.subject, "cross.0.0", "encoder_self.0.1")
    p, q = (m.call(batch).softmax(dim=-1) for m in (teacher, model))
    valid = batch.target != PAD
    kl = ((p * (p / q).log()).sum(dim=-1)[valid]).mean()
    ce = F.cross_entropy(model.call(batch)[valid], batch.target[valid])
    assert float(kl) > 0.01, "the fixture must tell right from wrong"
    distil = study.training.distil
    torch.testing.assert_close(distil(model, batch, teacher, 0.3), 0.7 * ce + 0.3 * kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(distil(model, batch, teacher, 0.0), cross_entropy(model, batch))
    with torch.enable_grad():
        plain, taught = (FineTune(steps=2, distillation=d)(study, model, 0, None, print)[0] for d in (0.0, 0.9))
    assert not torch.equal(plain.output.bias, taught.output.bias)


def test_a_control_has_the_shape_of_the_small_model_and_is_the_same_twice(study: Study) -> None:
    left = without(study.subject, "cross.0.0")
    first, second = (FromScratch()(study, left, 0, None, lambda state: None)[0] for _ in range(2))
    assert torch.equal(first.output.bias, second.output.bias)
    assert first.grid.sizes == left.grid.sizes


def test_a_recovery_is_kept_for_all_that_decides_it_and_nothing_else(study: Study) -> None:
    def kept_for(recovery: Recovery, left: Seq2Seq = study.subject, draw: int = 0, extra_steps: int = 2) -> Any:
        asked: list[dict[str, Any]] = []

        def remember(kind: str, what: dict[str, Any], make: Any) -> dict[str, Any]:
            asked.append(what)
            return {"weights": None, "history": [], "note": ""}

        recover(recovery, replace(study, extra_steps=extra_steps, remember=remember), left, draw)
        return asked[0]

    first, other = (without(study.subject, f"cross.0.{n}") for n in (0, 1))
    assert list(kept_for(FineTune())["recovered_with"]) == ["mhaprune.recoveries.fine_tune"]
    assert kept_for(FineTune(), first) != kept_for(FineTune(), other)
    assert kept_for(FineTune()) != kept_for(FineTune(start=Refit())) != kept_for(FineTune(start=Refit(ridge=0.1)))
    scratch = kept_for(FromScratch(), first)
    assert scratch == kept_for(FromScratch(), other), "only the shape matters"
    assert scratch != kept_for(FromScratch(), first, extra_steps=7)
    assert kept_for(FromScratch(1)) == kept_for(FromScratch(3)) != kept_for(FromScratch(3), draw=1)


def test_a_control_never_starts_from_the_weights_of_a_run(
    study: Study, task: Sort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any seed that people use: else a draw of the control would be the dense model itself."""
    monkeypatch.setattr(type(study.training), "__call__", lambda *arguments: pd.DataFrame())
    started = set()
    for seed in range(4):
        torch.manual_seed(seed)
        started.add(weights_digest(Seq2Seq(study.subject.config, len(task.vocabulary), None)))
    left = study.subject.without(HeadMask(study.subject.grid))
    controls = [
        weights_digest(FromScratch()(replace(study, seed=seed), left, draw, None, lambda state: None)[0])
        for seed in range(4)
        for draw in range(3)
    ]
    assert len({*controls}) == 12, "each draw of each seed has its own"
    assert not started & {*controls}
