"""See inside the heads: what they look at, what they contribute, and what breaks without them.

Dimensions: E = examples of a split, N = all heads, M = 1 + N: first all heads open, then each head closed in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pandas as pd

from mhaprune.heads import HeadGrid, HeadId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Experiment, Findings, Setup, with_proofs
from mhaprune.lab.experiments.examples import check_examples, close_each, sequence_tables, text_tables
from mhaprune.lab.experiments.explain import explain_report as report
from mhaprune.lab.experiments.explain.alignment import alignment_table, without_duplicates
from mhaprune.lab.experiments.explain.patterns import observe
from mhaprune.lab.reporting.agreement import rank_agreement
from mhaprune.lab.reporting.plots import appendix
from mhaprune.lab.reporting.shared_figures import agreement
from mhaprune.lab.reporting.training_curves import training_curve
from mhaprune.lab.sources.pretrained import PretrainedSource
from mhaprune.measure.accuracy import interval_for
from mhaprune.measure.outcomes import measure
from mhaprune.progress import doing
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.scorers.scoring import Scoring, head_columns, heads_table
from mhaprune.settings.ranges import Ge
from mhaprune.statistics.intervals import prunable, with_interval
from mhaprune.subject import Outcome
from mhaprune.tables import HEAD, MOMENTS, QUALITY, REFERENCE, named


@dataclass(frozen=True)
class Explain(Experiment):
    """A look at what the heads of one model do: tables `looks`, `wrong`, `patterns`, `alignment`, `heads`, `agreement`,
    `examples`, `attention`, `closed` and `training`.

    Attention is shown while the model answers an example; for a pretrained model, on a text of the report split. A head
    is prunable if closing it alone costs less than `tolerance_nats`. The confidence is 95 % for all these claims
    together.
    """

    examples: tuple[Annotated[int, Ge(0)], ...] = ()
    """Numbers of the examples of the report split to show, counted from 0. If empty, the run's own `example` is shown,
    or else the first of the split."""
    shown: Annotated[int, Ge(0)] = 3
    """Largest number of further examples to list for each head: examples that turn wrong without this head."""
    tolerance_nats: Annotated[float, Ge(0)] = 0.01
    """The largest cost of a prunable head, in nats of mean loss."""

    reads_example = True
    question = "What does every head look at, and what breaks without it?"
    then = "`experiment=ablate` removes heads."
    steps = ("model", "score", "patterns", "close each head", "show", "prove", "figures and page")
    seconds = (18, 1, 0.3, 0.7, 0.2, 0.2, 3.5)
    figures = (
        *(report.head_profiles, report.attention_maps),
        *(appendix(agreement), appendix(training_curve)),
    )
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)
    head_map = staticmethod(report.head_map)

    def check(self, setup: Setup) -> None:
        if REFERENCE not in setup.scorers:
            raise ValueError(f"scorer=[{','.join(setup.scorers)}]: must name ablation, which says what heads are worth")
        if setup.example is not None and self.examples:
            raise ValueError(f"experiment.examples={list(self.examples)}: an example of your own is shown already")
        have = len(setup.source.splits.report) if setup.trained is None else setup.trained.task.report
        check_examples("examples", self.examples, have)
        if isinstance(setup.source, PretrainedSource):
            try:
                setup.source.heads.subject.attention_maps(setup.source.splits.report[:1])
            except ValueError as error:
                raise ValueError(f"experiment=explain: {str(error).partition(';')[0]}") from None

    def __call__(self, study: Study) -> Findings:
        subject, examples = study.subject, study.splits.report
        scoring = Scoring(subject, study.splits.score, study.seed, study.remember)
        with doing("score"):
            heads = heads_table(scoring, study.scorers)
        with doing("patterns"):
            aligned = None if study.task is None else study.task.alignment(study.splits.score)
            observed = observe(subject, study.splits.score, aligned)
        with doing("close each head"):
            outcomes = close_each(subject, examples)
        closed = closed_table(subject.grid.heads, outcomes)
        dense_grid = study.whole_grid or subject.grid
        looks = head_summary(dense_grid, subject.grid, observed.looks, heads, closed, self.tolerance_nats)
        looks["scored_examples"] = len(study.splits.score)
        idle = HeadMask(subject.grid).without(*named(looks[looks["prunable"] & ~looks["removed"]]))
        looks["without_prunable"] = float(measure(subject, examples, idle.gates(examples.device)).quality.mean())
        equivalence = EquivalenceCheck(subject, study.splits.proof)
        for mask in (HeadMask(subject.grid).without(*subject.grid), idle):
            equivalence.prove(mask)
        with doing("show"):
            numbers = self.examples or (0,)
            if study.task is None:
                shown = text_tables(study, numbers, outcomes)
            else:
                shown = sequence_tables(study, numbers, outcomes, self.shown)
        tables = {
            "looks": looks,
            **shown,
            "heads": heads,
            "agreement": rank_agreement(heads),
            "patterns": without_duplicates(observed.patterns),
            **(alignment_table(aligned, study.splits.score, observed.patterns, heads) if aligned else {}),
            **study.training_table,
        }
        return with_proofs(study, tables, equivalence.worst)


def head_summary(
    dense: HeadGrid,
    remaining: HeadGrid,
    looks: pd.DataFrame,
    heads: pd.DataFrame,
    closed: pd.DataFrame,
    tolerance: float,
) -> pd.DataFrame:
    """Return one row per head of the dense model: what it looks at, its score and cost, and whether it was removed."""
    first = heads[(heads["scorer"] == heads["scorer"].iloc[0]) & (heads["draw"] == 0)]
    table = pd.DataFrame(map(head_columns, dense))
    table["removed"] = [HeadId(site, *rest) not in remaining for site, *rest in table[HEAD].to_numpy()]
    for part in (first[[*HEAD, "scorer", "score", "stderr", "rank"]], looks, closed):
        table = table.merge(part, how="left", on=HEAD)
    ablation = heads[heads["scorer"] == REFERENCE].set_index(HEAD).reindex(pd.MultiIndex.from_frame(table[HEAD]))
    table["prunable"] = prunable(ablation[MOMENTS].to_numpy().T, tolerance)
    return table.assign(tolerance=tolerance)


def closed_table(heads: Sequence[HeadId], closed: Outcome) -> pd.DataFrame:
    """Return one row per head, for the model with this head closed: the quality and its interval, how many examples
    turn wrong and how many turn right (if an answer is right or wrong), and the rise of the loss."""
    exact_ME, loss_ME = (x.double().cpu().numpy() for x in (closed.quality, closed.loss))
    rows, yes_or_no = [], bool(np.isin(exact_ME, (0, 1)).all())
    for head, exact_E, loss_E in zip(heads, exact_ME[1:], loss_ME[1:], strict=True):
        turned = {"turned_wrong": exact_E < exact_ME[0], "turned_right": exact_E > exact_ME[0]} if yes_or_no else {}
        rows.append(
            head_columns(head)
            | with_interval(QUALITY, exact_E, interval_for(QUALITY, exact_E))
            | {name: int(which_E.sum()) for name, which_E in turned.items()}
            | {"open_quality": exact_ME[0].mean(), "examples": len(exact_E)}
            | {"loss_rise": (loss_E - loss_ME[0]).mean()}
        )
    return pd.DataFrame(rows)
