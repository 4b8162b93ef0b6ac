"""The part of each run in what is collected from many: its name, its numbers, and the settings that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.reporting.head_map import SmallMap, in_small
from mhaprune.reporting.headline import Number
from mhaprune.reporting.settings import Setting, by_use, setting
from mhaprune.settings.sweep import SWEEP_SETTINGS
from mhaprune.storage.seals import Damaged
from mhaprune.storage.store import in_one_line, reason
from mhaprune.sweeps.runs import FoundRun
from mhaprune.tables import LABEL, SETTING, Tables, varying

RESERVED = ("cache", "hydra", LABEL, SETTING, *SWEEP_SETTINGS)
"""Settings that are no names of runs."""
NOT_SET = "not set"


@dataclass(frozen=True)
class Part:
    """The part of a run in what is collected, or why it adds nothing."""

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

    @property
    def trained_with(self) -> dict[str, Any]:
        """Facts of the training of its model, as columns; none where they are not known."""
        return {f"trained with {name}": value for name, value in self.run.status.get("trained_with", {}).items()}

    def damaged(self, why: str) -> Part:
        return Part(self.run, self.label, self.setting, self.settings, why_not=f"damaged: {why}")

    def misfit(self, error: Exception) -> Part:
        """The part of a run whose tables are not those of its experiment."""
        return self.damaged(f"its tables do not fit, {in_one_line(reason(error))}")


def named(runs: Sequence[FoundRun]) -> tuple[list[Part], list[str]]:
    """Return a part for each run, with its names, and the settings that differ between runs, the seed last.

    A label tells a run apart: by these settings and, where that is not enough, by its folder.
    """
    settings = [_settings(run.status) for run in runs]
    if len({mine.get("experiment") for mine in settings}) == 1:
        for mine in settings:
            mine.pop("experiment", None)
    values: dict[str, set[str | None]] = {name: set() for mine in settings for name in mine}
    for mine, run in zip(settings, runs, strict=True):
        for name in values if "identity" in run.status else mine:  # else only what was typed is known
            values[name].add(mine.get(name))
    differ = sorted((name for name in values if len(values[name]) > 1), key=lambda name: name == "seed")
    labels = [_joined(mine, differ) for mine in settings]
    places, depth, often = [Path(run.place).parts for run in runs], 1, Counter(labels)
    while len({place[-depth:] for place in places}) < len(places):
        depth += 1
    parts = []
    for run, mine, label, place in zip(runs, settings, labels, places, strict=True):
        if not label or often[label] > 1:
            label = ", ".join(filter(None, [label, "/".join(place[-depth:])]))
        seedless = _joined(mine, [name for name in differ if name != "seed"])
        parts.append(Part(run, label, seedless, mine, why_not=run.why_not))
    return parts, differ


def _joined(settings: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={settings[name]}" for name in names if name in settings)


def _settings(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a run: its identity, and whatever else its command line set."""
    identity = status.get("identity", {})
    settings = {"experiment": status["experiment"].rpartition(".")[2].lower()} if "experiment" in status else {}
    settings |= {name: str(value) for name, value in identity.items() if name not in ("run", LABEL, SETTING)}
    for override in status.get("overrides", []):
        key, _, value = override.partition("=")
        short = key.removeprefix("model.")  # as the identity calls it
        if short not in identity and key != "experiment" and key.split(".")[0] not in RESERVED:
            settings[key if identity else short] = value
    return settings


def with_findings(part: Part) -> Part:
    """Return the part with what its run found. A run that is damaged, unfinished or of no known experiment adds
    nothing."""
    run, kind = part.run, part.run.experiment
    if part.why_not is not None or kind is None:
        return part
    findings, sealed = run.status.get("findings"), run.sealed
    try:
        tables = run.tables()
        # Where the status lacks the first sentence of the report, it is made from the tables.
        sentence = str(findings[0]) if findings and sealed else next(iter(kind.say(tables)))
        part = replace(part, tables=tables, headline=list(kind.headline(tables)), sentence=sentence)
    except Damaged as error:
        return part.damaged(str(error))
    except Exception as error:  # tables may hold anything
        return part.misfit(error)
    with suppress(Exception):  # a run without a map of its heads is compared all the same
        if "head_map" in run.status and sealed:
            noted = run.status["head_map"]
            return replace(part, small_map=noted and SmallMap(**noted))
        verdict = kind.head_map(tables)
        return replace(part, small_map=None if verdict is None else in_small(verdict))
    return part


def settings_of(parts: Sequence[Part]) -> list[Setting]:
    """Return the settings that differ between runs, the seed left out, in the order in which figures use them.

    Of settings that always change together the first stands for all.
    """
    found: dict[tuple[int, ...], Setting] = {}
    for name in dict.fromkeys(name for part in parts for name in part.settings):
        values = [part.settings.get(name, NOT_SET) for part in parts]
        groups = tuple(pd.factorize(pd.Series(values))[0])
        if name != "seed" and max(groups) > 0 and groups not in found:
            found[groups] = setting(name, values)
    return by_use(found.values())


def numbers_of(parts: Sequence[Part], settings: Sequence[Setting]) -> pd.DataFrame:
    """Return a row per run and number by which it is compared first, with the values of these settings."""
    rows = [
        number._asdict() | {LABEL: part.label} | {each.name: part.settings.get(each.name, NOT_SET) for each in settings}
        for part in parts
        for number in part.headline
    ]
    return pd.DataFrame(rows, columns=[*Number._fields, LABEL, *(each.name for each in settings)])


def title_of(parts: Sequence[Part], varying: Sequence[str]) -> str:
    """Say what was run on which task, and what differs: `ablate on sort, by num_heads, 3 seeds`."""
    whole = [part for part in parts if part.why_not is None]
    kinds = dict.fromkeys(part.run.experiment for part in whole)
    done = ", ".join(kind.__name__.lower() for kind in kinds if kind is not None)
    tasks = _listed(list(dict.fromkeys(part.settings.get("task", "no task") for part in whole)) or ["no task"])
    title = f"{done or 'Runs'} on {tasks}"
    settings = [name for name in varying if name not in ("experiment", "task", "seed")]
    if settings:
        title += f", by {_listed(settings)}"
    seeds = {part.settings["seed"] for part in parts if "seed" in part.settings}
    return title + (f", {len(seeds)} seeds" if len(seeds) > 1 else "")


def _listed(names: Sequence[str]) -> str:
    """Write `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def table_of(parts: Sequence[Part], varying: Sequence[str]) -> pd.DataFrame:
    """Return a row per run: its settings, its first numbers, how it ended, what trained its model, and where it is.

    Runs of one `start` were timed side by side.
    """
    rows = []
    for part in parts:
        settings = {name: part.settings.get(name) for name in (*varying, *part.settings)}
        numbers = {number.name: number.value for number in part.headline}
        ended = {"state": part.why_not or "done", **{name: part.run.status.get(name) for name in ("seconds", "start")}}
        rows.append({LABEL: part.label, **settings, **numbers, **ended, **part.trained_with, "folder": part.run.place})
    return varying_first(pd.DataFrame(rows))


def varying_first(frame: pd.DataFrame) -> pd.DataFrame:
    """Order the columns: first what a row is called, then the columns that vary, then those that never do."""
    varies = [name for name in varying(frame) if name != LABEL]
    return frame[[LABEL, *varies, *(name for name in frame if name not in (LABEL, *varies))]]
