"""The calls `mhaprune.save` and `mhaprune.load`."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from mhaprune.api.to_lab import lab
from mhaprune.saving.folders import load_folder, save_folder
from mhaprune.saving.model_card import LOST, lost_before
from mhaprune.saving.removal_file import REMOVAL
from mhaprune.settings.ranges import checked
from mhaprune.settings.refusals import foreign, naming_full_disk


@checked
def load(
    path: str | Path,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    model: nn.Module | None = None,
) -> nn.Module:
    """Load a saved model: a file of `experiment=train` or `experiment=prune` as a `Loaded`, or a folder that `save` or
    `save_pretrained` of transformers wrote. Raises ValueError, one line, for anything else.

    `trust_remote_code` allows Python code in the folder to run. Folders written by `save` do not need it. `model` is
    for a model of your own: it is what your code builds, with all its heads and any weights, and stays as it is.

    >>> found = mhaprune.run("experiment=train", "task=copy", "training.steps=20", "cache=my_cache", folder="copy")
    >>> model = mhaprune.load("copy/model.pt")
    >>> len(model.grid), len(model.decode("3 1 2", "4 4"))
    (24, 2)
    """
    with foreign(f"device={device}: not to be had on this machine"):
        torch.empty(0, device=device)
    if any(os.path.exists(Path(path, name)) for name in ("config.json", REMOVAL)):  # Path.exists raises for bad names
        found = load_folder(Path(path), trust_remote_code, model).to(device)
        vars(found)[LOST] = lost_before(Path(path), found)
        return found
    model_of_task: nn.Module = lab("sources.loaded").loaded(str(path), device)
    return model_of_task


@checked
def save(
    model: nn.Module,
    path: str | Path,
    tokenizer: Any = None,
    table: pd.DataFrame | None = None,
    about: dict[str, Any] | None = None,
) -> None:
    """Write a pruned model into a folder that `load` reads, and its tokenizer or processor, if you give it.

    The README of the folder, unless it has another one, is a model card: it says what was removed, and how to read the
    folder. It shows `table`, for example that of `Heads.evaluate`, which `verify` measures again. It begins with what
    a hub of models reads: the base model and the licence, where they are known, the row of the table that is of this
    model, and `about`, for example `{"license": "mit"}`.

    A model of transformers is also read without mhaprune: `AutoModelFor....from_pretrained(path,
    trust_remote_code=True)`. A SentenceTransformer is read by its own class, adapters of peft are merged. Of any other
    model the weights are written, with the heads that it lost; `load` repeats this on a model that your code builds.

    >>> mhaprune.save(heads_of_bert.prune(keep=0.5), "small")
    >>> type(mhaprune.load("small")).__name__
    'BertModel'
    >>> mhaprune.save(heads.prune(mask={0: [1]}), "mine")
    >>> [layer.num_heads for layer in mhaprune.load("mine", model=model).attention]
    [3, 4]
    """
    with naming_full_disk(path):
        save_folder(model, path, tokenizer, table, about)


def __getattr__(name: str) -> Any:
    """Return `Loaded` for pickles that name it here."""
    if name == "Loaded":
        return lab("sources.loaded").Loaded
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
