"""Write a model for other runtimes, and say how far what they compute is from the model."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune.hooks.eval_mode import at_rest
from mhaprune.hooks.pytree import tensors_in
from mhaprune.measure.outcomes import apart
from mhaprune.progress import shown, track
from mhaprune.proofs.block_by_block import largest
from mhaprune.saving.onnx_file import computed, runtime, session_of, traced_program, twice, write_onnx
from mhaprune.settings.ranges import checked
from mhaprune.settings.refusals import foreign
from mhaprune.statistics.intervals import mean_interval

ALLOWED = 1e-3
"""The largest difference from the model, in float32, relative to its largest output."""


@checked
@shown()
def export(
    model: nn.Module, path: str | Path, batch: Any = None, int8: bool = False, report: Sequence[Any] = ()
) -> float:
    """Write a model to a file that other runtimes read: `.onnx`, or `.pt2` for `torch.export.load`.

    The batch is a dict by names, a tuple of inputs or a tensor. Its examples may later be more or fewer, and longer or
    shorter if it has two dimensions and the model allows it. The file is read again, for `.onnx` by onnxruntime, and
    must compute the same outputs. Returns the largest difference. Raises ValueError, one line, for a model that cannot
    be exported; then no file is left.

    With `int8`, the weights of the file are rounded to 8 bits, with a scale for each output feature, and what they read
    is rounded while it runs (dynamic quantisation of onnxruntime). This changes the outputs, so a card beside the file,
    `NAME.md`, says by how much: the cosine between each example's outputs before and after, or how far the number of an
    example moves if it has one, over the batches of `report`, or over `batch`.

    >>> mhaprune.export(heads.prune(keep=3, by="magnitude"), "small.pt2", batches[0]) < 1e-5
    True
    """
    if batch is None:
        raise ValueError("batch=None: must be a dict by names, a tuple of inputs or a tensor")
    path = Path(path)
    if path.suffix not in (".onnx", ".pt2") or not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"path={path}: must be a file that ends in .onnx or .pt2, in a folder that exists")
    if int8 and path.suffix != ".onnx":
        raise ValueError(f"int8=True: is for files that end in .onnx, not {path}")
    if report and not int8:
        raise ValueError("report: is for int8=True, other files compute the same")
    inputs, named = twice(*arguments_of(batch))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, at_rest(model), torch.no_grad():
        file = Path(folder, path.name)
        with foreign(f"path={path}: {type(model).__name__} cannot be exported"):
            expected = list(tensors_in(model(*inputs, **named)))
            program = traced_program(model, inputs, named)
            if path.suffix == ".pt2":
                torch.export.save(program, file)
                found = list(tensors_in(torch.export.load(file).module()(*inputs, **named)))
            else:
                write_onnx(program, file, int8)
                session = session_of(file, torch.get_num_threads())
                found = [*computed(session, inputs, named)]
        pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
        difference = largest([0.0, *(apart(a, b) for a, b in pairs)])
        allowed = ALLOWED * max(1.0, *(float(b[b.isfinite()].abs().max()) for _, b in pairs if b.isfinite().any()), 1.0)
        if int8:
            sides = [both_sides(model, session, each) for each in track(report or [batch], "batches")]
            Path(folder, f"{path.name}.md").write_text(_card(path.name, changed_by(sides), bool(report)))
        elif not difference <= allowed:
            raise ValueError(f"path={path}: the exported model differs by {difference:.3g} from the model")
        for each in Path(folder).iterdir():
            each.replace(path.parent / each.name)
    return difference


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as the arguments of a call, by place and by name."""
    named = dict(batch) if isinstance(batch, Mapping) else {}
    return (() if named else batch if isinstance(batch, tuple) else (batch,)), named


def both_sides(model: nn.Module, session: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return what a session and the model compute for each example of a batch, (B, W) each: all real outputs of the
    example together, without those at padding."""
    inputs, named = arguments_of(batch)
    given = [*tensors_in((inputs, named))]
    mask = named.get("attention_mask")
    sides = []
    for outputs in (computed(session, inputs, named), [*tensors_in(model(*inputs, **named))]):
        real = [x.double() for x in outputs if x.is_floating_point() and x.dim() and len(x) == len(given[0])]
        if mask is not None:
            real = [x.flatten(2).mul(mask[..., None]) if x.shape[:2] == mask.shape and x.dim() > 2 else x for x in real]
        sides.append(torch.cat([x.reshape(len(x), -1).nan_to_num(0.0, 0.0, 0.0) for x in real], dim=1))
    return sides[0], sides[1]


def changed_by(sides: Sequence[tuple[Tensor, Tensor]]) -> str:
    """Return a sentence on how far the outputs of two sides are apart, with the interval of a mean over examples."""
    if single := all(ours.shape[1] == 1 for ours, _ in sides):  # of which a cosine would be the sign alone
        ours, theirs = (torch.cat(each) for each in zip(*sides, strict=True))
        spread = float(theirs.std()) if len(theirs) > 1 else 0.0
        values_E = ((ours - theirs).abs() / (spread or 1.0)).flatten().numpy()
        what, unit = "the number of an example moves by", " standard deviations over examples" * bool(spread)
        extreme = f"the largest is {values_E.max():.4f}"
    else:
        values_E = torch.cat([F.cosine_similarity(*each, dim=1) for each in sides]).numpy()
        what, unit = "the cosine between an example's outputs before and after is", ""
        extreme = f"the smallest is {values_E.min():.4f}"
    n, said = len(values_E), f"{what} {values_E.mean():.4f}{unit}"
    if n == 1:
        return f"Over 1 example, {said}."
    low, high = mean_interval(values_E)
    low, high = (max(0.0, low), high) if single else (low, min(1.0, high))
    return f"Over {n} examples, {said} (95 % interval of the mean {low:.4f} to {high:.4f}; {extreme})."


def _card(name: str, changed: str, reported: bool) -> str:
    return f"""# {name}

Written by mhaprune. The weights of matrix products are in 8 bits, with a scale for each output feature; what they read
is rounded while the model runs (dynamic quantisation of onnxruntime {runtime().__version__}).

Its outputs are not those of the model. {changed}

This was measured on the examples {"of the report" if reported else "that it was exported with"} only: on others it may
be more.
"""
