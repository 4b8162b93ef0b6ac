"""See inside the heads: what they look at, what they are worth, and how a call of their layer goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from torch import Tensor

from mhaprune.data import Examples
from mhaprune.experiments.anatomy.calls import call_in, call_of_other_sizes, place_in_block, scaling_here
from mhaprune.experiments.anatomy.scaling import scaling_table
from mhaprune.experiments.anatomy.walkthrough import Call, largest_difference, steps_table, values_table, walk
from mhaprune.experiments.base import Experiment, Findings, Study
from mhaprune.experiments.examples import attention_table, examples_table, heads_named, show
from mhaprune.experiments.explain.gate_starts import from_other_starts
from mhaprune.experiments.explain.patterns import observe
from mhaprune.experiments.explain.without_each import close_each, closed_table, turned_wrong
from mhaprune.heads import HeadGrid, HeadId, HeadMask, Site
from mhaprune.measure import all_open, measure
from mhaprune.model.gates import Softmax
from mhaprune.model.transformer import Seq2Seq
from mhaprune.pruning.removal import MAX_DIFFERENCE, ProofFailed, Removal, proofs
from mhaprune.ranges import Ge, Sizes
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.agreement import HEAD, REFERENCE, rank_agreement
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import Scoring, head_columns, heads_table
from mhaprune.statistics import prunable, spearman
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Explain(Experiment):
    """What the heads of one model do: tables `looks`, `wrong`, `patterns`, `heads`, `agreement`,
    `examples`, `attention`, `tensors`, `values`, `scaling`, `scaling_here`, `gates`, `starts` and `training`.

    Attention is shown while the model answers an example. The call of one head is followed step by step: the most
    important of `heads`. A head is prunable if at 95 % confidence its ablation costs less than `tolerance_nats`.
    """

    examples: tuple[Annotated[int, Ge(0)], ...] = ()
    """Which examples of the report split to show, counted from 0. Without any, the run's own `example` is shown, or
    else the first of the split."""
    heads: tuple[str, ...] = ()
    """The heads (`cross.1.2`) and layers (`cross.1`) to look at. Without any, all heads."""
    shown: Annotated[int, Ge(0)] = 3
    """Number of examples to list for each head, of those that turn wrong without it."""
    starts: Annotated[int, Ge(0)] = 2
    """Number of other starts from which the gates are trained, while the weights stay as they are."""
    start_steps: Annotated[int, Ge(1)] = 100
    """Number of training steps from each start."""
    retrain: bool = False
    """Whether to train the whole model again too, from gates with another start."""
    tolerance_nats: Annotated[float, Ge(0)] = 0.01
    """The largest cost of a prunable head, in nats of mean loss."""
    head_dims: Sizes = (2, 4, 8, 16, 32, 64, 128, 256, 512)
    """The sizes of a head for which scores are compared with and without division by √d_head."""

    reads_example: ClassVar[bool] = True

    def check(self, grid: HeadGrid, scorers: Mapping[str, Scorer], schedules: Mapping[str, Schedule]) -> None:
        if REFERENCE not in scorers:
            raise ValueError(f"scorer=[{','.join(scorers)}]: must name ablation, which says what heads are worth")
        try:
            for name in self.heads:
                heads_named(name, grid)
        except ValueError as error:
            raise ValueError(f"experiment.{error}") from None

    def __call__(self, study: Study) -> Findings:
        subject, report = study.subject, study.splits.report
        if study.example is not None and self.examples:
            raise ValueError(f"experiment.examples={list(self.examples)}: an example of your own is shown already")
        if max(self.examples, default=0) >= len(report):
            raise ValueError(
                f"experiment.examples={list(self.examples)}: the report split has examples 0 to {len(report) - 1}"
            )
        scoring = Scoring(subject, study.splits.score, study.seed, study.remember)
        heads = heads_table(scoring, study.scorers)
        seen = observe(subject, study.splits.score)
        closed = close_each(subject, report)
        looks = looks_table(subject, seen.looks, heads, closed_table(subject.grid.heads, closed), self.tolerance_nats)
        looks["without_prunable"] = without_prunable(subject, looks, report)
        chosen = [head for name in self.heads for head in heads_named(name, subject.grid)] or list(subject.grid)
        scores = dict(zip(subject.grid, heads["score"][: len(subject.grid)], strict=True))
        followed = max(chosen, key=scores.__getitem__)
        shown = [show(subject, study.task, *pair) for pair in self._sources(study)]
        call = call_in(subject, followed, shown[0].batch, report)
        steps = walk(call)
        other, place = call_of_other_sizes(subject), place_in_block(subject, followed)
        removal = Removal(subject, report)
        removal.prove(HeadMask(subject.grid).without(followed))
        tables = {
            "looks": looks,
            "wrong": turned_wrong(subject, study.task, report, closed, chosen, self.shown),
            "examples": examples_table(shown, study.splits.train),
            "heads": heads,
            "agreement": rank_agreement(heads),
            "patterns": seen.patterns,
            "attention": attention_table(subject, study.task, shown, chosen),
            "tensors": pd.concat(
                [
                    steps_table(str(followed.block), steps),
                    steps_table("a layer with sizes of its own", walk(other)),
                ]
            ),
            "values": values_table(steps, place).assign(**head_columns(followed), place=place),
            "scaling": scaling_table(self.head_dims),
            "scaling_here": scaling_here(subject, study.task, call, followed, shown[0].batch),
            **self._gates(study, heads),
            "training": study.history,
        }
        difference = proved_equal(call, other)
        proved = {"max_difference_masked_removed": removal.worst, "max_difference_wide_independent": difference}
        return Findings(tables, proved | proofs(subject, report))

    def _sources(self, study: Study) -> Iterator[tuple[Sequence[str], Sequence[str] | None]]:
        """Sources to show with what is right, where that is known."""
        if study.example is not None:
            yield study.example, study.task.answer(study.example)
            return
        decode, report = study.task.vocabulary.decode, study.splits.report
        for number in self.examples or (0,):
            yield decode(report.source[number].tolist()), decode(report.target[number].tolist())

    def _gates(self, study: Study, heads: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """Tables `starts` and `gates`, of a model that has some: where they go from other starts, head by head; and how
        the ranking by gates agrees with that of the start, of the model's own gates and of ablation."""
        own_N = study.subject.learned_gates()
        if self.retrain and not isinstance(study.gate, Softmax):
            raise ValueError(
                "experiment.retrain=True: the model has no learned gates to start otherwise, gate=softmax has"
            )
        if own_N is None:
            return {}
        own = numbers(own_N)
        ablation = heads.loc[heads["scorer"] == REFERENCE, "score"].to_numpy()
        rows = [ranking("trained", own, first_gates(study.history, study.subject), ablation)]
        tables = {}
        if self.starts:
            starts = from_other_starts(study.subject, study.splits.train, self.starts, self.start_steps, study.seed)
            for start, mine in starts.groupby("start"):
                end, begin = (mine[f"gate_{when}"].to_numpy() for when in ("end", "start"))
                row = ranking(f"weights held still, start {start}", end, begin, ablation)
                rows.append(row | {"spearman_with_own": spearman(end, own)})
            tables["starts"] = starts
        if self.retrain and isinstance(study.gate, Softmax):
            init: Any = "rand" if study.gate.init == "zeros" else "zeros"
            other, history = study.retrain(replace(study.gate, init=init))
            scoring = Scoring(other, study.splits.score, study.seed)
            ablation = numbers(scoring(REFERENCE, study.scorers[REFERENCE]).scores.values[0])
            gates = numbers(other.learned_gates())
            rows.append(ranking(f"retrained, init={init}", gates, first_gates(history, other), ablation))
            tables["retraining"] = history
        return {"gates": pd.DataFrame(rows), **tables}


def proved_equal(*calls: Call) -> float:
    """The largest difference between a layer's output and that of its heads one by one; raises `ProofFailed`."""
    difference = float(np.max([largest_difference(call) for call in calls]))
    if not difference <= MAX_DIFFERENCE:
        raise ProofFailed(
            f"a layer and its heads one by one differ by {difference:.3g}, allowed is {MAX_DIFFERENCE:g} in float64"
        )
    return difference


def numbers(values: Tensor | None) -> np.ndarray:
    assert values is not None
    return values.detach().double().cpu().numpy()


def first_gates(history: pd.DataFrame, subject: Subject) -> np.ndarray:
    """What the gates of a model were before its training."""
    return history.loc[0, [f"gate_{head}" for head in subject.grid]].to_numpy(float)


def ranking(name: str, gates: np.ndarray, start: np.ndarray, ablation: np.ndarray) -> dict[str, Any]:
    """How the ranking by gates agrees with that of where they started, and with ablation."""
    return {
        "gates": name,
        "spearman_with_start": spearman(gates, start),
        "spearman_with_ablation": spearman(gates, ablation),
        "spearman_with_own": nan,
    }


def looks_table(
    subject: Seq2Seq, looks: pd.DataFrame, heads: pd.DataFrame, closed: pd.DataFrame, tolerance: float
) -> pd.DataFrame:
    """One row per head of the unpruned model: what it does, what it is worth, whether it is there at all."""
    config = subject.config
    first = heads[(heads["scorer"] == heads["scorer"].iloc[0]) & (heads["draw"] == 0)]
    table = pd.DataFrame(map(head_columns, HeadGrid.full(config.blocks, config.num_heads)))
    table["removed"] = [HeadId(Site(site), *rest) not in subject.grid for site, *rest in table[HEAD].to_numpy()]
    for part in (first[[*HEAD, "scorer", "score", "stderr", "rank"]], looks, closed):
        table = table.merge(part, how="left", on=HEAD)
    ablation = heads[heads["scorer"] == REFERENCE].set_index(HEAD).reindex(pd.MultiIndex.from_frame(table[HEAD]))
    table["prunable"] = prunable(ablation["score"].to_numpy(), ablation["stderr"].to_numpy(), tolerance)
    return table.assign(tolerance=tolerance)


def without_prunable(subject: Subject, looks: pd.DataFrame, report: Examples) -> float:
    """Exact match with every head closed of which each alone is prunable."""
    rows = looks[looks["prunable"] & ~looks["removed"]][HEAD].itertuples(index=False)
    mask = HeadMask(subject.grid, frozenset(HeadId(Site(site), layer, head) for site, layer, head in rows))
    gates_N = all_open(subject, 1)[0] * mask.gates(report.source.device)
    return float(measure(subject, report, gates_N).sequence_accuracy.mean())
