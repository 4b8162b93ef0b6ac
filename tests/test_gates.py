from __future__ import annotations

import math

import pytest
import torch

from mhaprune.gates import Softmax


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


def test_a_negative_rate_is_refused() -> None:
    for settings in ({"learning_rate": -1}, {"learning_rate": math.nan}, {"entropy_weight": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))}=.*: must be 0 or more"):
            Softmax(**settings)
