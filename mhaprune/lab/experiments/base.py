"""The interface of experiments: a study of a model, and figures and sentences made from its tables."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pandas as pd

from mhaprune.heads import HeadGrid
from mhaprune.inputs import Study
from mhaprune.lab.experiments.budgets import check_budgets, heads_to_remove
from mhaprune.lab.reporting.head_map import Verdict, heads_that_matter
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.reporting.plots import Figures, Plot, draw
from mhaprune.lab.sources.source import ModelSource
from mhaprune.lab.sources.trained import TrainedSource
from mhaprune.progress import doing
from mhaprune.pruning.pruned import proofs
from mhaprune.recoveries.base import Recovery
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.settings.ranges import Checked, Ge, Within
from mhaprune.tables import Tables


@dataclass(frozen=True)
class Findings:
    """The tables, checks and files that an experiment returns. An experiment writes no files itself."""

    tables: dict[str, pd.DataFrame]
    """Tidy tables by name. Figures and sentences are made from them."""
    checks: dict[str, float] = field(default_factory=dict)
    """The numbers that the proofs measured, by name, for `status.json`: for example, the largest difference between
    masking and removing the same heads."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents of further files, by their path in the run folder."""


@dataclass(frozen=True)
class Setup:
    """The facts about a run that are known before anything is trained."""

    source: ModelSource
    scorers: Mapping[str, Scorer]
    schedules: Mapping[str, Schedule]
    recoveries: Mapping[str, Recovery]
    example: Sequence[str] | None = None
    """The symbols of a source sequence that the user typed; None without one."""

    @property
    def grid(self) -> HeadGrid:
        """Return the heads that the model will have."""
        return self.source.grid

    def check_scorers(self) -> None:
        """Raise ValueError if there is no scorer."""
        if not self.scorers:
            raise ValueError("scorer=[]: must name at least one scorer, for example scorer=[ablation]")

    @property
    def trained(self) -> TrainedSource | None:
        """Return the source of a model that is trained here; None for a pretrained model."""
        return self.source if isinstance(self.source, TrainedSource) else None


@dataclass(frozen=True)
class Experiment(Checked, ABC):
    """A study of one trained model. It makes figures, sentences and the map of heads from its own tables.

    A table may have any name: `run` and `collect` leave the reading of tables to the experiment.

    >>> @dataclass(frozen=True)
    ... class Census(Experiment):
    ...     '''The number of heads of each block.'''
    ...
    ...     def __call__(self, study):
    ...         grid = study.subject.grid
    ...         return Findings({"census": pd.DataFrame({"block": map(str, grid.blocks), "heads": grid.sizes})})
    ...
    ...     @staticmethod
    ...     def say(tables):
    ...         yield f"{tables['census']['heads'].sum()} heads in {len(tables['census'])} blocks."
    >>> list(Census.say(Census()(Study.of(heads)).tables))
    ['8 heads in 2 blocks.']
    """

    question: ClassVar[str] = ""
    """The question that the experiment answers, for the top of its report."""
    then: ClassVar[str] = ""
    """What to do next, in a sentence or two, for the report."""
    steps: ClassVar[Sequence[str]] = ()
    """The steps of a run that its progress line counts, in their order, from the model to the report."""
    seconds: ClassVar[Sequence[float]] = ()
    """The seconds of each step with default settings on one core, by which the first run tells the time left."""
    figures: ClassVar[Figures] = ()
    """The figures of one run, in the order of the report."""
    figures_over_runs: ClassVar[Figures] = ()
    """The figures that compare several runs. Their tables have the columns `label` and `setting`."""
    recovers: ClassVar[bool] = False
    """Whether the experiment uses recoveries."""
    measures_shift: ClassVar[bool] = False
    """Whether the experiment measures models on examples of other kinds."""
    needs_training: ClassVar[bool] = False
    """Whether the experiment needs mhaprune's own model and its training, so that a pretrained model is refused."""
    reads_example: ClassVar[bool] = False
    """Whether the experiment looks at an example of the user."""

    @abstractmethod
    def __call__(self, study: Study) -> Findings: ...

    @staticmethod
    @abstractmethod
    def say(tables: Tables) -> Iterator[str]:
        """Yield sentences about the findings of one run. The first sentence answers the question of the experiment."""

    @staticmethod
    def say_in_common(tables: Tables) -> Iterator[str]:
        """Yield sentences about several runs together; none if the experiment does not compare runs in words."""
        return iter(())

    @staticmethod
    def head_map(tables: Tables) -> Verdict | None:
        """Return a decision for each head: it stays or can be removed. None if the experiment does not decide this."""
        return None

    @staticmethod
    def headline(tables: Tables) -> Sequence[Number]:
        """Return the numbers that a comparison of runs shows first, drawn against the settings that differ."""
        return ()

    def check(self, setup: Setup) -> None:
        """Raise ValueError, before anything is trained, for settings that do not fit the rest of the run."""
        return

    def refuse_unread(self, name: str, source: ModelSource, shift: Collection[str], recovery: Collection[str]) -> None:
        """Raise ValueError for settings that this experiment does not read. `name` is its option; the others are
        settings of the run."""
        if self.needs_training and not isinstance(source, TrainedSource):
            raise ValueError(
                f"experiment={name}: looks into mhaprune's own model, which it trains, so it needs model=transformer;"
                " experiment=ablate studies any model"
            )
        if shift and not self.measures_shift:
            raise ValueError(
                f"shift=[{','.join(shift)}]: experiment={name} measures no examples of other kinds,"
                " experiment=ablate does"
            )
        if recovery and not self.recovers:
            raise ValueError(
                f"recovery=[{','.join(recovery)}]: experiment={name} recovers nothing, experiment=prune does"
            )


@dataclass(frozen=True)
class HeadBudgets(Experiment):
    """A study of models that have lost some of their heads."""

    budgets: tuple[int | float, ...] = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
    """Numbers of heads to remove: shares of all heads (0.25) or numbers of heads (6)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budgets(self.budgets)

    def check(self, setup: Setup) -> None:
        if any("@" in block.site for block in setup.grid.blocks):
            raise ValueError("heads of single calls can be closed, not removed: set model.calls=false")
        for schedule in setup.schedules.values():
            heads_to_remove(self.budgets, len(setup.grid), len(schedule.smallest(setup.grid).removed))

    def removals(self, grid: HeadGrid) -> list[int]:
        """Return the numbers of heads to remove from a model with these heads, ascending and always with 0."""
        return heads_to_remove(self.budgets, len(grid))


@dataclass(frozen=True)
class WithinTolerance(Experiment):
    """A study of which heads can be removed at a small loss of exact match, and how fast the pruned model is.

    A latency is the time of one greedy decoding. The dense and the pruned model are timed in turn.
    """

    tolerance: Annotated[float, Within(0, 1)] = 0.01
    """The largest loss of exact match, as a difference of two shares: 0.01 is one percentage point."""
    latency_batch: Annotated[int, Ge(1)] = 32
    """Number of examples in one timed decoding."""
    latency_rounds: Annotated[int, Ge(1)] = 20
    """Number of timed decodings of each model."""


def the_one(schedules: Mapping[str, Schedule]) -> Schedule:
    """Return the only schedule. Raises ValueError if there are none or several."""
    if len(schedules) != 1:
        raise ValueError(f"schedule=[{','.join(schedules)}]: must name exactly one; experiment=prune compares several")
    return next(iter(schedules.values()))


def with_proofs(
    study: Study, tables: dict[str, pd.DataFrame], worst: float, files: dict[str, bytes] | None = None
) -> Findings:
    """Return the findings of an experiment that removes heads, with its proofs as `checks`. `worst` is the largest
    difference between removing and masking the same heads."""
    with doing("prove"):
        checks = proofs(study.subject, study.splits.report)
    return Findings(tables, {"max_difference_masked_removed": worst, **checks}, files or {})


def functions_of(kind: type[Experiment]) -> Figures:
    """Return the functions that draw the map of the heads, and then all other figures."""

    def of_map(tables: Tables) -> Plot | None:
        verdict = kind.head_map(tables)
        return None if verdict is None or not len(verdict.heads) else heads_that_matter(verdict)

    return (of_map, *kind.figures)


def figures_of(kind: type[Experiment], tables: Tables) -> Iterator[Plot]:
    """Yield the map of the heads, then every figure whose tables the run has."""
    yield from draw(functions_of(kind), tables)
