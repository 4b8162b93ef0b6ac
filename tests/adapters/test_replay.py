from __future__ import annotations

import torch
from torch import Tensor

from classifier import Classifier, batches
from mhaprune import losses
from mhaprune.adapters.wrap import wrap
from mhaprune.measure import all_open, measure, measure_masks


class InPlace(Classifier):
    """Adds to the output of its embedding where that lies."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for attention, forward in zip(self.attention, self.feed_forward, strict=True):
            x += attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
            x += forward(x.relu())
        return {"logits": self.output(x.mean(dim=1))}


def test_what_was_written_to_in_place_is_computed_again() -> None:
    heads = wrap(InPlace(), losses.classification, score=batches(2))
    gates_MN = all_open(heads.subject, 1 + len(heads.grid))
    gates_MN[1:].fill_diagonal_(0.0)
    split = heads.splits["score"]
    plain = torch.stack([measure(heads.subject, split, gates_N).loss for gates_N in gates_MN])
    torch.testing.assert_close(measure_masks(heads.subject, split, gates_MN).loss, plain)
