"""Write a model for other runtimes, and prove that they compute the same."""

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.hooks.eval_mode import at_rest, switched_off
from mhaprune.hooks.pytree import mapped, tensors_in
from mhaprune.measure.outcomes import apart
from mhaprune.progress import shown
from mhaprune.proofs.block_by_block import largest
from mhaprune.settings.ranges import checked
from mhaprune.settings.refusals import foreign

LARGEST_FILE = 1_500_000_000
"""Number of bytes of weights from which a second file holds them: one file of ONNX holds two gigabytes."""
ALLOWED = 1e-3
"""The largest difference from the model, in float32, relative to its largest output."""


@checked
@shown()
def export(model: nn.Module, path: str | Path, batch: Any = None) -> float:
    """Write a model to a file that other runtimes read: `.onnx`, or `.pt2` for `torch.export.load`.

    The batch is a dict by names, a tuple of inputs or a tensor. Its examples may later be more or fewer, and longer or
    shorter if it has two dimensions and the model allows it. The file is read again, for `.onnx` by onnxruntime, and
    must compute the same outputs. Returns the largest difference. Raises ValueError, one line, for a model that cannot
    be exported; then no file is left.

    >>> mhaprune.export(heads.prune(keep=3, by="magnitude"), "small.pt2", batches[0]) < 1e-5
    True
    """
    if batch is None:
        raise ValueError("batch=None: must be a dict by names, a tuple of inputs or a tensor")
    path = Path(path)
    if path.suffix not in (".onnx", ".pt2") or not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"path={path}: must be a file that ends in .onnx or .pt2, in a folder that exists")
    named = dict(batch) if isinstance(batch, Mapping) else {}
    inputs = () if named else batch if isinstance(batch, tuple) else (batch,)
    # What has one example would be taken for what can have no more.
    inputs, named = mapped((inputs, named), lambda x: torch.cat([x, x]) if x.dim() and len(x) == 1 else x)
    varied: Any = {name: _varied(value) for name, value in named.items()} or tuple(map(_varied, inputs))
    caches = switched_off([("use_cache", getattr(part, "config", None)) for part in model.modules()])
    with at_rest(model), caches, torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, path.name)
        with foreign(f"path={path}: {type(model).__name__} cannot be exported"):
            expected = list(tensors_in(model(*inputs, **named)))
            program = torch.export.export(model, inputs, named, dynamic_shapes=varied, strict=False)
            if path.suffix == ".pt2":
                torch.export.save(program, file)
                found = list(tensors_in(torch.export.load(file).module()(*inputs, **named)))
            else:
                found = _to_onnx(program, file, (*inputs, *named.values()))
        pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
        difference = largest([0.0, *(apart(a, b) for a, b in pairs)])
        allowed = ALLOWED * max(1.0, *(float(b[b.isfinite()].abs().max()) for _, b in pairs if b.isfinite().any()), 1.0)
        if not difference <= allowed:
            raise ValueError(f"path={path}: the exported model differs by {difference:.3g} from the model")
        for each in Path(folder).iterdir():
            each.replace(path.parent / each.name)
    return difference


def _to_onnx(program: Any, file: Path, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Write a file of ONNX. Return what onnxruntime computes from it."""
    try:
        runtime: Any = importlib.import_module("onnxruntime")
        importlib.import_module("onnxscript")
    except ImportError:
        raise ValueError("needs onnx, onnxscript and onnxruntime: pip install 'mhaprune[onnx]'") from None
    written: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    written.save(file, external_data=size > LARGEST_FILE)
    session = runtime.InferenceSession(str(file))
    given = [tensor.numpy() for tensor in tensors_in(inputs)]
    names = [each.name for each in session.get_inputs()]
    return [torch.from_numpy(each) for each in session.run(None, dict(zip(names, given, strict=True)))]


def _varied(value: Any) -> Any:
    """Return the dimensions that may change: the examples, and the positions of a tensor with two dimensions."""
    if not isinstance(value, Tensor):
        return None
    return dict.fromkeys(range(min(2 if value.dim() == 2 else 1, value.dim())), torch.export.Dim.AUTO)
