"""A user's batches, put together and taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mhaprune.wrapping.batches import Batches


def texts() -> list[dict[str, Tensor]]:
    """Two batches of different lengths, padded on the left."""
    return [
        {
            "input_ids": torch.tensor([[0, 0, 5], [6, 7, 8]]),
            "attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]]),
            "labels": torch.tensor([[-100, -100, 5], [-100, 7, 8]]),
        },
        {
            "input_ids": torch.tensor([[0, 2, 3, 4, 9]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1]]),
            "labels": torch.tensor([[-100, 2, 3, 4, 9]]),
        },
    ]


def test_the_batches_of_a_user_come_back_as_they_were() -> None:
    data = Batches.of(texts(), "score")
    assert len(data) == 3
    for given, at in zip(texts(), ([0, 1], [2]), strict=True):
        batch = data[torch.tensor(at)].arguments()
        assert batch.keys() == given.keys()
        assert all(torch.equal(batch[key], given[key]) for key in given)


def test_shorter_examples_are_filled_up_on_the_right_with_what_nothing_reads() -> None:
    batch = Batches.of(texts(), "score")[torch.tensor([2, 0])].arguments()
    assert batch["input_ids"].tolist() == [[0, 2, 3, 4, 9], [0, 0, 5, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, 4, 9], [-100, -100, 5, -100, -100]]


def test_real_tokens_are_never_cut_whatever_the_mask_holds() -> None:
    """The example with one real token keeps the place of that token."""
    data = Batches.of(texts(), "score")
    for start in range(3):
        for stop in range(start + 1, 4):
            part = data[start:stop].arguments()
            for row, e in enumerate(range(start, stop)):
                ids = data.fields["input_ids"][e]
                assert part["input_ids"][row].tolist() == ids[: part["input_ids"].shape[1]].tolist()
                assert not ids[part["input_ids"].shape[1] :].any()


def test_order_and_lengths() -> None:
    data = Batches.of(texts(), "score")
    assert data.lengths().tolist() == [1, 3, 4]
    assert data.by_length().tolist() == [0, 1, 2]
    batches = list(data.shuffled_batches(2, torch.Generator().manual_seed(0)).__next__().arguments()["input_ids"])
    assert len(batches) == 2


def test_tuples_tensors_and_constants_keep_their_form() -> None:
    assert Batches.of([torch.ones(2, 3), torch.zeros(1, 3)], "score")[:2].arguments().tolist() == [[1.0] * 3] * 2
    pair = Batches.of([(torch.ones(2, 3), torch.arange(2))], "score")[1:].arguments()
    assert [part.tolist() for part in pair] == [[[1.0] * 3], [1]]
    assert Batches.of([{"x": torch.ones(2), "flag": True}], "score")[:1].arguments()["flag"] is True


def test_padding_is_not_real() -> None:
    data = Batches.of(texts(), "score")
    assert torch.equal(data.valid(5, of_decoder=False), data.fields["attention_mask"] != 0)
    assert data.valid(5, of_decoder=True)[1].tolist() == [False, True, True, False, False]  # by the labels
    assert data.valid(9, of_decoder=False).all()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "score: holds no batches"),
        (None, "score: holds no batches"),
        (
            [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}],
            "score: batches differ in length .x. and have no attention_mask",
        ),
        ([{"x": torch.ones(2, 3)}, {"y": torch.ones(2, 3)}], "score: every batch must have the same tensors"),
        (
            [{"x": torch.ones(2), "y": torch.ones(3)}],
            "score: every tensor of a batch must have a row per example, here are x",
        ),
        ([{"x": torch.ones(())}], "score: every tensor of a batch must have a row per example"),
        (["text"], "score: a batch is a str, must be a dict, a tuple or a tensor"),
        ([{"x": 3}], "score: every batch must have the same tensors"),
    ],
)
def test_batches_that_cannot_be_used_are_refused(batches: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches.of(batches, "score")
