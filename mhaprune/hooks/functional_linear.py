"""See a linear module also where its weight is handed to a function, as with a joint bias of parts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mhaprune.hooks.products import WeightProduct, places_of


@contextmanager
def calls_begun(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the modules whose calls have begun and not ended, the outermost first."""
    running: list[nn.Module] = []
    with ExitStack() as stack:
        for module in model.modules():
            enter = module.register_forward_pre_hook(lambda module, _: running.append(module))
            leave = module.register_forward_hook(lambda *_: running.pop() and None)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield running


class WeightsInUse(TorchFunctionMode):
    """A mode of torch in which a product with the weight of a linear module, as by `F.linear` or `x @ module.weight.T`,
    returns `through(module, input, output)`, to which the bias is added. `running` are the modules whose calls have
    begun; the last one's own call of `F.linear` is left alone."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        running: Sequence[nn.Module],
        through: Callable[[nn.Module, Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.running, self.through = running, through
        self.modules = places_of(modules)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for product in WeightProduct.of(func, args, kwargs or {}):
            module = product.module_of(self.modules)
            if module is not None and self.running[-1:] != [module]:
                made = product.by(partial(self._through, module))
                return made if product.bias is None else made + product.bias
        return func(*args, **(kwargs or {}))

    def _through(self, module: Any, x: Tensor) -> Tensor:
        return self.through(module, x, F.linear(x, module.weight))
