"""What must hold for every task of conf/task, a new one too."""

from dataclasses import replace

import pytest
import torch

from mhaprune.data import EOS, PAD, SPECIAL, Examples, Splits
from mhaprune.tasks.base import Task
from support.composing import every
from support.sizes import options

NAMES = options("task")
Rows = list[tuple[list[int], list[int]]]


@pytest.fixture(params=NAMES)
def task(request: pytest.FixtureRequest) -> Task:
    found = every("task")[request.param]
    assert isinstance(found, Task)
    return found


@pytest.fixture(scope="module")
def all_splits() -> dict[Task, Splits]:
    return {task: task.splits() for task in every("task").values()}


@pytest.fixture
def splits(task: Task, all_splits: dict[Task, Splits]) -> Splits:
    return all_splits[task]


def rows(examples: Examples) -> Rows:
    return list(zip(examples.source.tolist(), examples.target.tolist(), strict=True))


def test_splits_have_the_sizes_asked_for_and_share_no_example(task: Task, splits: Splits) -> None:
    assert {name: len(examples) for name, examples in splits.items() if name != "train"} == task.held_out
    assert len(splits.train) > 0
    seen: set[tuple[int, ...]] = set()
    for name, examples in splits.items():
        own = {tuple(token for token in source if token != PAD) for source in examples.source.tolist()}
        assert len(own) == len(examples), f"{name}: no example twice"
        assert not own & seen, name
        seen |= own


def test_examples_are_whole_and_of_the_vocabulary(task: Task, splits: Splits) -> None:
    assert len(set(task.vocabulary.symbols)) == len(task.vocabulary.symbols)
    assert not set(SPECIAL) & set(task.vocabulary.symbols)
    for _, examples in splits.items():
        for ids in (examples.source, examples.target):
            assert ids.dtype == torch.long
            assert ((ids == EOS).sum(dim=1) == 1).all(), "closed once"
            ends = (ids == EOS).int().argmax(dim=1, keepdim=True)
            after = torch.arange(ids.shape[1]) > ends
            assert (ids[after] == PAD).all()
            assert ((ids[~after] == EOS) | (ids[~after] >= len(SPECIAL))).all()
            assert int(ids.max()) < len(task.vocabulary)
            assert (ends > 0).all(), "no example is empty"


def test_the_same_task_has_the_same_examples_and_another_seed_others(task: Task, splits: Splits) -> None:
    again, other = replace(task).splits(), replace(task, seed=task.seed + 1).splits()
    for name, examples in splits.items():
        assert torch.equal(examples.source, getattr(again, name).source)
        assert torch.equal(examples.target, getattr(again, name).target)
    assert not torch.equal(other.report.source, splits.report.source)


def test_what_a_person_types_is_read_and_answered_as_the_examples_are(task: Task, splits: Splits) -> None:
    """And encoding is undone by decoding."""
    decode, report = task.vocabulary.decode, splits.report[:8]
    again = task.encode([(decode(source), decode(target)) for source, target in rows(report)])
    assert torch.equal(again.source, report.source)
    assert torch.equal(again.target, report.target)
    for source, target in rows(splits.report[:2]):
        text = task.show(source, target)
        typed, shown = text.split(" -> ")
        assert task.read(typed) == decode(source)
        answer = task.answer(task.read(typed))
        assert answer is None or list(answer) == decode(target)
        assert "".join(decode(target)) == shown.replace(" ", "")


def test_what_cannot_be_read_is_refused_in_one_line(task: Task) -> None:
    for text, message in (("", "is empty, allowed are"), ("  ", "is empty, allowed are"), ("é", "é is not in the voc")):
        with pytest.raises(ValueError, match=f"^example='{text}': {message}[^\n]*$"):
            task.read(text)


def test_there_are_few_groups_and_memory_is_estimated_before_anything_is_made(task: Task, splits: Splits) -> None:
    groups = [task.group(source) for source, _ in rows(splits.report)]
    assert all(isinstance(group, str) and group for group in groups)
    assert len(set(groups)) < len(groups)
    assert task.bytes_of_examples() >= 0
    if task.bytes_of_examples():
        tensors = sum(ids.nbytes for _, examples in splits.items() for ids in (examples.source, examples.target))
        assert task.bytes_of_examples() > tensors
