"""Sweeps of jobs that are done at once, without Hydra."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.runs.jobs import Job, Sweep
from mhaprune.lab.runs.launching import do_sweep
from mhaprune.lab.runs.processes import do_in_sweep
from mhaprune.lab.runs.run import Results
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.lab.runs.sweep_settings import SWEEP_SETTINGS, SweepSettings
from mhaprune.settings.options import target
from mhaprune.storage.cache import code_of
from mhaprune.storage.store import fingerprint
from support.made_tables import pruning_table, summary


class Bench:
    """Does sweeps without Hydra. A job writes its tables at once; a test may let it do something else before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "mine"
        self.how = SweepSettings(sweep="mine")
        self.wrong: dict[str, Callable[[], object]] = {}
        """What the job with these settings does."""
        self.at_once = 1000
        """After so many jobs the launcher is lost."""

    def __call__(self, *settings: str, **orders: Any) -> None:
        """The sweep over settings of the form `seed=0,1`."""
        self.how = SweepSettings(sweep="mine", **orders)
        do_sweep(self.root, list(map(list, itertools.product(*map(self._each, settings)))), [], self.how, self)

    @staticmethod
    def _each(setting: str) -> list[str]:
        key, _, values = setting.partition("=")
        return [f"{key}={value}" for value in values.split(",")]

    @staticmethod
    def identity(job: Job) -> str:
        return fingerprint([one for one in job.overrides if one.partition("=")[0] not in (*SWEEP_SETTINGS, "cache")])

    def check(self, job: Job) -> None:
        """Any settings will do."""

    def start(self, jobs: Sequence[Job], starts: int) -> None:
        for job in jobs[: self.at_once]:
            run: Any = functools.partial(self._do, job)
            do_in_sweep(lambda run=run: run, self.root / job.name, job.overrides, lambda: self.how, starts)
        if len(jobs) > self.at_once:
            raise RuntimeError("a worker\nwas killed")

    def _do(self, job: Job, folder: RunFolder) -> Results:
        with (self.folder / "log").open("a") as log:
            log.write(f"{job.label}\n")
        identity = {"run": self.identity(job), "task": "sort"}
        folder.note(experiment=target(Ablate()), identity=identity, code=code_of(["mhaprune.tables"]))
        folder.note(findings=["9 of 24 heads can go."])
        self.wrong.get(job.label, lambda: None)()
        folder.write_table("pruning", pruning_table())
        folder.write_table("summary", summary().assign(tolerance=0.01))
        return Results("", {}, {}, ["done"], {}, {}, {})

    def done(self) -> list[str]:
        """The jobs that were begun since the last call, in their order."""
        log = self.folder / "log"
        labels = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return labels

    def job(self, name: str) -> Path:
        [found] = self.root.glob(f"*{name}-*")
        return found

    @property
    def jobs(self) -> list[Job]:
        """All jobs of its list."""
        found = Sweep.read(self.root)
        assert found is not None
        return found.jobs

    @property
    def states(self) -> list[str]:
        return list(pd.read_csv(self.root / "runs.csv")["state"])
