"""Models in which finding heads meets something else: passes without gradients, computed weights, other packages."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from support.attention import HEADS, Attention, Stack, wrapped

H = HEADS


class Cycles(nn.Module):
    """The first of its cycles runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.attention(x)
        out: Tensor = x + self.attention(x)
        return out


def test_a_layer_that_once_runs_without_gradients_is_found_in_another_call() -> None:
    assert repr(wrapped(Cycles)) == "4 heads in 1 block, all with an effect, all removable"


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        spectral_norm,
        lambda linear: prune.l1_unstructured(linear, "weight", 0.3),
    ],
)
def test_weights_that_are_computed_can_be_gated_and_the_refusal_names_the_way(change: Any) -> None:
    model: Any = Stack(Attention, Attention)
    for layer in model.layers:
        change(layer.v)
    heads = wrapped(model)
    assert len(heads.score("ablation")) == 2 * H
    with pytest.raises(ValueError, match=r"the weight of layers.0.v is computed from others; .*prune.remove$"):
        heads.prune(mask={0: [1]})


def test_a_model_of_torch_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is installed may not be importable, as with a torchvision that does not fit."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    broken = ModuleType("transformers")
    monkeypatch.setitem(sys.modules, "transformers", broken)
    heads = wrapped(Attention)
    assert len(heads.grid) == H
    heads.prune(mask={0: [1]})


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_several_processes_is_refused(tmp_path: Path) -> None:
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'all'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Stack(Attention))
        with pytest.raises(ValueError, match=r"^model: is a DistributedDataParallel, wrap model.module$"):
            wrapped(model)
    finally:
        distributed.destroy_process_group()
