"""Low-rank adapters (LoRA, Hu et al. 2022) by peft: training of a few weights, which become part of the model."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from mhaprune.subject import Batch
from mhaprune.wrapping.gated import GatedModel


@contextmanager
def low_rank(model: GatedModel, rank: int, batch: Batch) -> Iterator[None]:
    """While the context lasts, the only weights of the model that ask for a gradient are adapters: for each linear map
    W, two matrices B and A of this rank, so that it computes (W + 2 B A) x. At the end they are added to the weights.

    B begins as zero, so at first nothing changes. `batch` is passed through the model once, to see which maps it calls.
    Raises ValueError if the model calls no linear map, as our own network, which reads the weights itself.
    """
    from peft import LoraConfig, LoraModel

    module = model.module
    if not (maps := _called_maps(model, batch)):
        raise ValueError(f"lora={rank}: this model calls no linear map, so there is nothing to adapt; leave it out")
    asked = {name: weight.requires_grad for name, weight in module.named_parameters()}
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="|".join(map(re.escape, maps)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft sees for itself that a map is a Conv1D
        adapted: Any = LoraModel(module, config, "default")
    with ExitStack() as undo:
        undo.callback(lambda: [weight.requires_grad_(asked[name]) for name, weight in module.named_parameters()])
        undo.callback(lambda: vars(module).pop("peft_config", None))
        undo.callback(adapted.merge_and_unload)
        yield


def _called_maps(model: GatedModel, batch: Batch) -> list[str]:
    """Return the paths of the linear maps that a pass calls, and whose weights nothing else uses.

    The W_O of a block that has lost all heads is left out: its columns must stay zero.
    """
    silent = {block.out for block in model.blocks if block.silent}
    uses = Counter(id(weight) for _, weight in model.module.named_parameters(remove_duplicate=False))
    called: set[str] = set()
    with ExitStack() as undo:
        for path, module in model.module.named_modules():
            if _is_linear(module) and path not in silent and uses[id(module.weight)] == 1:
                undo.callback(module.register_forward_hook(lambda *given, path=path: called.add(path)).remove)
        model.outputs(batch)
    return sorted(called)


def _is_linear(module: nn.Module) -> bool:
    """Return True for a linear map of torch, or for a `Conv1D` of transformers. peft adapts no class made of them."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"
