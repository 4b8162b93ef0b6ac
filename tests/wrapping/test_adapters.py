"""Low-rank adapters are all that is trained, and then are part of the weights."""

import copy
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="pip install 'mhaprune[lora]'")

from tiny_families import FAMILIES, batch_of, make

import mhaprune
from mhaprune import losses
from mhaprune.front.heads import Heads
from mhaprune.measure.outcomes import Diverged
from mhaprune.recoveries.fine_tune import FineTune
from mhaprune.wrapping.training import FINE_TUNING
from mhaprune.wrapping.wrapped import WrappedModel

RANK = 2


@pytest.fixture(scope="module")
def heads() -> Heads:
    few = [batch_of(FAMILIES["llama"])] * 3
    return mhaprune.wrap(make(FAMILIES["llama"]), losses.language_model, score=few, choose=few, report=few)


def weights(model: WrappedModel) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.model.named_parameters()}


def test_every_linear_map_changes_by_a_matrix_of_this_rank_and_nothing_else_does(heads: Heads) -> None:
    before = heads.without({0: [0, 1]})
    after = heads.without({0: [0, 1]}, fine_tune={"steps": 20, "lora": RANK, "learning_rate": 0.01})
    assert list(weights(after)) == list(weights(before))
    assert [type(each) for each in after.model.modules()] == [type(each) for each in before.model.modules()]
    assert vars(after.model).keys() == vars(before.model).keys()
    assert all(weight.requires_grad for weight in after.model.parameters())
    for name, weight in weights(after).items():
        change = (weight - weights(before)[name]).double()
        if name.endswith("proj.weight") or name == "lm_head.weight":
            sizes = torch.linalg.svdvals(change)
            assert sizes[RANK - 1] > 1e3 * sizes[RANK:].max(), name
        else:
            assert not change.any(), name
    score = heads.splits["score"]
    assert after.evaluate(score).loss.mean() < before.evaluate(score).loss.mean()


def test_a_layer_without_heads_adds_nothing_also_after_training(heads: Heads) -> None:
    after = heads.without({1: [0, 1, 2, 3]}, fine_tune={"steps": 5, "lora": RANK, "learning_rate": 0.05})
    (silent,) = (block for block in after.blocks if block.silent)
    w_o: Any = after.model.get_submodule(silent.out)
    assert not w_o.weight.any()


def test_the_usual_rate_is_ten_times_that_of_all_weights(heads: Heads) -> None:
    lesson = heads._lesson
    assert FineTune(lora=1).descent(lesson).learning_rate == pytest.approx(
        10 * FineTune().descent(lesson).learning_rate
    )
    assert FineTune(lora=1, learning_rate=0.1).descent(lesson).learning_rate == 0.1


def test_an_interrupted_training_ends_with_the_same_bits(heads: Heads) -> None:
    left, states = heads.without({0: [0]}), list[Any]()
    lesson = replace(heads._lesson, training=replace(FINE_TUNING, checkpoint_every=8))
    whole, _ = FineTune(steps=9, lora=RANK)(lesson, left, 0, None, lambda state: states.append(copy.deepcopy(state)))
    assert [state["step"] for state in states] == [8]
    torch.manual_seed(9)
    resumed, _ = FineTune(steps=9, lora=RANK)(lesson, left, 0, states[0], lambda state: None)
    for name, weight in weights(resumed).items():
        assert torch.equal(weight, weights(whole)[name]), name


def test_the_dense_model_is_as_it_was_also_after_a_failure(heads: Heads) -> None:
    before, modules = weights(heads.subject), list(heads.subject.model.modules())
    with pytest.raises(Diverged):
        heads.without({0: [0]}, fine_tune={"steps": 3, "lora": RANK, "learning_rate": 1e30})
    assert list(heads.subject.model.modules()) == modules
    assert all(torch.equal(weight, before[name]) for name, weight in weights(heads.subject).items())


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, "^lora=0: must be 1 or more$"),
        (2.5, "^lora=2.5: must be a whole number"),
        ("all", "^lora='all': must be a whole number"),
    ],
)
def test_a_rank_that_is_no_number_of_columns_is_refused(heads: Heads, rank: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heads.prune(mask={0: [0]}, fine_tune={"steps": 3, "lora": rank})


def test_without_peft_its_installation_is_named(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"^lora=2: needs peft, pip install 'mhaprune\[lora\]'$"):
        heads.prune(mask={0: [0]}, fine_tune={"steps": 3, "lora": 2})
