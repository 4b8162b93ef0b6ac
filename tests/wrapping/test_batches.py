"""A user's batches, put together and taken apart, and losses of them against the same by hand."""

from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from mhaprune import losses
from mhaprune.subjects.batches import Batches
from mhaprune.subjects.stacks import DENSE


def text(*ids: list[int]) -> dict[str, Tensor]:
    """A batch padded on the left; the first place of a row has no label."""
    ids_BT = torch.tensor(ids)
    labels_BT = ids_BT.masked_fill(ids_BT == 0, -100)
    labels_BT[:, 0] = -100
    return {"input_ids": ids_BT, "attention_mask": (ids_BT != 0).long(), "labels": labels_BT}


TEXTS = [text([0, 0, 5], [6, 7, 8]), text([0, 2, 3, 4, 9])]


def test_the_batches_of_a_user_come_back_as_they_were() -> None:
    data = Batches.of(TEXTS, "score")
    assert len(data) == 3
    assert data.lengths().tolist() == [1, 3, 4]
    for given, at in zip(TEXTS, ([0, 1], [2]), strict=True):
        batch = data[torch.tensor(at)].arguments()
        assert batch.keys() == given.keys()
        assert all(torch.equal(batch[key], given[key]) for key in given)


def test_only_examples_of_one_width_share_a_pass() -> None:
    data = Batches.of([*TEXTS, text([1, 2, 3])], "score")
    assert [batch.arguments()["input_ids"].tolist() for batch in data.batches(9)] == [
        [[0, 0, 5], [6, 7, 8]],
        [[0, 2, 3, 4, 9]],
        [[1, 2, 3]],
    ]
    order = data.by_length()
    passes = [data[at].arguments()["input_ids"].tolist() for at in data.passes(order, 9)]
    assert passes == [[[0, 0, 5], [6, 7, 8]], [[1, 2, 3]], [[0, 2, 3, 4, 9]]]
    with pytest.raises(ValueError, match="share no pass"):
        data.arguments()


def test_tuples_tensors_and_constants_keep_their_form() -> None:
    assert Batches.of([torch.ones(2, 3), torch.zeros(1, 3)], "score")[:2].arguments().tolist() == [[1.0] * 3] * 2
    pair = Batches.of([(torch.ones(2, 3), "a", torch.arange(2))], "score")[1:].arguments()
    assert pair[1] == "a", "in the order in which it was given"
    assert [part.tolist() for part in pair[::2]] == [[[1.0] * 3], [1]]
    assert Batches.of([{"x": torch.ones(2), "flag": True}], "score")[:1].arguments()["flag"] is True


def test_what_is_no_tensor_stays_with_its_batch() -> None:
    """A list of one entry per example is selected with its example."""
    given = [{"x": torch.ones(2, 1) * n, "prompt": n % 2, "texts": [f"{n}a", f"{n}b"]} for n in range(4)]
    data = Batches.of(given, "score")
    for at in data.passes(data.by_length(), 3):
        batch = data[at].arguments()
        assert batch["prompt"] == int(batch["x"][0]) % 2 == int(batch["x"][-1]) % 2
        assert [text[0] for text in batch["texts"]] == [str(int(x)) for x in batch["x"]]


def test_a_batch_for_proofs_has_the_longest_and_the_shortest_example_of_all_splits() -> None:
    wide, narrow = text([0, 2, 3, 4, 9], [1, 2, 3, 4, 5], [0, 0, 0, 1, 2]), text([3, 3, 1])
    splits = [Batches.of([each], "score") for each in (text([6, 7, 8]), wide, narrow)]
    tried = Batches.extremes(splits)
    parts = [batch.arguments()["input_ids"].tolist() for batch in tried.batches(9)]
    assert parts == [[[1, 2, 3, 4, 5], [0, 2, 3, 4, 9], [0, 0, 0, 1, 2]], [[6, 7, 8]]]
    (together,) = Batches.extremes([Batches.of([wide], "score")]).batches(9)
    assert sorted(together.lengths().tolist()) == [2, 4, 5]
    alone = [
        Batches.of([each], "score") for each in (text([1, 2, 3, 4]), text([1, 2], [3, 4], [5, 6]), text([1, 2, 3]))
    ]
    parts = [batch.arguments()["input_ids"].tolist() for batch in Batches.extremes(alone).batches(9)]
    assert parts == [[[1, 2, 3, 4]], [[1, 2], [1, 2], [3, 4]]], "two examples share a pass, as in the user's batches"
    single = Batches.extremes([Batches.of([text([1, 2]), text([1, 0])], "score")])
    assert [len(batch) for batch in single.batches(9)] == [1, 1], "no pass is larger than the user's batches"


def test_padding_is_not_real() -> None:
    short, long = Batches.of(TEXTS, "score").batches(2)
    assert torch.equal(short.mask, short.fields["attention_mask"] != 0)  # type: ignore[arg-type]
    assert short.of_decoder(3)[1].tolist() == [False, True, True]  # by the labels
    assert short.of_decoder(9).all()
    assert Batches.of([text([1, 2])], "score").mask is None
    assert len(long) == 1


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "holds no batches"),
        (iter([]), "holds no batches, .*; an iterator can be read only once"),
        (TensorDataset(torch.ones(2, 3)), "is a TensorDataset, must be a list of batches or a DataLoader"),
        ([{"x": torch.ones(2, 3)}, {"y": torch.ones(2, 3)}], "every batch must have the same tensors"),
        ([{"x": torch.ones(2), "y": torch.ones(3)}], "every tensor of a batch must have a row per example, here are x"),
        ([{"x": torch.ones(())}], "every tensor of a batch must have a row per example"),
        (["text"], "a batch is a str, must be a dict, a tuple or a tensor"),
        ([{"x": 3}], "every batch must have the same tensors"),
        ([{"x": torch.ones(2), "more": {"y": torch.ones(2)}}], "more is a dict with tensors in it, must be a tensor"),
    ],
)
def test_batches_that_cannot_be_used_are_refused(batches: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"score: {message}"):
        Batches.of(batches, "score")


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
    assert found[2].isnan(), "no token counts"
    ids, mask = LABELS.clamp(min=0), (LABELS != -100).long()
    masked = losses.language_model(LOGITS, {"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(masked[0], found[0])
    torch.testing.assert_close(masked[1], F.cross_entropy(LOGITS[1, 2], LABELS[1, 3])), "nothing follows from padding"


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
    moved = {**batch, DENSE: pooled.flip(0)}
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


def test_a_stream_that_goes_on_after_several_epochs_is_the_rest_of_the_whole_one() -> None:
    data = Batches.of([torch.arange(12).view(6, 2)], "score")

    def stream(skip: int, count: int) -> list[list[int]]:
        drawn = data.shuffled_batches(2, torch.Generator().manual_seed(0), skip=skip)
        return [batch.at[:, 1].tolist() for batch in islice(drawn, count)]

    assert stream(5, 3) == stream(0, 8)[5:]
