"""Tables for experiments: how well a model answers a task, and which symbols it gets wrong."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from mhaprune.lab.tasks.base import Task
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.measure.accuracy import accuracy_columns, by_group, calibration_columns, size_columns
from mhaprune.measure.outcomes import BATCH_SIZE, measure
from mhaprune.statistics.intervals import with_interval
from mhaprune.subject import Subject
from mhaprune.tables import ERROR_RATE, join_names


def answer_tables(subject: Subject, task: Task, report: Examples, shown: int) -> dict[str, pd.DataFrame]:
    """Return three tables: `accuracy` (one row), `groups` (exact match in each), and `examples` (the answers to the
    first `shown` examples)."""
    outcome = measure(subject, report)
    heads = {"heads_total": len(subject.grid), "heads": join_names(subject.grid)}
    accuracy = heads | accuracy_columns(outcome) | with_interval(ERROR_RATE, symbol_errors(subject, task, report))
    accuracy |= calibration_columns(subject, report, outcome)
    accuracy |= size_columns(subject, report)
    return {
        "accuracy": pd.DataFrame([accuracy]),
        "groups": by_group(outcome, [task.group(source) for source in report.source.tolist()]),
        "examples": answers(subject, task, report[:shown]),
    }


def symbol_errors(subject: Subject, task: Task, examples: Examples) -> np.ndarray:
    """Return a number for each example, (E,), whose mean over examples is the symbol error rate under greedy decoding:
    the edits that turn all answers into the right ones, per symbol of the right ones.

    A rate is a ratio of two sums over examples. The spread of these numbers is that of the ratio (Cochran 1977, section
    2.11).
    """
    counts = []
    for batch in examples.batches(BATCH_SIZE):
        for target, answer in zip(batch.target.tolist(), subject.predict(batch).tolist(), strict=True):
            right, said = task.vocabulary.decode(target), task.vocabulary.decode(answer)
            counts.append((edits(said, right), len(right)))
    errors_E, symbols_E = np.array(counts, dtype=float).T
    rate = errors_E.sum() / symbols_E.sum()
    linear_E: np.ndarray = rate + (errors_E - rate * symbols_E) / symbols_E.mean()
    return linear_E


def edits(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the smallest number of insertions, deletions and exchanges of symbols that turn one sequence into the
    other (Levenshtein 1966).

    >>> edits("kitten", "sitting")
    3
    """
    costs = list(range(len(second) + 1))
    for i, symbol in enumerate(first, 1):
        before, costs[0] = costs[0], i
        for j, other in enumerate(second, 1):
            before, costs[j] = costs[j], min(costs[j] + 1, costs[j - 1] + 1, before + (symbol != other))
    return costs[-1]


def answers(subject: Subject, task: Task, examples: Examples) -> pd.DataFrame:
    """Return a table with the model's greedy answer to each example."""
    rows = []
    predicted = subject.predict(examples)
    for source, target, answer in zip(
        examples.source.tolist(), examples.target.tolist(), predicted.tolist(), strict=True
    ):
        said = task.vocabulary.decode(answer)
        right = said == task.vocabulary.decode(target)
        rows.append({"example": task.show(source, target), "prediction": " ".join(said), "correct": right})
    return pd.DataFrame(rows)
