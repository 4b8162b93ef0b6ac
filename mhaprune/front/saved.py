"""Saved models: write and load them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from mhaprune.data import pad
from mhaprune.heads import HeadGrid
from mhaprune.model.checkpoint import load as read
from mhaprune.model.transformer import Seq2Seq
from mhaprune.settings.ranges import checked
from mhaprune.settings.refusals import foreign, naming_full_disk
from mhaprune.sources.trained import restored
from mhaprune.tasks.base import Task
from mhaprune.wrapping.model_card import LOST, lost_before
from mhaprune.wrapping.removal_file import REMOVAL
from mhaprune.wrapping.saving import load_folder, save_folder


class Loaded(nn.Module):
    """A saved model with the task that it was trained on. Calling it with source and prefix returns logits."""

    def __init__(self, network: Seq2Seq, task: Task) -> None:
        super().__init__()
        self.network, self.task = network, task

    @property
    def grid(self) -> HeadGrid:
        """The heads that the model still has."""
        return self.network.grid

    def forward(self, source_BS: Tensor, prefix_BT: Tensor, gates: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of the token after each position of the prefix; `gates` (N,) or (B, N), 1 is open."""
        with self.network.gated(len(source_BS), gates):
            return self.network(source_BS, prefix_BT)

    @checked
    def decode(self, *sources: str) -> str | list[str]:
        """Return the model's answer to a source as a person types it (`"3 1 2"`); a list for several sources.

        Raises ValueError, one line, for a source that the task cannot read.
        """
        if not sources:
            raise ValueError("decode: needs a source, for example decode('3 1 2')")
        words: list[Sequence[str]] = [self.task.read(source) for source in sources]
        ids_BS = pad([self.task.vocabulary.encode(symbols) for symbols in words]).to(self.network.positions.device)
        said = self.network.decode_greedily(ids_BS, self.network.config.max_length, stop=True)
        shown = [self.task.show(source, target) for source, target in zip(ids_BS.tolist(), said.tolist(), strict=True)]
        answers = [text.rpartition(" -> ")[2] for text in shown]
        return answers[0] if len(answers) == 1 else answers


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
    return Loaded(*restored(read(str(path)), device))


@checked
def save(model: nn.Module, path: str | Path, tokenizer: Any = None, table: pd.DataFrame | None = None) -> None:
    """Write a pruned model into a folder that `load` reads, and its tokenizer or processor, if you give it.

    The README of the folder, unless it has another one, is a model card: it says what was removed, and how to read the
    folder. It shows `table`, for example that of `Heads.evaluate`.

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
        save_folder(model, path, tokenizer, table)
