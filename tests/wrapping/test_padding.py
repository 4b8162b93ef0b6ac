"""Whose padding a mask says: decided by module, not by its length or by words in paths."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhaprune
from mhaprune.api.wrap import Heads
from mhaprune.attention.layer import MultiHeadAttention

WIDTH, LENGTH = 16, 5


class Layer(nn.Module):
    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.own, self.other = MultiHeadAttention(WIDTH, 4), MultiHeadAttention(WIDTH, 4) if reads else None
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(
        self, x: Tensor, hidden: Tensor | None, read: Tensor | None = None, unread: Tensor | None = None
    ) -> Tensor:
        x = x + self.own(x, x, x, key_padding_mask=hidden)[0]
        if self.other is not None:
            x = x + self.other(x, read, read, key_padding_mask=unread)[0]
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """An image encoder, and text that reads it or stands beside it, or that is read by the image."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.reads = nn.Embedding(30, WIDTH), reads
        self.image_encoder, self.text_decoder = Layer(reads == "image"), Layer(reads == "text")
        self.masked = True

    def forward(self, input_ids: Tensor, attention_mask: Tensor, image: Tensor) -> Tensor:
        text, hidden = self.embedding(input_ids), (attention_mask == 0) if self.masked else None
        if self.reads == "image":
            text = self.text_decoder(text, hidden)
            image = self.image_encoder(image, None, text, hidden)
        else:
            image = self.image_encoder(image, None)
            text = self.text_decoder(text, hidden, *((image, None) if self.reads == "text" else ()))
        weights = attention_mask[..., None].to(text)
        return torch.cat([image.mean(dim=1), (text * weights).sum(dim=1) / weights.sum(dim=1)], dim=1)


def batch(left: bool = False) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(1, 30, (4, LENGTH), generator=draw), torch.ones(4, LENGTH, dtype=torch.long)
    for row, count in enumerate((0, 1, 2, 3)):
        if count:
            mask[row, slice(0, count) if left else slice(-count, None)] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "image": torch.randn(4, LENGTH, WIDTH, generator=draw),
    }


def wrapped(model: nn.Module, given: Any, **how: Any) -> Heads:
    return mhaprune.wrap(model, lambda output, batch: output.square().mean(dim=1), score=[given], **how)


@torch.no_grad()
def norms(model: Any, given: dict[str, Tensor], out: str, real: Tensor) -> list[float]:
    """The mean over real positions of the norm of what each head adds."""
    module, seen = model.get_submodule(out), list[Tensor]()
    hook = module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(**given)
    hook.remove()
    heads = zip(seen[0].split(WIDTH // 4, dim=-1), module.weight.split(WIDTH // 4, dim=1), strict=True)
    return [float((x @ weight.T).norm(dim=-1)[real].mean()) for x, weight in heads]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("reads", ["nothing", "text", "image"])
def test_padding_is_that_of_the_rows_of_each_module(reads: str, masked: bool, left: bool) -> None:
    """The image has as many positions as the text, and the mask is for the text alone."""
    model, given = Model(reads).eval(), batch(left)
    model.masked = masked
    if not masked and reads == "image":
        return  # rows of the image then depend on the padding of the text, and nothing tells them apart
    heads, real = wrapped(model, given), given["attention_mask"].bool()
    table = heads.score("gate_output")
    for block in heads.subject.blocks:
        name = next(name for name, each in heads.subject.by_name.items() if each is block)
        mine = table[(table["site"] == name.site) & (table["layer"] == name.layer)]["score"].tolist()
        counted = real if "text" in block.path else torch.ones_like(real)
        assert mine == pytest.approx(norms(model, given, block.out, counted), rel=1e-4), block.path


def test_keys_of_an_image_are_all_real_and_those_of_a_text_are_not() -> None:
    for reads, unreal in (("text", False), ("image", True)):
        heads = wrapped(Model(reads).eval(), given := batch())
        maps = heads.subject.attention_maps(heads.splits.score)
        name = next(name for name, block in heads.subject.by_name.items() if block.path.endswith("other"))
        keys = maps[name].keys
        assert torch.equal(keys, given["attention_mask"].bool() if unreal else torch.ones_like(keys))


def test_a_refit_reads_all_positions_of_the_image() -> None:
    heads = wrapped(Model("text").eval(), given := batch(), units=("head", "neuron"))
    rows = {
        each.name: len(each.parts[0][0]) for each in heads.subject.last_maps([heads.subject.placed(heads.splits.score)])
    }
    whole, real = given["attention_mask"].numel(), int(given["attention_mask"].sum())
    assert {path: count for path, count in rows.items() if "image" in path} == {
        "image_encoder.own.out_proj": whole,
        "image_encoder.down": whole,
    }
    assert {count for path, count in rows.items() if "text" in path} == {real}
