"""Models and tokenizers of transformers from a folder. transformers is imported only where one is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from mhaprune.adapters.saving import check_config, check_folder, class_in, shrinking
from mhaprune.settings.refusals import foreign

CLASSES = {
    "feature-extraction": "AutoModel",
    "sequence-classification": "AutoModelForSequenceClassification",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}
"""What a model is for, and the class of transformers that reads one."""
INSTALL = "pip install -e '.[hf]'"


class Folder:
    """A folder of transformers or, with `hub`, the name of one to download. Its Python code runs only if it is trusted.
    Raises ValueError for anything else."""

    def __init__(self, path: str, hub: bool = False, trust_remote_code: bool = False) -> None:
        try:
            import transformers
        except ImportError:
            raise ValueError(f"model.path={path}: reading it needs transformers: {INSTALL}") from None
        self.library: Any = transformers
        self.path, self.options = path, {"local_files_only": not hub, "trust_remote_code": trust_remote_code}
        if not hub and not os.path.isdir(path):
            raise ValueError(
                f"model.path={path}: no such folder; name one that save_pretrained wrote, or add model.hub=true to"
                " download a model of that name"
            )
        if not hub and not (Path(path) / "config.json").is_file():
            raise ValueError(f"model.path={path}: has no config.json, must be a folder that save_pretrained wrote")
        if not hub:
            with foreign(f"model.path={path}: cannot be read"):
                check_folder(Path(path))
        self.config = self._read("config", transformers.AutoConfig.from_pretrained)
        with foreign(f"model.path={path}: its config cannot be read"):
            check_config(self.config)

    @property
    def tasks(self) -> list[str]:
        """What its kind of model can be made for."""
        return [task for task in CLASSES if self._kind(task) is not None]

    def task(self, wanted: str | None) -> str:
        """What the model is for: what is wanted, else what its weights were saved for."""
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
        """The model with all of its weights. A part that no folder has, and that is not read, is left out."""
        kind = self._kind(task)
        more: dict[str, Any] = {}
        with shrinking(kind):
            model, found = self._load(kind)
            if _only_pooler(found["missing_keys"]):
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
        """Its tokenizer, which can fill up texts to one length."""
        tokenizer = self._read("tokenizer", self.library.AutoTokenizer.from_pretrained)
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


def _only_pooler(names: Any) -> bool:
    return bool(names) and all("pooler" in name for name in names)
