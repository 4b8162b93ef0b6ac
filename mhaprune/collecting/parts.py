"""What one run adds to what is collected from many, read and tried for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mhaprune.collecting.runs import FoundRun
from mhaprune.reporting.headline import Number
from mhaprune.reporting.verdict import Verdict
from mhaprune.storage.seals import Damaged
from mhaprune.storage.store import reason
from mhaprune.tables import LABEL, SETTING, Tables


@dataclass(frozen=True)
class Part:
    """What a run adds to what is collected, or why it adds nothing."""

    run: FoundRun
    label: str
    tables: Tables = field(default_factory=dict)
    """With the columns that tell the runs apart."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """All that is known of its settings, by name."""
    sentence: str = ""
    """The first finding of the run."""
    headline: Sequence[Number] = ()
    """The numbers by which runs are compared first."""
    verdict: Verdict | None = None
    """Which heads stay, if the run says so."""
    why_not: str | None = None

    def left_out(self) -> str:
        return f"{self.label} is not in here, {self.why_not} ({self.run.folder})."


def part_of(run: FoundRun, label: str, setting: str, settings: Mapping[str, str]) -> Part:
    """What a run adds. One that is damaged, unfinished or of no known experiment adds nothing."""
    if run.why_not is not None:
        return Part(run, label, settings=settings, why_not=run.why_not)
    kind = run.experiment
    assert kind is not None
    try:
        tables = run.tables()
        for frame in tables.values():
            frame.insert(0, LABEL, label)
            frame.insert(1, SETTING, setting)
        sentence, headline = next(iter(kind.say(tables))), list(kind.headline(tables))
    except Damaged as error:
        return Part(run, label, settings=settings, why_not=f"damaged: {error}")
    except Exception as error:  # tables may hold anything
        return misfit(run, label, settings, error)
    verdict = None
    with suppress(Exception):  # a run without one is compared all the same
        verdict = kind.head_map(tables)
    return Part(run, label, tables, settings, sentence, headline, verdict)


def misfit(run: FoundRun, label: str, settings: Mapping[str, str], error: Exception) -> Part:
    """A run whose tables are not those of its experiment."""
    return Part(run, label, settings=settings, why_not=f"damaged: its tables do not fit, {said(error)}")


def said(error: Exception) -> str:
    """Any error in one line."""
    return " ".join(reason(error).split())
