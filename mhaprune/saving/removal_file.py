"""Save any other pruned model: its weights, and the removal to repeat on a model that its own code builds."""

import json
from functools import partial
from pathlib import Path

import torch
from torch import nn

from mhaprune.measure.outcomes import check_weights_finite
from mhaprune.settings.refusals import foreign, quoted
from mhaprune.storage.store import write_file, write_json
from mhaprune.surgery.bare_weights import MAP
from mhaprune.surgery.copying import copied
from mhaprune.surgery.record import Cut
from mhaprune.surgery.removal import keep_heads
from mhaprune.surgery.reshaping import give_shapes
from mhaprune.surgery.torch_attention import converted

REMOVAL, WEIGHTS = "removal.json", "weights.pt"


def save_removal(model: nn.Module, folder: Path) -> None:
    """Write the weights of a model, and which heads it has lost, into a folder that exists."""
    write_file(folder / WEIGHTS, partial(torch.save, model.state_dict()))
    write_json(folder / REMOVAL, {"class": type(model).__name__, "removed": vars(Cut.of(model) or Cut())})


def load_removal(folder: Path, model: nn.Module | None) -> nn.Module:
    """Return a copy of `model`, the model as it was before any removal, with the heads and the weights of the folder.
    It is in evaluation mode.

    Raises ValueError, one line, if the model does not fit.
    """
    with foreign(f"{folder}: {REMOVAL} is damaged"):
        content = json.loads((folder / REMOVAL).read_text())
        name, cut = quoted([content["class"]]), Cut.read(content["removed"])
    if model is None:
        raise ValueError(f"{folder}: holds the weights of a {name}, give one: mhaprune.load(path, model={name}(...))")
    with foreign(f"{folder}: {WEIGHTS} is damaged"):
        weights = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True)
    with foreign(f"{folder}: does not fit the model={type(model).__name__}, must be the {name} before any removal"):
        smaller = copied(converted(model)).eval()
        give_shapes(smaller, cut.shapes, cut.attributes)
        for path, heads in cut.heads.items():
            if path not in {*cut.attributes, *cut.shapes} and not path.endswith(MAP):  # what a parameter reads
                keep_heads(smaller, path, heads)
        cut.leave_in(smaller)
        for name, tensor in (*smaller.named_parameters(), *smaller.named_buffers()):
            if name in weights:
                tensor.data = tensor.data.to(weights[name].dtype)
        smaller.load_state_dict(weights)
        check_weights_finite(smaller)
    return smaller
