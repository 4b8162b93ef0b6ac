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
from mhaprune.surgery.bare_weights import as_written

Runtime = Literal["torch", "onnxruntime", "onnxruntime-int8"]
"""A way to compute a model. In int8 the weights of matrix products are rounded, see `mhaprune.export`."""


class Served(nn.Module):
    """A model that a session of onnxruntime computes. It takes the arguments of the model, with tensors of the same
    names and the other values that it was made with, and returns what the model does. Raises ValueError for others."""

    model: nn.Module

    def __init__(self, model: nn.Module, session: Any, given: Any, form: Any) -> None:
        super().__init__()
        self.config, self.session, self.form = getattr(model, "config", None), session, form
        self.others = _others(given)
        vars(self)["model"] = model  # no part of it: its weights are not what computes

    def get_submodule(self, target: str) -> nn.Module:
        return self.model.get_submodule(target)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if _others((inputs, named)) != self.others:
            raise Unsupported("runtime: was made for other arguments that are no tensors, which must be the same")
        with foreign("runtime: a batch is not computed, its sizes may be others than those of the first one"):
            found = iter(computed(self.session, inputs, named))
        return mapped(self.form, lambda _: next(found))


@torch.no_grad()
def served(model: nn.Module, call: Callable[[nn.Module], object], runtime: Runtime) -> Served:
    """Return the model as this runtime computes it. `call` calls the model once. Raises `Unsupported` for a model that
    the runtime does not compute."""
    written = as_written(model)
    given: list[tuple[Any, Any]] = []
    form: list[Any] = []
    handles = [
        written.register_forward_pre_hook(lambda _, inputs, named: given.append((inputs, named)), with_kwargs=True),
        written.register_forward_hook(lambda *each: form.append(each[-1])),
    ]
    with at_rest(written):
        try:
            call(written)
        finally:
            for handle in handles:
                handle.remove()
        kinds = sorted({str(x.dtype).removeprefix("torch.") for x in model.parameters() if x.is_floating_point()})
        kinds += sorted({x.device.type for x in model.parameters()})
        if kinds != ["float32", "cpu"]:
            raise Unsupported(f"runtime={runtime}: computes models in float32 on the cpu, not {', '.join(kinds)}")
        if len(given) != 1:
            raise Unsupported(f"runtime={runtime}: the model is called {len(given)} times for a batch, must be once")
        inputs, named = twice(*given[0])
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.onnx")
            with foreign(f"runtime={runtime}: {type(model).__name__} cannot be exported"):
                write_onnx(traced_program(written, inputs, named), file, int8=runtime == "onnxruntime-int8")
                session = session_of(file, torch.get_num_threads())
    return Served(model, session, given[0], mapped(form[0], lambda x: x[:0] if x.dim() else x))


def _others(given: Any) -> str:
    """Return the arguments that are no tensors, and the names of those that are, as a text."""
    return repr(mapped(given, lambda x: "a tensor"))
