"""Tables of examples that experiments show: the model's answers, and the attention of each head."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import HeadId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.base import Task
from mhaprune.lab.tasks.sequences import EOS, SPECIAL, Examples, pad, shift_right
from mhaprune.measure.outcomes import all_open, measure_masks
from mhaprune.progress import track
from mhaprune.scorers.scoring import head_columns
from mhaprune.subject import Outcome, Subject
from mhaprune.tables import HEAD, LOSS_RISE, QUALITY


class AnsweredExample(NamedTuple):
    """A source sequence with the model's own answer, as a batch of one without padding and as words. `right` is the
    correct answer; None if the task does not know it."""

    batch: Examples
    source: str
    answer: str
    right: str | None


def show(
    subject: Seq2Seq, task: Task, source: Sequence[str], right: Sequence[str] | None, gates: Tensor | None = None
) -> AnsweredExample:
    """Let the model answer a source sequence, with `gates` (N,) if they are given. The answer ends at the end symbol;
    without this symbol, at the largest length of the model."""

    def words(target: Sequence[int]) -> tuple[str, str]:
        text, _, answer = task.show(source_1S[0].tolist(), target).rpartition(" -> ")
        return text, answer

    source_1S = pad([task.vocabulary.encode(source)]).to(subject.positions.device)
    said_1T = subject.decode_greedily(source_1S, subject.config.max_length, gates, stop=True)
    ends = (said_1T[0] == EOS).nonzero()[:1, 0].tolist()
    target_1T = said_1T[:, : ends[0] + 1] if ends else said_1T
    known = None if right is None else words(task.vocabulary.encode(right))[1]
    return AnsweredExample(Examples(source_1S, target_1T), *words(target_1T[0].tolist()), known)


def examples_table(shown: Iterable[AnsweredExample], train: Examples) -> pd.DataFrame:
    """Return one row per example, numbered from 0: source, answers, whether the model `ended` its answer, the number of
    `symbols` in the source, and `trained_symbols`, this number for the longest source of training."""
    rows = []
    trained = train.source.shape[1] - 1
    for number, example in enumerate(shown):
        correct = None if example.right is None else example.answer == example.right
        words = {"source": example.source, "answer": example.answer, "right_answer": example.right}
        ended = bool((example.batch.target == EOS).any())
        lengths = {"ended": ended, "symbols": example.batch.source.shape[1] - 1, "trained_symbols": trained}
        rows.append({"example": number, **words, "correct": correct, **lengths})
    return pd.DataFrame(rows)


def attention_table(subject: Seq2Seq, task: Task, shown: Iterable[AnsweredExample]) -> pd.DataFrame:
    """Return one row per example, head, query and key with the attention `weight`. `reads` is the token at the query,
    `looks_at` the token at the key. `writes` is the token that the decoder predicts there; None in the encoder."""
    parts = list[pd.DataFrame]()
    for number, example in enumerate(shown):
        source, target = tokens(task, example.batch.source), tokens(task, example.batch.target)
        prefix = tokens(task, shift_right(example.batch.target))
        with torch.no_grad():
            maps = subject.attention_maps(example.batch)
        for block, seen in maps.items():
            reads = source if block.site == Site.ENCODER_SELF else prefix
            keys = prefix if block.site == Site.DECODER_SELF else source
            writes = [None] * len(source) if block.site == Site.ENCODER_SELF else target
            heads = [head for head in subject.grid if head.block == block]
            parts += _cells(number, heads, seen.weights[0], {"reads": reads, "writes": writes}, keys)
    return pd.concat(parts, ignore_index=True)


def _cells(
    example: int,
    heads: Sequence[HeadId],
    weights_HTU: Tensor,
    at_query: Mapping[str, Sequence[str | None]],
    keys: Sequence[str],
) -> Iterator[pd.DataFrame]:
    """Yield a table for each head of a block, with one row per query and key. `heads` are those of the block."""
    for head, weights_TU in zip(heads, weights_HTU.double().cpu().numpy(), strict=True):
        places = pd.MultiIndex.from_product(map(range, weights_TU.shape), names=["query", "key"])
        frame = places.to_frame(index=False)
        columns = {name: [words[i] for i in frame["query"]] for name, words in at_query.items()}
        columns |= {"looks_at": [keys[i] for i in frame["key"]], "weight": weights_TU.flatten()}
        yield pd.DataFrame({"example": example, **head_columns(head), **frame, **columns})


def tokens(task: Task, ids: Tensor) -> list[str]:
    """Return the names of the tokens in a batch of one example."""
    names = (*SPECIAL, *task.vocabulary.symbols)
    return [names[i] for i in ids[0].tolist()]


def check_examples(field: str, numbers: Sequence[int], have: int) -> None:
    """Raise ValueError for a number that is no example of the report split, which has `have` examples."""
    if max(numbers, default=0) >= have:
        raise ValueError(
            f"experiment.{field}={max(numbers)}: the report split has examples 0 to {have - 1} (task.report or"
            " model.report)"
        )


def shown_by(study: Study, numbers: Sequence[int]) -> list[AnsweredExample]:
    """Let the model answer the user's own example or, without one, the examples of the report split with these
    numbers."""
    assert isinstance(study.subject, Seq2Seq)
    decode, report = study.task.vocabulary.decode, study.splits.report
    pairs: list[tuple[Sequence[str], Sequence[str] | None]] = [
        (decode(report.source[n].tolist()), decode(report.target[n].tolist())) for n in numbers
    ]
    if study.example is not None:
        pairs = [(study.example, study.task.answer(study.example))]
    return [show(study.subject, study.task, *pair) for pair in pairs]


def sequence_tables(study: Study, numbers: Sequence[int], closed: Outcome, most_wrong: int) -> dict[str, pd.DataFrame]:
    """Return the tables `wrong` (see `turned_wrong`), `closed` (see `answers_without`), `examples` and `attention` for
    mhaprune's own model."""
    network, task, splits = study.subject, study.task, study.splits
    assert isinstance(network, Seq2Seq)
    shown = shown_by(study, numbers)
    without = answers_without(network, task, shown)
    return {
        "wrong": turned_wrong(network, task, shown, without, splits.report, closed, most_wrong),
        "examples": examples_table(shown, splits.train),
        "attention": attention_table(network, task, shown),
        "closed": without,
    }


def answers_without(subject: Seq2Seq, task: Task, shown: Sequence[AnsweredExample]) -> pd.DataFrame:
    """Return a row per example and head, with the model's answer when this head is closed."""
    rows = []
    for head in track(subject.grid, "heads", name=str):
        gates_N = HeadMask(subject.grid).without(head).gates(subject.positions.device).to(subject.positions.dtype)
        for number, one in enumerate(shown):
            symbols = task.vocabulary.decode(one.batch.source[0].tolist())
            answer = show(subject, task, symbols, None, gates_N).answer
            rows.append({"example": number, **head_columns(head), "answer": answer})
    return pd.DataFrame(rows, columns=["example", *HEAD, "answer"])


def close_each(subject: Subject, examples: Data) -> Outcome:
    """Return the outcome with all heads open and then with one head closed at a time, (1 + N, E)."""
    gates_MN = all_open(subject, 1 + len(subject.grid))
    gates_MN[1:].fill_diagonal_(0.0)
    return measure_masks(subject, examples, gates_MN)


MOST_WEIGHTS = 2_000_000
"""Largest number of attention weights of a text in a table. Of a longer text, the first tokens are shown."""


def text_tables(study: Study, numbers: Sequence[int], closed: Outcome) -> dict[str, pd.DataFrame]:
    """Return three tables for a pretrained model: `examples`, one row per text; `attention` (see `attention_table`);
    and `closed`, the quality and the rise of the loss of each text with a head closed.

    `closed` are the outcomes of the report split with all heads open and with each head closed, (1 + N, E). If the
    tokens of a text are not known, they are named by their positions.
    """
    texts, parts, without = [], list[pd.DataFrame](), []
    grid = study.subject.grid
    most = max(int((MOST_WEIGHTS / len(grid)) ** 0.5), 1)
    for example, number in enumerate(numbers):
        batch = study.splits.report[number : number + 1]
        (words,) = study.tokens(batch) if study.tokens is not None else [[]]
        with torch.no_grad():
            maps = study.subject.attention_maps(batch)
        longest = 0
        for block, seen in maps.items():
            counts = [int(real[0].sum()) for real in (seen.queries, seen.keys)]  # without padding
            # A layer that is called several times reads the words anew in each call.
            named = [bool(words) and count % len(words) == 0 for count in counts]
            queries, keys = (
                words * (count // len(words)) if known else list(map(str, range(count)))
                for known, count in zip(named, counts, strict=True)
            )
            weights_HTU = seen.weights[0][:, seen.queries[0]][:, :, seen.keys[0]][:, :most, :most]
            heads = [head for head in grid if head.block == block]
            parts += _cells(example, heads, weights_HTU, {"reads": queries}, keys)
            longest = max(longest, *counts)
        texts.append({"example": example, "source": " ".join(words), "symbols": longest})
        for i, head in enumerate(grid, 1):
            rise = float(closed.loss[i, number] - closed.loss[0, number])
            measured = {QUALITY: float(closed.quality[i, number]), "open_quality": float(closed.quality[0, number])}
            without.append({"example": example, **head_columns(head), **measured, LOSS_RISE: rise})
    return {
        "examples": pd.DataFrame(texts),
        "attention": pd.concat(parts, ignore_index=True),
        "closed": pd.DataFrame(without),
    }


def turned_wrong(
    subject: Seq2Seq,
    task: Task,
    asked: Sequence[AnsweredExample],
    without: pd.DataFrame,
    examples: Examples,
    closed: Outcome,
    shown: int,
) -> pd.DataFrame:
    """Return a row per head and example whose answer turns wrong when this head is closed, with the wrong answer. For
    each head, the examples `asked` come first, whose answers are those of `without`, then up to `shown` of the
    `examples`."""
    right_E = closed.quality[0] == 1
    rows: list[dict[str, Any]] = []
    for head in subject.grid:
        gates_N = HeadMask(subject.grid).without(head).gates(examples.device).to(subject.positions.dtype)
        answers = without[(without[HEAD] == list(head)).all(axis=1)]
        for number, without_it in answers[["example", "answer"]].itertuples(index=False):
            one = asked[number]
            if one.answer == one.right != without_it:
                example = f"{one.source} -> {one.right}"
                rows.append(head_columns(head) | {"example": example, "said_without_it": without_it})
        at = (right_E & (closed.quality[1 + subject.grid.index(head)] == 0)).nonzero()[:shown, 0]
        if not len(at):
            continue
        some = examples[at]
        said = subject.decode_greedily(some.source, examples.target.shape[1], gates_N)
        for source, target, answer in zip(some.source.tolist(), some.target.tolist(), said.tolist(), strict=True):
            words = task.show(source, answer).rpartition(" -> ")[2]
            rows.append(head_columns(head) | {"example": task.show(source, target), "said_without_it": words})
    return pd.DataFrame(rows, columns=[*HEAD, "example", "said_without_it"])
