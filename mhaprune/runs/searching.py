"""Search by Optuna: the results of earlier jobs decide the settings of the next jobs. Nothing but the jobs is
stored."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mhaprune.runs.jobs import Job, Sweep
from mhaprune.settings.sweep import SearchSettings
from mhaprune.storage.locks import read_bytes
from mhaprune.storage.store import read_status

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

TRIES = 20
"""Largest number of proposals to ask for per wanted job, because a proposal may repeat an earlier one."""


def check_optuna() -> None:
    """Raise ValueError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ValueError("search=optuna: is not installed: pip install -e '.[search]'")


class OptunaSearch:
    """Proposes the settings of further jobs. Raises ValueError if no setting can be chosen."""

    def __init__(
        self, search: SearchSettings, fixed: Sequence[str], space: Mapping[str, BaseDistribution], root: Path
    ) -> None:
        """`fixed` are the settings of every job, `space` the settings to choose, `root` the folder of the sweep."""
        self.search, self.fixed, self.space, self.root = search, fixed, space, root
        if not self.space:
            raise ValueError(
                "search=optuna: needs settings to choose from, for example model.num_heads=2,4,8 or"
                " 'training.learning_rate=tag(log,interval(1e-4,1e-2))'"
            )

    def more(self, jobs: Sequence[Job]) -> list[list[str]]:
        """Return the settings of the next jobs; none if enough jobs are done, or no new settings were found.

        Random draws depend only on the jobs, so an interrupted search continues as if it had not stopped.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=len(jobs), constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction=self.search.goal)
        study.add_trials([self._trial(job) for job in jobs])
        known = {frozenset(job.overrides) for job in jobs}
        proposals: list[list[str]] = []
        wanted = min(self.search.at_once, self.search.trials - len(jobs))
        for _ in range(TRIES * max(0, wanted)):
            settings = self._settings(study.ask(dict(self.space)).params)
            if frozenset(settings) not in known:
                known.add(frozenset(settings))
                proposals.append(settings)
            if len(proposals) == wanted:
                break
        return proposals

    def check_table(self, tables: Sequence[str]) -> None:
        """Raise ValueError if `tables` lacks the table whose column the search optimises."""
        table = self.search.column.partition(".")[0]
        if table not in tables:
            raise ValueError(f"{self._key}: there is no table {table}, allowed are {', '.join(tables)}")

    def each_value(self) -> list[list[str]]:
        """Return the settings of a few jobs that together contain every choice, and both ends of every range."""
        ends: dict[str, Sequence[Any]] = {
            key: getattr(each, "choices", None) or (each.low, each.high)  # type: ignore[attr-defined]
            for key, each in self.space.items()
        }
        longest = max(map(len, ends.values()))
        return [self._settings({key: own[min(i, len(own) - 1)] for key, own in ends.items()}) for i in range(longest)]

    def again(self, before: Sweep) -> list[list[str]]:
        """Return the settings of the earlier jobs: proposed settings as they were, fixed settings as they are now."""
        return [[*self.fixed, *filter(before.tells, job.overrides)] for job in before.jobs]

    def best(self, jobs: Sequence[Job]) -> str:
        """Return the best job and its value, in words."""
        values = {job.label: value for job in jobs if (value := self._value(job)) is not None}
        if not values:
            return "no job of the search is done"
        label = (max if self.search.goal == "maximize" else min)(values, key=lambda label: values[label])
        return f"best of {len(values)}: {label}, with {self.search.column} {values[label]:.4g}"

    def _settings(self, chosen: Mapping[str, Any]) -> list[str]:
        return [*self.fixed, *(f"{key}={_text(value, self.space[key])}" for key, value in chosen.items())]

    def _trial(self, job: Job) -> FrozenTrial:
        import optuna

        value, state = self._value(job), optuna.trial.TrialState
        given = dict(one.split("=", 1) for one in job.overrides)
        params = {key: _read(key, given[key], distribution) for key, distribution in self.space.items()}
        return optuna.trial.create_trial(
            params=params,
            distributions=dict(self.space),
            value=value,
            state=state.FAIL if value is None else state.COMPLETE,
        )

    def _value(self, job: Job) -> float | None:
        """Return the number that the search optimises, from a job; None if the job is not done or its column holds no
        number."""
        folder, (table, _, column) = self.root / job.name, self.search.column.partition(".")
        if read_status(folder).get("status") != "done":
            return None
        tables = {path.stem: path for path in sorted(folder.glob("*.csv"))}
        self.check_table(list(tables))
        frame = pd.read_csv(io.BytesIO(read_bytes(tables[table]))).select_dtypes("number")
        if column not in frame:
            raise ValueError(f"{self._key}: no such column of numbers, allowed are {', '.join(frame)}")
        values = frame[column].dropna()
        value = values.iloc[-1:].max() if self.search.row == "last" else values.agg(self.search.row)
        return None if pd.isna(value) else float(value)

    @property
    def _key(self) -> str:
        return f"search.column={self.search.column}"


def _text(value: Any, distribution: BaseDistribution) -> str:
    """Return a value as text with six digits, or with all digits if rounding would leave the range."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.6g}"
    return short if distribution._contains(float(short)) else repr(value)


def _read(key: str, text: str, distribution: BaseDistribution) -> Any:
    """Return the value of a setting in an earlier job. Raises ValueError if the value could not be chosen now."""
    with suppress(ValueError):  # a text that is no number, or none of the choices
        kind: Any = type(getattr(distribution, "low", text))
        value = kind(text)
        if distribution._contains(distribution.to_internal_repr(value)):
            return value
    raise ValueError(
        f"{key}: an earlier job of this search has {text}, which may not be chosen now; name another sweep"
    )
