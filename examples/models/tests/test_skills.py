"""The seven skills of a language model: what is asked for can be known from what stands before it."""

import random
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from mhaprune_models import skills, smollm2
from mhaprune_models.smollm2 import SKILLS, Smollm2


class Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, text: str, **options: Any) -> Any:
        return type("Encoding", (), {"input_ids": list(map(ord, text))})()


def texts(kind: str, count: int) -> list[tuple[str, str]]:
    """Each text of a kind, as what is given and what is asked for."""
    found = islice(SKILLS[kind](random.Random(0), Letters()), count)
    return [("".join(map(chr, ids[:begin])), "".join(map(chr, ids[begin:]))) for ids, begin in found]


def test_numbers_are_counted_on() -> None:
    for given, asked in texts("counting", 50):
        numbers = [int(part) for part in given.rstrip(",").split(",")]
        steps = {after - before for before, after in pairwise(numbers)}
        assert len(numbers) == 4
        assert steps == {int(asked) - numbers[-1]}


def test_facts_are_each_asked_once() -> None:
    found = texts("facts", 1000)
    assert len(found) == len({given for given, _ in found}) > 140
    assert ("The capital of France is", " Paris") in found
    assert ("The opposite of hot is", " cold") in found
    assert all(asked.startswith(" ") and len(asked.split()) == 1 for _, asked in found)


def test_what_is_copied_stands_before() -> None:
    for ids, begin in islice(skills.copying(random.Random(0), Letters()), 5):
        half = len(ids) // 2
        assert ids[:half] == ids[half:]
        assert begin == half + 1, "the first of the second half cannot be known"


@pytest.mark.parametrize("kind", ["agreement", "giving"])
def test_a_rule_asks_for_its_right_word(kind: str) -> None:
    for given, asked in texts(kind, 20):
        if kind == "agreement":
            assert asked == (" are" if given.split()[1].endswith("s") else " is")
        else:
            assert given.split().count(asked.strip().strip(",")) + given.count(f"{asked.strip()},") >= 1


@pytest.mark.parametrize("kind", ["code", "prose"])
def test_pieces_have_one_length_and_do_not_overlap(kind: str) -> None:
    found = list(islice(SKILLS[kind](random.Random(0), Letters()), 200))
    assert {len(ids) for ids, _ in found} == {skills.LENGTH}
    assert len({ids for ids, _ in found}) > 190
    assert {begin for _, begin in found} == {1}


def test_only_what_is_asked_for_has_labels() -> None:
    batch = skills.batch_of([((5, 6, 7, 8), 2), ((1, 2), 1)])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [1, 2, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8], [-100, 2, -100, -100]]


def test_splits_share_no_text_and_hold_as_many_of_each_skill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "language_model", lambda cache: (torch.nn.Linear(1, 1), Letters()))
    read = Smollm2(score=70, choose=14, report=28).read(None, "skills", "")
    seen: set[tuple[int, ...]] = set()
    for split, count in (("score", 10), ("choose", 2), ("report", 4)):
        assert list(read.splits[split]) == list(SKILLS)
        for batches in read.splits[split].values():
            rows = [
                row[mask != 0] for b in batches for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)
            ]
            mine = {tuple(row.tolist()) for row in rows}
            assert len(mine) == count
            assert not mine & seen
            seen |= mine
    for size, message in ((7, "model.score=7: must have two texts or more of 7 skills$"), (7000, "too few texts of")):
        with pytest.raises(ValueError, match=message):
            Smollm2(score=size).read(None, "skills", "")


def test_what_is_said_of_a_text_does_not_depend_on_its_batch() -> None:
    class Model(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> Any:
            logits = torch.nn.functional.one_hot(ids, 10).float()
            return type("Output", (), {"logits": logits[:, -logits_to_keep:]})()

    texts = [((5, 6, 7, 8), 2), ((1, 2, 3, 4), 1)]
    both = smollm2.called(Model(), skills.batch_of(texts))["logits"]
    for row, text in zip(both, texts, strict=True):
        [alone] = smollm2.called(Model(), skills.batch_of([text]))["logits"]
        assert torch.equal(row, alone)
        assert alone.any(dim=-1).nonzero().flatten().tolist() == list(range(text[1] - 1, 3))
