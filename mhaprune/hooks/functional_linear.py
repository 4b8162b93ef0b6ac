"""See a linear module also where its weight is handed to a function, as with a joint bias of parts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


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
    """A mode of torch in which `F.linear` with the weight of a linear module returns `through(module, input, output)`,
    to which the bias is added. `running` are the modules whose calls have begun; the last one's own call of `F.linear`
    is left alone."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        running: Sequence[nn.Module],
        through: Callable[[nn.Module, Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.running, self.through = running, through
        self.modules: dict[Any, nn.Module] = {
            module.weight: module for module in modules if isinstance(module, nn.Linear)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {}) if func is F.linear else {}
        module = self.modules.get(given.get("weight"))
        if module is None or self.running[-1:] == [module]:
            return func(*args, **(kwargs or {}))
        bias = given.pop("bias", None)
        made = self.through(module, given["input"], func(**given))
        return made if bias is None else made + bias
