"""What must hold for every task of conf/task and of examples/words, a new one too, and what each of them asks for."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mhaprune.data import Splits
from mhaprune.lab.tasks.base import SequenceTask, Task
from mhaprune.lab.tasks.copy import Copy
from mhaprune.lab.tasks.mirror_difference import MirrorDifference
from mhaprune.lab.tasks.reverse import Reverse
from mhaprune.lab.tasks.running_sum import RunningSum
from mhaprune.lab.tasks.sequences import EOS, PAD, SPECIAL, Examples
from mhaprune.lab.tasks.sort import Sort
from support.composing import every, known

NAMES = known("task")
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


def test_shifts_are_of_another_kind_than_anything_that_is_learnt(task: Task, splits: Splits) -> None:
    seen = {tuple(source) for _, examples in splits.items() for source, _ in decoded_rows(task, examples)}
    again = task.shifts()
    for name, examples in task.shifts().items():
        assert 2 <= len(examples) <= task.report, name
        own = decoded_rows(task, examples)
        assert not {tuple(source) for source, _ in own} & seen, name
        assert torch.equal(examples.source, again[name].source), "the same on every call"
        for source, target in own[:20]:
            assert list(task.answer(source) or ()) == target


SMALLEST: dict[str, int] = {"valid": 2, "score": 2, "choose": 2}


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"max_length": 2, "min_length": 1, "train": 10, "report": 20}, ["3 symbols", "repeated symbols"]),
        ({"num_symbols": 2, "max_length": 7, "train": 20, "report": 40}, ["8 symbols"]),
        ({"num_symbols": 2, "min_length": 5, "max_length": 5, "train": 1, "report": 2}, ["6 symbols"]),
    ],
)
def test_shifts_of_short_sequences_share_nothing_with_the_splits(settings: dict[str, int], kinds: list[str]) -> None:
    """Of few sequences most are drawn, and with two symbols all of them are sequences of two symbols."""
    task = Sort(**(SMALLEST | settings))
    seen = {tuple(source) for _, examples in task.splits().items() for source, _ in decoded_rows(task, examples)}
    assert list(task.shifts()) == kinds
    for examples in task.shifts().values():
        assert len(examples) > 0
        assert not {tuple(source) for source, _ in decoded_rows(task, examples)} & seen


def test_a_symbol_that_is_written_stands_for_symbols_of_the_source(task: Task, splits: Splits) -> None:
    for source, target in rows(splits.report[:50]):
        read, written = task.vocabulary.decode(source), task.vocabulary.decode(target)
        found = task.aligned(source, target)
        assert len(found) in (0, len(written))
        assert all(0 <= place < len(read) for places in found for place in places)
        if isinstance(task, Sort | Reverse):
            assert [{read[place] for place in places} for places in found] == [{symbol} for symbol in written]


def decoded_rows(task: Task, examples: Examples) -> list[tuple[list[str], list[str]]]:
    decode = task.vocabulary.decode
    return [(decode(source), decode(target)) for source, target in rows(examples)]


SMALL: dict[str, Any] = {"valid": 20, "score": 20, "choose": 20, "report": 20}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Copy(**SMALL, train=100), lambda s: s),
        (Reverse(**SMALL, train=100), lambda s: s[::-1]),
        (Sort(**SMALL, train=100), sorted),
        (
            MirrorDifference(**SMALL, num_symbols=10, train=100),
            lambda s: [str((int(a) - int(b)) % 10) for a, b in zip(s, s[::-1], strict=True)],
        ),
        (RunningSum(**SMALL, train=100), lambda s: [str(sum(map(int, s[: i + 1])) % 10) for i in range(len(s))]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_targets_are_right(task: SequenceTask, expected: Any) -> None:
    for _, examples in task.splits().items():
        for source, target in decoded_rows(task, examples):
            assert target == expected(source)
            assert 2 <= len(source) <= 10


def test_a_mirror_difference_depends_on_the_order_and_takes_all_symbols_there_are() -> None:
    """The sums of two places are the same in both orders, and the differences are not."""
    ten, four = (MirrorDifference(**SMALL, num_symbols=number, max_length=7, train=100) for number in (10, 4))
    assert list(ten.answer([*"312"])) == ["1", "0", "9"]
    assert list(ten.answer([*"213"])) == ["9", "0", "1"]
    assert list(four.answer([*"3012"])) == ["1", "3", "1", "3"]
    assert list(ten.answer(["7"])) == ["0"]


def test_splits_are_of_a_kind() -> None:
    """Lengths are spread alike: short sequences run out early, and must not all end in the first split."""
    splits = Sort().splits()
    means = [float((examples.source != PAD).sum(1).float().mean()) for _, examples in splits.items()]
    assert max(means) - min(means) < 0.7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train": 200, "num_symbols": 2, "min_length": 2, "max_length": 4},
            "train=200: all splits together need 280 distinct sequences, at most 14 are drawn",
        ),
        ({"min_length": 11}, "min_length=11: must be at most max_length=10"),
    ],
)
def test_sequences_that_cannot_be_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sort(**SMALL, **settings)


def test_blanks_between_symbols_may_be_left_out_and_what_is_unknown_is_named() -> None:
    task = Sort()
    assert task.read("3 1 2") == task.read("312") == ["3", "1", "2"]
    with pytest.raises(ValueError, match="example='1 x é 2': x, é are not in the vocabulary, allowed are 0 1 2"):
        task.read("1 x é 2")
    with pytest.raises(ValueError, match="example='3 12': 12 is not in the vocabulary, allowed are 0 1 2"):
        task.read("3 12")
