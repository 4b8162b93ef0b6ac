"""Find the hidden neurons of feed-forward layers: the inputs of W_2, and the rows of W_1 that make them.

Dimensions: W = neurons of a layer.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.discovery.attention import as_named
from mhaprune.discovery.hints import why_uncut
from mhaprune.discovery.layouts import features_of, probe
from mhaprune.heads import BlockId
from mhaprune.hooks.blocks import Block, Rows, Source, name_blocks, neighbours, weight_of
from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.hooks.pytree import features_dim, is_linear
from mhaprune.surgery.record import Cut

LARGEST = 8
"""The largest number of features of one linear map that make one neuron. It is 2 for a packed gated layer."""
SITE = "neuron"
"""The site of the neurons of a model; the first word of several sites."""


def find_neurons(call: ModelCall, heads: Sequence[Block]) -> tuple[list[Block], tuple[str, ...]]:
    """Return a block for every linear map W_2 that reads no heads, and whose inputs at all positions are made one by
    one from outputs of linear maps: those of W_1 and, for a gated layer such as SwiGLU, those of the factor.

    Which rows make a neuron is told by gradients, so that any activation will do.
    Modules in between that hold numbers for each neuron, such as a convolution by channel, are cut along. The second
    value has the paths of W_2 of experts that are sent some of the tokens.
    """
    model = call.model
    outs, noted = {block.out for block in heads}, Cut.of(model) or Cut()
    paths = {module: path for path, module in model.named_modules()}
    leaves: list[tuple[str, Tensor]] = []
    made: dict[str, dict[str, Rows]] = {}
    calls = Counter[str]()
    shared: list[tuple[Tensor, dict[str, Rows]]] = []
    picked: set[str] = set()
    nodes: dict[Any, nn.Module] = {}
    between: dict[str, list[nn.Module]] = {}

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls[path := paths[module]] += 1
        x = inputs[0].movedim(features_dim(module), -1)
        picked.update([path] * _is_picked(inputs[0]))
        if path not in (*outs, *made) and "lora_" not in path:
            if not shared or shared[0][0] is not inputs[0]:  # several maps may read one tensor
                shared[:] = [(inputs[0], _rows(x, leaves, outs, least=1 if path in noted.heads else 3))]
            made[path] = shared[0][1]
            if made[path]:
                between[path] = [nodes[node] for node in _before(inputs[0]) if node in nodes]

    def passing(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            nodes[output.grad_fn] = module

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        leaf = probe(output.detach().movedim(features_dim(module), -1)).requires_grad_()
        leaves.append((paths[module], leaf))
        return leaf.movedim(-1, features_dim(module)).clone()  # which the model may write to

    with call.at_rest(gradients=True), ExitStack() as stack:
        for module in model.modules():
            if is_linear(module):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            elif not [*module.children()] and [*module.parameters()]:
                stack.callback(module.register_forward_hook(passing).remove)
        call()
    blocks, experts = [], list[str]()
    readers = {path: [out for out, rows in made.items() if path in rows] for rows in made.values() for path in rows}
    for out, rows in made.items():
        width = weight_of(model.get_submodule(out)).shape[1]
        if picked & rows.keys():
            experts.append(out)
        elif rows:
            names = tuple(range(width))
            path = _holding([out, *rows])
            made_by = tuple(Source(each, names) for each in rows.values())
            others = [other for each in rows for other in readers[each] if other != out and _share(rows, made[other])]
            also = f"{others[0]} reads the neurons of {next(iter(rows))} too" if others else ""
            facts: Any = {"names": names, "why_not": why_uncut(model, [out, *rows]) or also, "calls": calls[out]}
            facts["numbers"] = tuple(
                (f"{paths[module]}.{name}", -x.dim())
                for module in between[out]
                for name, x in (*module.named_parameters(), *module.named_buffers())
                if x.dim() and len(x) == width
            )
            block = Block(path, out, neighbours(width, width), made_by, "neuron", attends=False, **facts)
            blocks.append(as_named(block, noted))
    return blocks, tuple(experts)


def _rows(x: Tensor, leaves: Sequence[tuple[str, Tensor]], outs: Collection[str], least: int) -> dict[str, Rows]:
    """Return the linear maps that make the columns of x one by one, by their path, each with the rows that make every
    column; empty if a column depends on more, or on the output of attention, or if there are fewer than
    `least`.

    x holds all positions of one example, (1, T, W) or (T, W). The first, second and last column tell for all others.
    """
    W = x.shape[-1]
    if x.dim() < 2 or len(x.flatten(0, -2)) < 2 or least > W or not x.requires_grad:
        return {}
    if any(len(features) > LARGEST for features in _read(x, 0, leaves)):  # soon known of most
        return {}
    rows: dict[str, Rows] = {}
    for (path, leaf), *read in zip(
        leaves, *(_read(x, column, leaves) for column in (0, min(1, W - 1), W - 1)), strict=True
    ):
        first, second, last = read
        if len(first) != len(second):
            return {}
        steps = [b - a for a, b in zip(first, second, strict=False)] if W > 1 else [1] * len(first)
        by_part = [range(a, a + step * W, step) for a, step in zip(first, steps, strict=True) if step > 0]
        if any(read):
            if not first or path in outs or leaf.shape[:-1] != x.shape[:-1] or [part[-1] for part in by_part] != last:
                return {}
            rows[path] = Rows(path, tuple(zip(*by_part, strict=True)))
    return rows


PICKS = ("IndexBackward", "IndexSelectBackward", "GatherBackward", "MaskedSelectBackward", "TakeAlongDimBackward")
"""The beginnings of names of graph nodes that pick rows."""


def _is_picked(x: Any) -> bool:
    """Return whether x holds rows that were picked from more or fewer, as the tokens that an expert gets. A norm or a
    factor may come after it."""
    nodes = [x.grad_fn] if isinstance(x, Tensor) else []
    for _ in range(6):
        node: Any
        for node in filter(None, nodes):
            if node.name().startswith(PICKS):
                sizes = getattr(node, "_saved_self_sym_sizes", None) or node._saved_self.shape
                return tuple(sizes[:-1]) != tuple(x.shape[:-1])
        nodes = [next_node for node in filter(None, nodes) for next_node, _ in node.next_functions[:1]]
    return False


def _before(x: Tensor) -> list[Any]:
    """Return the nodes of the graph that x was made by."""
    found: dict[Any, None] = {}
    nodes = [x.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found[node] = None
            nodes += [before for before, _ in node.next_functions]
    return [*found]


def _share(rows: dict[str, Rows], other: dict[str, Rows]) -> bool:
    """Return whether two linear maps read rows that are the same."""
    parts = (({n for h in each[path].heads for n in h} for each in (rows, other)) for path in rows if path in other)
    return any(mine & theirs for mine, theirs in parts)


def _read(x: Tensor, column: int, leaves: Sequence[tuple[str, Tensor]]) -> list[list[int]]:
    """Return, for each of these outputs of linear maps, the features that a column of x depends on. If a column is the
    sum of a feature and something else, as a residual stream is, all features are returned: others read it too."""
    tensors = [leaf for _, leaf in leaves]
    gradients = torch.autograd.grad(x[..., column].sum(), tensors, retain_graph=True, allow_unused=True)
    read = []
    for gradient in gradients:
        features = [] if gradient is None else features_of(gradient)
        added = bool(features) and _constant(gradient[..., features])
        read.append(list(range(gradient.shape[-1])) if added else features)
    return read


def _constant(gradient: Tensor) -> bool:
    """Return whether a gradient is the same at all positions, as in a sum, also after a factor of each feature. That of
    an activation is not."""
    rows = gradient.flatten(0, -2)
    return bool((rows == rows[:1]).all())


def _holding(paths: Sequence[str]) -> str:
    """Return the path of the smallest module that holds all of these."""
    words = zip(*(path.split(".")[:-1] for path in paths), strict=False)
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, words))


def name_neurons(blocks: Sequence[Block]) -> list[BlockId]:
    """Return the names of blocks of neurons: a site that no attention layer has, and a layer."""
    names = name_blocks([block.out for block in blocks])
    several = len({name.site for name in names}) > 1
    return [BlockId(f"{SITE}.{name.site}" if several else SITE, name.layer) for name in names]
