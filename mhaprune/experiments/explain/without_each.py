"""What breaks when one head is closed.

Dimensions: E = examples of a split, M = the open model and one with each head closed, N = all heads.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from mhaprune.data import Data, Examples
from mhaprune.evaluation import interval_for
from mhaprune.experiments.examples import Shown, answer_under
from mhaprune.heads import HeadId, HeadMask
from mhaprune.measure import all_open, measure_masks
from mhaprune.model.transformer import Seq2Seq
from mhaprune.progress import track
from mhaprune.scorers.scoring import head_columns
from mhaprune.statistics.intervals import with_interval
from mhaprune.subject import Outcome, Subject
from mhaprune.tables import HEAD, QUALITY
from mhaprune.tasks.base import Task


def close_each(subject: Subject, examples: Data) -> Outcome:
    """(1 + N, E): the outcome with all heads open and then with one closed at a time."""
    gates_MN = all_open(subject, 1 + len(subject.grid))
    gates_MN[1:].fill_diagonal_(0.0)
    return measure_masks(subject, examples, gates_MN)


def closed_table(heads: Sequence[HeadId], closed: Outcome) -> pd.DataFrame:
    """One row per head: the quality without it with its interval, the numbers of examples that it gets worse and better
    for, and the rise of the loss."""
    exact_ME, loss_ME = (x.double().cpu().numpy() for x in (closed.quality, closed.loss))
    rows = []
    for head, exact_E, loss_E in zip(heads, exact_ME[1:], loss_ME[1:], strict=True):
        rows.append(
            head_columns(head)
            | with_interval(QUALITY, exact_E, interval_for(QUALITY, exact_E))
            | {"turned_wrong": int((exact_E < exact_ME[0]).sum()), "turned_right": int((exact_E > exact_ME[0]).sum())}
            | {"open_quality": exact_ME[0].mean(), "examples": len(exact_E)}
            | {"loss_rise": (loss_E - loss_ME[0]).mean()}
        )
    return pd.DataFrame(rows)


def turned_wrong(
    subject: Seq2Seq,
    task: Task,
    asked: Sequence[Shown],
    examples: Examples,
    closed: Outcome,
    heads: Collection[HeadId],
    shown: int,
) -> pd.DataFrame:
    """For each of the `heads` what turns wrong when it is closed, with the model's answer: those that it was `asked`,
    and then the first `shown` of the `examples`."""
    right_E = closed.quality[0] == 1
    rows: list[dict[str, Any]] = []
    for n, head in enumerate(track(subject.grid, "heads", name=str)):
        if head not in heads:
            continue
        gates_N = HeadMask(subject.grid).without(head).gates(examples.device).to(subject.positions.dtype)
        for one in asked:
            without_it = answer_under(subject, task, one, gates_N)
            if one.answer == one.right != without_it:
                example = f"{one.source} -> {one.right}"
                rows.append(head_columns(head) | {"example": example, "said_without_it": without_it})
        at = (right_E & (closed.quality[n + 1] == 0)).nonzero()[:shown, 0]
        if not len(at):
            continue
        some = examples[at]
        said = subject.decode_greedily(some.source, examples.target.shape[1], gates_N)
        for source, target, answer in zip(some.source.tolist(), some.target.tolist(), said.tolist(), strict=True):
            words = task.show(source, answer).rpartition(" -> ")[2]
            rows.append(head_columns(head) | {"example": task.show(source, target), "said_without_it": words})
    return pd.DataFrame(rows, columns=[*HEAD, "example", "said_without_it"])
