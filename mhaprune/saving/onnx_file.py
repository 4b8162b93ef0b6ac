"""Write a traced model as a file of ONNX, in float32 or in int8, and compute with it in onnxruntime."""

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.hooks.eval_mode import switched_off
from mhaprune.hooks.pytree import mapped, tensors_in

LARGEST_FILE = 1_500_000_000
"""Number of bytes of weights from which a second file holds them: one file of ONNX holds two gigabytes."""
NEEDED = "needs onnx, onnxscript and onnxruntime: pip install 'mhaprune[onnx]'"


def runtime() -> Any:
    """Return the module onnxruntime. Raises ValueError, with the line that installs it."""
    try:
        importlib.import_module("onnxscript")
        return importlib.import_module("onnxruntime")
    except ImportError:
        raise ValueError(NEEDED) from None


def write_onnx(program: Any, file: Path, int8: bool = False) -> None:
    """Write a program of `torch.export`. With `int8`, the weights of matrix products are rounded to 8 bits, with a
    scale for each output feature, and what they read is rounded while the model runs (dynamic quantisation)."""
    runtime()
    whole = file.with_name(f"whole-{file.name}") if int8 else file
    with _without_advice():
        try:
            written: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
        except Exception as error:  # of code of torch, pages long
            raise ValueError(_cause(program, error)) from None
        size = sum(tensor.nbytes for tensor in program.state_dict.values())
        written.save(whole, external_data=size > LARGEST_FILE)
        if int8:
            quantization = importlib.import_module("onnxruntime.quantization")
            kind = quantization.QuantType.QInt8
            large = {"use_external_data_format": True} if size > LARGEST_FILE else {}
            quantization.quantize_dynamic(str(whole), str(file), per_channel=True, weight_type=kind, **large)
            for each in whole.parent.glob(f"{whole.name}*"):
                each.unlink()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep torch and onnxruntime from logging advice: packages that a model does not need, other ways to quantise."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def _cause(program: Any, error: BaseException) -> str:
    """Return the reason of an error of an export, in one line, with the module and the operator that it is about."""
    reasons: list[BaseException] = []
    while len(reasons) < 20 and error is not None and error not in reasons:
        reasons.append(error)
        error = error.__cause__  # type: ignore[assignment]
    text = " ".join(str(reasons[-1]).split())[:200] or type(reasons[-1]).__name__
    for node in program.graph.nodes:
        if any(f"%{node.name} :" in str(reason) for reason in reasons):
            path, _ = next(reversed((node.meta.get("nn_module_stack") or {"": ("", "")}).values()))
            return f"{path or 'its'} {node.target}: {text}"
    return text


def session_of(file: Path, threads: int) -> Any:
    """Return a session of onnxruntime on the processor, with as many threads."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def computed(session: Any, inputs: Any, named: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return what a session computes from the arguments of the model that was exported."""
    names = [each.name for each in session.get_inputs()]
    by_name = {*names} <= {*named}  # what the model does not read is no input of the file
    given = [named[name] for name in names] if by_name else [*tensors_in((inputs, named))]
    tensors = [tensor.detach().numpy() for tensor in given]
    return [torch.from_numpy(each) for each in session.run(None, dict(zip(names, tensors, strict=True)))]


def twice(inputs: Any, named: Any) -> Any:
    """Return arguments of one example as those of two: of one, an export makes a model that can take no more."""
    return mapped((inputs, named), lambda x: torch.cat([x, x]) if x.dim() and len(x) == 1 else x)


def traced_program(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return a program of `torch.export`, without a cache of keys and values."""
    sizes: Any = {name: _varied(value) for name, value in named.items()} or tuple(map(_varied, inputs))
    with switched_off([("use_cache", getattr(part, "config", None)) for part in model.modules()]):
        return torch.export.export(model, inputs, named, dynamic_shapes=sizes, strict=False)


def _varied(value: Any) -> Any:
    """Return the dimensions of an input that may change: the examples, and the positions of a tensor with two
    dimensions."""
    if not isinstance(value, Tensor):
        return None
    return dict.fromkeys(range(min(2 if value.dim() == 2 else 1, value.dim())), torch.export.Dim.AUTO)
