"""A model of the library transformers, read from a folder, with texts from a file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.lab.sources.pretrained import Judges, Pretrained, PretrainedModel, batched, chosen, tokens_of
from mhaprune.lab.sources.texts import CORRUPT, LABEL, TARGET, TEXT, Row, in_splits, read_rows
from mhaprune.saving.folders import check_config, check_folder, class_in, config_in, refuse_adapter, shrinking
from mhaprune.settings.refusals import foreign
from mhaprune.subjects.batches import IGNORED

log = logging.getLogger(__name__)


def probabilities(output: Any, batch: Any) -> Tensor:
    """Return the probabilities of the classes, (B, C), from the `logits` of an output."""
    return output["logits"].softmax(dim=-1)


DRIFT, LIKELIHOOD, CLASSIFICATION = "drift", "likelihood", "classification"
OBJECTIVES: dict[str, dict[str, Judges]] = {
    "feature-extraction": {DRIFT: (losses.drift, None)},
    "sequence-classification": {
        CLASSIFICATION: (losses.classification, losses.accuracy),
        DRIFT: (losses.Drift(probabilities), None),
    },
    "causal-lm": {LIKELIHOOD: (losses.language_model, losses.next_token_accuracy)},
    "seq2seq-lm": {LIKELIHOOD: (losses.seq2seq, losses.token_accuracy)},
}
"""The possible objectives of each task, the usual one first."""


@dataclass(frozen=True)
class Hf(Pretrained):
    """A model of the library transformers. `data` is a file of texts, see `sources.texts`.

    The objective `drift` needs only texts. It is one minus the cosine between the present output and the output with
    all heads; for a classifier, outputs are the probabilities of the classes. `likelihood` is the cross-entropy of the
    next token, of the tokens of the column `target` alone if there is one; an encoder-decoder needs it.
    `classification` is the cross-entropy of the column `label`. The column `corrupt` has a counterpart of each text,
    with as many tokens, for scores of patching.
    """

    path: str | None = None
    """The folder of the model and its tokenizer, as `save_pretrained` or `mhaprune.save` writes it."""
    task: Literal["feature-extraction", "sequence-classification", "causal-lm", "seq2seq-lm"] | None = None
    """The task of the model. None means the task for which its weights were saved."""
    hub: bool = False
    """Whether `path` is the name of a model to download. Otherwise nothing is downloaded."""

    trust_remote_code: bool = False
    """Whether Python code in the folder is run; a model that transformers does not know needs it. The code may do
    anything that you may do on this machine."""

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
        needed = [LABEL] if name == CLASSIFICATION else [TARGET] if task == "seq2seq-lm" else []
        rows = in_splits(read_rows(data, *needed), self.sizes, f"data={data}")
        return model_with_texts(folder, task, name, judged_by, rows, self)


def model_with_texts(
    folder: Folder,
    task: str,
    name: str,
    objective: Judges,
    rows: Mapping[str, Sequence[Row]],
    model: Pretrained,
    packages: Sequence[str] = (),
) -> PretrainedModel:
    """Return the model in `folder`, with its texts in batches."""
    network, tokenizer = folder.model(task), folder.tokenizer()
    classes = getattr(folder.config, "num_labels", 0)
    if name == DRIFT and task == "sequence-classification" and classes < 2:
        raise ValueError(
            f"objective=drift: needs a model of two or more classes, model.path={folder.path} has {classes}"
        )

    every = [row for some in rows.values() for row in some]
    asked = sum(bool(row.target) for row in every)
    if task == "causal-lm" and asked not in (0, len(every)):
        raise ValueError(f"data: {asked} of {len(every)} texts have a target, all or none must have one")
    how: Any = {"padding": True, "truncation": True, "max_length": model.max_length, "return_tensors": "pt"}

    def tokens(part: Sequence[Row], column: str) -> dict[str, Tensor]:
        follows = [f" {row.target}" if row.target and task == "causal-lm" else "" for row in part]
        return dict(tokenizer([getattr(row, column) + more for row, more in zip(part, follows, strict=True)], **how))

    def read(part: Sequence[Row]) -> dict[str, Tensor]:
        batch = tokens(part, TEXT)
        if task == "causal-lm" and asked:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
            for labels, row in zip(batch["labels"], part, strict=True):
                labels[: begin_of_target(row, tokenizer, labels)] = IGNORED
        if name == CLASSIFICATION:
            batch["labels"] = torch.tensor([label_of(row, folder.config) for row in part])
        if task == "seq2seq-lm":
            written = tokenizer(text_target=[row.target for row in part], **how)
            batch["labels"] = written["input_ids"].masked_fill(written["attention_mask"] == 0, IGNORED)
        return batch

    def counterparts(part: Sequence[Row]) -> dict[str, Tensor]:
        batch, corrupt = read(part), tokens(part, CORRUPT)
        for row in part:
            own, other = (len(tokenizer(words)["input_ids"]) for words in (row.text, row.corrupt))
            if own != other:
                raise ValueError(f"{row.place}: text and corrupt have {own} and {other} tokens, must have as many")
        return batch | corrupt

    def of_kinds(some: Sequence[Row], make: Callable[[Sequence[Row]], Any]) -> Any:
        kinds = dict.fromkeys(row.kind for row in some)
        found = {kind: [make(part) for part in batched([row for row in some if row.kind == kind])] for kind in kinds}
        return found if len(found) > 1 else next(iter(found.values()))

    in_pairs = any(row.corrupt for row in every)
    return PretrainedModel(
        model=network,
        splits={split: of_kinds(some, read) for split, some in rows.items()},
        corrupt={split: of_kinds(some, counterparts) for split, some in rows.items() if in_pairs},
        objective=objective,
        facts={"model_task": task, "objective": name},
        packages=("transformers", *packages),
        tokens=partial(tokens_of, tokenizer),
    )


def begin_of_target(row: Row, tokenizer: Any, ids: Tensor) -> int:
    """Return the number of the first token of a row that is not of its text. Raises ValueError if there is none."""
    text = torch.tensor(tokenizer(row.text)["input_ids"][: len(ids)])
    same = (ids[: len(text)] == text).long().cumprod(dim=0).sum()
    if same >= (ids != IGNORED).sum():
        raise ValueError(f"{row.place}: its text fills model.max_length={len(ids)}, so that the target is cut off")
    return int(same)


def label_of(row: Row, config: Any) -> int:
    """Return the number of a row's class, which may be given by name or number. Raises ValueError for other labels."""
    named = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    if row.label in named:
        return named[row.label]
    if row.label.isdecimal() and len(row.label) < 20 and int(row.label) < config.num_labels:
        return int(row.label)
    allowed = f"0 to {config.num_labels - 1}" if len(named) > 20 else ", ".join(named)
    raise ValueError(
        f"{row.place}: the label {row.label[:40]!r} of {row.text[:40]!r} is none of the model's, {allowed}"
    )


CLASSES = {
    "feature-extraction": "AutoModel",
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}
"""The tasks, each with the class of transformers that loads a model for it."""
INSTALL = "pip install -e '.[hf]'"


class Folder:
    """A folder with a model of the library transformers or, with `hub`, the name of a model to download. Python code of
    the model runs only with `trust_remote_code`. Raises ValueError if there is no model that can be read."""

    def __init__(self, path: str, hub: bool = False, trust_remote_code: bool = False) -> None:
        try:
            import transformers
        except ImportError:
            raise ValueError(f"model.path={path}: reading it needs transformers: {INSTALL}") from None
        self.library: Any = transformers
        self.path, self.options = path, {"local_files_only": not hub, "trust_remote_code": trust_remote_code}
        if not hub:
            if not os.path.isdir(path):
                raise ValueError(
                    f"model.path={path}: no such folder; name one that save_pretrained wrote, or add model.hub=true to"
                    " download a model of that name"
                )
            if not (Path(path) / "config.json").is_file():
                raise ValueError(f"model.path={path}: has no config.json, must be a folder that save_pretrained wrote")
            with foreign(f"model.path={path}: cannot be read"):
                check_folder(Path(path))
            refuse_adapter("model.path", Path(path))
        self.config = self._read("config", config_in)
        with foreign(f"model.path={path}: its config cannot be read"):
            check_config(self.config, trust_remote_code)

    @property
    def tasks(self) -> list[str]:
        """The tasks that a model of this kind can be loaded for."""
        return [task for task in CLASSES if self._kind(task) is not None]

    def task(self, wanted: str | None) -> str:
        """Return the task of the model: `wanted`, or by default the task for which its weights were saved."""
        if wanted is None:
            saved = (getattr(self.config, "architectures", None) or [""])[0]
            named = [task for task in self.tasks if getattr(self._kind(task), "__name__", "") == saved]
            if not named:
                raise ValueError(f"model.task: holds a {saved or 'model'}, name one of {', '.join(self.tasks)}")
            return named[0]
        if wanted not in self.tasks:
            kind = type(self.config).__name__.removesuffix("Config")
            raise ValueError(f"model.task={wanted}: a {kind} can be made for {', '.join(self.tasks) or 'none of them'}")
        return wanted

    def model(self, task: str) -> nn.Module:
        """Return the model with all of its weights. A pooler without weights is left out. Raises ValueError if other
        weights are missing or have another shape."""
        kind = self._kind(task)
        more: dict[str, Any] = {}
        with shrinking(kind):
            model, found = self._load(kind)
            missing = found["missing_keys"]
            if missing and all("pooler" in name for name in missing):
                more = {"add_pooling_layer": False}
                model, found = self._load(kind, **more)
        for what in ("missing_keys", "mismatched_keys"):
            if found.get(what):
                names = ", ".join(sorted(map(str, found[what]))[:3])
                raise ValueError(
                    f"model.path={self.path}: is no model for model.task={task}, {what.replace('_', ' ')}: {names}"
                )
        assert isinstance(model, nn.Module)
        return model

    def tokenizer(self) -> Any:
        """Return the tokenizer, with a token to pad texts to one length on the right. On the left, as many chat models
        have it for generation, padding would shift the positions."""
        tokenizer = self._read("tokenizer", self.library.AutoTokenizer.from_pretrained)
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise ValueError(f"model.path={self.path}: its tokenizer has no token to fill up texts with")
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def _kind(self, task: str) -> Any:
        auto = getattr(self.library, CLASSES[task])
        if self.options["trust_remote_code"] and (found := class_in(self.path, self.config, CLASSES[task])) is not None:
            return found
        made = auto._model_mapping.get(type(self.config), None)
        return made[0] if isinstance(made, tuple | list) else made

    def _load(self, kind: Any, **more: Any) -> Any:
        def load(path: str, **options: Any) -> Any:
            return kind.from_pretrained(path, config=self.config, output_loading_info=True, **options, **more)

        return self._read("model", load)

    def _read(self, what: str, read: Any) -> Any:
        with foreign(f"model.path={self.path}: its {what} cannot be read", "model.trust_remote_code=true"):
            return read(self.path, **self.options)
