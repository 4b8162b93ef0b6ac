"""A small model that is not ours, with padded batches for it."""

from copy import deepcopy
from functools import cache

import torch
from torch import Tensor, nn

from mhaprune.attention.layer import MultiHeadAttention


class Classifier(nn.Module):
    """A tiny encoder, ours or torch's, that says which of three classes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(11, width), nn.Linear(width, 3)
        self.attention = nn.ModuleList(MultiHeadAttention(width, 4) for _ in range(2))
        self.feed_forward = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for attention, forward in zip(self.attention, self.feed_forward, strict=True):
            x = x + attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
            x = x + forward(x.relu())
        return {"logits": self.judged(self.output(x.mean(dim=1)), input_ids)}

    def judged(self, logits_BC: Tensor, ids_BT: Tensor) -> Tensor:
        """For tests with a model that answers in another way."""
        return logits_BC


def batches(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    made = []
    for length in range(4, 4 + count):
        ids = torch.randint(1, 11, (6, length), generator=draw)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 3})
    return made


def classifier() -> Classifier:
    """The model after thirty steps, and the random numbers that follow them. It is trained once."""
    model, state = _trained(torch.get_default_dtype())
    torch.set_rng_state(state)
    return deepcopy(model)


@cache
def _trained(dtype: torch.dtype) -> tuple[Classifier, Tensor]:
    torch.manual_seed(0)
    model = Classifier()
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for batch in batches(30, seed=5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(**batch)["logits"], batch["labels"]).backward()
        optimiser.step()
    return model, torch.get_rng_state()
