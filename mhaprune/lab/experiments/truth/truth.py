"""Scores against heads that are known to matter.

Dimensions: E = examples, N = heads, R = redraws or draws.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch

from mhaprune.heads import HeadMask
from mhaprune.inputs import Known, Study
from mhaprune.lab.experiments.base import Experiment, Findings, Setup, with_proofs
from mhaprune.lab.experiments.truth import truth_report as report
from mhaprune.lab.experiments.truth.truth_report import PATCHED
from mhaprune.lab.model.sites import Site
from mhaprune.lab.reporting.agreement import spearman
from mhaprune.lab.tasks.base import Task
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.progress import doing, track
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.scorers.base import Scores
from mhaprune.scorers.replacing import corrupted, rises
from mhaprune.scorers.scoring import Scoring, head_columns, heads_table, settings_text
from mhaprune.settings.ranges import Ge
from mhaprune.statistics.intervals import moments, skewed_ends

ALIGNED = "alignment"
UNKNOWN = f"experiment.known={ALIGNED}: needs a task that knows what the symbols of an answer stand for"


@dataclass(frozen=True)
class Truth(Experiment):
    """Scores against heads that are known: tables `truth`, `known`, `heads`.

    The known heads are those that the model names, because they were set by hand or published. Otherwise they are the
    `top` heads by exact patching on the *report* split, or those that align; the scores read the *score* split.
    """

    known: Literal["patching", "alignment"] = "patching"
    """How heads are known of a model that names none: by patching, or as the heads of cross-attention whose largest
    weight is on a source symbol that the written symbol stands for, in more than half of the cases."""
    top: Annotated[int, Ge(1)] = 8
    """Number of heads that count as known if they are found by patching."""
    redraws: Annotated[int, Ge(20)] = 200
    """Number of redraws of the examples for the intervals."""

    question = "Which scores find the heads that are known to matter?"
    then = "`experiment=ablate scorer=[NAME]` removes heads by the score that you choose."
    steps = ("model", "known heads", "score", "truth", "prove", "figures and page")
    seconds = (17, 0.5, 5, 0.1, 0.1, 0.5)
    figures = (report.areas, report.ranks)
    figures_over_runs = (report.over_runs,)
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)

    def check(self, setup: Setup) -> None:
        setup.check_scorers()
        if self.known == ALIGNED and setup.trained and type(setup.trained.task).aligned is Task.aligned:
            raise ValueError(UNKNOWN)

    def __call__(self, study: Study) -> Findings:
        subject, splits = study.subject, study.splits
        with doing("known heads"):
            study = replace(study, known=aligning(study)) if self.known == ALIGNED and not study.known else study
            known = known_table(study, self.top)
        matters_N = known["known"].to_numpy(bool)
        if not 0 < matters_N.sum() < len(matters_N):
            what = f"experiment.top={self.top}" if (known["known_from"] == PATCHED).all() else "experiment.known"
            counted = f"{matters_N.sum() or 'none'} of the model's {len(matters_N)} {subject.counted}"
            raise ValueError(f"{what}: {counted} matters, must be some and not all")
        scoring = Scoring(subject, splits.score, study.seed, study.remember)
        with doing("score"):
            heads = heads_table(scoring, study.scorers)
        exact_N = known["effect"].to_numpy(float)
        exact = study.scorers.get(PATCHED)
        patched = None if exact is None else scoring(PATCHED, exact).scores.values[0].cpu().numpy()
        rows = []
        for name, scorer in track(study.scorers.items(), "truth"):
            scores = scoring(name, scorer).scores
            cost = scoring.cost([scorer])
            row: dict[str, Any] = {"scorer": name, "family": scorer.family, "settings": settings_text(scorer)}
            row |= {"known_from": known["known_from"].iloc[0], "heads_known": int(matters_N.sum())}
            values_N, redrawn_RN = scores.values[0].cpu().numpy(), redrawn(scores, self.redraws, study.seed)
            for column, of in {"auroc": auroc, "recall": recall, "recall_twice": recall_twice}.items():
                over_draws = [of(each, matters_N) for each in scores.values.cpu().numpy()]
                row |= with_ends(column, float(np.mean(over_draws)), [of(each, matters_N) for each in redrawn_RN])
            row["spearman"] = spearman(values_N, exact_N)
            row["as_patching"] = np.nan if patched is None else recall(values_N, at_the_top(patched, self.top))
            rows.append(row | cost)
        table = pd.DataFrame(rows).sort_values("auroc", ascending=False, kind="stable", ignore_index=True)
        equivalence = EquivalenceCheck(subject, splits.proof)
        equivalence.prove(HeadMask(subject.grid).without(*subject.grid))
        return with_proofs(study, {"truth": table, "known": known, "heads": heads}, equivalence.worst)


@torch.no_grad()
def aligning(study: Study) -> Known:
    """Return the heads that align on the report split. Raises ValueError for a task that does not know what aligns."""
    report, subject = study.splits.report, study.subject
    if study.task is None or (aligned := study.task.alignment(report)) is None:
        raise ValueError(UNKNOWN)
    hits_N, symbols = torch.zeros(len(subject.grid)), 0
    for batch in report.batches(BATCH_SIZE):
        places_BTS = aligned(batch)
        symbols += int(places_BTS.any(dim=2).sum())
        for block, seen in subject.attention_maps(batch).items():
            if block.site == Site.CROSS:
                largest_BHT1 = seen.weights.argmax(dim=3, keepdim=True)
                hits_BHT1 = places_BTS[:, None].expand_as(seen.weights).gather(3, largest_BHT1)
                hits_N[subject.grid.positions(block)] += hits_BHT1.sum(dim=(0, 2, 3)).cpu()
    names = [str(head) for head, hits in zip(subject.grid, hits_N.tolist(), strict=True) if hits > symbols / 2]
    return Known(dict.fromkeys(names, "aligns"), ("aligns",), ALIGNED)


def known_table(study: Study, top: int) -> pd.DataFrame:
    """Return a row for each head: whether it is `known` to matter, its `role`, and, if it was patched, its `effect`
    with an interval."""
    grid, known = study.subject.grid, study.known
    table = pd.DataFrame(map(head_columns, grid))
    if known is not None:
        names = [str(head) for head in grid]
        if unknown := [name for name in known.roles if name not in names]:
            raise ValueError(f"known={unknown[0]}: is no head of the model, its heads are {', '.join(names[:8])}, ...")
        role_N = [known.roles.get(name, "") for name in names]
        table = table.assign(role=role_N, known=[role in known.useful for role in role_N], known_from=known.source)
        return table.assign(effect=np.nan, effect_low=np.nan, effect_high=np.nan)
    report = study.splits.report
    moments_3N = moments(rises(study.subject, report, corrupted(report)).cpu().numpy())
    low_N, high_N = skewed_ends(moments_3N)
    mine_N = at_the_top(moments_3N[0], top)
    roles = np.where(mine_N, "known", np.where(high_N < 0, "hurts", ""))
    table = table.assign(role=roles, known=mine_N, known_from=PATCHED)
    return table.assign(effect=moments_3N[0], effect_low=low_N, effect_high=high_N)


def redrawn(scores: Scores, redraws: int, seed: int) -> np.ndarray:
    """Return the scores (R, N) on redraws of the examples (a bootstrap), or the draws of a control; one row for a score
    without values for each example."""
    if scores.examples is None:
        return scores.values.cpu().numpy()
    values_EN = scores.examples
    draw = torch.Generator().manual_seed(seed)
    at_RE = torch.randint(len(values_EN), (redraws, len(values_EN)), generator=draw)
    times_RE = torch.zeros(redraws, len(values_EN)).scatter_add(1, at_RE, torch.ones(at_RE.shape))
    return (times_RE.to(values_EN) @ values_EN / len(values_EN)).cpu().numpy()


def with_ends(column: str, value: float, redrawn: list[float]) -> dict[str, float]:
    """Return a value with the middle 95 % of what redraws have as its interval; no ends for fewer than two."""
    low, high = np.quantile(redrawn, (0.025, 0.975)) if len(redrawn) > 1 else (np.nan, np.nan)
    return {column: value, f"{column}_low": float(low), f"{column}_high": float(high)}


def auroc(scores_N: np.ndarray, matters_N: np.ndarray) -> float:
    """Return the area under the receiver operating characteristic: the probability that a head that matters has a
    higher score than one that does not; equal scores count one half (Mann and Whitney 1947)."""
    ranks_N, positives = pd.Series(scores_N).rank().to_numpy(), int(matters_N.sum())
    above = ranks_N[matters_N].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(scores_N) - positives)))


def recall(scores_N: np.ndarray, matters_N: np.ndarray, times: int = 1) -> float:
    """Return the share of the heads that matter among `times` as many heads with the highest scores."""
    return float(matters_N[at_the_top(scores_N, times * int(matters_N.sum()))].sum() / matters_N.sum())


def at_the_top(scores_N: np.ndarray, count: int) -> np.ndarray:
    """Return True for the highest scores, (N,). Of equal scores the first count."""
    return np.isin(np.arange(len(scores_N)), np.argsort(-scores_N, kind="stable")[:count])


def recall_twice(scores_N: np.ndarray, matters_N: np.ndarray) -> float:
    """The share of the known heads among the first twice as many."""
    return recall(scores_N, matters_N, 2)
