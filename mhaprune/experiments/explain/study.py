"""See inside the heads: what they look at, what they contribute, and what breaks without them.

Dimensions: E = examples of a split, M = the model with all heads open and with each head closed, N = all heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd

from mhaprune.attention.gates import Softmax
from mhaprune.data import Data, Examples
from mhaprune.experiments.base import Experiment, Findings, Setup
from mhaprune.experiments.examples import (
    Shown,
    answer_under,
    attention_table,
    check_examples,
    examples_table,
    heads_named,
    show,
    sources,
    text_tables,
)
from mhaprune.experiments.explain import report
from mhaprune.experiments.explain.patterns import observe
from mhaprune.heads import HeadGrid, HeadId, HeadMask
from mhaprune.measure.columns import interval_for
from mhaprune.measure.outcomes import all_open, measure, measure_masks
from mhaprune.model.transformer import Seq2Seq
from mhaprune.progress import Stages, doing, track
from mhaprune.pruning.removal import EquivalenceCheck, proofs
from mhaprune.reporting.shared_figures import agreement
from mhaprune.reporting.training import training_curve
from mhaprune.scorers.agreement import rank_agreement, spearman
from mhaprune.scorers.scoring import Scoring, head_columns, heads_table
from mhaprune.settings.ranges import Ge
from mhaprune.statistics.intervals import prunable, with_interval
from mhaprune.studies.study import Source, Study
from mhaprune.subject import Outcome, Subject
from mhaprune.tables import GATE, HEAD, MOMENTS, QUALITY, REFERENCE, named
from mhaprune.tasks.base import Task


@dataclass(frozen=True)
class Explain(Experiment):
    """A look at what the heads of one model do: tables `looks`, `wrong`, `patterns`, `heads`, `agreement`, `examples`,
    `attention`, `gates` and `training`.

    Attention is shown while the model answers an example; for a pretrained model, on a text of the report split. A head
    is prunable if its ablation costs less than `tolerance_nats`, at 95 % confidence for all such heads together.
    """

    examples: tuple[Annotated[int, Ge(0)], ...] = ()
    """Numbers of the examples of the report split to show, counted from 0. If empty, the run's own `example` is shown,
    or else the first of the split."""
    heads: tuple[str, ...] = ()
    """The heads (`cross.1.2`) and layers (`cross.1`) to look at. If empty, all heads."""
    shown: Annotated[int, Ge(0)] = 3
    """Number of examples to list for each head that become wrong without the head."""
    retrain: bool = False
    """Whether to train the model a second time, from gates with another start."""
    tolerance_nats: Annotated[float, Ge(0)] = 0.01
    """The largest cost of a prunable head, in nats of mean loss."""

    reads_example = True
    stages: ClassVar[Stages] = {
        "score": 1,
        "patterns": 0.4,
        "close each head": 1,
        "show": 0.4,
        "gates": 0.1,
        "prove": 0.5,
    }
    tables = (
        "looks",
        "examples",
        "attention",
        "wrong",
        "heads",
        "agreement",
        "patterns",
        "gates",
        "retraining",
        "training",
    )
    figures = (report.head_profiles, report.attention_maps, agreement, training_curve)
    say = staticmethod(report.say)
    say_in_common = staticmethod(report.over_runs)
    headline = staticmethod(report.headline)
    head_map = staticmethod(report.head_map)

    def check(self, setup: Setup) -> None:
        if REFERENCE not in setup.scorers:
            raise ValueError(f"scorer=[{','.join(setup.scorers)}]: must name ablation, which says what heads are worth")
        if setup.example is not None and self.examples:
            raise ValueError(f"experiment.examples={list(self.examples)}: an example of your own is shown already")
        if setup.recipe is None:
            self._check_texts(setup.source)
        else:
            check_examples("examples", self.examples, setup.recipe.task)
        if self.retrain and not (setup.recipe and isinstance(setup.recipe.gate, Softmax)):
            raise ValueError(
                "experiment.retrain=True: the model has no learned gates to start otherwise, gate=softmax has"
            )
        try:
            for name in self.heads:
                heads_named(name, setup.grid)
        except ValueError as error:
            raise ValueError(f"experiment.{error}") from None

    def _check_texts(self, source: Source) -> None:
        """Raise ValueError for a pretrained model that returns no attention, and for a missing text."""
        texts = source.splits.report
        if max(self.examples, default=0) >= len(texts):
            raise ValueError(
                f"experiment.examples={max(self.examples)}: the report split has texts 0 to {len(texts) - 1}"
                " (model.report)"
            )
        try:
            source.sketch().attention_maps(texts[:1])
        except ValueError as error:
            raise ValueError(f"experiment=explain: {str(error).partition(';')[0]}") from None

    def __call__(self, study: Study) -> Findings:
        subject, examples = study.subject, study.splits.report
        scoring = Scoring(subject, study.splits.score, study.seed, study.remember)
        with doing("score"):
            heads = heads_table(scoring, study.scorers)
        with doing("patterns"):
            seen = observe(subject, study.splits.score)
        with doing("close each head"):
            closed = close_each(subject, examples)
        worth = closed_table(subject.grid.heads, closed)
        looks = looks_table(study.whole_grid, subject.grid, seen.looks, heads, worth, self.tolerance_nats)
        idle = prunable_heads(subject.grid, looks)
        looks["without_prunable"] = float(measure(subject, examples, idle.gates(examples.device)).quality.mean())
        chosen = [head for name in self.heads for head in heads_named(name, subject.grid)] or list(subject.grid)
        equivalence = EquivalenceCheck(subject, examples)
        for mask in (HeadMask(subject.grid).without(*chosen), idle):
            equivalence.prove(mask)
        with doing("show"):
            shown = self._shown(study, closed, chosen)
        with doing("gates"):
            gates = self._gates(study, heads)
        tables = {
            "looks": looks,
            **shown,
            "heads": heads,
            "agreement": rank_agreement(heads),
            "patterns": seen.patterns,
            **gates,
            **study.training_table,
        }
        with doing("prove"):
            proved = proofs(subject, examples)
        return Findings(tables, {"max_difference_masked_removed": equivalence.worst} | proved)

    def _shown(self, study: Study, closed: Outcome, heads: Sequence[HeadId]) -> dict[str, pd.DataFrame]:
        """Return tables `examples` and `attention` and, for a model that answers, `wrong`."""
        numbers = self.examples or (0,)
        if study.origin is None:
            return text_tables(study, numbers, heads)
        network, task, splits = study.trained.network, study.trained.task, study.trained.splits
        shown = [show(network, task, *pair) for pair in sources(study.trained, numbers)]
        return {
            "wrong": turned_wrong(network, task, shown, splits.report, closed, heads, self.shown),
            "examples": examples_table(shown, splits.train),
            "attention": attention_table(network, task, shown, heads),
        }

    def _gates(self, study: Study, heads: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """Return table `gates`, for a model with gates: the rank correlations of the trained gates with the gates at
        the start and with ablation. `retrain` adds a second model, and its training as `retraining`."""
        if study.subject.learned_gates() is None:
            return {}
        ablation = heads.loc[heads["scorer"] == REFERENCE, "score"].to_numpy()
        rows, tables = [gate_ranking("trained", study.subject, study.history, ablation)], {}
        gate = study.trained.gate
        if self.retrain and isinstance(gate, Softmax):
            init: Any = "rand" if gate.init == "zeros" else "zeros"
            other, tables["retraining"] = study.trained.retrain(replace(gate, init=init))
            scored = Scoring(other, study.splits.score, study.seed)(REFERENCE, study.scorers[REFERENCE])
            ablation = scored.scores.values[0].cpu().numpy()
            rows.append(gate_ranking(f"retrained, init={init}", other, tables["retraining"], ablation))
        return {"gates": pd.DataFrame(rows), **tables}


def gate_ranking(name: str, subject: Subject, history: pd.DataFrame, ablation_N: np.ndarray) -> dict[str, Any]:
    """Return the rank correlations of a model's gates with the gates before its training, and with ablation."""
    gates_N = subject.learned_gates()
    assert gates_N is not None
    start_N = history.loc[0, [f"{GATE}{head}" for head in subject.grid]].to_numpy(float)
    trained_N = gates_N.detach().cpu().numpy()
    correlations = {"start": spearman(trained_N, start_N), "ablation": spearman(trained_N, ablation_N)}
    return {"gates": name, **{f"spearman_with_{other}": rho for other, rho in correlations.items()}}


def looks_table(
    whole: HeadGrid, left: HeadGrid, looks: pd.DataFrame, heads: pd.DataFrame, closed: pd.DataFrame, tolerance: float
) -> pd.DataFrame:
    """Return one row per head of the dense model: what it looks at, its score and cost, and whether it was removed."""
    first = heads[(heads["scorer"] == heads["scorer"].iloc[0]) & (heads["draw"] == 0)]
    table = pd.DataFrame(map(head_columns, whole))
    table["removed"] = [HeadId(site, *rest) not in left for site, *rest in table[HEAD].to_numpy()]
    for part in (first[[*HEAD, "scorer", "score", "stderr", "rank"]], looks, closed):
        table = table.merge(part, how="left", on=HEAD)
    ablation = heads[heads["scorer"] == REFERENCE].set_index(HEAD).reindex(pd.MultiIndex.from_frame(table[HEAD]))
    table["prunable"] = prunable(ablation[MOMENTS].to_numpy().T, tolerance)
    return table.assign(tolerance=tolerance)


def prunable_heads(grid: HeadGrid, looks: pd.DataFrame) -> HeadMask:
    """Return a mask without all heads that are prunable one at a time."""
    there = looks[looks["prunable"] & ~looks["removed"]]
    return HeadMask(grid).without(*named(there))


def close_each(subject: Subject, examples: Data) -> Outcome:
    """Return the outcome with all heads open and then with one head closed at a time, (1 + N, E)."""
    gates_MN = all_open(subject, 1 + len(subject.grid))
    gates_MN[1:].fill_diagonal_(0.0)
    return measure_masks(subject, examples, gates_MN)


def closed_table(heads: Sequence[HeadId], closed: Outcome) -> pd.DataFrame:
    """Return one row per head: the quality without it with its interval, the numbers of examples that turn wrong and
    right, and the rise of the loss."""
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
    heads: Sequence[HeadId],
    shown: int,
) -> pd.DataFrame:
    """Return, for each of `heads`, examples that turn wrong when it is closed, with the model's answer: first the
    examples that the user `asked` for, then up to `shown` of `examples`."""
    right_E = closed.quality[0] == 1
    rows: list[dict[str, Any]] = []
    for head in track(heads, "heads", name=str):
        gates_N = HeadMask(subject.grid).without(head).gates(examples.device).to(subject.positions.dtype)
        for one in asked:
            without_it = answer_under(subject, task, one, gates_N)
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
