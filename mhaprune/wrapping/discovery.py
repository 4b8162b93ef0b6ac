"""Find the blocks of heads of a model by running it once and following gradients.

The output of every linear module is detached from the graph and made a leaf. So the gradient of a head's query leads to
the nearest linear module only, and its non-zero columns are the rows that make the head. In the same way, the next
linear module that reads the heads' outputs is W_O. This finds fused, interleaved and grouped layouts without a table of
models.

Dimensions: B = batch, T = queries, U = keys, H = query heads, G = key-value heads, K = head_dim, W = inputs of W_O.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.wrapping.blocks import AttentionBlock, Rows, Unsupported, block_of, neighbours, within
from mhaprune.wrapping.cuts import Cut
from mhaprune.wrapping.hints import nothing_found
from mhaprune.wrapping.interception import Attend, AttentionCalls, attention_interface
from mhaprune.wrapping.numbers import Followed, dimensions_of_heads
from mhaprune.wrapping.replay import at_rest, is_linear

NOTHING = "made by no linear module"
LORA = "adapted by LoRA; call merge_and_unload() on the model first"
REMEMBERED = 32
"""Number of linear modules that are remembered, the most recently called ones. The source of queries, keys and values
is searched among them."""


@dataclass
class _Found:
    """Facts about one attention call that discovery has seen."""

    module: nn.Module
    heads: int
    of_kv: tuple[int, ...]
    rows: dict[str, Rows | str] = field(default_factory=dict)
    """The rows of the linear modules that make each head's query, key and value, by these names; or a text that says
    why they were not found."""
    context: Tensor | None = None
    """The heads' outputs as a leaf, (B, H, T, K), or (B, T, H, K) if `heads_last`."""
    heads_last: bool = False
    out: nn.Module | None = None
    columns: tuple[tuple[int, ...], ...] = ()
    cross: bool = False
    numbers: list[tuple[str, int]] = field(default_factory=list)
    """See `AttentionBlock.numbers`."""
    inputs: list[tuple[int | str, int]] = field(default_factory=list)
    """See `AttentionBlock.inputs`."""


def discover(model: nn.Module, call: Callable[[nn.Module], object]) -> list[AttentionBlock]:
    """Return the blocks in the order in which `call` runs them. Raises `Unsupported`, naming module and reason.

    Attention is found if it calls `F.scaled_dot_product_attention` or the attention interface of transformers, if it is
    two matrix products with a softmax between them, or if it is a `MultiHeadAttention`.
    """
    for numbers in (True, False):
        trace = _Trace(model)
        try:
            with torch.enable_grad(), at_rest(model), trace.watching(numbers):
                call(model)
            break
        except RuntimeError:  # of code that takes no gradients with respect to its own tensors
            if not numbers:
                raise
    blocks: dict[str, AttentionBlock] = {}
    noted = Cut.of(model) or Cut()
    for found in trace.found:
        path = trace.paths[found.module]
        if found.out is None:
            raise Unsupported(
                f"{path} ({type(found.module).__name__}): no linear module that is called reads what its heads say"
            )
        rows: dict[str, Any] = {name: rows for name, rows in found.rows.items() if isinstance(rows, Rows)}
        facts: dict[str, Any] = {"columns": found.columns, "of_kv": found.of_kv, "cross": found.cross}
        facts["others"] = tuple(rows.pop(name) for name in sorted({*rows} - {"query", "key", "value"}))
        facts |= {"numbers": tuple(found.numbers), "inputs": tuple(found.inputs)}
        why_not = (f"its {'factor' if n == 'gate' else n} is {r}" for n, r in found.rows.items() if isinstance(r, str))
        facts["why_not"] = next(why_not, "")
        if hasattr(model.get_submodule(trace.paths[found.out].rpartition(".")[0]), "lora_A"):
            facts["why_not"] = f"its W_O is {LORA}"
        facts["names"] = tuple(range(found.heads))
        block = AttentionBlock(path, trace.paths[found.out], found.heads, whole=True, **facts, **rows)
        blocks.setdefault(path, as_named(block, noted))  # a shared layer is called again: the same heads
    if not blocks:
        raise Unsupported(nothing_found(model, trace.read))
    return list(blocks.values())


def as_named(block: AttentionBlock, cut: Cut) -> AttentionBlock:
    """Return the block with the names that its heads had before an earlier removal. A silent head does not count."""
    names = cut.heads.get(block.path)
    if names is None or not block.heads:
        return block
    if not names:
        silent = len(block.columns[0])
        return replace(block, heads=0, columns=(), of_kv=(), query=Rows("", ()), names=(), silent=silent)
    return replace(block, names=tuple(names))


class _Trace:
    """A recorder of one call of the model: hooks, patches, and the attention calls that they found."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.running: list[nn.Module] = []
        self.leaves: list[tuple[nn.Module, Tensor]] = []
        self.found: list[_Found] = []
        self.read: dict[str, Tensor] = {}
        """The last input of each linear module, by its path."""
        self.inside = False
        self.followed = Followed()
        self.given: dict[nn.Module, dict[int | str, Any]] = {}
        """The arguments of the last call of each module, by place or name."""

    @contextmanager
    def watching(self, numbers: bool = True) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                if numbers and not is_linear(module):
                    self.followed.store(path, module, stack)
                handles = [module.register_forward_pre_hook(self._enter, with_kwargs=True)]
                if is_linear(module):
                    handles.append(module.register_forward_hook(self._leaf))
                handles.append(module.register_forward_hook(self._leave))
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(attention_interface(self._of_interface))
            stack.enter_context(_WeightsInUse(self))
            stack.enter_context(AttentionCalls(self._of_call))
            yield

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self.running.append(module)
        if is_linear(module):
            if inputs:
                self.read[self.paths[module]] = inputs[0]
                self._reads(module, inputs[0])
            return None
        given = self.followed.given
        inputs, named = tuple(map(given, inputs)), {name: given(x) for name, x in named.items()}
        self.given[module] = dict(enumerate(inputs)) | named
        return inputs, named

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.running.pop()

    def _leaf(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not isinstance(output, Tensor):  # a router, which returns more
            return output
        leaf = output.detach().requires_grad_()
        self.leaves = [*self.leaves[-REMEMBERED:], (module, leaf)]
        return leaf.clone()  # what comes next may work in place

    def _of_interface(self, attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Any:
        found = self._begin(module, query, key, value)
        self.inside = True
        out, *others = attend(query.detach(), key.detach(), value.detach())
        self.inside = False
        self._find_numbers(found, [out.transpose(1, 2), query, key, value])
        found.context, found.heads_last = out.detach().requires_grad_(), True  # (B, T, H, K)
        return (found.context, *others)

    def _of_call(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Any:
        if query.dim() == 3 and len(query) > 1:  # of one example, so that only heads are in this dimension
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            return self._of_call(lambda *each: attend(*(x[0] for x in each))[None], query, key, value, options)[0]
        if self.inside or query.dim() != 4 or not self.running:
            return attend(query, key, value)
        found = self._begin(self.running[-1], query, key, value)
        out = attend(query.detach(), key.detach(), value.detach())
        self._find_numbers(found, [out, query, key, value])
        found.context = out.detach().requires_grad_()  # (B, H, T, K)
        return found.context.clone()

    def _begin(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> _Found:
        H, G = query.shape[1], key.shape[1]
        of_kv = getattr(module, "kept_of_kv", None) or [h * G // H for h in range(H)]
        rows = {"query": self._source(query), "key": self._source(key), "value": self._source(value)}
        return self._add(_Found(module, H, tuple(of_kv), rows))

    def _add(self, found: _Found) -> _Found:
        made = [self.read.get(rows.path) for rows in found.rows.values() if isinstance(rows, Rows)]
        found.cross = len(made) == 3 and made[0] is not None and any(x is not made[0] for x in made)
        self.found.append(found)
        return found

    def _find_numbers(self, found: _Found, computed: Sequence[Tensor]) -> None:
        """Record the tensors that hold a part for each head: parameters and buffers of the module, outputs of linear
        modules in it, and its arguments."""
        H, path, given = found.heads, self.paths[found.module], self.given.get(found.module, {})
        made = {rows.path for rows in found.rows.values() if isinstance(rows, Rows)}
        leaves = [(self.paths[module], leaf) for module, leaf in self.leaves if within(self.paths[module], path)]
        heads = [(module, leaf) for module, leaf in self.leaves if self.paths[module] in made]
        inputs = ((key, x) for key, x in given.items() if isinstance(x, Tensor) and x.requires_grad and H in x.shape)
        known: list[tuple[Any, Any, Tensor]] = [
            *((found.numbers, name, x) for name, x in self.followed.stored.items() if within(name, path)),
            *((found.rows, name, leaf) for name, leaf in leaves if name not in made),
            *((found.inputs, key, x) for key, x in inputs if not self._reached(x.sum(), heads)),
        ]
        dims = dimensions_of_heads(computed, [x for *_, x in known])
        for (where, name, x), dim in zip(known, dims, strict=True):
            if where is found.rows and dim == -1:
                where[name] = Rows(name, neighbours(x.shape[-1], H))
            elif dim is not None and (where is found.numbers or (where is found.inputs and x.shape[dim] == H)):
                where.append((name, dim))

    def _source(self, heads: Tensor) -> Rows | str:
        """Return the linear module that made these heads, (B, heads, T, K), with the rows of each head; or the reason
        why there is none."""
        weights = torch.rand_like(heads) + 0.5  # without them, parts could cancel
        made = self._reached((heads * weights).sum(), self.leaves) if heads.requires_grad else []
        rows: dict[nn.Module, list[tuple[int, ...]]] = {}
        for h in range(heads.shape[1]) if made else ():
            leaves = [(module, leaf) for module, leaf, _ in made]
            for module, _, gradient in self._reached((heads[:, h] * weights[:, h]).sum(), leaves):
                columns = gradient.flatten(0, -2).abs().amax(0).nonzero().flatten().tolist()
                rows.setdefault(module, []).append(tuple(columns))
        sources = {self.paths[module]: each for module, each in rows.items() if any(each)}
        if not sources:
            return NOTHING
        if any("lora_" in path for path in sources):
            return LORA
        if len(sources) > 1:
            return f"made by {len(sources)} linear modules, {', '.join(sources)}"
        ((path, each),) = sources.items()
        if len({row for head in each for row in head}) != sum(map(len, each)):
            shared = 1 < len(set(each)) < len(each)
            return f"made once for several heads by {path}" if shared else f"mixed from the heads of {path} (a norm?)"
        return Rows(path, tuple(each))

    @staticmethod
    def _reached(number: Tensor, leaves: Sequence[tuple[nn.Module, Tensor]]) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Return the leaves that a number depends on, each with its module before it and its gradient after it."""
        gradients = torch.autograd.grad(
            number, [leaf for _, leaf in leaves] or [number], retain_graph=True, allow_unused=True
        )
        pairs = zip(leaves, gradients, strict=False)
        return [(module, leaf, gradient) for (module, leaf), gradient in pairs if gradient is not None]

    def _reads(self, module: nn.Module, x: Any) -> None:
        """If the input of this linear module comes from the heads of a block, record the module as the W_O of that
        block, with the columns that read each head."""
        layer = self.model.get_submodule(self.paths[module].rpartition(".")[0])
        if isinstance(layer, MultiHeadAttention) and layer.out_proj is module:
            self._own(layer, module)
        for found in self.found:
            if found.out is None and found.context is not None and isinstance(x, Tensor) and x.requires_grad:
                leaf = found.context
                (reached,) = torch.autograd.grad(x.sum(), leaf, retain_graph=True, allow_unused=True)
                if reached is None:
                    continue
                context = leaf if found.heads_last else leaf.transpose(1, 2)
                if x.numel() == context.numel() and torch.equal(x.detach().flatten(), context.detach().flatten()):
                    found.columns = neighbours(x.shape[-1], found.heads)
                else:
                    found.columns = self._columns(x, leaf, found)
                found.out = module
                by_head = [x[..., list(columns)] for columns in found.columns]
                gate = self._source(torch.stack(by_head, dim=1))
                if gate != NOTHING:
                    found.rows["gate"] = gate

    def _own(self, layer: MultiHeadAttention, out: nn.Module) -> None:
        """Record a `MultiHeadAttention`, whose layout is known. If a module that contains it calls its output
        projection, that module is recorded."""
        caller = self.running[-2]
        inside = set(caller.modules())
        self.found = [found for found in self.found if found.module not in inside or found.out is not None]
        block = block_of(layer, self.paths[layer])
        rows: Any = {"query": block.query, "key": block.key, "value": block.value}
        self._add(_Found(caller, block.heads, block.of_kv, rows, out=out, columns=block.columns))

    def _columns(self, x: Tensor, leaf: Tensor, found: _Found) -> tuple[tuple[int, ...], ...]:
        """Return, for each head, the columns of x that depend on it, found by a gradient for each column."""
        of_head: list[list[int]] = [[] for _ in range(found.heads)]
        other = (0, 1, 3) if found.heads_last else (0, 2, 3)
        for column in range(x.shape[-1]):
            (gradient,) = torch.autograd.grad(x[..., column].sum(), leaf, retain_graph=True)
            for h in gradient.abs().sum(other).nonzero().flatten().tolist():
                of_head[h].append(column)
        if len({column for columns in of_head for column in columns}) != sum(map(len, of_head)):
            raise Unsupported(
                f"{self.paths[found.module]}: its heads are mixed before the first linear module that reads them, so"
                " they cannot be gated one by one (a norm over all heads, or a W_O that is no linear module?)"
            )
        return tuple(map(tuple, of_head))


class _WeightsInUse(TorchFunctionMode):
    """A mode of torch in which a linear module is seen also if its weight is handed to `F.linear`, as with a joint
    bias of parts."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace
        self.modules: dict[Any, nn.Module] = {
            module.weight: module for module in trace.paths if isinstance(module, nn.Linear)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {}) if func is F.linear else {}
        module = self.modules.get(given.get("weight"))
        if module is None or self.trace.running[-1:] == [module]:
            return func(*args, **(kwargs or {}))
        bias = given.pop("bias", None)
        self.trace.read[self.trace.paths[module]] = given["input"]
        made = self.trace._leaf(module, (), func(**given))
        return made if bias is None else made + bias
