"""The part of a sweep that needs Hydra: it composes the settings of jobs, and starts jobs by Hydra's launchers."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mhaprune.interrupts import handling
from mhaprune.lab.runs.jobs import Job
from mhaprune.lab.runs.launching import do_sweep
from mhaprune.lab.runs.processes import end_with_parent
from mhaprune.lab.runs.run import build, check
from mhaprune.lab.runs.run_folder import LOCK
from mhaprune.lab.runs.sweep_settings import SWEEP_SETTINGS, SweepSettings
from mhaprune.settings.plugins import conf_folder, results_folder
from mhaprune.storage.store import refuse_links

Values = Callable[[DictConfig, Sequence[str]], dict[str, Any]]
"""A function that takes a config and the overrides that made it, and returns the config as plain values."""


BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""The only sweeper of Hydra whose jobs are done here."""


class NoCallbacks:
    """Stands for the callbacks of Hydra, which see single runs only."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda **given: None


def composed_sweep(arguments: Sequence[str]) -> DictConfig:
    """Return the settings of a sweep. Those with several values keep their default; all stand in `hydra.overrides`."""
    overrides = OverridesParser.create().parse_overrides(list(arguments))
    single = [str(one.input_line) for one in overrides if not one.is_sweep_override()]
    config = hydra.compose("config", overrides=[*single, "hydra.mode=MULTIRUN"], return_hydra_config=True)
    with open_dict(config):
        config.hydra.overrides.task = [
            str(one.input_line) for one in overrides if one.key_or_group.split("/")[0].split(".")[0] != "hydra"
        ]
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return config


class HydraLauncher:
    """Composes the settings of jobs and starts the jobs, with the launcher that Hydra's settings name."""

    def __init__(
        self, config: DictConfig, loader: ConfigLoader, task: Callable[..., None], values: Values, root: Path
    ) -> None:
        self.config, self.loader, self.task, self.values, self.root = config, loader, task, values, root
        self.parser = OverridesParser.create(config_loader=loader)
        self.seen: list[list[str]] = []
        """The model settings of the jobs that were checked so far."""
        self.is_group = functools.cache(lambda key: bool(loader.get_group_options(key)))
        self.with_options = functools.cache(self._composed)

    def identity(self, job: Job) -> str:
        return str(build(self._values_of(job)).identity["run"])

    def check(self, job: Job) -> None:
        """Raise ValueError for a job that would be refused. A pretrained model is read only the first time."""
        refuse_links("hydra.sweep.dir", self.root, [f"{job.name}/{name}" for name in files_of_hydra(self.config)])
        groups = ("model", "data", "objective", "shift", "plugins")
        model = [one for one in job.overrides if re.split(r"[.=@]", one.lstrip("+~"))[0] in groups]
        again = model in self.seen
        self.seen.append(model)
        check(self._values_of(job), again)

    def start(self, jobs: Sequence[Job], starts: int) -> None:
        settings = self.config.hydra.launcher
        if "ray" in settings:
            from hydra_plugins.hydra_ray_launcher._launcher_util import start_ray

            with handling():  # else Ray would handle SIGTERM and end the sweep before the jobs have saved
                start_ray(settings.ray.init)
        if "n_jobs" in settings:
            _end_workers_of_joblib_with_this_process()
        task = functools.partial(self.task, start=starts)
        context = HydraContext(config_loader=self.loader, callbacks=cast(Any, NoCallbacks()))
        does = Plugins.instance().instantiate_launcher(context, task, self.config)
        place = f"hydra.sweep.dir={_quoted(str(self.root))}"
        does.launch([[*job.overrides, place, f"hydra.sweep.subdir={_quoted(job.name)}"] for job in jobs], 0)

    def _values_of(self, job: Job) -> dict[str, Any]:
        """Compose settings as Hydra does, but read the YAML files, which is slow, once per choice of options."""
        given = self.parser.parse_overrides(list(job.overrides))
        values = [one for one in given if one.type == OverrideType.CHANGE and not self.is_group(one.key_or_group)]
        own = copy.deepcopy(self.with_options(*(str(one.input_line) for one in given if one not in values)))
        try:
            for one in values:
                OmegaConf.update(own, one.key_or_group, one.value(), merge=True)
        except OmegaConfBaseException:
            self._composed(*job.overrides)  # whose error names the override
            raise
        return self.values(own, job.overrides)

    def _composed(self, *overrides: str) -> DictConfig:
        whole = self.loader.load_sweep_config(self.config, list(overrides))
        return OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])


def launch(
    config: DictConfig, loader: ConfigLoader, task: Callable[..., None], how: SweepSettings, values: Values
) -> None:
    """Do the sweep that this multirun config describes. `task` is called for each job, with the settings of the job and
    the number of the start."""
    if (sweeper := config.hydra.sweeper.get("_target_")) != BASIC:
        raise ValueError(f"hydra/sweeper: {sweeper} is not supported, must be basic, which does all jobs of a grid")
    if config.hydra.launcher.get("n_jobs") == 0:
        raise ValueError("hydra.launcher.n_jobs=0: must be 1 or more, or -1 for a job on each core")
    root = _root(config, how)
    with open_dict(config):
        config.hydra.sweep.dir = str(root)
    launcher = HydraLauncher(config, loader, task, values, root)
    overrides = _overrides(config, launcher.parser)
    check_counts(overrides, how.max_jobs)
    do_sweep(root, all_settings(overrides), _sources(config), how, launcher)


def files_of_hydra(config: DictConfig) -> list[str]:
    """Return the files that Hydra writes into the folder of a run, relative to the folder, and the lock file."""
    folder, yamls = config.hydra.output_subdir, ("config.yaml", "hydra.yaml", "overrides.yaml")
    return [LOCK, f"{config.hydra.job.name}.log", *(str(Path(folder, name)) for name in yamls if folder is not None)]


def _end_workers_of_joblib_with_this_process() -> None:
    """Make joblib's workers end with this process. Otherwise one that starts as this process is killed waits
    forever."""
    from joblib import register_parallel_backend
    from joblib.parallel import BACKENDS

    ended = functools.partial(BACKENDS["loky"], initializer=end_with_parent, initargs=(os.getpid(),))
    register_parallel_backend("loky", ended)


def _root(config: DictConfig, how: SweepSettings) -> Path:
    if how.sweep is None:
        return Path(config.hydra.sweep.dir)
    if typed := [text for text in config.hydra.overrides.hydra if text.startswith("hydra.sweep.dir=")]:
        raise ValueError(f"sweep={how.sweep}: names the folder of the sweep, leave {typed[0]} out")
    return results_folder() / "sweeps" / how.sweep


def check_counts(overrides: Sequence[Override], max_jobs: int) -> None:
    """Raise ValueError for a setting without a list of values, or for more than `max_jobs` jobs. Long ranges are not
    expanded."""
    counts = {}
    for one in overrides:
        text = str(one.input_line)
        if one.is_interval_sweep():
            raise ValueError(f"{text}: names no values, write them out, for example {one.get_key_element()}=1,2,4")
        if one.is_sweep_override():
            if (name := one.get_key_element().lstrip("+").split(".")[0]) in ("cache", *SWEEP_SETTINGS):
                raise ValueError(f"{text}: no job depends on {name}, must have one value")
            try:
                counts[text] = sum(1 for _ in itertools.islice(one.sweep_string_iterator(), max_jobs + 1))
            except ValueError:  # of Python's range
                raise ValueError(f"{text}: has a step of 0, must be range(START,STOP,STEP)") from None
            if not counts[text]:
                raise ValueError(f"{text}: holds no value; glob chooses options of a group, range(0,5) are 0 to 4")
    if math.prod(counts.values()) > max_jobs:
        raise ValueError(f"{' '.join(counts)}: are more jobs than max_jobs={max_jobs}")


def _overrides(config: DictConfig, parser: OverridesParser) -> list[Override]:
    """Return the overrides of `hydra.sweeper.params`, then the typed overrides."""
    typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(typed, list)
    params = [f"{name}={value}" for name, value in (config.hydra.sweeper.get("params") or {}).items()]
    return parser.parse_overrides([*params, *typed])


def all_settings(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the settings of every job. If a setting is given twice, the last one counts."""
    values: dict[str, list[str]] = {}
    for one in overrides:
        each = one.sweep_string_iterator() if one.is_sweep_override() else [one.get_value_element_as_str()]
        values[one.get_key_element()] = [f"{one.get_key_element()}={value}" for value in each]
    return list(map(list, itertools.product(*values.values())))


def _sources(config: DictConfig) -> list[str]:
    """Return what decides a job beside the overrides: the version of torch and the text of all YAML files."""
    sources = config.hydra.runtime.config_sources
    folders = [conf_folder(), *(Path(source.path) for source in sources if source.schema == "file")]
    files = sorted({path.resolve() for folder in folders for path in folder.rglob("*.yaml")})
    return [str(torch.__version__), *(path.read_text() for path in files)]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
