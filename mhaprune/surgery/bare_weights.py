"""Make linear modules of parameters that layers multiply by, as in `x @ self.W_O`, so that hooks see what they read,
and parameters of these modules again.

While such a layer runs, its attributes are views of the module's weight and bias. So its code stays as it is, and any
other use of them is right too.

Dimensions: I = inputs, O = outputs of a linear map.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain, permutations
from math import prod
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.hooks.functional_linear import calls_begun
from mhaprune.hooks.products import WeightProduct, place_of
from mhaprune.hooks.pytree import is_linear
from mhaprune.surgery.copying import copied
from mhaprune.surgery.record import Cut
from mhaprune.surgery.reshaping import freed, surround

MAP = "_map"
"""What the name of a linear module has behind that of its parameter."""
SUMS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
VIEWS = {
    *("chunk", "split", "view", "reshape", "transpose", "permute", "t", "flatten", "unflatten", "__getitem__"),
    *("unbind", "squeeze", "unsqueeze", "movedim", "swapaxes", "T", "mT"),
}
"""The names of functions of torch after which a parameter is still known."""


class Layout(NamedTuple):
    """The order in which the numbers of a parameter of any shape are the weight (O, I) of a linear map, or of several,
    one below the other."""

    order: tuple[int, ...]
    """The dimensions of the parameter: those of outputs, then those of inputs."""
    outputs: int
    """How many of these are of outputs."""
    sizes: tuple[int, ...]
    """The sizes of these dimensions. One of the outputs and one of the inputs may become smaller, see `_fitted`."""
    parts: tuple[int, ...]
    """The rows of each map."""

    def paths(self, name: str) -> list[str]:
        """Return the names of the linear modules that a parameter of this name becomes. They are others, because while
        the layer runs its own is that of a tensor."""
        return [f"{name}{MAP}" + f"_{n}" * (len(self.parts) > 1) for n in range(len(self.parts))]

    def matrix(self, parameter: Tensor) -> Tensor:
        return parameter.permute(self.order).flatten(0, self.outputs - 1).flatten(1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter before any removal."""
        return tuple(self.sizes[self.order.index(dim)] for dim in range(len(self.order)))

    def parameter(self, matrix: Tensor) -> Tensor:
        """Return a view of a matrix in the layout of the parameter."""
        outputs, inputs = self.sizes[: self.outputs], self.sizes[self.outputs :]
        shape = [*_fitted(outputs, len(matrix), len(self.parts)), *_fitted(inputs, matrix.shape[1])]
        return matrix.view(shape).permute(*(self.order.index(dim) for dim in range(len(self.order))))


def _fitted(sizes: Sequence[int], total: int, parts: int = 1) -> list[int]:
    """Return sizes of which one is another, so that their product is `total`: the number of heads, which stands before
    their width. A size that counts the `parts` of the weight stays."""
    several = [n for n, size in enumerate(sizes) if size != 1 and not (n == 0 and size == parts)] or [len(sizes) - 1]
    free = several[-2:][0]
    rest = prod(size for n, size in enumerate(sizes) if n != free)
    return [total // rest if n == free else size for n, size in enumerate(sizes)]


class _Products(TorchFunctionMode):
    """A mode of torch that notes by which parts of parameters the layers multiply that own them. `running` are the
    modules whose calls have begun."""

    def __init__(self, model: nn.Module, running: Sequence[nn.Module]) -> None:
        super().__init__()
        self.running = running
        named = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
        self.owners = {
            id(parameter): (module, name)
            for module in model.modules()
            if not (type(module).__module__.startswith(("torch.", "mhaprune.")) or is_linear(module))
            for name, parameter in module.named_parameters(recurse=False)
            if named[id(parameter)] == 1 and parameter.is_floating_point()
        }
        self.views: dict[int, tuple[Tensor, nn.Parameter, list[Any]]] = {}
        """By identity: a view of a parameter, this parameter, and the steps that make the view."""
        self.products: dict[int, tuple[Tensor, WeightProduct, Any]] = {}
        """By identity: what a product is, to which a bias may be added next, the product, and its weight."""
        self.seen: dict[tuple[nn.Module, str], list[Use]] = {}
        """By layer and parameter."""
        self.elsewhere: set[tuple[nn.Module, str]] = set()
        """The parameters by which others multiply, while their layer does not run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        known = self._known(args[0]) if args else None
        if known and (getattr(func.__self__, "__name__", "") if name == "__get__" else name) in VIEWS:
            for n, each in enumerate(out) if isinstance(out, tuple | list) else [(None, out)]:
                self.views[id(each)] = (each, known[1], [*known[2], (func, args[1:], kwargs, n)])
        for product in WeightProduct.of(func, args, kwargs):
            if known := self._known(product.weight):
                self.products[id(out)] = (out, product, known)
                self._note(product, known[1], known[2])
        if func in SUMS and len(args) == 2 and not kwargs:
            for said, bias in (args, args[::-1]):
                if id(said) in self.products and self._known(bias):
                    _, product, known = self.products[id(said)]
                    self._note(product._replace(bias=bias), known[1], known[2])
        return out

    def _known(self, x: Any) -> tuple[Tensor, nn.Parameter, list[Any]] | None:
        return (x, x, []) if isinstance(x, nn.Parameter) and id(x) in self.owners else self.views.get(id(x))

    def _note(self, product: WeightProduct, parameter: nn.Parameter, steps: Sequence[Any]) -> None:
        layer, name = self.owners[id(parameter)]
        matrix = product.matrix(_places(parameter, steps))
        if layer not in self.running:
            self.elsewhere.add((layer, name))
        if matrix is None:
            return
        use = Use.of(parameter, matrix)
        if bias := self._known(product.bias):
            owner, of_bias = self.owners[id(bias[1])]
            rows = _places(bias[1], bias[2]).flatten()
            first = int(rows[0])
            if owner is layer and torch.equal(rows, torch.arange(first, first + use.rows)):
                use = use._replace(bias=(of_bias, first))
        self.seen.setdefault((layer, name), []).append(use)


class Use(NamedTuple):
    """The part of a parameter that is the weight of a map."""

    order: tuple[int, ...]
    outputs: int
    """See `Layout`; 0 if no order fits."""
    begin: int
    rows: int
    """The rows of the whole matrix that the map has."""
    bias: tuple[str, int] | None = None
    """The parameter in which the bias of the map stands, and where it begins."""

    @classmethod
    def of(cls, parameter: Tensor, matrix: Tensor) -> Self:
        """Return the use of a part with these places in the parameter, (O, I)."""
        places = _places(parameter)
        for order in permutations(range(parameter.dim())):
            for outputs in range(1, parameter.dim()):
                whole = places.permute(order).flatten(0, outputs - 1).flatten(1)
                begin = int((whole[:, 0] == matrix[0, 0]).int().argmax())
                if torch.equal(whole[begin : begin + len(matrix)], matrix):
                    return cls(order, outputs, begin, len(matrix))
        return cls((), 0, 0, 0)


def _places(parameter: Tensor, steps: Sequence[Any] = ()) -> Tensor:
    """Return the places in a parameter of the numbers of a view of it."""
    places = torch.arange(parameter.numel()).view(parameter.shape)
    for func, args, kwargs, n in steps:
        made = func(places, *args, **kwargs)
        places = made if n is None else made[n]
    return places


def _layout(parameter: Tensor, uses: Sequence[Use]) -> Layout | None:
    """Return the layout in which these are maps, one below the other; None if there is none."""
    parts = {use.begin: use.rows for use in uses}
    (order, outputs), *others = {(use.order, use.outputs) for use in uses}
    begins = sorted(parts)
    follow = begins == [sum(parts[begin] for begin in begins[:n]) for n in range(len(begins))]
    if (
        others
        or not outputs
        or not follow
        or prod(parameter.shape[dim] for dim in order[:outputs]) != sum(parts.values())
    ):
        return None
    return Layout(order, outputs, tuple(parameter.shape[dim] for dim in order), tuple(parts[begin] for begin in begins))


def with_linear_parameters(call: ModelCall) -> nn.Module:
    """Return a copy that shares all other weights, in which parameters that layers multiply by are linear modules; or
    the model itself, if there are none."""
    model = call.model
    with call.at_rest(), calls_begun(model) as running:
        noted = _Products(model, running)
        with noted, suppress(Exception):  # of a model that may be anybody's; the passes that need an output name it
            call()
    layouts: dict[nn.Module, dict[str, Layout]] = {}
    for (layer, name), uses in noted.seen.items():
        layout = None if (layer, name) in noted.elsewhere else _layout(getattr(layer, name), uses)
        if layout and not any(hasattr(layer, path) for path in layout.paths(name)):
            layouts.setdefault(layer, {})[name] = layout
    if not layouts:
        return model
    paths = {module: path for path, module in model.named_modules()}
    twin = copied(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for layer, made in layouts.items():
        uses_of = {name: noted.seen[layer, name] for name in made}
        _make_linear(twin.get_submodule(paths[layer]), made, _biases(layer, made, uses_of))
    return twin


def _biases(
    layer: nn.Module, layouts: Mapping[str, Layout], uses: Mapping[str, Sequence[Use]]
) -> dict[str, tuple[str, ...]]:
    """Return the parameters that are the biases of these maps, each with the paths of the maps in their order."""
    found: dict[str, dict[int, str]] = {}
    rows: dict[str, int] = {}
    whole: list[tuple[str, dict[int, str]]] = []
    for name, layout in layouts.items():
        parts = dict(zip(accumulate(layout.parts[:-1], initial=0), layout.paths(name), strict=True))
        rows |= dict(zip(layout.paths(name), layout.parts, strict=True))
        for use in uses[name]:
            if use.bias is not None and use.begin in parts:
                bias, first = use.bias
                found.setdefault(bias, {}).setdefault(first, parts[use.begin])
                if first == use.begin and layer.get_parameter(bias).numel() == sum(layout.parts):
                    whole.append((bias, parts))
    for bias, parts in whole:  # some of which were not seen with it: a bias may be added later, or be scaled
        found[bias] = parts | found[bias]
    taken = Counter(path for by_place in found.values() for path in by_place.values())
    biases = {}
    for bias, by_place in found.items():
        own, places = layer.get_parameter(bias), sorted(by_place)
        paths = tuple(by_place[place] for place in places)
        ends = [*accumulate((rows[path] for path in paths), initial=0)]
        alone = all(taken[path] == 1 for path in paths)
        wide = sum(size != 1 for size in own.shape) > 1 and len(paths) > 1  # of which no view has fewer heads
        if alone and [*places, own.numel()] == ends and not wide and own.dim() <= 2:
            biases[bias] = paths
    return biases


class BareMap(nn.Linear):
    """A linear map whose bias the layer adds itself. It is held here, so that it is cut with the rows of the weight."""

    bias_added_after = True

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _make_linear(layer: Any, layouts: Mapping[str, Layout], biases: Mapping[str, Sequence[str]]) -> None:
    """Make linear modules of parameters of a layer, in place."""
    if "linear_parameters" not in vars(layer):
        layer.linear_parameters, layer.linear_biases, layer.own_parameters = {}, {}, [*layer._parameters]
        surround(layer, forward_with_linear_parameters)
    made = dict[str, BareMap]()
    for name, layout in layouts.items():
        weight = layer._parameters[name]
        for path, matrix in zip(layout.paths(name), layout.matrix(weight.detach()).split(layout.parts), strict=True):
            made[path] = BareMap(matrix.shape[1], len(matrix), bias=False, device="meta").train(layer.training)
            made[path].weight = nn.Parameter(matrix, weight.requires_grad)
        delattr(layer, name)
    shapes = {}
    for bias, paths in biases.items():
        own = layer._parameters[bias]
        for path, numbers in zip(
            paths, own.detach().flatten().split([len(made[p].weight) for p in paths]), strict=True
        ):
            made[path].bias = nn.Parameter(numbers, own.requires_grad)
        shapes[bias] = (tuple(paths), tuple(own.shape))
        delattr(layer, bias)
    for path, module in made.items():
        layer.add_module(path, module)
    layer.linear_parameters = layer.linear_parameters | dict(layouts)
    layer.linear_biases = layer.linear_biases | shapes


def forward_with_linear_parameters(layer: Any, inner: Any, *arguments: Any, **named: Any) -> Any:
    """Call a layer in the mode `LinearParameters`."""
    with LinearParameters(layer):
        return inner(*arguments, **named)


class LinearParameters(TorchFunctionMode):
    """A mode of torch in which parameters of a layer are those of its linear modules, and in which a product with one
    calls the module."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.given: dict[str, Tensor] = {}
        self.maps: dict[Any, nn.Linear] = {}
        """The modules, by the place in memory of their weights as they are in `given`."""
        for name, layout in layer.linear_parameters.items():
            parts = [layer.get_submodule(path) for path in layout.paths(name)]
            matrix = _joined([part.weight for part in parts])
            self.given[name] = layout.parameter(matrix)
            for part, weight in zip(parts, matrix.split([len(each.weight) for each in parts]), strict=True):
                self.maps[place_of(weight)] = part
        for bias, (paths, shape) in layer.linear_biases.items():
            numbers = _joined([layer.get_submodule(path).bias for path in paths])
            self.given[bias] = numbers.view(_fitted(shape, len(numbers)))

    def __enter__(self) -> Self:
        vars(self.layer).update(self.given)
        return cast("Self", super().__enter__())

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name in self.given:
            vars(self.layer).pop(name, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for product in WeightProduct.of(func, args, kwargs):
            if module := self.maps.get(place_of(product.matrix(product.weight))):
                said = product.by(module)
                return said if product.bias is None else said + product.bias
        return func(*args, **kwargs)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def make_parameters(model: nn.Module) -> None:
    """Make parameters of the linear modules again, in place, with the shapes that a removal left. Then the layers run
    as they are written. One that has lost all its heads keeps one, for which W_O is zero; training may change that."""
    shapes, gone = dict[str, list[int]](), set[str]()
    layers: list[tuple[str, Any]] = [each for each in model.named_modules() if "linear_parameters" in vars(each[1])]
    for path, layer in layers:
        made, start = LinearParameters(layer).given, f"{path}." if path else ""
        maps = {name: layout.paths(name) for name, layout in layer.linear_parameters.items()}
        of_weights = [(name, layout.shape, maps[name][0], "weight") for name, layout in layer.linear_parameters.items()]
        of_biases = [(name, shape, paths[0], "bias") for name, (paths, shape) in layer.linear_biases.items()]
        for name, before, inside, kind in (*of_weights, *of_biases):
            own = made[name].detach().clone(memory_format=torch.contiguous_format)
            learned = getattr(layer.get_submodule(inside), kind).requires_grad
            layer.register_parameter(name, nn.Parameter(own, learned))
            shapes |= {start + name: [*own.shape]} if own.shape != before else {}
        for inside in chain(*maps.values()):
            gone.add(start + inside)
            delattr(layer, inside)
        for name in layer.own_parameters:  # in the order of before
            layer._parameters[name] = layer._parameters.pop(name)
        del layer.linear_parameters, layer.linear_biases, layer.own_parameters
        freed(layer, forward_with_linear_parameters)
    Cut.reshaped(model, gone, shapes)


def as_written(model: nn.Module) -> nn.Module:
    """Return a copy for `make_parameters`, or the model itself if nothing was made linear."""
    if not any("linear_parameters" in vars(each) for each in model.modules()):
        return model
    twin = copied(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    make_parameters(twin)
    return twin
