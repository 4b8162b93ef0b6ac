from __future__ import annotations

import math

import pytest
import torch

from mhaprune.attention.gates import Softmax
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.tasks.sort import Sort


def test_an_untrained_gate_changes_nothing() -> None:
    assert Softmax(scale="heads", init="zeros")(4)().tolist() == [1.0] * 4


def test_the_gate_of_the_exercise_sums_to_one() -> None:
    torch.manual_seed(3)
    gate = Softmax(scale="one", init="rand")(4)
    torch.manual_seed(3)
    assert torch.equal(gate(), torch.rand(4).softmax(0))


def test_entropy_pressure_pulls_heads_apart() -> None:
    gate = Softmax(entropy_weight=0.5)(4)
    penalty = gate.penalty()
    assert penalty is not None
    assert penalty.item() == pytest.approx(0.5 * math.log(4))
    with torch.no_grad():
        gate.logits.copy_(torch.tensor([50.0, 0, 0, 0]))
    peaked = gate.penalty()
    assert peaked is not None
    assert peaked.item() == pytest.approx(0.0, abs=1e-6)
    assert Softmax()(4).penalty() is None


def test_where_gates_start_leaves_the_weights_alone(task: Sort) -> None:
    """Models of one seed differ in their gates and in nothing else."""
    states = []
    for init in ("zeros", "rand"):
        torch.manual_seed(3)
        model = Seq2Seq(Transformer(d_model=8, num_heads=2), len(task.vocabulary), Softmax(init=init))  # type: ignore[arg-type]
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) != name.endswith("gate.logits"), name
