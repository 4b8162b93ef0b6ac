from __future__ import annotations

import pytest
from torch import Tensor

from classifier import Classifier, batches
from mhaprune import losses
from mhaprune.adapters.wrap import wrap


def test_a_model_that_counts_its_heads_is_gated_and_not_pruned() -> None:
    """What it computes depends on how many heads there are, so a removed head is not a masked one."""

    class Counts(Classifier):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            scale = 1 / self.attention[0].num_heads if self.attention[0].num_heads else 1.0
            return {"logits": scale * super().forward(input_ids, attention_mask, labels)["logits"]}

    heads = wrap(Counts(), losses.classification, score=batches(1))
    assert heads.proven.difference > 1e-3
    assert heads.proven.why_not.startswith("masked and removed differ by 0.")
    assert len(heads.score("ablation")) == len(heads.grid)
    assert len(heads.mask(keep=6, by="greedy").removed) == 2, "masks are enough for that"
    with pytest.raises(ValueError, match="heads of this model can be gated, not removed: masked and removed differ"):
        heads.mask(keep=6, by="greedy_refit")
    with pytest.raises(ValueError, match="heads of this model can be gated, not removed: masked and removed differ"):
        heads.prune(0.5)
