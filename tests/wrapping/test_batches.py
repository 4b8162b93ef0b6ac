"""A user's batches, put together and taken apart, and losses of them against the same by hand."""

import pickle
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from mhaprune import losses, wrap
from mhaprune.wrapping import on_demand
from mhaprune.wrapping.batches import Batches
from mhaprune.wrapping.on_demand import OnDemand
from support.classifier import Classifier


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


def test_shorter_examples_are_filled_up_on_the_right_with_what_nothing_reads() -> None:
    """Nothing real is cut, whatever stands in the mask before it."""
    data = Batches.of(TEXTS, "score")
    batch = data[torch.tensor([2, 0])].arguments()
    assert batch["input_ids"].tolist() == [[0, 2, 3, 4, 9], [0, 0, 5, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3, 4, 9], [-100, -100, 5, -100, -100]]
    assert data[:1].arguments()["input_ids"].tolist() == [[0, 0, 5]]


def test_tuples_tensors_and_constants_keep_their_form() -> None:
    assert Batches.of([torch.ones(2, 3), torch.zeros(1, 3)], "score")[:2].arguments().tolist() == [[1.0] * 3] * 2
    pair = Batches.of([(torch.ones(2, 3), torch.arange(2))], "score")[1:].arguments()
    assert [part.tolist() for part in pair] == [[[1.0] * 3], [1]]
    assert Batches.of([{"x": torch.ones(2), "flag": True}], "score")[:1].arguments()["flag"] is True


def test_padding_is_not_real() -> None:
    data = Batches.of(TEXTS, "score")
    assert torch.equal(data.valid(5, of_decoder=False), data.fields["attention_mask"] != 0)
    assert data.valid(5, of_decoder=True)[1].tolist() == [False, True, True, False, False]  # by the labels
    assert data.valid(9, of_decoder=False).all()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "holds no batches"),
        (iter([]), "holds no batches, .*; an iterator can be read only once"),
        (TensorDataset(torch.ones(2, 3)), "is a TensorDataset, must be a list of batches or a DataLoader"),
        ([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], "batches differ in length .x. and have no attention_mask"),
        ([{"x": torch.ones(2, 3)}, {"y": torch.ones(2, 3)}], "every batch must have the same tensors"),
        ([{"x": torch.ones(2), "y": torch.ones(3)}], "every tensor of a batch must have a row per example, here are x"),
        ([{"x": torch.ones(())}], "every tensor of a batch must have a row per example"),
        (["text"], "a batch is a str, must be a dict, a tuple or a tensor"),
        ([{"x": 3}], "every batch must have the same tensors"),
    ],
)
def test_batches_that_cannot_be_used_are_refused(batches: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"score: {message}"):
        Batches.of(batches, "score")


class Reader(Classifier):
    """A model that reads no padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for attention in self.attention:
            x = x + attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
        return {"last_hidden_state": self.output(x)}


class Read(Dataset[Any]):
    """Texts of different lengths, which notes how many of them are read at once."""

    def __init__(self, draws: bool = False) -> None:
        self.draws, self.at_once = draws, [0]

    def __len__(self) -> int:
        return 13

    def __getitem__(self, n: int) -> Tensor:
        self.at_once[-1] += 1
        drawn = torch.randint(1, 6, (1,)) if self.draws else torch.tensor([n % 5 + 1])
        return torch.cat([drawn, torch.arange(n % 4 + 2) + 1])

    def loader(self, **how: Any) -> DataLoader[Any]:
        return DataLoader(self, batch_size=4, collate_fn=self.collated, **how)

    def collated(self, texts: list[Tensor]) -> dict[str, Tensor]:
        self.at_once.append(0)
        return text(*pad_sequence(texts, batch_first=True).tolist())


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every split is one that does not fit into memory."""
    monkeypatch.setattr(on_demand, "LARGE", 0)


def test_a_large_loader_is_read_again_for_each_batch_with_the_same_results(large: None) -> None:
    torch.manual_seed(0)
    model, dataset = Reader(), Read()
    loader = dataset.loader()
    held = wrap(model, losses.drift, score=list(loader), choose=list(loader), report=list(loader))
    read = wrap(model, losses.drift, score=loader, choose=loader, report=loader)
    assert isinstance(read.splits.score.fields, OnDemand)
    assert torch.equal(read.splits.score.lengths(), held.splits.score.lengths())
    for scorer in ("ablation", "taylor", "gate_output", "ablation_resample"):
        columns = ["head", "score", "score_low"]
        pd.testing.assert_frame_equal(read.score(scorer)[columns], held.score(scorer)[columns], rtol=1e-5)
    mask = read.mask(keep=2, by=[1, 2, 3, 4, 8, 7, 6, 5])
    pd.testing.assert_frame_equal(read.evaluate(mask), held.evaluate(mask), rtol=1e-5)
    assert max(dataset.at_once) <= 4, "never more than the largest batch"
    small = [heads.prune(mask=mask, refit=True, fine_tune=3).state_dict() for heads in (read, held)]
    torch.testing.assert_close(*small, rtol=1e-3, atol=1e-4)


def test_a_batch_of_a_large_loader_is_read_once_and_goes_to_others_as_tensors(large: None) -> None:
    dataset = Read()
    found = on_demand.readings(dataset.loader(), "score")
    assert found is not None
    assert all(part.is_meta for batch in found[0] for part in batch.values()), (
        "no numbers are kept of the first reading"
    )
    data = Batches.of(dataset.loader(), "score")
    before = sum(dataset.at_once)
    batch = data[torch.tensor([12, 3])]
    assert len(batch) == 2
    assert sum(dataset.at_once) == before, "not read yet"
    twice = [batch.arguments(), batch.converted(torch.device("cpu"), torch.double).arguments()]
    sent = pickle.loads(pickle.dumps(replace(batch, form=dict)))
    assert sum(dataset.at_once) == before + 2
    assert type(sent.fields) is dict
    for given in (*twice, sent.arguments()):
        assert given["input_ids"].tolist() == [[3, 1, 2, 0, 0, 0], [4, 1, 2, 3, 4, 5]]


def test_a_shuffled_loader_keeps_the_order_of_its_first_reading(large: None) -> None:
    data = Batches.of(Read().loader(shuffle=True), "score")
    once, again = (torch.cat([part.fields["input_ids"].sum(dim=1) for part in data.batches(4)]) for _ in range(2))
    assert torch.equal(once, again)
    assert len(set(data.fields.at.tolist())) == 13  # type: ignore[attr-defined]


def test_what_cannot_be_read_again_and_what_is_small_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch.manual_seed(1) and torch.cat([batch["input_ids"].sum(1) for batch in Read().loader(shuffle=True)])
    torch.manual_seed(1)
    small = Batches.of(Read().loader(shuffle=True), "score")
    assert type(small.fields) is dict
    assert torch.equal(small.fields["input_ids"].sum(dim=1), order), "looking does not change the order"
    monkeypatch.setattr(on_demand, "LARGE", 0)
    assert type(Batches.of(Read(draws=True).loader(), "score").fields) is dict
    doubled = DataLoader(Read(), batch_size=2, collate_fn=lambda texts: {"x": torch.ones(2 * len(texts), 3)})
    assert len(Batches.of(doubled, "score")) == 26
    assert type(Batches.of(doubled, "score").fields) is dict
    many = DataLoader(TensorDataset(torch.rand(5, 3), torch.arange(5)), batch_size=2)
    assert [part.tolist() for part in Batches.of(many, "score")[1:3].arguments()][1] == [1, 2]
    with pytest.raises(ValueError, match="score: batches differ in length .0. and have no attention_mask"):
        Batches.of(DataLoader([torch.ones(n) for n in (3, 4)]), "score")  # type: ignore[arg-type]


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
