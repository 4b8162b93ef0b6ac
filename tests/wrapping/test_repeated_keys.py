"""Keys that a layer itself repeats for several heads."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from support.own_layers import HEADS, WIDTH, apart, check, closed, made, wrapped
from support.sizes import slow

K = WIDTH // HEADS


class InWindowsGrouped(nn.Module):
    """Windows stand before heads, and the fused function repeats the keys of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv = HEADS, 2
        self.W_q, self.W_o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.W_k, self.W_v = nn.Linear(WIDTH, 2 * K), nn.Linear(WIDTH, 2 * K)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        y = F.pad(x, (0, 0, 0, -T % 3)).reshape(-1, 3, WIDTH)
        q, k, v = (f(y).unflatten(-1, (-1, K)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
        said = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.W_o(said.reshape(B, -1, said.shape[-1])[:, :T])


class Grouped(nn.Module):
    """Grouped queries in one's own code: keys are repeated before the product."""

    def __init__(self, parts: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep = HEADS, parts, HEADS // parts
        self.wq, self.W_o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, parts * K, bias=False) for _ in range(2))

    def repeat(self, x: Tensor) -> Tensor:
        """(B, T, G, K) for every head, (B, T, H, K)."""
        return x[:, :, :, None].expand(-1, -1, -1, self.n_rep, -1).flatten(2, 3)

    def kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.wk(x), self.wv(x)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).view(*x.shape[:2], self.n_heads, K)
        k, v = (self.repeat(y.view(*x.shape[:2], self.n_kv_heads, K)) for y in self.kv(x))
        said = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.W_o(said.transpose(1, 2).flatten(2))


class Interleaved(Grouped):
    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.n_rep, dim=2)


class InTurns(Grouped):
    """Head after head reads the next part."""

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1, self.n_rep, 1)


class FusedParts(Grouped):
    """One module makes keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.wkv = nn.Linear(WIDTH, 4 * K, bias=False)
        del self.wk, self.wv

    def kv(self, x: Tensor) -> Any:
        return self.wkv(x).chunk(2, dim=-1)


class OnePart(Grouped):
    def __init__(self) -> None:
        super().__init__(1)


WHOLE, SINGLE, ONE_EACH = {0: [2, 3], 1: [0, 1]}, {0: [3], 1: [0, 2, 3]}, {0: [0, 2], 1: [1, 3]}


@pytest.mark.parametrize("kind", [Grouped, Interleaved, InTurns, FusedParts, OnePart, InWindowsGrouped])
@pytest.mark.parametrize("gone", [WHOLE, SINGLE, *slow(ONE_EACH)], ids=["whole", "single", "one of each"])
def test_keys_that_a_layer_repeats_go_with_their_heads(kind: Any, gone: dict[int, list[int]], tmp_path: Path) -> None:
    model, _, small = check(kind, tmp_path, gone=gone)
    again = wrapped(small)
    left = next(head.head for head in again.grid if head.layer == 0)
    outs = ["layers.0.W_o", "layers.1.W_o"]
    assert apart(again.prune(mask={0: [left]}), closed(model, outs, {0: [*gone[0], left], 1: gone[1]})) < 1e-9


def test_groups_of_heads_are_units_too() -> None:
    model = made(Grouped).double()
    groups = wrapped(model).units("group")
    assert len(groups.grid) == 4
    small: Any = groups.prune(mask={0: [0]})
    assert small.layers[0].wk.out_features == K
    assert apart(small, closed(model, ["layers.0.W_o"], {0: [0, 1]})) < 1e-9


class Eight(Grouped):
    """Eight narrow heads of two groups: seven with keys of their own have more weights."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_rep = 8, 4
        self.wk, self.wv = (nn.Linear(WIDTH, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).view(*x.shape[:2], self.n_heads, 2)
        k, v = (self.repeat(y.view(*x.shape[:2], self.n_kv_heads, 2)) for y in self.kv(x))
        said = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))
        return self.W_o(said.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("keep", [0.95, 0.9, 0.7, 0.5])
def test_a_share_of_weights_is_what_is_left_where_keys_are_shared_or_copied(keep: float) -> None:
    model = made(Eight)

    def size(module: nn.Module) -> int:
        return sum(weight.numel() for name, weight in module.named_parameters() if "layers" in name)

    small = wrapped(model).prune(keep=keep, of="weights", by=[n % 8 + n // 8 for n in range(16)])
    assert keep - 0.3 < size(small) / size(model) <= keep


def test_a_model_that_grows_is_warned_of() -> None:
    grown = r"^prune: the model has \d+ weights now, \d+ before, .*unit=\"group\" removes"
    with pytest.warns(UserWarning, match=grown):
        wrapped(made(Eight)).prune(mask={0: [0], 1: [5]})
