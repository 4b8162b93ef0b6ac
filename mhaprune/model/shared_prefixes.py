"""Many masks in one pass; a part that several masks share is computed once.

Masks that agree on all heads before a block share the hidden states at its input. Masks that differ in a block share
the outputs of its heads: a gate g on head n changes the output of the block by -(1 - g) c_n O_n.

Dimensions: M = masks, P = distinct states before a block, C = distinct states after it, Y = distinct memories, B =
batch, T = positions, S = positions of a memory, H = heads of a block, K = head_dim, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.heads import Block
from mhaprune.model.network import AttentionSublayer, project_memory


@dataclass(frozen=True)
class Branches:
    """Many masks at one point of a model, with each distinct hidden state stored once.

    The class exists because scorers measure hundreds of masks on one batch, and most of the computation is the same for
    all of them. Masks that close the same heads up to a point have the same hidden state there. A `Branches` starts
    with one state for all masks. At each attention block, a state splits only if its masks differ in that block.

    It is immutable: each step of the model returns a new one. The two index arrays are on the CPU, so that finding
    equal states never waits for an accelerator.
    """

    states: Tensor
    """The distinct hidden states, (P, B, T, D)."""
    masks: np.ndarray
    """For each mask, its index among all masks of the pass, (M,)."""
    rows: np.ndarray
    """For each mask, the index of its state in `states`, (M,)."""
    memory: tuple[Mapping[Block, tuple[Tensor, Tensor]], np.ndarray] | None = None
    """The input of the cross-attention, with each distinct output of the encoder stored once: the keys and values of
    each block, (Y, B, H, S, K) each, and the row of Y that each mask reads, (M,). None before the decoder."""

    @classmethod
    def root(cls, state_BTD: Tensor, num_masks: int) -> Branches:
        """Return the start of the tree of masks: before the first head, all masks share one state."""
        return cls(state_BTD[None], np.arange(num_masks), np.zeros(num_masks, dtype=int))

    def apply(self, function: Callable[[Tensor], Tensor]) -> Branches:
        """Return the branches after a part of the model that has no heads; the part is applied to each state."""
        return replace(self, states=function(self.states.flatten(0, 1)).unflatten(0, self.states.shape[:2]))

    def remember(self, sublayers: Sequence[AttentionSublayer], state_BTD: Tensor) -> Branches:
        """Begin the decoder: all masks share one new state, and `sublayers` attend to the states of the encoder."""
        keys_values = {}
        memories = project_memory(self.states.flatten(0, 1), sublayers)
        for sublayer, projected in zip(sublayers, memories, strict=True):
            if projected is None:
                continue
            keys, values = (x.unflatten(0, self.states.shape[:2]) for x in projected)
            keys_values[sublayer.block] = keys, values
        return Branches(state_BTD[None], self.masks, np.zeros_like(self.rows), (keys_values, self.rows))

    def split(self, at_most: int) -> Iterator[Branches]:
        """Yield parts of these branches, each with at most `at_most` states."""
        for start in range(0, len(self.states), at_most):
            here = (self.rows >= start) & (self.rows < start + at_most)
            memory = self.memory and (self.memory[0], self.memory[1][here])
            yield Branches(self.states[start : start + at_most], self.masks[here], self.rows[here] - start, memory)

    def attend(
        self,
        sublayer: AttentionSublayer,
        gates: np.ndarray,
        fallback: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        is_causal: bool = False,
    ) -> Branches:
        """Apply one attention block under gates (all masks, H). The states attend to the memory of the block if there
        is one, otherwise to themselves. `bias` (B, 1, 1, S) is added to the scores."""
        attention = sublayer.attention
        if attention.num_heads == 0:
            return replace(self, states=self.states + attention.out_proj.bias)
        keys_values, memories_M = self.memory or ({}, self.rows)
        if sublayer.block not in keys_values:
            parents_M, x_PBTD = self.rows, self.states
            context_PBHTK = _attend(sublayer, x_PBTD, bias, is_causal=is_causal)
        else:
            keys, values = keys_values[sublayer.block]
            pairs_P, parents_M = np.unique(self.rows * len(keys) + memories_M, return_inverse=True)
            x_PBTD = _take(self.states, pairs_P // len(keys))
            context_PBHTK = _cross_attend(sublayer, x_PBTD, keys, values, pairs_P % len(keys), bias)
        open_PBTD = x_PBTD + attention.merge(context_PBHTK.flatten(0, 1)).unflatten(0, context_PBHTK.shape[:2])
        kinds_GH, kind_M = np.unique(gates[self.masks], axis=0, return_inverse=True)
        children_C, rows_M = np.unique(parents_M * len(kinds_GH) + kind_M, return_inverse=True)
        origin_C, gates_CH = children_C // len(kinds_GH), kinds_GH[children_C % len(kinds_GH)]
        states_CBTD = _closed(attention, open_PBTD, context_PBHTK, origin_C, gates_CH, fallback)
        return replace(self, states=states_CBTD, rows=rows_M)


def depth_first(root: Branches, steps: Sequence[Callable[[Branches], Branches]], at_most: int) -> Iterator[Branches]:
    """Yield the branches after the last step, in parts.

    Each step takes at most `at_most` states at once. A part is run to its end before the next one starts, so that the
    current states are few and stay in the processor's cache.
    """
    todo = [(0, root)]
    while todo:
        done, branches = todo.pop()
        if len(branches.states) > at_most:
            todo += [(done, part) for part in branches.split(at_most)]
        elif done < len(steps):
            todo.append((done + 1, steps[done](branches)))
        else:
            yield branches


def _attend(sublayer: AttentionSublayer, x_PBTD: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
    bias = None if bias is None else bias.repeat(len(x_PBTD), 1, 1, 1)
    return sublayer.attend(x_PBTD.flatten(0, 1), bias=bias, **how).unflatten(0, x_PBTD.shape[:2])


def _cross_attend(
    sublayer: AttentionSublayer, x_PBTD: Tensor, keys: Tensor, values: Tensor, read_P: np.ndarray, bias: Tensor | None
) -> Tensor:
    if len(set(read_P.tolist())) == 1:
        # All states attend to one memory, so they are computed as one longer text.
        x_BXD = x_PBTD.transpose(0, 1).flatten(1, 2)
        context_BHXK = sublayer.attend(x_BXD, (keys[read_P[0]], values[read_P[0]]), bias)
        return context_BHXK.unflatten(2, (len(x_PBTD), -1)).permute(2, 0, 1, 3, 4)
    keys_values = tuple(_take(x, read_P).flatten(0, 1) for x in (keys, values))
    return _attend(sublayer, x_PBTD, bias, keys_values=keys_values)


def _closed(
    attention: MultiHeadAttention,
    open_PBTD: Tensor,
    context_PBHTK: Tensor,
    origin_C: np.ndarray,
    gates_CH: np.ndarray,
    fallback: Tensor | None,
) -> Tensor:
    """Compute the states after a block, (C, B, T, D), where some of its heads are closed, wholly or in part.

    State c starts as row `origin_C[c]` of `open_PBTD`, in which all heads are open. The contribution of each closed
    head is subtracted. With a `fallback`, the contribution of the fallback is added instead.
    """
    child_X, head_X = (gates_CH != 1).nonzero()
    if len(child_X) == 0:
        return _take(open_PBTD, origin_C)
    heads, shape = attention.num_heads, open_PBTD.shape[1:]
    lost_U, which_X = np.unique(origin_C[child_X] * heads + head_X, return_inverse=True)
    lost_UBTK = context_PBHTK[lost_U // heads, :, lost_U % heads]
    if fallback is not None:
        lost_UBTK = lost_UBTK - fallback.expand(shape[0], heads, -1, -1).transpose(0, 1)[lost_U % heads]
    output_HKD = attention.effective_output().mT.unflatten(0, (heads, -1))
    lost_UXD = lost_UBTK.flatten(1, 2) @ output_HKD[lost_U % heads]
    weights_CU = np.zeros((len(origin_C), len(lost_U)))
    weights_CU[child_X, which_X] = gates_CH[child_X, head_X] - 1
    weights = torch.from_numpy(weights_CU).to(lost_UXD)
    return torch.addmm(_take(open_PBTD, origin_C).flatten(1), weights, lost_UXD.flatten(1)).unflatten(1, shape)


def _take(x_P: Tensor, rows: np.ndarray) -> Tensor:
    """Return these rows of a tensor. If they are all rows in order, return the tensor itself, without a copy."""
    return x_P if np.array_equal(rows, np.arange(len(x_P))) else x_P[rows]
