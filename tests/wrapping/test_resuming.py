"""Long scorings: kept on disk, so that they go on after an interruption, and batches that do not fit."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mhaprune
from mhaprune import losses
from mhaprune.storage import cache
from support.classifier import Classifier, batches, classifier

SPLIT = batches(4)


@pytest.fixture(autouse=True)
def everything_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SLOW", 0.0)


class Counted:
    """A loss that counts the rows it judges by their length."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls, self.factor = Counter[int](), factor

    def __call__(self, output: Any, batch: Any) -> Tensor:
        self.calls[batch["input_ids"].shape[1]] += 1
        return losses.classification(output, batch).mul(self.factor).round(decimals=1)


def right(output: Any, batch: Any) -> Tensor:
    return (output["logits"].argmax(dim=1) == batch["labels"]).float()


def scored(folder: Path | None, loss: Any, model: Classifier | None = None, scorer: str = "ablation") -> Any:
    heads = mhaprune.wrap(model or classifier(), loss, score=SPLIT, quality=right, cache=folder)
    loss.calls.clear()
    return heads.score(scorer).drop(columns="seconds")


@pytest.mark.parametrize("scorer", ["ablation", "ablation_mean"])
def test_a_killed_scoring_goes_on_and_is_equal_in_every_bit(
    tmp_path: Path, scorer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = scored(None, Counted(), scorer=scorer)
    calls, judge = Counter[int](), losses.classification

    def killed(output: Any, batch: Any) -> Tensor:
        calls[length := batch["input_ids"].shape[1]] += 1
        if length == 6 and calls[length] > 3 and calls[7] > 1:
            raise KeyboardInterrupt
        return judge(output, batch)

    monkeypatch.setattr(losses, "classification", killed)  # which is known by its name
    with pytest.raises(KeyboardInterrupt):
        scored(tmp_path, Counted(), scorer=scorer)
    monkeypatch.setattr(losses, "classification", judge)
    again = Counted()
    assert scored(tmp_path, again, scorer=scorer).equals(whole)
    assert again.calls == {4: 1, 5: 1, 6: 10, 7: 10}  # an open pass tells the batch; then eight heads and none closed


@pytest.mark.slow
def test_what_was_measured_of_something_else_is_not_taken(tmp_path: Path) -> None:
    scored(tmp_path, Counted())
    other = classifier()
    with torch.no_grad():
        other.attention[0].q_proj.weight.mul_(1.0001)  # the open model answers the same, when rounded
    for loss, model in ((Counted(factor=2.0), None), (Counted(), other)):
        assert scored(tmp_path, loss, model).equals(scored(None, Counted(factor=loss.factor), model))
        assert set(loss.calls.values()) == {10}


@pytest.mark.slow
def test_two_losses_that_agree_on_the_open_model_are_two(tmp_path: Path) -> None:
    logits = [classifier()(**batch)["logits"].detach() for batch in SPLIT]
    known = {len(batch["input_ids"][0]): each for batch, each in zip(SPLIT, logits, strict=True)}

    def squared(output: Any, batch: Any) -> Tensor:
        return (output["logits"] - known[batch["input_ids"].shape[1]][: len(batch["input_ids"])]).square().mean(dim=1)

    def absolute(output: Any, batch: Any) -> Tensor:
        return (output["logits"] - known[batch["input_ids"].shape[1]][: len(batch["input_ids"])]).abs().mean(dim=1)

    def score(loss: Any, folder: Path | None) -> list[float]:
        heads = mhaprune.wrap(classifier(), loss, score=SPLIT, quality=right, cache=folder)
        return heads.score("ablation")["score"].tolist()

    assert score(squared, tmp_path) != score(absolute, tmp_path) == score(absolute, None)


def test_a_damaged_file_is_set_aside_and_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = scored(tmp_path, Counted())
    files = sorted(tmp_path.glob("masks-*.pt"))
    assert len(files) == 4
    files[0].write_bytes(files[0].read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert scored(tmp_path, again := Counted()).equals(whole)
    assert sorted(again.calls.values()) == [1, 1, 1, 10]
    assert "set aside" in caplog.text


def test_a_batch_that_does_not_fit_is_named_with_the_size_that_would() -> None:
    class Large(Classifier):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            if len(input_ids) > limit:
                raise torch.OutOfMemoryError
            return super().forward(input_ids, attention_mask, labels)

    limit = 9
    heads = mhaprune.wrap(Large(), losses.classification, score=SPLIT)
    limit = 4
    with pytest.raises(ValueError, match="a batch of 6 examples of these does not fit .*, 3 would; give smaller"):
        mhaprune.wrap(Large(), losses.classification, score=SPLIT)
    with pytest.raises(ValueError, match=r"a batch of 6 examples of these .* memory of cpu, 3 would; give smaller"):
        heads.score("ablation")
    limit = 0
    with pytest.raises(ValueError, match="of 6 examples of these does not fit .*, not even one would"):
        heads.score("gate_output")
    limit = 4
    with pytest.raises(ValueError, match="of 6 examples of these does not fit .*; give smaller|cpu, give smaller"):
        heads.score("taylor_example")  # whose hooks wait for all six


def test_what_takes_no_second_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    scored(tmp_path, Counted())
    assert not list(tmp_path.iterdir())
