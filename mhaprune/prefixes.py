"""Many masks in one pass: what masks have in common is computed once.

Masks that agree on all heads up to a block share the states before it; masks that differ in a block share what its
heads put out. A head closed to g changes the block's output from that with all heads open by -(1 - g) c_n O_n.

Dimensions: M = masks, P = distinct states before a block, C = distinct states after it, B = batch, T = positions, S =
positions of a memory, H = heads of a block, K = head_dim, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mhaprune.layers import AttentionSublayer


@dataclass(frozen=True)
class Branches:
    """The distinct hidden states (P, B, T, D) of many masks at one point of a model, and which of them each mask is in
    (M,)."""

    states: Tensor
    rows: Tensor

    @classmethod
    def root(cls, state_BTD: Tensor, num_masks: int) -> Branches:
        """Before the first head all masks are in one state."""
        return cls(state_BTD[None], torch.zeros(num_masks, dtype=torch.long, device=state_BTD.device))

    def apply(self, function: Callable[[Tensor], Tensor]) -> Branches:
        """A part of the model without heads."""
        return Branches(function(self.states.flatten(0, 1)).unflatten(0, self.states.shape[:2]), self.rows)

    def attend(
        self,
        sublayer: AttentionSublayer,
        gates_MH: Tensor,
        fallback: Tensor | None = None,
        *,
        memory: Branches | None = None,
        bias: Tensor | None = None,
        is_causal: bool = False,
    ) -> Branches:
        """One attention block, of the states to themselves or to those of `memory`."""
        attention, inputs = sublayer.attention, self._paired(memory)
        if attention.num_heads == 0:
            return Branches(inputs.states + attention.out_proj.bias, inputs.rows)
        num_parents, batch = inputs.states.shape[:2]
        x_XTD = inputs.states.flatten(0, 1)
        h_XTD = sublayer.norm(x_XTD)
        if memory is None:
            keys_values = attention.project(h_XTD, h_XTD)
        else:
            memory_YSD = memory.states.flatten(0, 1)
            keys, values = attention.project(memory_YSD, memory_YSD)
            read = inputs.memory_rows
            keys_values = (_select(keys, read, batch), _select(values, read, batch))
        if bias is not None:
            bias = bias.repeat(num_parents, 1, 1, 1)
        context_XHTK, _ = attention.attend(h_XTD, *keys_values, bias, is_causal=is_causal)
        open_PBTD = (x_XTD + attention.merge(context_XHTK)).unflatten(0, (num_parents, batch))

        kinds_GH, kind_M = gates_MH.unique(dim=0, return_inverse=True)
        children_C, rows_M = (inputs.rows * len(kinds_GH) + kind_M).unique(return_inverse=True)
        origin_C, gates_CH = children_C // len(kinds_GH), kinds_GH[children_C % len(kinds_GH)]
        states_CBTD = open_PBTD[origin_C]
        context_PBHTK = context_XHTK.unflatten(0, (num_parents, batch))
        output_HKD = attention.out_proj.weight.mT.unflatten(0, (attention.num_heads, attention.head_dim))
        output_HKD = output_HKD * attention.head_scale()[:, None, None]
        for n in range(attention.num_heads):
            closed = (gates_CH[:, n] != 1).nonzero().squeeze(1)
            if len(closed):
                parents, which = origin_C[closed].unique(return_inverse=True)
                lost_PBTK = context_PBHTK[parents, :, n]
                if fallback is not None:
                    lost_PBTK = lost_PBTK - fallback.expand(batch, attention.num_heads, -1, -1)[:, n]
                lost_CBTD = (lost_PBTK @ output_HKD[n])[which]
                states_CBTD.index_add_(0, closed, lost_CBTD * (gates_CH[closed, n] - 1)[:, None, None, None])
        return Branches(states_CBTD, rows_M)

    def _paired(self, memory: Branches | None) -> _Inputs:
        """The distinct inputs of a block: states, and where it reads a memory, pairs of the two."""
        if memory is None:
            return _Inputs(self.states, self.rows, self.rows)
        pairs_P, rows_M = (self.rows * len(memory.states) + memory.rows).unique(return_inverse=True)
        return _Inputs(self.states[pairs_P // len(memory.states)], rows_M, pairs_P % len(memory.states))


@dataclass(frozen=True)
class _Inputs:
    states: Tensor
    rows: Tensor
    memory_rows: Tensor


def _select(x_YHSK: Tensor, rows_P: Tensor, batch: int) -> Tensor:
    """The rows (P·B, ...) of a tensor whose first axis is (rows, B) in one."""
    return x_YHSK.unflatten(0, (-1, batch))[rows_P].flatten(0, 1)


def lexicographic_order(rows_MN: Tensor) -> Tensor:
    """The order (M,) that sorts rows by their first column, then by their second, and so on."""
    _, order_M = rows_MN.unique(dim=0, return_inverse=True)
    return order_M.argsort(stable=True)
