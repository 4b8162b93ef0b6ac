"""Find the blocks of heads of a model by running it once and following gradients.

The output of every linear module is detached from the graph and made a leaf. So the gradient of a head's query leads to
the nearest linear module only, and its non-zero columns are the rows that make the head. In the same way, the next
linear module that reads the heads' outputs is W_O. This finds fused, interleaved and grouped layouts without a table of
models.

Dimensions: B = batch, T = queries, U = keys, H = query heads, G = key-value heads, K = head_dim, W = inputs of W_O.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.discovery.found import (
    INFERENCE,
    NO_GRAD,
    SUM,
    Found,
    made_of,
    of_heads_alone,
    own_part,
    reads_elsewhere,
    unusable,
    weighs_in,
)
from mhaprune.discovery.layouts import NOTHING, columns_of_heads, reached, rows_of_heads, rows_read, without_repeats
from mhaprune.discovery.leading import folded, leading
from mhaprune.discovery.loops import of_call, together
from mhaprune.discovery.per_head_tensors import (
    Followed,
    dimensions_of_heads,
    factor_of_values,
    inner_factor,
    is_sum,
    learned_factor,
    with_running,
)
from mhaprune.hooks.attention_calls import Attend, AttentionCalls, attention_interface
from mhaprune.hooks.blocks import ROLES, Block, Rows, around, block_of, neighbours, within
from mhaprune.hooks.eval_mode import aside, attributes_kept
from mhaprune.hooks.functional_linear import WeightsInUse
from mhaprune.hooks.pytree import features_dim, is_convolution, is_linear, same_tensor
from mhaprune.hooks.softmaxes import Softmaxes, lengths_in
from mhaprune.surgery.record import Cut

REMEMBERED = 32
"""Number of linear modules, those called last, among which the sources of queries, keys and values are searched."""


class Trace:
    """A recorder of one call of the model: hooks, patches, and the attention calls that they found.

    `seen` replaces the numbers of linear modules and heads; or all heads are `closed`, and say 0. If `weights`, the
    weights of linear modules are followed too. If the blocks are `known`, only the factors of their heads are found.
    What the trace `before` has shown of the columns of W_O counts too.
    """

    def __init__(
        self,
        model: nn.Module,
        dropped: Set[int],
        seen: Callable[[Tensor], Tensor] = Tensor.detach,
        weights: bool = False,
        known: Sequence[Block] | None = None,
        before: "Trace | None" = None,
        closed: bool = False,
    ) -> None:
        self.model, self.dropped, self.closed = model, dropped, closed
        self.seen, self.weights, self.before = seen, weights, before
        self.known = known if known is None else {each.path: each for each in known if each.attends or each.in_calls}
        self.pruned = set((Cut.of(model) or Cut()).heads)
        """The paths of modules that have lost heads, and may have one that is left."""
        self.whole = True
        """False if gradients show fewer rows or columns of some heads than of others."""
        self.unexplained = False
        """True if queries, keys or values are made in another way than by linear modules alone."""
        self.overlooked: dict[str, str] = {}
        """The paths of modules that attend in another way, each with the reason why it is not usable, or no text."""
        self.beside: dict[str, None] = {}
        """The paths of maps that read what attention weights make beside the heads that were found."""
        self.of_others: dict[nn.Module, None] = {}
        """The linear modules that are called for other states than heads."""
        self.softmaxes = Softmaxes(self._where)
        self.paths = {module: path for path, module in model.named_modules()}
        self.running: list[nn.Module] = []
        self.leaves: list[tuple[nn.Module, Tensor]] = []
        self.found: list[Found] = []
        self.read: dict[str, Tensor] = {}
        """The last input of each linear module, by its path."""
        self.inside = False
        self.weighed: tuple[nn.Module, Tensor] | None = None
        """The attention weights that were found last, with the module."""
        self.followed = Followed(None if seen is Tensor.detach else seen)
        self.given: dict[nn.Module, dict[int | str, Any]] = {}
        """The arguments of the last call of each module, by place or name."""

    @contextmanager
    def watching(self, numbers: bool = True) -> Iterator[None]:
        with attributes_kept(self.model), ExitStack() as stack:
            for path, module in self.model.named_modules():
                makes = is_linear(module) or is_convolution(module)
                if numbers and (self.weights or not makes):
                    self.followed.store(path, module, stack)
                handles = [module.register_forward_pre_hook(self._enter, with_kwargs=True)]
                if makes:
                    handles.append(module.register_forward_hook(self._leaf))
                handles.append(module.register_forward_hook(lambda *_: self.running.pop() and None))
                inner = any(within(path, other) for other in self.overlooked)
                if isinstance(module, torch.jit.ScriptModule) and not inner:
                    self.overlooked[path] = "is made by torch.jit, which shows nothing: wrap the module it was made of"
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(attention_interface(self._of_interface))
            stack.enter_context(self.softmaxes)
            stack.enter_context(WeightsInUse(self.paths, self.running, self._of_weight))
            stack.enter_context(AttentionCalls(self._of_call))
            yield
        self.overlooked |= dict.fromkeys(self.softmaxes.found, "")

    def _where(self) -> tuple[str | None, set[int]]:
        if self.inside or not self.running:
            return None, set()
        read = [lengths_in(list(self.given.get(module, {}).values())) for module in self.running]
        return self.paths[self.running[-1]], set().union(*read)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self.running.append(module)
        if torch.is_inference_mode_enabled():
            return None
        if is_linear(module) or is_convolution(module):
            if inputs and isinstance(inputs[0], Tensor):
                x = self.read[self.paths[module]] = inputs[0].movedim(features_dim(module), -1)
                self._reads(module, x)
            return None
        given = self.followed.given
        inputs, named = tuple(map(given, inputs)), {name: given(x) for name, x in named.items()}
        self.given[module] = dict(enumerate(inputs)) | named
        return inputs, named

    def _leaf(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not isinstance(output, Tensor) or output.is_inference():  # a router, which returns more
            return output
        leaf = self.seen(output.detach().movedim(features_dim(module), -1)).requires_grad_()
        self.leaves = [*self.leaves[-REMEMBERED:], (module, leaf)]
        return leaf.movedim(-1, features_dim(module)).clone()  # what comes next may work in place

    def _of_weight(self, module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        self.read[self.paths[module]] = x
        self._reads(module, x)
        return self._leaf(module, (), output)

    def _of_interface(self, attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Any:
        if torch.is_inference_mode_enabled():
            self.overlooked[self.paths[module]] = INFERENCE
            return attend(query, key, value)
        found = self._begin(module, query, key, value)
        self.inside = True
        out, *others = attend(query.detach(), key.detach(), value.detach())
        self.inside = False
        self.find_numbers(found, [out.transpose(1, 2), query, key, value])
        found.context, found.heads_last = self._said(out), True  # (B, T, H, K)
        return (found.context, *others)

    def _of_call(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        if self.inside or not self.running:
            return attend(query, key, value)
        states = self.followed.states(self.leaves) if "of_product" in options else []
        if states and not all(aside(made_of)(x, states) for x in (query, key, value)):
            return attend(query, key, value)  # such as feed-forward layers with weights for each head
        again = "weights" in options and self._weigh_again(options["weights"])
        if again or not value.numel():  # or of a layer that has lost its head
            return attend(query, key, value)
        first = len(self.found)
        said = self._found_by(attend, query, key, value, *(options[name] for name in ("weights",) if name in options))
        if isinstance(scores := options.get("weights", options.get("attn_mask")), Tensor) and scores.requires_grad:
            for found in self.found[first:]:
                found.scored_by = {self.paths[module] for module, *_ in reached(scores.sum(), self.leaves)}
                queries = found.rows.get("query")
                if "weights" in options and isinstance(queries, Rows) and queries.path not in found.scored_by:
                    self.found.remove(found)  # the weights are of another product of the same size
                    self.overlooked[self.paths[found.module]] = ""
        return said

    @aside
    def _weigh_again(self, weights: Tensor) -> bool:
        """Return whether attention weights are those that were found last, perhaps in another order, as where values of
        distances are added (Shaw et al. 2018). If the call that was found last is `dropped`, this one is in its
        place."""
        self.softmaxes.known(weights)
        before, self.weighed = self.weighed, (self.running[-1], weights.detach())
        if before is None or before[0] is not self.running[-1] or before[1].numel() != weights.numel():
            return False
        one, other = (x.flatten().sort().values for x in (before[1], self.weighed[1]))
        again = bool(one[0] < one[-1]) and torch.equal(one, other)
        if again and len(self.found) - 1 in self.dropped:
            self.found.pop()
            return False
        if again and self.found:
            self.found[-1].weighs_again = True
        return again

    def _found_by(self, attend: Attend, *made: Tensor) -> Tensor:
        """Note attention with queries, keys and values, and weights if they are known, of any leading dimensions."""
        (query, key, value), path = made[:3], self.paths[self.running[-1]]
        if torch.is_inference_mode_enabled():
            self.overlooked[path] = INFERENCE
            return attend(query, key, value)
        several = query.dim() == 3 and (len(query) > 1 or path in self.pruned)  # one example: so these are heads
        if query.dim() < 3 or (query.dim() == 3 and not several):
            if query.dim() < 3 or not all(reached(x.sum(), self.leaves) for x in made[:3]):
                self.overlooked[path] = ""
                return attend(query, key, value)
            one = self._of_heads(lambda *each: attend(*(x[0] for x in each))[None], *(x[None] for x in made))
            return one[0]
        if query.dim() == 4 and len(query) == 1:
            return self._of_heads(attend, *made)
        shared = aside(folded)(made[:3], self.leaves) if query.dim() == 3 else None
        if shared is not None and len({*map(len, made)}) == 1:

            def joined(*each: Tensor) -> Tensor:
                return attend(*(x.flatten(0, 1) for x in each)).unflatten(0, shared)

            return self._found_by(joined, *(x.unflatten(0, shared) for x in made)).flatten(0, 1)
        lead = aside(leading)(made[:3], self.leaves)
        if query.dim() == 4 and lead.heads == (1,):
            return self._of_heads(attend, *made)

        def in_order(*each: Tensor) -> Tensor:
            return lead.by_head(attend(*map(lead.back, each)))

        return lead.back(self._of_heads(in_order, *map(lead.by_head, made)))

    def _of_heads(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Note attention of one example, or its windows, with query (B, H, T, K)."""
        found = self._begin(self.running[-1], query, key, value)
        out = attend(query.detach(), key.detach(), value.detach())
        computed = [out, query, key, value]
        self.find_numbers(found, computed)
        found.computed = computed if found.heads == 1 else []
        if weights is not None and self.known is None:
            self._find_scores(found, weights)
        if value.shape[1] == found.heads and (found.heads == 1 or self._numbers_of_heads(found)):
            made = found.rows.get("value")
            leaves = {self.paths[module]: leaf for module, leaf in self.leaves}
            leaf = leaves.get(made.path) if isinstance(made, Rows) else None
            own = None if leaf is None else factor_of_values(value, leaf, cast("Rows", made).heads, found.of_kv)
            found.inner = inner_factor(partial(attend, query.detach(), key.detach()), value, own)
        found.context = self._said(out)  # (B, H, T, K)
        return found.context.clone()

    def _said(self, out: Tensor) -> Tensor:
        return (torch.zeros_like(out) if self.closed else self.seen(out.detach())).requires_grad_()

    @aside
    def _begin(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Found:
        H, G = query.shape[1], max(key.shape[1], value.shape[1])  # one key may serve all heads
        of_kv = getattr(module, "kept_of_kv", None) or [h * G // H for h in range(H)]
        if self.known is not None:
            block = of_call(self.known.get(self.paths[module]), self.found, module, H)
            of_roles: dict[str, Rows | str] = {each.role: each.rows for each in block.made_by} if block else {}
            of_kv, columns = (block.of_kv, block.columns) if block else (tuple(of_kv), ())
            return self._add(Found(module, H, of_kv, of_roles, columns=columns))
        rows = self._sources("query", query, H) | self._sources("key", key, H) | self._sources("value", value, H)
        numbers: dict[str, int] = {}
        for name, x in zip(ROLES, (query, key, value), strict=True):
            if isinstance(rows.get(name), str) and x.shape[1] in (1, H):
                self.unexplained = True
                holds = any(is_linear(part) for part in module.modules())
                layer = self.paths[module] if holds else self.paths[module].rpartition(".")[0]
                if own := self.followed.parts(x):  # a tensor of other layers too is an argument, found later
                    numbers |= {path: dim for path, dim in own.items() if within(path, layer)}
                    del rows[name]
                elif not (read := reached(x.sum(), self.leaves)) and bool((x == x[:, :1]).all()):
                    del rows[name]  # such as vectors of positions, which serve all heads
                elif not any(within(self.paths[m], layer) for m, *_ in read):
                    rows[name] = NOTHING  # but an earlier layer
        once = [name for name in ROLES[1:] if isinstance(made := rows.get(name), Rows) and len(made.heads) == 1 < G]
        if once == ["key", "value"]:
            of_kv = [0] * H
        for name in once if len(once) < 2 else ():
            made = cast("Rows", rows[name])
            rows[name] = replace(made, heads=((),) * G)
        if G == H and (repeated := without_repeats(rows)):
            of_kv = repeated
        found = Found(module, H, tuple(of_kv), rows, numbers=[*numbers.items()])
        if not torch.is_grad_enabled():
            found.unusable = NO_GRAD
        return self._add(found)

    def _add(self, found: Found) -> Found:
        sources = [found.rows.get(name) for name in ("query", "key", "value")]
        made = [self.read.get(rows.path) for rows in sources if isinstance(rows, Rows)]
        found.cross = len(made) == 3 and not all(same_tensor(x, made[0]) for x in made[1:])
        self.found.append(found)
        return found

    @aside
    def find_numbers(self, found: Found, computed: Sequence[Tensor]) -> None:
        """Record the tensors that hold a part for each head: parameters and buffers of the module, outputs of linear
        modules in it, and its arguments. They may also be of the module around it that makes the queries."""
        if self.known is not None:
            return
        H, given = found.heads, self.given.get(found.module, {})
        made = {rows.path for rows in found.rows.values() if isinstance(rows, Rows)}
        path = self._layer(found)
        noted = {*dict(found.numbers), *dict(found.numbers_of_keys), *dict(found.inputs)}
        leaves = [(self.paths[module], leaf) for module, leaf in self.leaves if within(self.paths[module], path)]
        heads = [(module, leaf) for module, leaf in self.leaves if self.paths[module] in made]
        inputs = ((key, x) for key, x in given.items() if key not in noted and isinstance(x, Tensor) and H in x.shape)
        stored = self.followed.stored.items()
        known: list[tuple[Any, Any, Tensor]] = [
            *((found.numbers, name, x) for name, x in stored if within(name, path) and name not in noted),
            *((found.rows, name, leaf) for name, leaf in leaves if name not in made),
            *((found.inputs, key, x) for key, x in inputs if x.requires_grad and not reached(x.sum(), heads)),
        ]
        dims, whole = dimensions_of_heads(computed, [x for *_, x in known])
        self.whole = self.whole and whole
        for (where, name, x), dim in zip(known, dims, strict=True):
            if where is found.rows and dim == -1:
                where[name] = Rows(name, neighbours(x.shape[-1], H))
            elif dim is not None and where is found.inputs and x.shape[dim] == H:
                where.append((name, dim))
            elif dim is not None and where is found.numbers:
                where += with_running(self.model, name, dim)
        if 1 < (G := len({*found.of_kv})) < H:
            of = found.of_kv
            rest = [(name, x) for where, name, x in known if where is found.numbers and name not in dict(where)]
            repeated = [x[:, list(of)] if x.shape[1] == G else x for x in computed]
            dims, _ = dimensions_of_heads(repeated, [x for _, x in rest], of)
            for (name, _), dim in zip(rest, dims, strict=True):
                found.numbers_of_keys += [] if dim is None else with_running(self.model, name, dim)

    @aside
    def _find_scores(self, found: Found, weights: Tensor) -> None:
        """Record the rows that make attention weights (B, H, T, U), but neither the queries nor the keys of the product
        that was found: those of keys, if it is that of queries and positions (Dai et al. 2019)."""
        if weights.dim() != 4 or weights.shape[1] != found.heads or not weights.requires_grad:
            return
        known: dict[str, set[int]] = {}
        for rows in (rows for rows in found.rows.values() if isinstance(rows, Rows)):
            known.setdefault(rows.path, set()).update(*rows.heads)
        read = {self.paths[self.leaves[n][0]]: rows for n, rows in rows_read(weights, self.leaves).items()}
        if all(known.get(path, set()).issuperset(rows) for path, rows in read.items()):
            return
        made, _ = rows_of_heads(weights, self.leaves, self.paths)
        for rows in () if isinstance(made, str) else made:
            rest = tuple(tuple(row for row in head if row not in known.get(rows.path, ())) for head in rows.heads)
            if within(rows.path, self._layer(found)) and len(rest) == found.heads and all(rest):
                found.rows[f"score of {rows.path}"] = Rows(rows.path, rest)

    def _layer(self, found: Found) -> str:
        """Return the path of the smallest module in which a call of attention is, with the maps that make its queries,
        and W_O, if it is known."""
        made = [rows.path for name, rows in found.rows.items() if name.startswith("query") and isinstance(rows, Rows)]
        out = [] if found.out is None else [self.paths[found.out]]
        return around(self.paths[found.module], *made, *out)

    def _sources(self, name: str, heads: Tensor, H: int) -> dict[str, Rows | str]:
        """Return the rows of the linear modules that made these heads, (B, heads, T, K), or the reason why there are
        none, by `name` and, of further modules, by longer names."""
        found, whole = rows_of_heads(heads, self.leaves, self.paths, name in ROLES[1:])
        self.whole = self.whole and (whole or (name == "gate" and not isinstance(found, str)))  # it may be one number
        if isinstance(found, str):
            return {name: found}
        if len(found) > 1 and heads.shape[1] != H:
            return {name: f"made by {len(found)} linear modules, {', '.join(rows.path for rows in found)}"}
        return {name if n == 0 else f"{name} of {rows.path}": rows for n, rows in enumerate(found)}

    @aside
    def _reads(self, module: nn.Module, x: Any) -> None:
        """If the input of this linear module comes from the heads of a block, record the module as the W_O of that
        block, with the columns that read each head."""
        layer = self.model.get_submodule(self.paths[module].rpartition(".")[0])
        if isinstance(layer, MultiHeadAttention) and layer.out_proj is module:
            self._own(layer, module)
            return
        if not torch.is_grad_enabled():
            return
        calls = []
        for found in self.found:
            if found.out is None and found.context is not None and isinstance(x, Tensor) and x.requires_grad:
                leaf = found.context
                (reached,) = torch.autograd.grad(x.sum(), leaf, retain_graph=True, allow_unused=True)
                if reached is None:
                    continue
                found.out, found.read, found.unusable = module, x if self.closed else x.detach(), ""
                calls.append(found)
                if is_linear(module):
                    self.find_factor(found, x)
                if self.known is not None:
                    continue
                if self.running[-1] is not module:
                    found.unusable = "the weight of its W_O is handed to a function, the module must be called"
                elif not is_linear(module):
                    found.unusable = f"its W_O is a {type(module).__name__}, must be a linear module, or 1×1"
                else:
                    found.columns, whole = columns_of_heads(x, leaf, found.heads_last, self._known_columns(found))
                    self.whole = self.whole and whole
                    others = [n for n in range(x.shape[-1]) if n not in {*chain(*found.columns)}]
                    found.unusable = unusable(found.columns)
                    if not found.unusable and others and weighs_in(found, x[..., others], self.leaves, self.paths):
                        found.unusable = "its weights make more of what W_O reads than these heads say"
                summed = False if found.unusable else is_sum(x[..., [*chain(*found.columns)]], [leaf])
                if summed is not False and not own_part(found, x, self.leaves, self.paths):
                    found.unusable, found.bent = SUM if summed else "", not summed
                if not found.unusable:
                    gated = torch.stack([x[..., list(columns)] for columns in found.columns], dim=1)
                    gates = self._sources("gate", gated, found.heads)
                    found.rows |= {name: rows for name, rows in gates.items() if rows != NOTHING}
                    self.find_numbers(found, [gated])
            elif (
                self.known is None
                and not found.unusable
                and found.out is not module
                and any(found is last for last in self.found[-2:])
                and reads_elsewhere(found, x)
            ):
                if columns_of_heads(x, cast("Tensor", found.context), found.heads_last)[0] != found.columns:
                    found.unusable = (
                        f"its heads are read by {self.paths[cast('nn.Module', found.out)]} and also, by other columns"
                        f" or beside other states, by {self.paths[module]}"
                    )
                found.also[module] = None
            elif (
                found.weighs_again
                and found.out is not module
                and isinstance(x, Tensor)
                and weighs_in(found, x, self.leaves, self.paths)
            ):
                self.beside[self.paths[module]] = None
        mine = [each for each in self.found if each.out is module or module in each.also]
        called = self.known is None and self.running[-1] is module
        if called and not of_heads_alone(x, mine, self.followed.states(self.leaves), self.leaves, self.paths):
            self.of_others[module] = None
        inner = sorted((self.paths[found.module] for found in calls), key=len)
        if len(calls) > 1 and is_linear(module) and all(within(path, inner[0]) for path in inner):
            together(calls, x, self.find_factor, self.find_numbers if self.known is None else None)

    def _known_columns(self, found: Found) -> Sequence[Sequence[int]]:
        """Return the columns of the heads of a call that the trace before has shown."""
        place, calls = self.found.index(found), [] if self.before is None else self.before.found
        return calls[place].columns if place < len(calls) and calls[place].module is found.module else ()

    def find_factor(self, found: Found, x: Tensor, calls: Sequence[Found] = ()) -> None:
        """Find the factor by which the layer itself multiplies each head, or those of several `calls`, see
        `learned_factor`. A tensor with one number for each head is cut with the heads, also if each factor depends on
        all of its numbers, as those of a softmax do."""
        layer = around(self.paths[found.module], self.paths[cast("nn.Module", found.out)])
        H, followed = found.heads, self._numbers_of_heads(found)
        tensors = [tensor for *_, tensor in followed]
        of_calls = [
            learned_factor(x, cast("Tensor", each.context), 2 if each.heads_last else 1, tensors, each.inner)
            for each in calls or [found]
        ]
        factors = [factor for factor, _ in of_calls if factor is not None]
        found.factor = torch.cat(factors) if len(factors) == len(of_calls) else None
        read = [any(each) for each in zip(*(read for _, read in of_calls), strict=True)]
        found.gated = any(read)
        for (where, name, tensor), is_read in zip(followed, read, strict=True):
            mine = where is found.inputs or within(name, layer)
            if is_read and mine and tensor.numel() == H and name not in dict(where):
                where.append((name, list(tensor.shape).index(H) - tensor.dim()))

    def _numbers_of_heads(self, found: Found) -> list[tuple[Any, Any, Tensor]]:
        """Return the tensors that may hold a number for each head, each with the list that it would be noted in, and
        its name there."""
        H, given = found.heads, self.given.get(found.module, {})
        sizes = {H, getattr(found.module, "all_heads", H)}  # of an argument that is cut at each call
        followed: list[tuple[Any, Any, Tensor]] = [
            *((found.numbers, name, tensor) for name, tensor in self.followed.stored.items()),
            *((found.inputs, key, tensor) for key, tensor in given.items() if isinstance(tensor, Tensor)),
        ]
        return [each for each in followed if each[2].requires_grad and sizes & {*each[2].shape}]

    def _own(self, layer: MultiHeadAttention, out: nn.Module) -> None:
        """Record a `MultiHeadAttention`, whose layout is known. If a module that contains it calls its output
        projection, that module is recorded."""
        caller = self.running[-2]
        inside = set(caller.modules())
        self.found = [found for found in self.found if found.module not in inside or found.out is not None]
        block = block_of(layer, self.paths[layer])
        rows: Any = {source.role: source.rows for source in block.made_by}
        self._add(Found(caller, block.heads, block.of_kv, rows, out=out, columns=block.columns, unusable=""))
