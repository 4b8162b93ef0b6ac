"""Find tensors that hold a part for each head: position biases, slopes, factors.

They are found by gradients: the output of head h depends on index h of one dimension, and on nothing else.

Dimensions: B = batch, H = heads, T = queries, K = head_dim.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.discovery.layouts import Leaves, drawn
from mhaprune.hooks.blocks import within
from mhaprune.hooks.eval_mode import ModelCall, attributes_kept
from mhaprune.surgery.copying import copied

RUNNING = ("running_mean", "running_var")
"""The buffers of a norm over the batch, which take no gradients; they go with its weight."""
ROUNDED = 1e-5
"""The largest derivative that may be rounding."""
SMALL = 2**12
"""The largest size of a parameter that may hold a part for each head and be clamped."""


class Followed:
    """Tensors that are no outputs of linear modules and that gradients lead to during one call of a model."""

    def __init__(self, seen: Callable[[Tensor], Tensor] | None = None) -> None:
        self.seen = seen
        """Replaces the numbers of small parameters during the call; None to leave them."""
        self.stored: dict[str, Tensor] = {}
        """The parameters, buffers and other tensors of modules, by their path."""
        self.tables: list[Tensor] = []
        """The weights of embeddings."""
        self._given: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Arguments and their copies with a gradient, by identity and version."""

    def store(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        """Follow the parameters, buffers and tensors that are plain attributes of a module, until the stack is closed
        and, of these, `attributes_kept` ends."""
        plain = [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False), *plain]:
            if not tensor.is_floating_point() or name in RUNNING:
                if not isinstance(tensor, nn.Parameter):
                    setattr(module, name, tensor.clone())
                continue
            if isinstance(tensor, nn.Parameter) and self.seen and tensor.numel() <= SMALL:
                stack.callback(setattr, module, name, tensor)
                tensor = nn.Parameter(self.seen(tensor.detach()))
                setattr(module, name, tensor)
            elif isinstance(tensor, nn.Parameter):
                stack.callback(tensor.requires_grad_, False)
                tensor.requires_grad_()
            else:
                tensor = tensor.detach().requires_grad_().clone()  # which the model may write to
                setattr(module, name, tensor)
            self.stored[f"{path}.{name}" if path else name] = tensor
            self.tables += [tensor] if isinstance(module, nn.Embedding) else []

    def given(self, x: Any) -> Any:
        """Return an argument of a module. A tensor that could have a dimension of heads is returned with a gradient."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 3 or x.requires_grad:
            return x
        return self._given.setdefault((id(x), x._version), (x, x.detach().requires_grad_().clone()))[1]

    def states(self, leaves: Leaves) -> list[Tensor]:
        """Return what the model has computed, as far as gradients lead to it: the outputs of linear modules, arguments,
        and tables of embeddings."""
        return [*(leaf for _, leaf in leaves), *(copy for _, copy in self._given.values()), *self.tables]

    def parts(self, heads: Tensor) -> dict[str, int]:
        """Return the tensors of modules, by their path, that make these heads, (B, H, T, K), with the dimension of the
        heads: as where code multiplies with a parameter of its own."""
        made = [each for each in self.stored.items() if each[1].dim() > 1 and heads.requires_grad]
        tensors = [tensor for _, tensor in made]
        read = torch.autograd.grad(heads.sum(), tensors, retain_graph=True, allow_unused=True) if made else ()
        made = [each for each, gradient in zip(made, read, strict=True) if gradient is not None]
        dims, _ = dimensions_of_heads([heads], [tensor for _, tensor in made])
        return {name: dim for (name, _), dim in zip(made, dims, strict=True) if dim is not None}

    def biases_in(self, path: str) -> list[Tensor]:
        """Return the biases, as of norms, of a module."""
        return [x for name, x in self.stored.items() if name.endswith(("bias", "beta")) and within(name, path)]


def dimensions_of_heads(
    computed: Sequence[Tensor], tensors: Sequence[Tensor], of: Sequence[int] = ()
) -> tuple[list[int | None], bool]:
    """Return for each tensor the dimension that the heads share, or None. Each head reads a part of its own, or the
    part with the number `of[h]`; all parts are equally long and stand side by side. The dimension is counted from the
    last, which is -1.

    The second value is False if a tensor with a part for each head is read, but changes nothing, as one that is
    clamped.

    `computed` holds what each head computes, all (B, H, T, K), such as queries and outputs.
    """
    H = computed[0].shape[1]
    own_HP = torch.eye(H, dtype=torch.bool)[list(of or range(H))]  # the part that each head may read
    own_HP = own_HP[:, own_HP.any(dim=0)]
    P = own_HP.shape[1]
    computed = [x for x in computed if x.shape[1] == H > 1 and x.requires_grad]
    dims = [(n, dim) for n, x in enumerate(tensors) for dim in range(-x.dim(), 0)] if computed else []
    places = [(n, dim) for n, dim in dims if tensors[n].shape[dim] % P == 0]
    if not places:
        return [None] * len(tensors), True
    rows: list[Tensor] = []
    joined = torch.stack([x.sum() for x in computed]).sum()
    read = torch.autograd.grad(joined, tensors, retain_graph=True, allow_unused=True)
    flat = [n for n, gradient in enumerate(read) if gradient is not None and not gradient.any()]
    weights = [drawn(x[:, 0]) + 0.5 for x in computed]  # without them, parts could cancel
    for h in range(H):
        of_head = torch.stack([(x[:, h] * each).sum() for x, each in zip(computed, weights, strict=True)]).sum()
        gradients = torch.autograd.grad(of_head, tensors, retain_graph=True, materialize_grads=True)
        rows.append(torch.stack([gradients[n].movedim(dim, 0).reshape(P, -1).any(dim=1) for n, dim in places]))
    found: list[int | None] = [None] * len(tensors)
    for (n, dim), reads_HP in zip(places, torch.stack(rows, dim=1), strict=True):
        if reads_HP.any() and not reads_HP[~own_HP.to(reads_HP.device)].any():
            found[n] = dim
    return found, not any(P in tensors[n].shape and found[n] is None for n in flat)


def with_running(model: nn.Module, name: str, dim: int) -> list[tuple[str, int]]:
    """Return the name of a tensor with a part for each head and its dimension, and those of the running numbers of a
    norm over the batch, which go with its weight."""
    owner, _, last = name.rpartition(".")
    kept = vars(model.get_submodule(owner))["_buffers"] if last == "weight" else {}
    return [(name, dim), *((f"{owner}.{each}", dim) for each in RUNNING if kept.get(each) is not None)]


def made_in_calls(call: ModelCall, path: str) -> bool:
    """Return whether the module that holds a tensor, given by its path, computes it anew where it is missing or empty,
    in a call or in `train()`. It would then compute it for all heads after a removal, as slopes that are cached. The
    tensor is taken away for the time of the trial."""
    owner, _, name = path.rpartition(".")
    module = call.model.get_submodule(owner)
    held = getattr(module, name)
    for less in () if isinstance(held, nn.Parameter) else (None, held.new_empty([0] * held.dim())):
        if type(module).train is not nn.Module.train:
            twin = copied(module)  # it may do more, such as merge weights
            setattr(twin, name, less)
            with suppress(Exception):
                twin.train(module.training)
            if isinstance(now := getattr(twin, name, None), Tensor) and now.numel():
                return True
        with attributes_kept(call.model):
            setattr(module, name, less)
            with suppress(Exception), call.at_rest():  # of a model that may be anybody's
                call.first()
            if isinstance(now := getattr(module, name), Tensor) and now.numel():
                return True
    return False


def factor_of_values(value: Tensor, leaf: Tensor, rows: Sequence[Sequence[int]], of: Sequence[int]) -> Tensor | None:
    """Return the number by which the values of each head, (B, H, T, K), are multiplied after the linear module with the
    output `leaf` that makes them by the rows `rows[of[h]]`, or by all if those are empty, (H,); None if it is not one
    number for each head."""
    if not rows or {*of} != {*range(len(rows))} or len({*map(len, rows)}) > 1:  # none, of a silent head
        return None
    firsts = [of.index(part) for part in range(len(rows))] if any(rows) else [0]  # parts may be repeated
    (slope,) = torch.autograd.grad(
        value[:, firsts].sum(), leaf, retain_graph=True, create_graph=True, allow_unused=True
    )
    if slope is None or not slope.requires_grad:
        return None
    by_part = torch.stack([slope[..., list(each) or slice(None)].flatten() for each in rows])
    return by_part[list(of), 0] if torch.equal(by_part, by_part[:, :1].expand_as(by_part)) else None


def inner_factor(said: Callable[[Tensor], Tensor], value: Tensor, own: Tensor | None) -> Tensor | None:
    """Return the number by which the values of each head, (B, H, T, K), or its weights are multiplied, (H,): the output
    of a head for values that are all `own`, or 1. `said` returns the outputs of all heads for values. None if it is not
    one number for each head."""
    ones = torch.ones_like(value)
    out = said(ones if own is None else ones * own.view(1, -1, 1, 1))
    by_head = out.movedim(1, 0).flatten(1)
    if not out.requires_grad or not torch.allclose(by_head, by_head[:, :1].expand_as(by_head)):
        return None
    factor = by_head[:, 0]
    rounded = factor.detach() - 1
    return factor - rounded.where(rounded.abs() < ROUNDED, 0)  # the weights of a softmax sum to 1, but for rounding


def is_sum(x: Tensor, contexts: Sequence[Tensor], constant: bool = True) -> bool | None:
    """Return whether x, the input of a linear module, is the outputs of heads, `contexts` of one call or several, plus
    states that differ between positions, as a residual stream: then no gate at x closes the heads alone. If not
    `constant`, what is the same at all positions counts too. None behind a norm or an activation, whose derivatives
    say nothing about sums."""
    if not x.numel():
        return False
    u = torch.ones_like(x, requires_grad=True)
    slopes = torch.autograd.grad(x, contexts, grad_outputs=u, create_graph=True)
    bent = [
        torch.autograd.grad(s.sum(), contexts, retain_graph=True, allow_unused=True) for s in slopes if s.requires_grad
    ]
    if any(each is not None for of_one in bent for each in of_one):
        return None
    said = torch.stack([(slope * context.detach()).sum() for slope, context in zip(slopes, contexts, strict=True)])
    (of_heads,) = torch.autograd.grad(said.sum(), u, retain_graph=True)
    rest = (x - of_heads).detach().flatten(0, -2)
    rest = rest[of_heads.flatten(0, -2).any(dim=-1)]  # x may hold other heads at other positions
    return differs(rest if constant and len(rest) > 1 else torch.cat((torch.zeros_like(rest[:1]), rest)), x)


def differs(states: Tensor, x: Tensor) -> bool:
    """Return whether states, (N, W), are not all the same, but for rounding in numbers as large as those of x."""
    size = float(x.detach().abs().nan_to_num(0, 0, 0).max())
    return not torch.allclose(states, states[:1].expand_as(states), atol=1e-5 * size, rtol=0, equal_nan=True)


def learned_factor(
    x: Tensor, context: Tensor, heads_dim: int, tensors: Sequence[Tensor], inner: Tensor | None = None
) -> tuple[Tensor | None, list[bool]]:
    """Return the number by which a layer multiplies the output of each head, (H,), and for each of these tensors
    whether the number depends on it.

    It is the derivative of the input x of W_O in the outputs of the heads, `context`, if that is one number for each
    head, times an `inner_factor`; else None.
    """
    grad = partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    (slope,) = grad(x.sum(), context, create_graph=True)
    by_place = slope.movedim(heads_dim, 0).flatten(1, 2)  # (H, B·T, K)
    read = by_place.detach().any(dim=-1).any(dim=0)  # x may hold only some of the positions
    by_head = (by_place[:, read] if read.any() else by_place).flatten(1)
    if not torch.equal(by_head, by_head[:, :1].expand_as(by_head)):
        return None, [False] * len(tensors)
    factor = by_head[:, 0] if inner is None else by_head[:, 0] * inner
    weights = drawn(factor) + 0.5  # without them, the factors of a softmax would cancel
    slopes = grad((factor * weights).sum(), tensors) if factor.requires_grad and tensors else [None] * len(tensors)
    # The sum of the weights of a softmax depends on its scores by rounding alone.
    depends = [each is not None and (inner is None or bool((each.abs() > ROUNDED).any())) for each in slopes]
    return factor.detach(), depends
