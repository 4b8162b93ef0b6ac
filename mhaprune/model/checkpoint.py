"""Models as files: weights, shape and task in plain containers, so that reading one runs no code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mhaprune.cache import weights_digest
from mhaprune.data import Examples, shift_right
from mhaprune.heads import HeadId
from mhaprune.model.transformer import Seq2Seq

FORMAT, VERSION = "mhaprune model", 1
BROUGHT = ("task", "model", "gate", "training")
"""The settings of a run that a saved model brings with it."""
KINDS: dict[str, type] = {
    "settings": dict,
    "heads": list,
    "weights": dict,
    "history": list,
    "facts": dict,
    "steps_since": int,
    "digest": str,
}


@dataclass(frozen=True)
class SavedModel:
    """What a file holds.

    `settings` are the task, model, gate and training as a config has them; `heads` those that are left; `history` the
    table of the training that came first, `steps_since` how many steps were trained after it; `facts` what run it came
    from; `digest` a fingerprint of the weights.
    """

    settings: dict[str, Any]
    heads: tuple[HeadId, ...]
    weights: dict[str, Tensor]
    history: list[dict[str, Any]]
    facts: dict[str, Any]
    steps_since: int
    digest: str


def to_bytes(
    model: Seq2Seq,
    settings: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    steps_since: int = 0,
) -> bytes:
    """A file's content."""
    buffer = io.BytesIO()
    content = {
        "format": FORMAT,
        "version": VERSION,
        "settings": dict(settings),
        "heads": [str(head) for head in model.grid],
        "weights": {name: value.cpu() for name, value in model.state_dict().items()},
        "digest": weights_digest(model),
        "history": [dict(row) for row in history],
        "facts": dict(facts),
        "steps_since": steps_since,
    }
    torch.save(content, buffer)
    return buffer.getvalue()


def load(path: str) -> SavedModel:
    """Raises ValueError, one line, for a file that is not there, not whole, not ours or of another version."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"model_file={path}: cannot be read ({error.strerror}), must name a saved model") from None
    try:
        content = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError):
        raise ValueError(f"model_file={path}: truncated or no saved model at all") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"model_file={path}: holds something else, must be a model that mhaprune saved")
    if content.get("version") != VERSION:
        raise ValueError(
            f"model_file={path}: saved in version {content.get('version')} of the format, this mhaprune reads {VERSION}"
        )
    try:
        parts = [content[field.name] for field in fields(SavedModel)]
        for field, part in zip(fields(SavedModel), parts, strict=True):
            if not isinstance(part, KINDS[field.name]):
                raise ValueError(f"{field.name} is a {type(part).__name__}")
        missing = set(BROUGHT) - set(content["settings"])
        if missing or len(content["settings"]) > len(BROUGHT):
            raise ValueError(f"its settings are {', '.join(content['settings'])}, must be {', '.join(BROUGHT)}")
        return replace(SavedModel(*parts), heads=tuple(map(HeadId.parse, content["heads"])))
    except KeyError as name:
        raise ValueError(f"model_file={path}: damaged, {name} is missing") from None
    except ValueError as error:
        raise ValueError(f"model_file={path}: damaged, {error}") from None


def exported(model: Seq2Seq, batch: Examples) -> torch.export.ExportedProgram:
    """The program of source (B, S) and prefix (B, T) to logits (B, T, V), for batches and lengths of any size."""
    # Copies: a slice of a longer tensor would be part of what the program asks for.
    inputs = batch.source.clone(), shift_right(batch.target)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    return torch.export.export(model, inputs, dynamic_shapes=(sizes, sizes))
