"""`distil=`: towards the dense model on texts without labels, for some minutes, the best of ten kept."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from mhaprune.api.recovering import DISTILLING, study_of
from mhaprune.api.wrap import Heads
from mhaprune.recoveries import fine_tune
from mhaprune.recoveries.fine_tune import EVALUATIONS, FineTune
from mhaprune.training.fine_tuning import FINE_TUNING
from support.classifier import Classifier, batches, classifier

STEPS = 20
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
    splits = {"score": batches(3, 1), "choose": batches(3, 2), "report": batches(2, 3)}
    return mhaprune.wrap(model or classifier(), losses.classification, **{**splits, **given})


@torch.no_grad()
def divergence(teacher: nn.Module, model: nn.Module) -> float:
    said = [[each(**batch)["logits"].log_softmax(dim=-1) for batch in texts(10, 9)] for each in (model, teacher)]
    ours, theirs = (torch.cat(each) for each in said)
    return float(F.kl_div(ours, theirs, reduction="batchmean", log_target=True))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([x.detach().flatten() for x in model.parameters()])


def test_it_comes_nearer_to_the_dense_model_on_texts_that_nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FineTune, "_planned", lambda *_: 2 * STEPS)
    heads = wrapped()
    small, distilled = heads.prune(mask=MASK), heads.prune(mask=MASK, distil=texts(8, 4))
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
    monkeypatch.setitem(DISTILLING, "learning_rate", 0.3)  # which ruins the model
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
    heads, recovery = wrapped(), FineTune(minutes=1.0)
    given: Any = heads.without(MASK), recovery.descent(FINE_TUNING), heads.splits, None
    planned = recovery._planned(*given)
    measured, tried = (EVALUATIONS + 3) * 2, 8 * 0.5  # the dense model, before and after each part; and these steps
    assert planned == (60 - measured - tried) / 0.5
    clock = ticks()
    with pytest.raises(ValueError, match=r"^minutes=0.5: is too short to measure and train the model, must be 0.51$"):
        FineTune(minutes=0.5)._planned(*given)


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
    assert seen == [2, 4, 6]
    monkeypatch.setattr(FineTune, "_planned", lambda *_: 1000)  # the machine is faster now
    assert torch.equal(weights(wrapped(cache=tmp_path).prune(mask=MASK, distil=given)), whole)
    assert seen == [2, 4, 6, *range(8, STEPS, 2)]
    again = wrapped(cache=tmp_path)
    assert torch.equal(weights(again.prune(mask=MASK, distil=given)), whole)
    assert len(seen) == 9, "done, so nothing is trained again"
    assert len(again.trainings) == EVALUATIONS + 1


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
def test_what_decides_a_training_decides_what_is_taken_from_the_cache(tmp_path: Path) -> None:
    def listed(word: str) -> list[dict[str, Any]]:
        return [{**batch, "words": [word] * 6} for batch in texts(4, 4)]

    def learnt(model: nn.Module, given: Any = None, **how: Any) -> Tensor:
        def call(model: nn.Module, batch: Any) -> Any:
            scale = {"loud": 3.0}.get(batch.pop("words", [""])[0], 1.0)
            return {"logits": scale * model(**batch)["logits"]}

        heads = wrapped(model, cache=tmp_path, call=call, **how)
        return weights(heads.prune(mask=MASK, distil=given or texts(4, 4)))

    still = classifier()
    still.embedding.requires_grad_(False)
    found = [learnt(classifier()), learnt(classifier(), seed=1), learnt(still)]
    found += [learnt(classifier(), listed("soft")), learnt(classifier(), listed("loud"))]
    for n, one in enumerate(found):
        for other in found[:n]:
            assert torch.equal(one, other) == (n == 3 and other is found[0]), n


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
def test_within_a_loss_no_weights_are_chosen_on_the_split_that_tests_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISTILLING, "learning_rate", 0.02)
    heads, order = wrapped(), [float(n) for n in range(8)]
    heads.prune(within=0.9, by=order, distil=iter(texts(3, 4)))
    assert len(heads.trainings) > 11, "an iterator is read once for all sizes"
    assert "lost" not in heads.trainings


def test_the_teacher_is_the_model_in_torch() -> None:
    heads = wrapped()
    elsewhere = replace(heads, subject=heads.subject.changed(runtime="onnxruntime-int8"))
    assert study_of(elsewhere).subject.runtime == "torch"  # type: ignore[attr-defined]


@torch.no_grad()
def test_the_share_of_a_drift_from_the_teacher_is_the_one_that_was_asked_for() -> None:
    heads = drift_of_dropping()
    smaller, batch = heads.without({0: [0, 1]}), heads.splits.score.first(4)
    smaller.model.eval()
    parts = [float(FINE_TUNING.distil(smaller, batch, heads.subject, share)) for share in (0.0, 0.9, 1.0)]
    assert parts[0] != parts[2]
    assert parts[1] == pytest.approx(0.1 * parts[0] + 0.9 * parts[2])


def test_what_cannot_be_distilled_on_is_refused() -> None:
    heads = wrapped(shift={"other": batches(2, 8)})
    with pytest.raises(ValueError, match="^minutes=3: is how long distil= trains, give it batches or leave it out"):
        heads.prune(mask=MASK, minutes=3.0)
    for name, seed in (("report", 3), ("other", 8), ("choose", 2)):
        small = [{**batch, "input_ids": batch["input_ids"].int()} for batch in texts(2, seed)]
        for given in (texts(2, seed), small, [{**batch, "target": batch["input_ids"] * 2} for batch in texts(2, seed)]):
            with pytest.raises(ValueError, match=rf"^distil: 12 examples are in \*{name}\* too, must be others"):
                heads.prune(mask=MASK, distil=[*given, *[{**given[0], "input_ids": given[0]["input_ids"] % 2 + 1}]])
    frozen = classifier().requires_grad_(False)
    with pytest.raises(ValueError, match="^recovery=fine_tune: none of the model's weights asks for a gradient"):
        wrapped(frozen).prune(mask=MASK, distil=texts(2, 4))
    with pytest.raises(ValueError, match="^distil: holds no batches"):
        heads.prune(mask=MASK, distil=[])
    with pytest.raises(ValueError, match="^choose: no batches were given"):
        mhaprune.wrap(classifier(), losses.classification, score=batches(2)).prune(mask=MASK, distil=texts(2, 4))
    with pytest.raises(ValueError, match="^minutes=0"):
        heads.prune(mask=MASK, distil=texts(2, 4), minutes=0)
