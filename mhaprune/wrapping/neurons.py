"""Find the hidden neurons of feed-forward layers: the inputs of W_2, and the rows of W_1 that make them.

Dimensions: W = neurons of a layer.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.heads import BlockId
from mhaprune.wrapping.at_rest import at_rest, without_results
from mhaprune.wrapping.blocks import Block, Rows, Source, name_blocks, neighbours, weight_of
from mhaprune.wrapping.cuts import Cut
from mhaprune.wrapping.discovery import as_named
from mhaprune.wrapping.hints import why_uncut
from mhaprune.wrapping.layouts import probe
from mhaprune.wrapping.tensors import is_linear

LARGEST = 8
"""The largest number of features of one linear map that make one neuron. It is 2 for a packed gated layer."""
SITE = "neuron"
"""The site of the neurons of a model; the first word of several sites."""


def find_neurons(model: nn.Module, heads: Sequence[Block], run: Callable[[], Any]) -> list[Block]:
    """Return a block for every linear map W_2 that reads no heads, and whose inputs at all positions are made one by
    one from outputs of linear maps: those of W_1 and, for a gated layer such as SwiGLU, those of the factor.

    `run` calls the model with a batch. Which rows make a neuron is told by gradients, so that any activation will do.
    Experts that are sent some of the tokens are not found.
    """
    outs = {block.out for block in heads}
    paths = {module: path for path, module in model.named_modules()}
    leaves: list[tuple[str, Tensor]] = []
    made: dict[str, dict[str, Rows]] = {}
    calls = Counter[str]()
    shared: list[tuple[Tensor, dict[str, Rows]]] = []

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls[path := paths[module]] += 1
        if path not in (*outs, *made) and "lora_" not in path:
            if not shared or shared[0][0] is not inputs[0]:  # several maps may read one tensor
                shared[:] = [(inputs[0], _rows(inputs[0], leaves, outs))]
            made[path] = shared[0][1]

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        leaf = probe(output.detach()).requires_grad_()
        leaves.append((paths[module], leaf))
        return leaf.clone()  # which the model may write to

    with torch.enable_grad(), at_rest(model), without_results(model), ExitStack() as stack:
        for module in filter(is_linear, model.modules()):
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        run()
    blocks, noted = [], Cut.of(model) or Cut()
    for out, rows in made.items():
        width = weight_of(model.get_submodule(out)).shape[1]
        if rows:
            names = tuple(range(width))
            path = _holding([out, *rows])
            made_by = tuple(Source(each, names) for each in rows.values())
            facts: Any = {"names": names, "why_not": why_uncut(model, [out, *rows]), "calls": calls[out]}
            block = Block(path, out, neighbours(width, width), made_by, "neuron", attends=False, **facts)
            blocks.append(as_named(block, noted))
    return blocks


def _rows(x: Tensor, leaves: Sequence[tuple[str, Tensor]], outs: Collection[str]) -> dict[str, Rows]:
    """Return the linear maps that make the columns of x one by one, by their path, each with the rows that make every
    column; empty if a column depends on more, or on the output of attention.

    x holds all positions of one example, (1, T, W) or (T, W). The first, second and last column tell for all others.
    """
    W = x.shape[-1]
    if x.dim() < 2 or len(x.flatten(0, -2)) < 2 or W < 3 or not x.requires_grad:
        return {}
    if any(len(features) > LARGEST for features in _read(x, 0, leaves)):  # soon known of most
        return {}
    rows: dict[str, Rows] = {}
    for (path, leaf), *read in zip(leaves, *(_read(x, column, leaves) for column in (0, 1, W - 1)), strict=True):
        first, second, last = read
        steps = [b - a for a, b in zip(first, second, strict=False)]
        by_part = [range(a, a + step * W, step) for a, step in zip(first, steps, strict=True) if step > 0]
        if any(read):
            if not first or path in outs or leaf.shape[:-1] != x.shape[:-1] or [part[-1] for part in by_part] != last:
                return {}
            rows[path] = Rows(path, tuple(zip(*by_part, strict=True)))
    return rows


def _read(x: Tensor, column: int, leaves: Sequence[tuple[str, Tensor]]) -> list[list[int]]:
    """Return, for each of these outputs of linear maps, the features that a column of x depends on. If a column is the
    sum of a feature and something else, as a residual stream is, all features are returned: others read it too."""
    tensors = [leaf for _, leaf in leaves]
    gradients = torch.autograd.grad(x[..., column].sum(), tensors, retain_graph=True, allow_unused=True)
    read = []
    for gradient in gradients:
        features = [] if gradient is None else gradient.flatten(0, -2).any(dim=0).nonzero().flatten().tolist()
        added = bool(features) and bool((gradient[..., features] == 1).all())
        read.append(list(range(gradient.shape[-1])) if added else features)
    return read


def _holding(paths: Sequence[str]) -> str:
    """Return the path of the smallest module that holds all of these."""
    words = zip(*(path.split(".")[:-1] for path in paths), strict=False)
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, words))


def name_neurons(blocks: Sequence[Block]) -> list[BlockId]:
    """Return the names of blocks of neurons: a site that no attention layer has, and a layer."""
    names = name_blocks([block.out for block in blocks])
    several = len({name.site for name in names}) > 1
    return [BlockId(f"{SITE}.{name.site}" if several else SITE, name.layer) for name in names]
