"""`distil=`: towards the dense model on texts without labels, for some minutes, the best of ten kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads
from mhaprune.recoveries import fine_tune
from mhaprune.recoveries.fine_tune import EVALUATIONS, FineTune
from mhaprune.training.fine_tuning import FINE_TUNING
from support.classifier import Classifier, batches, classifier

STEPS = 40
MASK = {0: [0, 1], 1: [2]}


class Dropping(Classifier):
    """With dropout, and linear maps of a scale that training moves."""

    def judged(self, logits_BC: Tensor, ids_BT: Tensor) -> Tensor:
        return F.dropout(logits_BC, 0.5, self.training)


def texts(count: int, seed: int) -> list[dict[str, Tensor]]:
    return [{name: x for name, x in batch.items() if name != "labels"} for batch in batches(count, seed)]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps as fit into ten minutes on a machine that never changes."""
    monkeypatch.setattr(FineTune, "_planned", lambda *_: STEPS)


def wrapped(model: nn.Module | None = None, **given: Any) -> Heads:
    splits = {"score": batches(3, 1), "choose": batches(8, 2), "report": batches(8, 3)}
    return mhaprune.wrap(model or classifier(), losses.classification, **{**splits, **given})


@torch.no_grad()
def divergence(teacher: nn.Module, model: nn.Module) -> float:
    said = [[each(**batch)["logits"].log_softmax(dim=-1) for batch in texts(10, 9)] for each in (model, teacher)]
    ours, theirs = (torch.cat(each) for each in said)
    return float(F.kl_div(ours, theirs, reduction="batchmean", log_target=True))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([x.detach().flatten() for x in model.parameters()])


@pytest.mark.usefixtures("planned")
def test_it_comes_nearer_to_the_dense_model_on_texts_that_nothing_read() -> None:
    heads = wrapped()
    small, distilled = heads.prune(mask=MASK), heads.prune(mask=MASK, distil=texts(20, 4))
    assert divergence(heads.subject.model, distilled) < 0.7 * divergence(heads.subject.model, small)
    table = heads.trainings
    assert table["step"].tolist() == [4 * n for n in range(EVALUATIONS + 1)]
    assert table["then"].unique().tolist() == ["distilled"]
    assert table["units_kept"].unique().tolist() == [5]
    assert table["valid_loss"].notna().all()


@pytest.mark.usefixtures("planned")
def test_no_label_is_read() -> None:
    heads, wrong = wrapped(), [{**batch, "labels": 2 - batch["labels"]} for batch in batches(6, 4)]
    found = [weights(heads.prune(mask=MASK, distil=given)) for given in (wrong, batches(6, 4), texts(6, 4))]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.usefixtures("planned")
def test_the_best_of_the_measurements_is_kept_by_the_kind_that_loses_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mhaprune.api.recovering.DISTILLING, "learning_rate", 0.3)  # which ruins the model
    choose = {"long": batches(6, 2)[3:], "short": batches(2, 5)}
    heads = wrapped(choose=choose)
    small = heads.without(MASK, distil=texts(6, 4))
    table, dense = heads.trainings, wrapped(report=choose).evaluate()["quality"]
    assert table["lost"].iloc[-1] > table["lost"].min()
    again = mhaprune.wrap(small.model, losses.classification, score=batches(2), report=choose).evaluate()["quality"]
    assert (dense - again).max() == pytest.approx(table["lost"].min())
    assert (dense - again).min() < (dense - again).max(), "else any kind would do"


def drift_of_dropping() -> Heads:
    torch.manual_seed(1)
    drift = losses.Drift(lambda output, batch: output["logits"])
    splits = {"score": texts(3, 1), "choose": texts(3, 2), "report": texts(3, 3)}
    return mhaprune.wrap(Dropping(), drift, **splits)


@pytest.mark.usefixtures("planned")
def test_dropout_is_off_and_a_copy_without_loss_learns_nothing() -> None:
    heads = drift_of_dropping()
    heads.prune(mask={}, distil=texts(4, 4))
    assert heads.trainings["loss"].max() < 1e-3, "with dropout it is about 1"


def test_as_many_steps_are_taken_as_fit_beside_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes 2 s, a step half a second, on this clock."""

    def ticks() -> Iterator[float]:
        yield from (0.0, 2.0)
        while True:
            yield from (10.0, 10.5)

    clock = ticks()
    monkeypatch.setattr(fine_tune.time, "perf_counter", lambda: next(clock))
    heads, recovery = wrapped(), FineTune(minutes=1.0, distillation=1.0)
    planned = recovery._planned(
        heads.without(MASK),
        recovery.descent(FINE_TUNING),
        heads.splits,
        lambda model, batch: sum(weight.sum() for weight in model.module.parameters()),
    )
    assert planned == (60 - (EVALUATIONS + 1) * 2) / 0.5


@pytest.mark.usefixtures("planned")
def test_what_was_killed_goes_on_and_ends_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, save = texts(6, 4), fine_tune._with_planned
    whole = weights(wrapped().prune(mask=MASK, distil=given))
    seen = []

    def killed(*arguments: Any) -> None:
        save(*arguments)
        seen.append(arguments[2]["step"])
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(fine_tune, "_with_planned", killed)
    with pytest.raises(KeyboardInterrupt):
        wrapped(cache=tmp_path).prune(mask=MASK, distil=given)
    assert seen == [4, 8, 12]
    monkeypatch.setattr(FineTune, "_planned", lambda *_: 1000)  # the machine is faster now
    assert torch.equal(weights(wrapped(cache=tmp_path).prune(mask=MASK, distil=given)), whole)
    assert seen == [4, 8, 12, *range(16, 40, 4)]
    again = wrapped(cache=tmp_path)
    assert torch.equal(weights(again.prune(mask=MASK, distil=given)), whole)
    assert len(seen) == 9, "done, so nothing is trained again"
    assert len(again.trainings) == EVALUATIONS + 1


def test_what_cannot_be_distilled_on_is_refused() -> None:
    heads = wrapped(shift={"other": batches(2, 8)})
    with pytest.raises(ValueError, match="^minutes=3: is how long distil= trains, give it batches or leave it out"):
        heads.prune(mask=MASK, minutes=3.0)
    for name, seed in (("report", 3), ("other", 8)):
        with pytest.raises(ValueError, match=rf"^distil: 12 examples are in \*{name}\* too, must be others"):
            heads.prune(mask=MASK, distil=[*texts(1, 7), *texts(2, seed)])
    with pytest.raises(ValueError, match="^distil: holds no batches"):
        heads.prune(mask=MASK, distil=[])
    with pytest.raises(ValueError, match="^choose: no batches were given"):
        mhaprune.wrap(classifier(), losses.classification, score=batches(2)).prune(mask=MASK, distil=texts(2, 4))
    with pytest.raises(ValueError, match="^minutes=2: is for when=after"):
        FineTune(minutes=2.0, when="between")
    with pytest.raises(ValueError, match="^minutes=0"):
        heads.prune(mask=MASK, distil=texts(2, 4), minutes=0)
