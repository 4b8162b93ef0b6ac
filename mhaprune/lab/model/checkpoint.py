"""Save and load models as files: weights, sizes and task in plain containers, so that loading runs no code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mhaprune.attention.gates import GateConfig
from mhaprune.heads import HeadGrid, HeadId
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import NeuronSite, Site
from mhaprune.measure.outcomes import check_weights_finite
from mhaprune.settings.refusals import BROUGHT, foreign
from mhaprune.storage.cache import weights_digest
from mhaprune.storage.locks import read_bytes
from mhaprune.storage.seals import Damaged, opened, sealed

FORMAT, VERSION = "mhaprune model", 4
"""The format of saved model files, and its version. A file of version 4 ends with a checksum."""
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
    """The content of the file of a saved model."""

    path: str
    """The path from which the file was read. The path is not part of the content."""
    settings: dict[str, Any]
    """The settings `task`, `model`, `gate` and `training`, in the form of a config."""
    heads: tuple[HeadId, ...]
    """The heads that are left."""
    weights: dict[str, Tensor]
    """The `state_dict` of the model, on the CPU."""
    history: list[dict[str, Any]]
    """A row for each evaluation during the first training."""
    facts: dict[str, Any]
    """The identity of the run that saved the model."""
    steps_since: int
    """Number of steps that the model was trained after the first training, for example by fine-tuning."""
    digest: str
    """A fingerprint of the weights."""


def to_bytes(
    model: Seq2Seq,
    settings: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    steps_since: int = 0,
) -> bytes:
    """Return the bytes of a model file, which `load` can read."""
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
    return sealed(content)


def load(path: str) -> SavedModel:
    """Read the file of a saved model. Raises ValueError, one line, if the file is missing, damaged, of another format
    or of another version."""
    try:
        data = read_bytes(Path(path))
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"model_file={path[:200]}: cannot be read ({why}), must name a saved model") from None
    try:
        content = opened(data)
    except Damaged as error:
        raise ValueError(f"model_file={path}: damaged or no saved model at all, {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"model_file={path}: holds something else, must be a model that mhaprune saved")
    if content.get("version") != VERSION:
        raise ValueError(
            f"model_file={path}: saved in version {content.get('version')} of the format, this mhaprune reads {VERSION}"
        )
    with foreign(f"model_file={path}: damaged"):
        if missing := [name for name in KINDS if name not in content]:
            raise ValueError(f"{missing[0]} is missing")
        parts = {name: content[name] for name in KINDS}
        for name, part in parts.items():
            if not isinstance(part, KINDS[name]):
                raise ValueError(f"{name} is a {type(part).__name__}")
        if set(content["settings"]) != set(BROUGHT):
            given = ", ".join(map(str, content["settings"]))
            raise ValueError(f"its settings are {given}, must be {', '.join(BROUGHT)}")
        heads = tuple(HeadId.parse(str(head), [*Site, *NeuronSite]) for head in content["heads"])
        return SavedModel(path, **parts | {"heads": heads})


def restore(
    saved: SavedModel, config: Transformer, vocabulary_size: int, gate: GateConfig | None = None, device: str = "cpu"
) -> Seq2Seq:
    """Build a model with the sizes in `config` and the heads in `saved`, and return it with the saved weights.

    Raises ValueError, one line, if the weights do not fit the model, are not finite, or have changed since they were
    saved.
    """
    with foreign(f"model_file={saved.path}: damaged"):
        with torch.device("meta"):  # its settings may say any size, which takes no memory here
            sketch = Seq2Seq(config, vocabulary_size, gate, HeadGrid(config.grid.blocks, saved.heads))
        wanted = {name: value.shape for name, value in sketch.state_dict().items()}
        found = {name: value.shape for name, value in saved.weights.items() if isinstance(value, Tensor)}
        if wrong := [name for name in wanted | saved.weights if wanted.get(name) != found.get(name)]:
            raise ValueError(f"its weights do not fit: {', '.join(map(str, wrong[:3]))}")
        model = Seq2Seq(config, vocabulary_size, gate, HeadGrid(config.grid.blocks, saved.heads)).to(device)
        model.load_state_dict(saved.weights)
        if weights_digest(model) != saved.digest:
            raise ValueError("its weights are not those that were saved")
        check_weights_finite(model)
        return model
