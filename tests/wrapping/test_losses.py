"""Losses and qualities against the same by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mhaprune import losses

LOGITS = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, 3, -100], [-100, -100, 4, 5], [6, -100, -100, -100]])


def test_classification() -> None:
    logits, labels = LOGITS[:, 0], torch.tensor([0, 1, 2])
    batch = {"labels": labels}
    expected = -logits.log_softmax(-1)[torch.arange(3), labels]
    torch.testing.assert_close(losses.classification({"logits": logits}, batch), expected)
    assert losses.accuracy(logits, {"labels": logits.argmax(-1)}).tolist() == [1, 1, 1]


def test_a_language_model_is_judged_on_its_own_tokens_wherever_the_padding_stands() -> None:
    expected = [
        torch.stack([F.cross_entropy(LOGITS[b, t - 1], LABELS[b, t]) for t in range(1, 4) if LABELS[b, t] >= 0])
        for b in range(2)
    ]
    found = losses.language_model(LOGITS, {"labels": LABELS})
    torch.testing.assert_close(found[:2], torch.stack([values.mean() for values in expected]))
    assert found[2] == 0  # no token counts
    ids, mask = LABELS.clamp(min=0), (LABELS != -100).long()
    torch.testing.assert_close(losses.language_model(LOGITS, {"input_ids": ids, "attention_mask": mask}), found)


def test_share_of_next_tokens() -> None:
    right = LOGITS.argmax(-1).roll(1, dims=1)
    assert losses.next_token_accuracy(LOGITS, {"labels": right}).tolist() == [1, 1, 1]
    right[0, 1] = (right[0, 1] + 1) % 7
    assert losses.next_token_accuracy(LOGITS, {"labels": right}).tolist() == pytest.approx([2 / 3, 1, 1])


def test_sequences_are_right_if_all_their_tokens_are() -> None:
    right = torch.where(LABELS < 0, -100, LOGITS.argmax(-1))
    assert losses.exact_match(LOGITS, {"labels": right}).tolist() == [1, 1, 1]
    right[1, 2] = (right[1, 2] + 1) % 7
    assert losses.exact_match(LOGITS, {"labels": right}).tolist() == [1, 0, 1]
    expected = F.cross_entropy(LOGITS.mT, LABELS, reduction="none").sum(1) / torch.tensor([3, 2, 1])
    torch.testing.assert_close(losses.seq2seq(LOGITS, {"labels": LABELS}), expected)


def test_drift_is_the_angle_to_the_whole_model_over_real_tokens() -> None:
    states, mask = torch.randn(2, 3, 5), torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = {"attention_mask": mask}
    pooled = losses.mean_of_tokens({"last_hidden_state": states}, batch)
    torch.testing.assert_close(pooled[0], states[0, :2].mean(0))
    moved = {**batch, "dense": pooled.flip(0)}
    expected = 1 - F.cosine_similarity(pooled, pooled.flip(0), dim=-1)
    torch.testing.assert_close(losses.drift({"last_hidden_state": states}, moved), expected)
    torch.testing.assert_close(losses.similarity({"last_hidden_state": states}, moved), 1 - expected)


def test_each_loss_brings_its_quality() -> None:
    assert losses.quality_for(losses.classification) is losses.accuracy
    assert losses.name_of(losses.quality_for(losses.drift)) == "similarity"
    own = losses.quality_for(lambda output, batch: torch.ones(3))
    assert own(None, None).tolist() == [-1, -1, -1]
    assert losses.name_of(own) == "minus the loss"


def test_what_a_loss_cannot_find_is_named() -> None:
    with pytest.raises(ValueError, match="loss: needs labels in every batch, there are x"):
        losses.classification(LOGITS[:, 0], {"x": LABELS})
    with pytest.raises(ValueError, match="loss: the model returns a list without logits"):
        losses.classification([LOGITS], {"labels": LABELS})
