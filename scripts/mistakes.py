"""What common mistakes in scoring heads cost: `python scripts/mistakes.py sort reverse inflection`.

Each mistake is made on purpose, on the models of several seeds, and removes heads at the budgets of
`experiment=compare`. Its cost is the exact match on the report split that the right way leaves and the mistake does
not, mean over the budgets.
"""

# Dimensions: E = examples, N = heads, S = steps of a loop over batches.

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from mhaprune.command_line import described
from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.measure import gate_gradients, measure_masks
from mhaprune.schedules.base import Judge
from mhaprune.schedules.budgets import heads_to_remove, removing
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.ablation import Ablation
from mhaprune.statistics import spearman, student_interval
from mhaprune.subject import Subject
from mhaprune.trained import Study

BUDGETS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
BATCH = 32
SEEDS = {"inflection": 3}
DEFAULT_SEEDS = 5


def per_example(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    """The right way: |derivative| of every example, then the mean (Michel et al. 2019, equation 2)."""
    return gradients_EN.abs().mean(dim=0)


def per_batch(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    """|·| of the derivative of a batch's mean loss: what examples disagree about cancels."""
    return torch.stack([batch.mean(dim=0).abs() for batch in gradients_EN.split(BATCH)]).mean(dim=0)


def whole_split(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    """The same with the whole split as one batch."""
    return gradients_EN.mean(dim=0).abs()


def not_zeroed(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    """`mask.grad.abs()` added up batch after batch, and `mask.grad` never set to zero: early batches count most."""
    sums_SN = torch.stack([batch.sum(dim=0) for batch in gradients_EN.split(BATCH)])
    return sums_SN.cumsum(dim=0).abs().sum(dim=0)


def not_zeroed_per_example(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    """The same with batches of one example."""
    return gradients_EN.cumsum(dim=0).abs().sum(dim=0)


def normalised_by_layer(gradients_EN: Tensor, grid: HeadGrid) -> Tensor:
    """The right score divided by its norm over the heads of a block: every block then has heads of equal weight."""
    scores = grid.split(per_example(gradients_EN, grid))
    return torch.cat([scores_H / scores_H.norm() for scores_H in scores.values()])


MISTAKES: tuple[Callable[[Tensor, HeadGrid], Tensor], ...] = (
    per_batch,
    whole_split,
    not_zeroed,
    not_zeroed_per_example,
    normalised_by_layer,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["sort"], metavar="TASK", help="default: sort")
    parser.add_argument("--seeds", type=int, help="models per task: 2 or more; default 5, of inflection 3")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.seeds is not None and arguments.seeds < 2:
        parser.error(f"--seeds={arguments.seeds}: an interval over models needs 2 or more")
    try:
        rows = [row for task in arguments.tasks for row in mistakes_on(task, arguments.seeds)]
    except ValueError as error:
        parser.error(str(error))
    table = pd.DataFrame(rows)
    print(table.to_json(orient="records", indent=2) if arguments.json else table.round(2).to_string(index=False))


def mistakes_on(task: str, seeds: int | None) -> Iterator[dict[str, object]]:
    """A row per mistake."""
    models = range(seeds or SEEDS.get(task, DEFAULT_SEEDS))
    studies = [studied(task, seed) for seed in tqdm(models, task, disable=None, leave=False)]
    measured = [gradient_mistakes(study) for study in studies]
    for mistake in measured[0]:
        yield row(task, mistake, [costs[mistake] for costs in measured])
    progress = tqdm(models, f"{task}, random gates", disable=None, leave=False)
    random = [studied(task, seed, "gate.init=rand") for seed in progress]
    extra = [behind_ablation(there) - behind_ablation(here) for here, there in zip(studies, random, strict=True)]
    rho = [gate_and_ablation(study) for study in random]
    yield row(task, "random_gate_init", list(zip(extra, rho, strict=True)))


def studied(task: str, seed: int, *overrides: str) -> Study:
    return described("experiment=train", f"task={task}", f"seed={seed}", *overrides).study()


def row(task: str, mistake: str, measured: list[tuple[float, float]]) -> dict[str, object]:
    """Cost in points of exact match with its interval over models, and how alike the two orders of the heads are."""
    costs = 100 * np.array([cost for cost, _ in measured])
    low, high = student_interval(costs)
    rho = float(np.mean([rho for _, rho in measured]))
    return {"task": task, "mistake": mistake, "models": len(costs)} | {
        "cost_points": costs.mean(), "low": low, "high": high, "spearman": rho
    }  # fmt: skip


def gradient_mistakes(study: Study) -> dict[str, tuple[float, float]]:
    """The cost of every mistake, and Spearman's correlation of its scores with the right ones."""
    grid, gradients_EN = study.subject.grid, gate_gradients(study.subject, study.splits.score)
    right_N = per_example(gradients_EN, grid)
    wrong = {mistake.__name__: mistake(gradients_EN, grid) for mistake in MISTAKES}
    right, *accuracies = exact_match(study, [right_N, *wrong.values()])
    return {
        name: (right - accuracy, spearman(right_N.tolist(), wrong[name].tolist()))
        for name, accuracy in zip(wrong, accuracies, strict=True)
    }


def behind_ablation(study: Study) -> float:
    """By how much exact match the heads that the gates choose are behind those that ablation chooses."""
    ablation, gate = exact_match(study, gates_and_ablation(study))
    return ablation - gate


def gate_and_ablation(study: Study) -> float:
    ablation_N, gates_N = gates_and_ablation(study)
    return spearman(ablation_N.tolist(), gates_N.tolist())


def gates_and_ablation(study: Study) -> list[Tensor]:
    gates_N = study.subject.learned_gates()
    assert gates_N is not None
    return [Ablation()(study.subject, study.splits.score, study.seed).values[0], gates_N.detach()]


def exact_match(study: Study, scores: list[Tensor]) -> list[float]:
    """On the report split, mean over the budgets, with the heads of lowest score removed."""
    budgets = [k for k in heads_to_remove(BUDGETS, len(study.subject.grid)) if k]
    masks: list[HeadMask] = []
    for scores_N in scores:
        masks += OneShot()(
            Judge(study.subject, partial(given, scores_N), no_loss), removing(budgets, study.subject.grid)
        )
    gates_MN = torch.stack([mask.gates(study.splits.report.source.device) for mask in masks])
    exact_M = measure_masks(study.subject, study.splits.report, gates_MN).sequence_accuracy.double().mean(dim=1)
    return exact_M.view(len(scores), len(budgets)).mean(dim=1).tolist()


def given(scores_N: Tensor, subject: Subject) -> Tensor:
    """Scores that were computed before, for a schedule that asks for them."""
    return scores_N


def no_loss(masks: Sequence[HeadMask]) -> Tensor:
    raise AssertionError("one-shot pruning measures no loss")


if __name__ == "__main__":
    main()
