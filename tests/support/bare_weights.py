"""Layers that multiply by parameters of their own, which are no linear modules."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.own_layers import HEADS, WIDTH

K = WIDTH // HEADS


def drawn(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.3 * torch.randn(*shape))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class Matrices(nn.Module):
    """`x @ W + b`, with the numbers of heads as literals."""

    out = "Wo"

    def __init__(self) -> None:
        super().__init__()
        self.Wq, self.bq, self.Wk, self.Wv, self.Wo = (
            drawn(*s) for s in ((WIDTH, WIDTH), (WIDTH,), *3 * [(WIDTH,) * 2])
        )

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.times(x, self.Wq) + self.bq, self.times(x, self.Wk), self.times(x, self.Wv)
        said = attend(*(each.view(B, T, HEADS, K).transpose(1, 2) for each in (q, k, v)))
        return self.times(said.transpose(1, 2).reshape(B, T, WIDTH), self.Wo)


class ByEinsum(Matrices):
    """With the weight as the first factor."""

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("io, bti -> bto", weight, x)


class ByAddmm(Matrices):
    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.addmm(x.new_zeros(1), x.flatten(0, 1), weight).view(*x.shape[:2], -1)


class Linear(nn.Module):
    """A linear layer of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = drawn(WIDTH, WIDTH), drawn(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OwnLinear(nn.Module):
    out = "o.weight"

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (Linear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made(x).unflatten(-1, (-1, K)).transpose(1, 2) for made in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).transpose(1, 2).flatten(2))


class ByHead(nn.Module):
    """Each weight with a dimension of heads, as in TransformerLens."""

    out = "W_O"

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (drawn(HEADS, WIDTH, K) for _ in range(3))
        self.W_O, self.b_Q, self.b_O = drawn(HEADS, K, WIDTH), drawn(HEADS, K), drawn(WIDTH)

    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("btd,hdk->bhtk", x, weight)

    def joined(self, said: Tensor) -> Tensor:
        return torch.einsum("...htk,hkd->...td", said, self.W_O) + self.b_O

    def forward(self, x: Tensor) -> Tensor:
        q = self.made(x, self.W_Q) + self.b_Q[:, None]
        return self.joined(attend(q, self.made(x, self.W_K), self.made(x, self.W_V)))


class Broadcast(ByHead):
    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return x[:, None] @ weight


class Summed(ByHead):
    """Sums over named dimensions, or over the last two and the first two."""

    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.tensordot(x, weight, dims=([-1], [1])).movedim(2, 1)

    def joined(self, said: Tensor) -> Tensor:
        return torch.tensordot(said.transpose(1, 2), self.W_O) + self.b_O


class Rearranged(ByHead):
    """As TransformerLens computes."""

    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.permute(0, 2, 1).reshape(-1, WIDTH)).unflatten(-1, (-1, K)).transpose(1, 2)

    def joined(self, said: Tensor) -> Tensor:
        weight = self.W_O.permute(2, 0, 1).reshape(WIDTH, -1)
        return F.linear(said.transpose(1, 2).flatten(2), weight, self.b_O)


class Grouped(Rearranged):
    """Two heads share keys and values, which have a bias and are repeated by a number of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.W_K, self.W_V, self.b_K = drawn(2, WIDTH, K), drawn(2, WIDTH, K), drawn(2, K)
        self.repeat_kv_heads = 2

    def forward(self, x: Tensor) -> Tensor:
        k = F.linear(x, self.W_K.permute(0, 2, 1).reshape(-1, WIDTH), self.b_K.reshape(-1))
        k, v = k.unflatten(-1, (-1, K)).transpose(1, 2), self.made(x, self.W_V)
        k, v = (torch.repeat_interleave(each, self.repeat_kv_heads, dim=1) for each in (k, v))
        return self.joined(attend(self.made(x, self.W_Q) + self.b_Q[:, None], k, v))


class WidthFirst(ByHead):
    """As in Flax."""

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (drawn(WIDTH, HEADS, K) for _ in range(3))

    def made(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("btd,dhk->bhtk", x, weight)


class Chunked(nn.Module):
    """One weight and one bias for queries, keys and values, cut apart before they are used."""

    out = "o"

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.o = drawn(3 * WIDTH, WIDTH), drawn(3 * WIDTH), drawn(WIDTH, WIDTH)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [F.linear(x, w, b) for w, b in zip(self.w.chunk(3), self.b.chunk(3), strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, K)).transpose(1, 2) for each in self.three(x))
        return self.joined(attend(q, k, v).transpose(1, 2).flatten(2))

    def joined(self, said: Tensor) -> Tensor:
        return F.linear(said, self.o)


class WithLinear(Chunked):
    """W_O is a linear module."""

    out = "o.weight"

    def __init__(self) -> None:
        super().__init__()
        del self.o
        self.o: Any = nn.Linear(WIDTH, WIDTH)

    def joined(self, said: Tensor) -> Tensor:
        made: Tensor = self.o(said)
        return made


class Partly(WithLinear):
    """A part of the bias is added after a factor, and one is not used."""

    def three(self, x: Tensor) -> Sequence[Tensor]:
        q, k, v = (F.linear(x, w) for w in self.w.chunk(3))
        of_q, _, of_v = self.b.chunk(3)
        return [q * K**-0.5 + of_q, k, v + of_v]


class Packed(Chunked):
    """One bias for two weights, and one of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.k, self.v, self.b = drawn(WIDTH, WIDTH), drawn(WIDTH, WIDTH), drawn(WIDTH, WIDTH), drawn(2 * WIDTH)
        self.c = drawn(1, WIDTH)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        of_q, of_v = self.b.chunk(2)
        return [F.linear(x, self.w, of_q), F.linear(x, self.k) + self.c, F.linear(x, self.v, of_v)]


class Columns(Chunked):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = drawn(WIDTH, 3 * WIDTH), drawn(1)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [x @ w for w in self.w.split(self.w.shape[1] // 3, dim=1)]


class Stacked(Chunked):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = drawn(3, HEADS, WIDTH, K), drawn(3, HEADS, K)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [(torch.einsum("btd,hdk->bthk", x, self.w[n]) + self.b[n]).flatten(2) for n in range(3)]


class StackedOnce(Stacked):
    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [each.flatten(2) for each in torch.einsum("btd,nhdk->nbthk", x, self.w)]


class ByFunction(nn.Module):
    """`F.multi_head_attention_forward` with parameters of the layer."""

    out = "w_out"

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.b_in, self.w_out, self.b_out = (
            drawn(*s) for s in ((3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        more: Any = (self.w_in, self.b_in, None, None, False, 0.0, self.w_out, self.b_out, self.training)
        return F.multi_head_attention_forward(y, y, y, WIDTH, HEADS, *more)[0].transpose(0, 1)


class Gated(Matrices):
    """The exercise: each head times its part of a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = drawn(1, HEADS, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.times(x, each).unflatten(-1, (-1, K)).transpose(1, 2) for each in (self.Wq, self.Wk, self.Wv))
        said = attend(q, k, v) * self.gate.softmax(dim=1)
        return self.times(said.transpose(1, 2).flatten(2), self.Wo)


class Unbound(Chunked):
    def __init__(self) -> None:
        super().__init__()
        self.w = drawn(3, WIDTH, WIDTH)

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [x @ w for w in self.w.unbind()]


class Reversed(Chunked):
    """The biases do not stand in the order of the weights."""

    def three(self, x: Tensor) -> Sequence[Tensor]:
        return [F.linear(x, w, b) for w, b in zip(self.w.chunk(3), self.b.chunk(3)[::-1], strict=True)]


class BiasAgain(nn.Module):
    """Biases that are used elsewhere too, and twice."""

    out = "o"

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (drawn(WIDTH, WIDTH) for _ in range(4))
        self.b, self.c = drawn(WIDTH), drawn(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.q, self.c), F.linear(x, self.k), F.linear(x, self.v, self.c)
        said = attend(*(each.unflatten(-1, (-1, K)).transpose(1, 2) for each in (q, k, v))).transpose(1, 2).flatten(2)
        return F.linear(said, self.o, 2 * self.b) + F.linear(said, self.o, self.b) + self.b.tanh()


class Mixed(nn.Module):
    """A linear module reads what parameters have made, beside one of another class."""

    out = "o.weight"

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.w, self.k, self.o = drawn(2, WIDTH, WIDTH), self.Own(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x @ self.w[0], self.k(x), x @ self.w[1]
        said = attend(*(each.unflatten(-1, (-1, K)).transpose(1, 2) for each in (q, k, v)))
        return self.o(said.transpose(1, 2).flatten(2))
