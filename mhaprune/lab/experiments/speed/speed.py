"""Time models with and without heads, at several sizes."""

import logging
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import pandas as pd

from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Findings, HeadBudgets, Setup, the_one, with_proofs
from mhaprune.lab.experiments.budgets import heads_to_remove
from mhaprune.lab.experiments.speed import speed_report as report
from mhaprune.lab.experiments.speed.matchup import Matchup, Workload, evenly, scaled
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.measure.times import device_name
from mhaprune.progress import doing, track
from mhaprune.pruning.plans import choices, plans_of
from mhaprune.pruning.pruned import prune, time_removed
from mhaprune.scorers.scoring import Scoring
from mhaprune.settings.ranges import Ge, Sizes, Within
from mhaprune.tables import DENSE_AGAIN

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speed(HeadBudgets):
    """Time models of several sizes with several shares of their heads removed: tables `speed`, `tradeoff`,
    `pruning` and `training`. Time does not depend on the values of the weights. So each size is timed on fresh models
    with random weights. They have as many layers and heads as the run's own model, and a feed-forward of the same
    proportion. Four models take turns: a dense model, a second copy of it (A/A), one with heads removed, and one built
    without them.

    The quality is that of the trained model. Its heads are removed as the schedule and the scorers choose, and
    `tradeoff` has exact match beside the milliseconds of a greedy decoding. For a pretrained model, `speed` is
    left out, and `tradeoff` has its quality beside the time of a forward pass.
    """

    d_models: Sizes = (64, 256, 512)
    """The widths of the fresh models."""
    batch_sizes: Sizes = (1, 32)
    """The numbers of examples of one call."""
    source_lengths: Sizes = (10,)
    """The lengths of the sources, in tokens."""
    target_lengths: Sizes = (10,)
    """The lengths of the targets, in tokens."""
    shares: tuple[Annotated[float, Within(0, 1)], ...] = (0.25, 0.5, 0.8333, 1.0)
    """The shares of all heads to remove from the fresh models, evenly from all blocks."""
    rounds: Annotated[int, Ge(1)] = 20
    """Number of rounds in which each model is timed once."""

    question = "How much faster is the model with fewer heads, and at which size?"
    then = "`experiment=ablate` shows which heads can be removed, and what that costs."
    steps = ("model", "sizes", "prune", "time", "prove", "figures and page")
    seconds = (18, 54, 8, 7, 0.2, 0.3)
    figures = (report.speedup_curves,)
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)

    def check(self, setup: Setup) -> None:
        super().check(setup)
        if the_one(setup.schedules).scoring != "none":
            setup.check_scorers()
        if setup.trained is None:
            log.warning("a pretrained model is timed as it is, so experiment.d_models and lengths are left out")
            return
        num_heads = setup.trained.model.num_heads
        shared = setup.trained.model.head_dim is None  # else heads keep their width at every d_model
        allowed = f"even and a multiple of {num_heads}, the heads of a block" if shared else "even"
        for d_model in self.d_models:
            if d_model % 2 or (shared and d_model % num_heads):
                raise ValueError(f"experiment.d_models={d_model}: must be {allowed}")

    def __call__(self, study: Study) -> Findings:
        timed = {} if study.task is None else {"speed": self.sizes(study)}
        pruning, timed["tradeoff"], difference = self.trained(study)
        device = device_name(study.subject.device)
        tables = {name: table.assign(device=device) for name, table in timed.items()}
        return with_proofs(study, {**tables, "pruning": pruning, **study.training_table}, difference)

    def sizes(self, study: Study) -> pd.DataFrame:
        """Return the table `speed`, of fresh models."""
        assert isinstance(study.subject, Seq2Seq)
        config, device = replace(study.subject.config, units=("head",)), study.subject.device
        full = config.grid
        masks = [evenly(full, count) for count in heads_to_remove(self.shares, len(full))]
        longest = max(*self.source_lengths, *self.target_lengths)
        workloads = [Workload(*size) for size in product(self.batch_sizes, self.source_lengths, self.target_lengths)]
        speed = []
        with doing("sizes", len(self.d_models) * len(workloads)) as step:
            for d_model in self.d_models:
                shape = scaled(config, d_model, longest)
                matchup = Matchup(shape, len(study.task.vocabulary), masks, device)
                for work in workloads:
                    speed.append(matchup.speed(work, self.rounds))
                    step.done += 1
        return pd.concat(speed, ignore_index=True)

    def trained(self, study: Study) -> tuple[pd.DataFrame, pd.DataFrame, float]:
        """Prune the trained model by every plan. Return a table of accuracy, a table of accuracy and latency, and the
        largest difference between removing and masking the same heads."""
        subject = study.subject
        scoring = Scoring(subject, study.splits.score, study.seed, study.remember)
        with doing("prune"):
            plans = plans_of(choices(scoring, study.scorers, the_one(study.schedules), self.removals(subject.grid)))
            pruning, _, difference = prune(subject, plans, study.splits)
        examples, first = study.splits.report, [plan for plan in plans if plan.draw == 0]
        parts, batch_sizes = [], dict.fromkeys(min(size, len(examples)) for size in self.batch_sizes)
        for batch_size in track(batch_sizes, "time", name=lambda size: f"batch {size}"):
            latency = time_removed(subject, first, examples[:batch_size], self.rounds)
            floor = latency[latency["scorer"] == DENSE_AGAIN].iloc[0]
            both = pruning.merge(latency, on=[name for name in latency if name in pruning])
            both[["aa_ratio", "aa_ratio_q1", "aa_ratio_q3"]] = floor[["speedup", "speedup_q1", "speedup_q3"]].tolist()
            parts.append(both.assign(batch_size=batch_size))
        return pruning, pd.concat(parts, ignore_index=True), difference
