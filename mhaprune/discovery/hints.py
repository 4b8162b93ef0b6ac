"""Messages on attention that was not found, and checks of attention that is named by hand."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.discovery.layouts import LORA
from mhaprune.hooks.blocks import ROLES, Block, Unsupported, within
from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.hooks.pytree import is_linear, mapped, tensors_in

OUT = ("out_proj", "o_proj", "to_out", "out", "c_proj", "dense", "wo", "w_o", "proj", "fc_o", "o")
"""Usual names of W_O."""


HEADS = ("num_heads", "n_heads", "heads", "n_head", "nhead", "num_attention_heads", "h")
"""Usual names of the number of heads."""
MADE_BY = tuple(
    tuple(
        form.format(each)
        for each in (role[0], role)
        for form in ("{}", "{}_proj", "to_{}", "w_{}", "w{}", "fc_{}", "{}_lin")
    )
    for role in ROLES
)
"""Usual names of the maps that make queries, keys and values."""
FUSED = ("qkv", "to_qkv", "qkv_proj", "in_proj", "c_attn", "wqkv", "query_key_value")
"""Usual names of one map that makes all three, one after the other."""


def unseen(model: nn.Module, blocks: Sequence[Block], overlooked: Collection[str] = ()) -> list[str]:
    """Return the paths of modules that belong to no block: those that were seen to attend, and those that are attention
    by name or class."""
    found = [block.path for block in blocks]
    left = [path for path, _ in _named_attention(model) if not any(within(path, f) or within(f, path) for f in found)]
    left = list(dict.fromkeys([*left, *overlooked]))
    return [path for path in left if not any(other != path and within(other, path) for other in left)]


def _named_attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that contain two matrices and are attention by the name of the module or of its class."""
    for path, module in model.named_modules():
        matrices = sum(parameter.dim() > 1 for parameter in module.parameters()) > 1
        names = path.rpartition(".")[-1].lower(), type(module).__name__.lower()
        if matrices and any(word in name for word in ("attn", "attention") for name in names):
            yield path, module


def nothing_found(model: nn.Module, called: Collection[str], overlooked: Collection[str] = ()) -> str:
    """Return the error message for a model without attention, with an example of `blocks=` filled in as far as
    possible. `called` are the paths of the linear modules that are called, `overlooked` those of modules that weigh
    positions in another way."""
    named = dict(_named_attention(model)) | {path: model.get_submodule(path) for path in overlooked if path}
    linear = {
        path: [name for name, part in module.named_modules() if name and is_linear(part)]
        for path, module in named.items()
    }
    usual = {path: [name for name in names if _own_name(name).lower() in OUT] for path, names in linear.items()}
    likely = usual if any(usual.values()) else linear
    linear = {path: [name for name in names if f"{path}.{name}" in called] for path, names in likely.items()}
    linear = {path: names for path, names in linear.items() if names}
    inner = [path for path in linear if not any(other != path and within(other, path) for other in linear)]
    message = (
        f"{type(model).__name__}: no attention found: no call of F.scaled_dot_product_attention, of the attention"
        " interface of transformers or of nn.MultiheadAttention, and no softmax between two products of matrices"
        " (matmul, bmm or einsum). "
    )
    if overlooked:
        message += f"{', '.join(path or 'the model' for path in overlooked)}: weighs positions in another way. "
    message += "Name the blocks by hand"
    if not inner:
        return f'{message}: blocks=[AttentionBlock("PATH", out="NAME OF W_O", heads=NUMBER)]'
    out = linear[inner[-1]][-1]
    named = {path: named[path] for path in inner if out in linear[path]}
    counts = {_heads_named(module) for module in named.values()}
    heads = counts.pop() if len(counts) == 1 else "NUMBER"
    paths = ", ".join(f'"{path}"' for path in named)
    made_by = {_made_by(module, out, heads) for module in named.values()}
    sources = made_by.pop() if len(made_by) == 1 else ""
    block = f'AttentionBlock(path, out="{out}", heads={heads}{sources})'
    return f"{message}, for example: blocks=[{block} for path in [{paths}]]"


def _own_name(path: str) -> str:
    """Return the last name in a path that is no place in a list, as `nn.Sequential` has them."""
    return next((name for name in reversed(path.split(".")) if not name.isdecimal()), path)


def _heads_named(module: nn.Module) -> str:
    """Return the number of heads that an attribute of a module holds, as a text; NUMBER if there is none."""
    kept = [item for part in module.modules() for item in vars(part).items() if type(item[1]) is int]
    named = [str(value) for name, value in kept if name in HEADS]
    others = [str(value) for name, value in kept if "heads" in name and "dim" not in name and "width" not in name]
    return next(iter(named + others), "NUMBER")


def _made_by(module: nn.Module, out: str, heads: str) -> str:
    """Return the arguments of `AttentionBlock` that name where queries, keys and values are made, with a comma before
    them; an empty text if the names and widths of the linear modules do not tell."""
    maps: dict[str, Any] = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    width = maps[out].in_features if out in maps else 0
    wide = {name: part.out_features for name, part in maps.items() if name != out}
    apart = [next((name for name in wide if name.rpartition(".")[2].lower() in names), "") for names in MADE_BY]
    if all(apart) and wide[apart[0]] == width:
        return "".join(f', {role}="{name}"' for role, name in zip(ROLES, apart, strict=True))
    fused = [name for name, size in wide.items() if size == 3 * width and name.rpartition(".")[2].lower() in FUSED]
    if len(fused) != 1 or not heads.isdecimal() or width % int(heads):
        return ""
    each = f'Rows.part(f"{{path}}.{fused[0]}", PART, 3, {heads}, {width // int(heads)})'
    return "".join(f", {role}={each.replace('PART', str(n))}" for n, role in enumerate(ROLES))


def why_uncut(model: nn.Module, paths: Sequence[str]) -> str:
    """Return the reason why one of these linear modules cannot be cut; an empty text if all can."""
    for path in paths:
        module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
        if hasattr(parent, "lora_A"):
            return f"{path} is {LORA}"
        if not isinstance(vars(module)["_parameters"].get("weight"), Tensor):
            return (
                f"the weight of {path} is computed from others; make it plain first, by remove_parametrizations or"
                " remove_weight_norm of torch.nn.utils, or by prune.remove"
            )
    return ""


def check_attention(call: ModelCall, blocks: Sequence[Block]) -> None:
    """Raise `Unsupported` for a block named by hand whose W_O reads nothing from other positions, or other inputs, of
    the module: then it is no attention."""
    inputs: dict[str, list[Tensor]] = {}
    read: dict[str, Tensor] = {}

    def enter(module: nn.Module, given: Any, named: Any, path: str) -> Any:
        if path in inputs:
            return None
        leaves = mapped((given, named), lambda x: x.detach().requires_grad_() if x.is_floating_point() else x)
        inputs[path] = [x for x in tensors_in(leaves) if x.requires_grad]
        return leaves

    def reading(module: nn.Module, given: Any, path: str) -> None:
        read.setdefault(path, given[0])

    with call.at_rest(gradients=True), ExitStack() as stack:
        for block in blocks:
            module, out = call.model.get_submodule(block.path), call.model.get_submodule(block.out)
            hook = module.register_forward_pre_hook(partial(enter, path=block.path), with_kwargs=True)
            stack.callback(hook.remove)
            hook = out.register_forward_pre_hook(partial(reading, path=block.path))
            stack.callback(hook.remove)
        call()
    for block in blocks:
        if block.path not in read:
            raise Unsupported(f"blocks: {block.out} is not called")
        x = read[block.path]
        leaves = inputs.get(block.path, [])
        if x.dim() < 3 or x.shape[1] < 2 or not leaves or not x.requires_grad:
            continue  # with one position, or tokens one after the other, nothing can be said
        reads = False
        for t, others in ((-1, slice(None, -1)), (0, slice(1, None))):
            gradients = torch.autograd.grad(x[:, t].square().sum(), leaves, retain_graph=True, allow_unused=True)
            elsewhere = (g[:, others] if g.shape[:2] == x.shape[:2] else g for g in gradients if g is not None)
            reads = reads or any(bool(each.any()) for each in elsewhere)
        if not reads:
            raise Unsupported(
                f"blocks: {block.out} is no output projection of attention: at each position it reads only this one"
            )
