"""Let another runtime than torch compute a model: for the times and the quality that it has where it is served."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mhaprune.hooks.blocks import Unsupported
from mhaprune.hooks.eval_mode import at_rest
from mhaprune.hooks.pytree import mapped
from mhaprune.saving.onnx_file import computed, session_of, traced_program, twice, write_onnx
from mhaprune.settings.refusals import foreign

Runtime = Literal["torch", "onnxruntime", "onnxruntime-int8"]
"""What computes a model. In int8 the weights of matrix products are rounded, see `mhaprune.export`."""


class Served(nn.Module):
    """A model that a session of onnxruntime computes. It takes the arguments of the model, with tensors of the same
    names, and returns the same values; other arguments count as they were when it was made."""

    model: nn.Module

    def __init__(self, model: nn.Module, session: Any, form: Any) -> None:
        super().__init__()
        self.config, self.session, self.form = getattr(model, "config", None), session, form
        vars(self)["model"] = model  # no part of it: its weights are not what computes

    def get_submodule(self, target: str) -> nn.Module:
        return self.model.get_submodule(target)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        found = iter(computed(self.session, inputs, named))
        return mapped(self.form, lambda _: next(found))


@torch.no_grad()
def served(model: nn.Module, call: Callable[[nn.Module], object], runtime: Runtime) -> Served:
    """Return the model as this runtime computes it. `call` calls the model once. Raises `Unsupported` for a model that
    the runtime does not compute."""
    given: list[tuple[Any, Any]] = []
    form: list[Any] = []
    handles = [
        model.register_forward_pre_hook(lambda _, inputs, named: given.append((inputs, named)), with_kwargs=True),
        model.register_forward_hook(lambda *each: form.append(each[-1])),
    ]
    with at_rest(model):
        try:
            call(model)
        finally:
            for handle in handles:
                handle.remove()
        kinds = sorted({str(x.dtype).removeprefix("torch.") for x in model.parameters() if x.is_floating_point()})
        if kinds != ["float32"] or any(x.device.type != "cpu" for x in model.parameters()):
            raise Unsupported(f"runtime={runtime}: computes models in float32 on the processor, not {', '.join(kinds)}")
        if len(given) != 1:
            raise Unsupported(f"runtime={runtime}: the model is called {len(given)} times for a batch, must be once")
        inputs, named = twice(*given[0])
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.onnx")
            with foreign(f"runtime={runtime}: {type(model).__name__} cannot be exported"):
                write_onnx(traced_program(model, inputs, named), file, int8=runtime == "onnxruntime-int8")
                session = session_of(file, torch.get_num_threads())
    return Served(model, session, mapped(form[0], lambda x: x[:0] if x.dim() else x))
