"""What competes: every scorer with every schedule that uses scores, and every schedule that uses none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mhaprune.progress import track
from mhaprune.pruning.plans import Choice, Plan, choices
from mhaprune.schedules.base import Schedule
from mhaprune.schedules.budgets import Budget
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import Scoring


@dataclass(frozen=True)
class Contestant:
    """A choice of heads under a name of its own."""

    name: str
    choice: Choice

    @property
    def plans(self) -> list[Plan]:
        """The plans in the name of the contestant."""
        return [plan._replace(scorer=self.name) for plan in self.choice.plans]


def contestants(
    scoring: Scoring, scorers: Mapping[str, Scorer], schedules: Mapping[str, Schedule], budgets: Sequence[Budget]
) -> Iterator[Contestant]:
    """A scorer goes by its own name with the first schedule that uses it, and by both names with every other."""
    known: set[str] = set()
    costs = [1.0 if schedule.scoring == "none" else float(len(scorers)) for schedule in schedules.values()]
    for how, schedule in track(schedules.items(), "schedule", costs=costs):
        for choice in choices(scoring, scorers, schedule, budgets, how):
            name = f"{choice.scorer} + {how}" if choice.scorer in known else choice.scorer
            known.add(choice.scorer)
            yield Contestant(name, choice)
