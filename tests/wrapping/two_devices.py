"""A model whose layers are on two devices gives what it gives on one.

`test_devices` runs these tests in a process of their own: autograd counts the devices once, at its first pass.
"""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")

from tiny_families import FAMILIES, batch_of, make

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads
from mhaprune.hooks.pytree import mapped
from mhaprune.scorers.base import Scorer
from mhaprune_literature.attention import Confidence, Entropy
from support.second_device import TwoDevices, second_device

__all__ = ["second_device"]
pytestmark = [pytest.mark.filterwarnings("ignore")]
FAMILY = FAMILIES["llama"]


def spread(model: Any, other: torch.device) -> Any:
    """Put the upper half on another device. As accelerate does it: every part brings its inputs to its own device, and
    the model brings its output back."""

    def bring(device: torch.device) -> Any:
        return lambda module, args, named: mapped((args, named), lambda x: x.to(device))

    layers, home = model.model.layers, torch.device("cpu")
    upper = [*layers[len(layers) // 2 :], model.model.norm, model.lm_head]
    for part in [model.model.embed_tokens, model.model.rotary_emb, *layers[: len(layers) // 2], *upper]:
        device = other if any(part is each for each in upper) else home
        part.to(device).register_forward_pre_hook(bring(device), with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: mapped(output, lambda x: x.to(home)))
    return model


def heads_of(model: nn.Module) -> Heads:
    few = [batch_of(FAMILY)]
    return mhaprune.wrap(model, losses.language_model, score=few, choose=few, report=few)


SCORERS: tuple[str | Scorer, ...] = (
    "ablation",
    "gate_output",
    "taylor",
    "taylor_example",
    Entropy(),
    "fisher",
    "magnitude",
    "refit_error",
    Confidence(),
    "ablation_mean",
    "ablation_resample",
    "taylor_batch",
)
RECOVERIES: tuple[dict[str, Any], ...] = ({}, {"refit": True}, {"fine_tune": 2}, {"fine_tune": {"distillation": 0.5}})


def numbers(heads: Heads) -> dict[str, list[float]]:
    """Scores, and the outputs of smaller models."""
    found = {str(scorer): heads.score(scorer)["score"].tolist() for scorer in SCORERS}
    mask = heads.mask(keep=0.5, by="gate_output", unit="group")
    for how in RECOVERIES:
        how = {key: value | {"steps": 2} if isinstance(value, dict) else value for key, value in how.items()}
        smaller = heads.without(mask, **how)
        found[str(how)] = smaller.outputs(heads.splits.report).flatten().tolist()
    without_a_layer = heads.without({1: [0, 1, 2, 3]}, fine_tune=2)
    found["no heads"] = without_a_layer.outputs(heads.splits.report).flatten().tolist()
    return found


def test_the_second_device_does_not_mix_with_the_first(second_device: torch.device) -> None:
    with TwoDevices(), pytest.raises(RuntimeError, match="tensors on cpu and second"):
        torch.ones(2, 2) @ torch.ones(2, 2, device=second_device)


def test_a_model_on_two_devices_gives_what_it_gives_on_one(second_device: torch.device) -> None:
    expected = numbers(heads_of(make(FAMILY)))
    with TwoDevices():
        heads = heads_of(spread(make(FAMILY), second_device))
        assert "all with an effect, all removable" in repr(heads)
        found = numbers(heads)
        smaller: Any = heads.prune(keep=0.5, by="gate_output", refit=True)
    assert {str(layer.self_attn.o_proj.weight.device) for layer in smaller.model.layers} == {"cpu", "second:0"}
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-3, abs=1e-4), name
