"""Attention whose code names the width of the model where that of its heads is meant."""

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhaprune
from mhaprune.surgery.reshaping import Sizes
from support.attention import Stack, close_by_hooks
from support.sizes import slow

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit.script")]

D, H = 24, 4


class Causal(nn.Module):
    """Fused queries, keys and values, split by the width of the model; heads of the width that the input implies."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.n_head, self.n_embd, self.fused = H, D, fused

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (
            part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(self.n_embd, dim=2)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / k.size(-1) ** 0.5
            y = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1) @ v
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return out


class Image(nn.Module):
    """One view makes queries, keys and values and all heads; another one joins the heads to the width of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(D, 3 * D), nn.Linear(D, D), H

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))
        return out


class Shared(nn.Module):
    """All query heads share a key head. The parts are split by a list of widths."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o_proj = nn.Linear(D, D + 2 * D // H), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([D, D // H, D // H], dim=-1)
        q, k, v = (part.view(len(x), -1, n, D // H).transpose(1, 2) for part, n in ((q, H), (k, 1), (v, 1)))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.o_proj(torch.reshape(y.transpose(1, 2), x.shape))
        return out


KINDS = {"fused": partial(Causal, True), "slow": partial(Causal, False), "image": Image, "shared": Shared}


@pytest.mark.parametrize("kind", ["fused", "shared", *slow("slow", "image")])
@torch.no_grad()
def test_removed_is_masked_once_and_twice_also_as_a_copy_from_a_file_and_exported(kind: str, tmp_path: Path) -> None:
    model: Any = Stack(*2 * [KINDS[kind]])
    heads = mhaprune.wrap(model, mhaprune.losses.drift, score=[torch.randn(2, 5, D)])
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    assert all(block.as_written for block in heads.subject.blocks)
    small = mhaprune.wrap(heads.prune(mask={0: [0, 1], 1: [1, 3]}), mhaprune.losses.drift, score=[torch.randn(2, 5, D)])
    again: Any = small.prune(mask={0: [2]})
    close_by_hooks([[*layer.children()][1] for layer in model.layers], D // H, {0: [0, 1, 2], 1: [1, 3]})
    torch.save(again, file := io.BytesIO())
    file.seek(0)
    mhaprune.export(again, tmp_path / "again.pt2", torch.randn(2, 5, D))
    copies = [copy.deepcopy(again), torch.load(file, weights_only=False), torch.compile(again, backend="eager")]
    for each in (again, *copies, torch.export.load(tmp_path / "again.pt2").module()):
        for shape in ((2, 5, D),) if each is not again else ((2, 5, D), (3, H, D), (H, 2, D), (1, D, D)):
            x = torch.randn(shape)
            torch.testing.assert_close(each(x), model(x))
    assert sum(weight.numel() for weight in again.parameters()) < sum(weight.numel() for weight in model.parameters())


def test_views_that_are_not_of_heads_stay_as_they_are() -> None:
    with Sizes({4: 3, 24: 18, 72: 54}):
        x = torch.rand(2, 4, 18)
        assert x.view(2, 4, 4, 6).shape == x.view(2, 4, 4, -1).shape == x.view(2, -1, 4, 6).shape == (2, 4, 3, 6)
        assert x.view(2, 4, 3, 6).reshape(2, 4, 24).shape == (2, 4, 18)
        assert torch.rand(2, 4, 54).view(2, 4, 3, 4, 6).shape == (2, 4, 3, 3, 6)
        assert [part.shape[-1] for part in torch.rand(2, 4, 54).split(24, dim=2)] == [18, 18, 18]
        assert [part.shape[-1] for part in torch.rand(2, 4, 54).split((24, 24, 24), -1)] == [18, 18, 18]
        assert torch.rand(2, 4, 24).view(2, 4, 4, 6).shape == (2, 4, 4, 6)
        assert torch.rand(2, 3, 24).view(2, 3, 24).view(-1).shape == (144,)
        assert torch.rand(8, 18).view(2, 4, 18).shape == torch.rand(2, 4, 18).view(-1, 18).view(2, 4, 18).shape
        assert torch.rand(()).view(1).shape == torch.rand(1, 1).view(()).view(1).shape == (1,)
        assert torch.zeros(4).view(torch.int32).dtype == torch.int32
        assert [len(part) for part in torch.rand(24, 2).split(4)] == [4] * 6
        assert [part.shape[1] for part in torch.rand(2, 18, 18).split(6, dim=1)] == [6, 6, 6]  # along positions
    with Sizes({3: 2, 18: 12, 54: 36}):
        assert torch.rand(2, 5, 36).view(2, 5, 3, 3, 6).shape == (2, 5, 3, 2, 6)
        assert torch.rand(2, 5, 12).view(2, 5, 3, 6).shape == (2, 5, 2, 6)
    with Sizes({6: 4, 36: 24}):
        assert torch.rand(2, 5, 24).view(2, 5, 6, 6).shape == (2, 5, 4, 6)
    with Sizes({4: 1, 24: 6}):
        assert torch.rand(8, 6).view(2, 4, 6).shape == (2, 4, 6)
