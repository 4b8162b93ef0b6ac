"""A model of `experiment=train` or `experiment=prune`, read from its file."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mhaprune.heads import HeadGrid
from mhaprune.lab.model.checkpoint import load
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.sources.trained import restored
from mhaprune.lab.tasks.base import Task
from mhaprune.lab.tasks.sequences import pad
from mhaprune.settings.ranges import checked


def loaded(path: str, device: torch.device | str) -> "Loaded":
    """Read a file, see `mhaprune.load`. Raises ValueError, one line, for another file."""
    return Loaded(*restored(load(path), device))


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
