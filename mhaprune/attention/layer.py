"""Multi-head attention from scratch, with a gate on every head.

Dimensions: B = batch, T = queries, U = keys, D = embed_dim, H = heads, K = head_dim.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune.attention.gates import GateConfig
from mhaprune.settings.ranges import Ge, Lt, checked

Size = Annotated[int, Ge(1)]


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2) whose heads can be gated, masked and removed:

        out = Σ_n g_n · softmax(Q_n K_nᵀ / √d) V_n O_n + b_O

    Q_n, K_n and V_n are what head n makes of query, key and value; d is `head_dim`. O_n is the slice of the output
    projection W_O that reads head n, and b_O is its bias. The gate g_n is a product of three numbers: the learned gate
    of the head, its entry in the buffer `head_mask`, and its entry in the `gates` of the call. Each is 1 by default.

    - `embed_dim`: width of the output.
    - `num_heads`: number of heads, also 0. The output of a layer without heads is b_O.
    - `qdim`, `kdim`, `vdim`: widths of query, key and value, each `embed_dim` by default.
    - `head_dim`: width of one head, by default `embed_dim // num_heads`.
    - `dropout`: probability of dropping an attention weight in training.
    - `bias`: True for a bias in the four projections.
    - `gate`: settings of the learned gates; None for a layer without learned gates.

    Raises ValueError if `num_heads` does not divide `embed_dim` and no `head_dim` is given, and for a size or a dropout
    that cannot be.

    It can take the place of the attention in a layer of `torch.nn` that was made with `batch_first=True`: set
    `self_attn` of an `nn.TransformerEncoderLayer`, and `self_attn` and `multihead_attn` of an
    `nn.TransformerDecoderLayer`. Stack such layers with `nn.TransformerEncoder(layer, n, enable_nested_tensor=False)`.

    >>> layer, x = mhaprune.MultiHeadAttention(64, 4), torch.randn(2, 5, 64)
    >>> output, weights = layer(x, x, x, gates=torch.tensor([1.0, 1.0, 0.0, 1.0]), need_weights=True)
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 4, 5, 5]))
    """

    head_mask: Tensor

    # Three attributes that layers of torch.nn read of their attention. The last two stand for separate projections
    # without a joint bias. In evaluation, they keep torch from its fused kernel, which does not know of gates.
    batch_first: ClassVar[bool] = True
    in_proj_bias: ClassVar[None] = None
    _qkv_same_embed_dim: ClassVar[bool] = False

    @checked
    def __init__(
        self,
        embed_dim: Size,
        num_heads: Annotated[int, Ge(0)],
        *,
        qdim: Size | None = None,
        kdim: Size | None = None,
        vdim: Size | None = None,
        head_dim: Size | None = None,
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0,
        bias: bool = True,
        gate: GateConfig | None = None,
    ) -> None:
        super().__init__()
        if head_dim is None:
            if num_heads < 1 or embed_dim % num_heads:
                allowed = ", ".join(str(h) for h in range(1, embed_dim + 1) if embed_dim % h == 0)
                raise ValueError(f"num_heads={num_heads}: must divide embed_dim={embed_dim}, so one of {allowed}")
            head_dim = embed_dim // num_heads
        self.embed_dim, self.num_heads, self.head_dim, self.dropout = embed_dim, num_heads, head_dim, dropout
        width = num_heads * head_dim
        self.q_proj = Projection(embed_dim if qdim is None else qdim, width, bias)
        self.k_proj = Projection(embed_dim if kdim is None else kdim, width, bias)
        self.v_proj = Projection(embed_dim if vdim is None else vdim, width, bias)
        self.out_proj = Projection(width, embed_dim, bias)
        self.gate = gate(num_heads) if gate else None
        self.register_buffer("head_mask", torch.ones(num_heads))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        gates: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query (B, T, qdim) to key (B, U, kdim) and value (B, U, vdim); returns (B, T, D) and the weights.

        As in `torch.nn.MultiheadAttention`, True in `key_padding_mask` (B, U) and in a boolean `attn_mask` means *not*
        attended to, and a float mask is added to the scores. `attn_mask` is (T, U), (B, T, U), (B·H, T, U), or (B, H,
        T, U) in which sizes may be 1. Unlike in torch, `is_causal` needs no mask; if a mask is given too, both apply.
        `gates` is (H,) or (B, H). The weights (B, H, T, U) are computed only if `need_weights`, else they are None. A
        query that may attend to nothing receives zeros from every head. Raises ValueError for a tensor of another
        shape, and for a mask of whole numbers, which could be a boolean or a float mask.
        """
        self._check(query, key, value, key_padding_mask, attn_mask, gates)
        if not self.num_heads:  # exporters know no products of empty tensors
            weights = query.new_zeros(len(query), 0, query.shape[1], key.shape[1]) if need_weights else None
            return self.out_proj(query.new_zeros(*query.shape[:2], 0)), weights
        if attn_mask is not None and attn_mask.dim() == 3 and len(attn_mask) != len(query):
            attn_mask = attn_mask.unflatten(0, (len(query), self.num_heads))
        queries_BHTK, keys_BHUK, values_BHUK = self.project(query, key, value)
        bias = None if key_padding_mask is None else padding_bias(key_padding_mask, query.dtype)
        if attn_mask is not None:
            added = _additive(attn_mask.unsqueeze(1) if attn_mask.dim() == 3 else attn_mask, query.dtype)
            bias = added if bias is None else bias + added
        context_BHTK, weights_BHTU = self.attend(
            queries_BHTK, keys_BHUK, values_BHUK, bias, is_causal=is_causal, need_weights=need_weights
        )
        return self.merge(context_BHTK, gates), weights_BHTU

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        gates: Tensor | None,
    ) -> None:
        if query.dim() != 3:
            raise ValueError(f"query of shape {tuple(query.shape)}: must be (batch, queries, width)")
        if attn_mask is not None and attn_mask.dim() == 4:  # any of its sizes may be 1
            full = (len(query), self.num_heads, query.shape[1], key.shape[1])
            attn_mask = attn_mask.expand(
                *(n if size == 1 else size for size, n in zip(attn_mask.shape, full, strict=True))
            )
        (B, T), U, H = query.shape[:2], key.shape[1] if key.dim() == 3 else 0, self.num_heads
        allowed: dict[str, tuple[Tensor | None, tuple[tuple[int, ...], ...]]] = {
            "query": (query, ((B, T, self.q_proj.in_features),)),
            "key": (key, ((B, U, self.k_proj.in_features),)),
            "value": (value, ((B, U, self.v_proj.in_features),)),
            "key_padding_mask": (key_padding_mask, ((B, U),)),
            "attn_mask": (attn_mask, ((T, U), (B, T, U), (B * H, T, U), (B, H, T, U))),
            "gates": (gates, ((H,), (B, H))),
        }
        for name, (given, shapes) in allowed.items():
            if given is not None and given.shape not in shapes:
                named = " or ".join(map(str, dict.fromkeys(shapes)))
                raise ValueError(f"{name} of shape {tuple(given.shape)}: must be {named}")
        for name in ("key_padding_mask", "attn_mask"):
            mask = allowed[name][0]
            if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
                raise ValueError(
                    f"{name} of {mask.dtype}: must be torch.bool, True where attention is forbidden, or real numbers"
                )

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries (B, H, T, K), keys and values (B, H, U, K) of every head. One product makes all three if
        query, key and value are one tensor."""
        if query is key is value:
            queries, keys, values = project_together(query, [self.q_proj, self.k_proj, self.v_proj])
        else:
            queries, keys, values = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        return self.split(queries), self.split(keys), self.split(values)

    def split(self, x_BTW: Tensor) -> Tensor:
        """Reshape heads side by side, (B, T, H·K), to heads one by one, (B, H, T, K)."""
        return x_BTW.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def attend(
        self,
        queries_BHTK: Tensor,
        keys_BHUK: Tensor,
        values_BHUK: Tensor,
        bias: Tensor | None = None,
        *,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return every head's output c_n before gate and W_O, (B, H, T, K), and its weights (B, H, T, U) or None.

        `bias` is added to the scores and broadcasts to (B, H, T, U).
        """
        dropout = self.dropout if self.training else 0.0
        if not need_weights and not (is_causal and bias is not None):
            return F.scaled_dot_product_attention(
                queries_BHTK, keys_BHUK, values_BHUK, attn_mask=bias, dropout_p=dropout, is_causal=is_causal
            ), None
        if is_causal:
            causal_TU = causal_bias(queries_BHTK.shape[2], keys_BHUK.shape[2], queries_BHTK.dtype, queries_BHTK.device)
            bias = causal_TU if bias is None else bias + causal_TU
        if not need_weights:
            return F.scaled_dot_product_attention(queries_BHTK, keys_BHUK, values_BHUK, bias, dropout), None
        scores_BHTU = queries_BHTK @ keys_BHUK.mT / math.sqrt(self.head_dim)
        if bias is not None:
            scores_BHTU = scores_BHTU + bias
        # The softmax of a row without any open key is NaN, and so is its gradient. The fused kernel gives zeros.
        nothing_open_BHT1 = (scores_BHTU == -math.inf).all(dim=-1, keepdim=True)
        weights_BHTU = scores_BHTU.masked_fill(nothing_open_BHT1, 0.0).softmax(dim=-1)
        weights_BHTU = weights_BHTU.masked_fill(nothing_open_BHT1, 0.0)
        return F.dropout(weights_BHTU, dropout, self.training) @ values_BHUK, weights_BHTU

    def merge(self, context_BHTK: Tensor, gates: Tensor | None = None) -> Tensor:
        """Put the heads side by side, multiply each by its gate (H,) or (B, H) and project: (B, T, D)."""
        scale = self.head_scale() if gates is None else self.head_scale() * gates.unsqueeze(-2)
        context_BTW, scale = context_BHTK.transpose(1, 2).flatten(2), self._spread(scale)
        own = type(self.out_proj) is Projection
        return self.out_proj(context_BTW, scale) if own else self.out_proj(*scaled((context_BTW,), scale))

    def effective_output(self, gates_H: Tensor | None = None) -> Tensor:
        """Return W_O, (D, H·K), with the columns of each head multiplied by the gate of this head."""
        scale = self.head_scale() if gates_H is None else self.head_scale() * gates_H
        return self.out_proj.weight * self._spread(scale)

    @torch.no_grad()
    def keep_heads(self, kept: Sequence[int]) -> None:
        """Remove all heads of the layer except `kept`, in place. `kept` holds the positions of heads in the layer, and
        may be empty. Raises ValueError for a position that is not in the layer, or is there twice.

        Rows of W_Q, W_K and W_V and *columns* of W_O are cut; the bias of W_O stays, also without heads. Learned gates
        and mask are folded into W_O, so the layer has no gate any more. The new layer returns what the old layer
        returned with the gates of the removed heads at 0. Frozen weights stay frozen, and shared ones shared.
        """
        if len({*kept} & {*range(self.num_heads)}) < len(kept):
            raise ValueError(f"kept={list(kept)}: must be different numbers from 0 to {self.num_heads - 1}")
        rows = torch.arange(self.num_heads * self.head_dim, device=self.head_mask.device)
        rows = rows.unflatten(0, (-1, self.head_dim))[list(kept)].flatten()

        @cache
        def cut(weight: nn.Parameter) -> nn.Parameter:
            return nn.Parameter(weight[rows], weight.requires_grad)

        for each in (self.q_proj, self.k_proj, self.v_proj):
            each.weight, each.out_features = cut(each.weight), len(rows)
            if each.bias is not None:
                each.bias = cut(each.bias)
        columns = self.effective_output().index_select(1, rows)
        self.out_proj.weight = nn.Parameter(columns, self.out_proj.weight.requires_grad)
        del self.gate  # which may be a module
        self.out_proj.in_features, self.num_heads, self.gate = len(rows), len(kept), None
        self.head_mask = torch.ones_like(self.head_mask[: len(kept)])

    def _spread(self, scale: Tensor) -> Tensor:
        """Repeat the scale of each head, (..., H), for its K columns: (..., H·K). Then a product takes one long inner
        loop instead of many short ones."""
        return scale.unsqueeze(-1).expand(*scale.shape, self.head_dim).flatten(-2)

    def head_scale(self) -> Tensor:
        """Return the learned gate of each head times its mask, (H,)."""
        return self.head_mask if self.gate is None else self.gate() * self.head_mask


def project_together(x: Tensor, projections: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Apply several linear maps to one input. Plain projections are computed as one product, which saves calls."""
    if not all(type(projection) is Projection for projection in projections):
        return [projection(x) for projection in projections]
    together = F.linear(x, *side_by_side(projections))
    return together.split([projection.out_features for projection in projections], dim=-1)


def side_by_side(projections: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of one linear map that does the work of several maps of one input: it returns
    their outputs side by side."""
    weights: list[Tensor] = [projection.weight for projection in projections]
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    return torch.cat(weights), torch.cat(biases) if biases else None


def scaled(inputs: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of a linear module so that it multiplies what it reads by `scale`. The module is a `Projection`
    that is called with a scale of its own, or any other one, called with x alone."""
    x, *own = inputs
    return (x, own[0] * scale) if own else (x * scale,)


def padding_bias(key_padding_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias (B, 1, 1, U) that is -inf where the mask (B, U) is True."""
    return _additive(key_padding_mask, dtype)[:, None, None, :]


def causal_bias(num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a bias (T, U) that is -inf above the diagonal: a position attends to itself and to earlier ones."""
    return torch.full((num_queries, num_keys), -math.inf, dtype=dtype, device=device).triu(1)


class Projection(nn.Linear):
    """An `nn.Linear` with Xavier weights and zero bias. Its width may be zero, for which torch's own initialisation
    warns.

    A call may give a scale of its inputs, (W,) or broadcastable to them.
    """

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is not None and scale.dim() > 1:
            (x,), scale = scaled((x,), scale), None
        # A scale for all tokens: the few columns of the weight are scaled in place of the many tokens.
        return F.linear(x, self.weight if scale is None else self.weight * scale, self.bias)

    def reset_parameters(self) -> None:
        if self.weight.numel() and not self.weight.is_meta:
            nn.init.xavier_uniform_(self.weight)
        if self.bias is not None and not self.bias.is_meta:
            nn.init.zeros_(self.bias)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in the precision of the scores, to be added: -inf where a boolean mask is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)
