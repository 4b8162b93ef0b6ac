"""What one run adds to what is collected from many, read and tried for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mhaprune.collecting.runs import FoundRun
from mhaprune.experiments.base import Experiment
from mhaprune.reporting.headline import Number
from mhaprune.reporting.verdict import SmallMap, in_small
from mhaprune.storage.seals import Damaged
from mhaprune.storage.store import reason
from mhaprune.tables import Tables


@dataclass(frozen=True)
class Part:
    """What a run adds to what is collected, or why it adds nothing."""

    run: FoundRun
    label: str
    setting: str = ""
    """The label without seed and folder."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """All that is known of its settings, by name."""
    tables: Tables = field(default_factory=dict)
    """Its tables as it wrote them."""
    sentence: str = ""
    """The first finding of the run."""
    headline: Sequence[Number] = ()
    """The numbers by which runs are compared first."""
    small_map: SmallMap | None = None
    """Which heads stay, if the run says so."""
    why_not: str | None = None

    def left_out(self) -> str:
        return f"{self.label} is not in here, {self.why_not} ({self.run.place})."


def part_of(run: FoundRun, label: str, setting: str, settings: Mapping[str, str]) -> Part:
    """What a run adds. One that is damaged, unfinished or of no known experiment adds nothing."""
    part = Part(run, label, setting, settings)
    if run.why_not is not None:
        return replace(part, why_not=run.why_not)
    kind = run.experiment
    assert kind is not None
    try:
        tables = run.tables()
        part = replace(part, tables=tables, headline=list(kind.headline(tables)), sentence=_sentence(kind, run, tables))
    except Damaged as error:
        return replace(part, why_not=f"damaged: {error}")
    except Exception as error:  # tables may hold anything
        return misfit(part, error)
    with suppress(Exception):  # a run without one is compared all the same
        part = replace(part, small_map=_small_map(kind, run, tables))
    return part


def _sentence(kind: type[Experiment], run: FoundRun, tables: Tables) -> str:
    """The first sentence of the report of the run. Where its status lacks it, it is made from the tables."""
    findings = run.status.get("findings")
    return str(findings[0]) if findings and run.sealed else next(iter(kind.say(tables)))


def _small_map(kind: type[Experiment], run: FoundRun, tables: Tables) -> SmallMap | None:
    """The same for the map of heads."""
    if "head_map" in run.status and run.sealed:
        noted = run.status["head_map"]
        return noted and SmallMap(**noted)
    verdict = kind.head_map(tables)
    return None if verdict is None else in_small(verdict)


def misfit(part: Part, error: Exception) -> Part:
    """A run whose tables are not those of its experiment."""
    return Part(
        part.run, part.label, part.setting, part.settings, why_not=f"damaged: its tables do not fit, {said(error)}"
    )


def said(error: Exception) -> str:
    """Any error in one line."""
    return " ".join(reason(error).split())
