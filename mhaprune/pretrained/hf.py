"""A model of transformers from a folder, with texts from a file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mhaprune.adapters import losses
from mhaprune.adapters.batches import IGNORED
from mhaprune.pretrained.base import Objective, Pretrained, PretrainedModel, batched, chosen
from mhaprune.pretrained.texts import LABEL, TARGET, Row, in_splits, read_rows
from mhaprune.pretrained.transformers_folder import Folder

log = logging.getLogger(__name__)


def probabilities(output: Any, batch: Any) -> Tensor:
    """(B, C): of the classes."""
    return output["logits"].softmax(dim=-1)


DRIFT, LIKELIHOOD, CLASSIFICATION = "drift", "likelihood", "classification"
OBJECTIVES: dict[str, dict[str, Objective]] = {
    "feature-extraction": {DRIFT: Objective(losses.drift)},
    "sequence-classification": {
        CLASSIFICATION: Objective(losses.classification, losses.accuracy),
        DRIFT: Objective(losses.Drift(probabilities)),
    },
    "causal-lm": {LIKELIHOOD: Objective(losses.language_model, losses.next_token_accuracy)},
    "seq2seq-lm": {LIKELIHOOD: Objective(losses.seq2seq, losses.token_accuracy)},
}
"""What a model for each task can be judged by, the usual one first."""


@dataclass(frozen=True)
class Hf(Pretrained):
    """A model of transformers. `data` is a file of texts, see `pretrained.texts`.

    The objective `drift` needs nothing but texts: one minus the cosine between what the model says and what it said
    with all its heads, of a classifier between the probabilities of the classes. `likelihood` is the cross-entropy of
    the next token or, of an encoder-decoder, of the column `target`; `classification` that of the column `label`.
    """

    path: str | None = None
    """The folder of the model and its tokenizer, as `save_pretrained` or `mhaprune.save` writes it."""
    task: Literal["feature-extraction", "sequence-classification", "causal-lm", "seq2seq-lm"] | None = None
    """What the model is for. None is what its folder says."""
    hub: bool = False
    """Whether `path` is the name of a model to download. Otherwise nothing is downloaded."""

    trust_remote_code: bool = False
    """Whether Python code in the folder is run, as a model that transformers does not know needs it. It may do anything
    that you may do on this machine."""

    @property
    def title(self) -> str:
        return Path(self.path or "hf").name

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        if self.path is None:
            raise ValueError("model.path=null: must name the folder of a model, for example model.path=my-bert")
        if data is None:
            raise ValueError("data=null: must name a file of texts, for example data=texts.txt")
        folder = Folder(self.path, self.hub, self.trust_remote_code)
        task = folder.task(self.task)
        name, judged_by = chosen(objective, OBJECTIVES[task], f"model.task={task}")
        rows = in_splits(read_rows(data, *needed(task, name)), self.sizes, f"data={data}")
        return model_with_texts(folder, task, name, judged_by, rows, self)


def needed(task: str, objective: str) -> list[str]:
    """The columns that a file must have beside the text."""
    if objective == CLASSIFICATION:
        return [LABEL]
    return [TARGET] if task == "seq2seq-lm" else []


def model_with_texts(
    folder: Folder,
    task: str,
    name: str,
    objective: Objective,
    rows: Mapping[str, Sequence[Row]],
    model: Pretrained,
    packages: Sequence[str] = (),
) -> PretrainedModel:
    """A model of transformers with texts in batches."""
    network, tokenizer = folder.model(task), folder.tokenizer()
    classes = getattr(folder.config, "num_labels", 0)
    if name == DRIFT and task == "sequence-classification" and classes < 2:
        raise ValueError(
            f"objective=drift: needs a model of two or more classes, model.path={folder.path} has {classes}"
        )

    def read(part: Sequence[Row]) -> dict[str, Tensor]:
        how: Any = {"padding": True, "truncation": True, "max_length": model.max_length, "return_tensors": "pt"}
        batch = dict(tokenizer([row.text for row in part], **how))
        if name == CLASSIFICATION:
            batch["labels"] = torch.tensor([label_of(row, folder.config) for row in part])
        if task == "seq2seq-lm":
            written = tokenizer(text_target=[row.target for row in part], **how)
            batch["labels"] = written["input_ids"].masked_fill(written["attention_mask"] == 0, IGNORED)
        return batch

    def tokens(batch: Any) -> list[list[str]]:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        return [tokenizer.convert_ids_to_tokens(row[real != 0].tolist()) for row, real in zip(ids, mask, strict=True)]

    return PretrainedModel(
        model=network,
        splits={split: [read(part) for part in batched(some)] for split, some in rows.items()},
        objective=objective,
        facts={"model_task": task, "objective": name},
        packages=("transformers", *packages),
        tokens=tokens,
        saves=model.save,
    )


def label_of(row: Row, config: Any) -> int:
    """The number of a class, which a file may call by its name or number. Raises ValueError for any other label."""
    named = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    if row.label in named:
        return named[row.label]
    if row.label.isdecimal() and len(row.label) < 20 and int(row.label) < config.num_labels:
        return int(row.label)
    allowed = f"0 to {config.num_labels - 1}" if len(named) > 20 else ", ".join(named)
    raise ValueError(
        f"{row.place}: the label {row.label[:40]!r} of {row.text[:40]!r} is none of the model's, {allowed}"
    )
