"""The callback of Hydra that refuses bad folders and bad jobs before a run or a sweep writes anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from mhaprune.lab.cli.values import settings_of_sweep, typed, values_of
from mhaprune.progress import doing, shown, track
from mhaprune.settings.refusals import RunFailed


class Refusals(Callback):
    """The callback of Hydra that refuses a run or a sweep. Its errors are `RunFailed`: Hydra only warns of others."""

    sweep: ClassVar[DictConfig | None] = None
    """The settings of the sweep that this process has begun."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with shown(), doing("load torch"):  # for seconds, before anything else can be said
            from mhaprune.lab.runs.run_folder import refuse_busy
            from mhaprune.storage.store import refuse_links

        given = "hydra.run.dir" in _of_hydra(config)  # else the folder is new
        try:
            if given and not config.hydra.run.dir:
                raise ValueError("hydra.run.dir='': must name a folder")
            folder = Path(config.hydra.run.dir if given else "new")
            refuse_busy(folder)
            refuse_links("hydra.run.dir", folder, files_of_hydra(config))
        except ValueError as error:
            raise RunFailed(error) from error

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with shown():
            with doing("load torch"):
                import mhaprune.lab.runs.collecting  # noqa: F401
            try:
                _name_by_what_varies(config)
                _check_folder(config)
                _check_grid(config)
            except Exception as error:
                raise RunFailed(error) from error
        Refusals.sweep = config


def name_of(kind: type) -> str:
    """Return the `_target_` of a plug-in of Hydra. Hydra imports its plug-ins twice, so two classes have this name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def files_of_hydra(config: DictConfig) -> list[str]:
    """Return the files that Hydra writes into the folder of a run, relative to the folder, and the lock file."""
    from mhaprune.lab.runs.run_folder import LOCK

    folder, yamls = config.hydra.output_subdir, ("config.yaml", "hydra.yaml", "overrides.yaml")
    return [LOCK, f"{config.hydra.job.name}.log", *(str(Path(folder, name)) for name in yamls if folder is not None)]


def folder_of_job(varying: str, overrides: Sequence[str], root: str) -> str:
    """Return the name of a job's folder: the settings that vary, shortened, and a fingerprint of all that decides it.

    If a folder below `root` has this fingerprint, return its name: the same job of a sweep that varied less.
    """
    from mhaprune.lab.runs.sweep_settings import LONGEST, deciding
    from mhaprune.storage.store import fingerprint

    mark = fingerprint(deciding(typed(overrides)))
    for path in sorted(Path(root).glob(f"*-{mark}")):
        return path.name
    readable = re.sub(r"[^\w.-]+", "_", varying, flags=re.ASCII).strip("_") or "job"
    return f"{readable[: LONGEST - 13]}-{mark}"


def _parsed(config: DictConfig, *more: str) -> list[Override]:
    """Return the overrides `more`, then the typed ones."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return parser.parse_overrides([*more, *typed(config.hydra.overrides.task)])


def _of_hydra(config: DictConfig) -> dict[str, str]:
    """Return the typed settings of Hydra itself, as they were typed, by their keys."""
    return {text.partition("=")[0].lstrip("+"): text for text in typed(config.hydra.overrides.hydra)}


def _name_by_what_varies(config: DictConfig) -> None:
    """Leave the settings with one value out of the names of jobs, and refuse lists of values that no job depends on."""
    from mhaprune.lab.runs.sweep_settings import COMMON, first_part

    keys = config.hydra.job.config.override_dirname.exclude_keys
    fixed = [*keys]
    for one in _parsed(config):
        key = one.key_or_group
        if not one.is_sweep_override():
            fixed.append(key)
        elif (name := first_part(key)) in COMMON:
            raise ValueError(f"{one.input_line}: no job depends on {name}, must have one value")
    # Every job is composed anew, from these overrides and its own.
    with read_write(config.hydra):
        quoted = ",".join(f"'{key}'" for key in fixed)
        config.hydra.overrides.hydra.append(f"hydra.job.config.override_dirname.exclude_keys=[{quoted}]")


def _check_folder(config: DictConfig) -> None:
    """Raise ValueError if the folder of the sweep is not for jobs, or would not keep them apart."""
    from mhaprune.lab.runs.run_folder import read_status
    from mhaprune.lab.runs.run_reader import COLLECTION
    from mhaprune.storage.store import refuse_links

    how = settings_of_sweep(config)
    given = _of_hydra(config)
    place = given.get("hydra.sweep.dir")
    if how.sweep is not None and place is not None:
        raise ValueError(f"sweep={how.sweep}: names the folder of the sweep, leave {place} out")
    if (subdir := given.get("hydra.sweep.subdir")) is not None:
        if "${" not in subdir:
            raise ValueError(f"{subdir}: all jobs would share it, write '${{hydra:job.num}}'")
        if re.search(r"=['\"]?/|\.\.", subdir):
            raise ValueError(f"{subdir}: leads out of the folder of the sweep, name folders in it")
    if config.hydra.launcher.get("n_jobs") == 0:
        raise ValueError("hydra.launcher.n_jobs=0: must be 1 or more, or -1 for a job on each core")
    root = Path(config.hydra.sweep.dir)
    there = sorted(root.iterdir()) if root.is_dir() else []
    jobs = [path for path in there if (path / "status.json").exists() or (path / ".hydra").is_dir()]
    ours = (root / "multirun.yaml").exists() or jobs
    if there and (not ours or read_status(root).get("kind", COLLECTION) != COLLECTION):
        name = f"sweep={how.sweep}" if how.sweep is not None else f"hydra.sweep.dir={root}"
        raise ValueError(f"{name}: its folder is not empty and holds no sweep, name another")
    files = files_of_hydra(config)
    of_jobs = [f"{path.name}/{name}" for path in there if path.is_dir() for name in files]
    refuse_links("hydra.sweep.dir", root, ["multirun.yaml", *of_jobs])


def _check_grid(config: DictConfig) -> None:
    """Raise ValueError for a job that would be refused, before the first one starts. Only Hydra's basic sweeper knows
    its jobs before: others choose them by what earlier jobs returned."""
    if config.hydra.sweeper._target_ != name_of(BasicSweeper):
        return
    from mhaprune.lab.runs.run import check
    from mhaprune.lab.runs.sweep_settings import first_part

    loader, models, folders = GlobalHydra.instance().config_loader(), list[list[str]](), dict[str, list[str]]()
    params = config.hydra.sweeper.params or {}
    [jobs] = BasicSweeper.split_arguments(_parsed(config, *(f"{key}={value}" for key, value in params.items())), None)
    if not jobs:
        raise ValueError("no job: a list of values is empty; glob chooses options of a group, range(0,5) are 0 to 4")
    for number, overrides in enumerate(track(jobs, "check")):
        model = [one for one in overrides if first_part(one) in ("model", "data", "objective", "shift", "plugins")]
        job = loader.load_sweep_config(config, overrides)
        check(values_of(job, overrides), model in models)
        models.append(model)
        with open_dict(job):
            job.hydra.job.num = job.hydra.job.id = number
        HydraConfig.instance().set_config(job)
        if job.hydra.sweep.dir != config.hydra.sweep.dir:
            raise ValueError(f"hydra.sweep.dir={job.hydra.sweep.dir}: all jobs need one, vary hydra.sweep.subdir")
        folder = job.hydra.sweep.subdir
        if folders.setdefault(folder, overrides) != overrides:
            raise ValueError(f"hydra.sweep.subdir={folder}: is the folder of several jobs, each must have its own")
