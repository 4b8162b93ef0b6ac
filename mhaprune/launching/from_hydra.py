"""Where a sweep meets Hydra, which knows the settings of its jobs and has launchers that start them."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from mhaprune.config import check
from mhaprune.interrupts import keeping_handlers
from mhaprune.launching.isolation import end_with_parent
from mhaprune.launching.searching import Range, Searching, check_optuna
from mhaprune.launching.sweeping import Launcher, do_sweep
from mhaprune.running import Run
from mhaprune.settings.plugins import conf_folder, results_folder
from mhaprune.storage.store import LOCK, refuse_links
from mhaprune.storage.sweeps import Job, Orders, Sweep


def launch(
    config: DictConfig,
    loader: ConfigLoader,
    task: Callable[..., None],
    orders: Orders,
    build: Callable[[DictConfig, Sequence[str]], Run],
    values: Callable[[DictConfig, Sequence[str]], dict[str, Any]],
) -> None:
    """Do the sweep that the config of a multirun asks for: `task` with the settings of each job and its `start`.

    `values` returns the settings of a job as `build` reads them.
    """
    if config.hydra.launcher.get("n_jobs") == 0:
        raise ValueError("hydra.launcher.n_jobs=0: must be 1 or more, or -1 for a job on each core")
    root = _root(config, orders)
    with open_dict(config):
        config.hydra.sweep.dir = str(root)
    parser = OverridesParser.create(config_loader=loader)
    written = files_of_hydra(config)
    seen: list[list[str]] = []
    place = f"hydra.sweep.dir={root}" if orders.sweep is None else f"sweep={orders.sweep}"

    def arguments(job: Job) -> list[str]:
        return [*job.overrides, f"hydra.sweep.dir={_quoted(str(root))}", f"hydra.sweep.subdir={_quoted(job.name)}"]

    @functools.cache
    def with_options(*options: str) -> DictConfig:
        whole = loader.load_sweep_config(config, list(options))
        return OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])

    @functools.cache
    def is_group(key: str) -> bool:
        return bool(loader.get_group_options(key))

    def composed(overrides: Sequence[str]) -> DictConfig:
        """As Hydra does it, but the files are read once for each choice of options, which takes longest."""
        given = parser.parse_overrides(list(overrides))
        options = [one for one in given if is_group(one.key_or_group) and not isinstance(one.value(), dict)]
        own = copy.deepcopy(with_options(*(str(one.input_line) for one in options)))
        ConfigLoaderImpl._apply_overrides_to_config([one for one in given if one not in options], own)
        return own

    def start(jobs: Sequence[Job], starts: int) -> None:
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        if "ray" in config.hydra.launcher:
            _start_ray(config.hydra.launcher.ray.init)
        if "n_jobs" in config.hydra.launcher:
            _end_workers_of_joblib_with_this_process()
        does = Plugins.instance().instantiate_launcher(context, functools.partial(task, start=starts), config)
        does.launch([arguments(job) for job in jobs], 0)

    def fits(overrides: Sequence[str]) -> Run | None:
        """Raise ValueError for settings that a job would refuse. A model that others made is read once."""
        model = [one for one in overrides if _is_of_model(one)]
        again = model in seen
        seen.append(model)
        return check(values(composed(overrides), overrides), again)

    def ready(job: Job) -> None:
        refuse_links("hydra.sweep.dir", root, [f"{job.name}/{name}" for name in written])
        fits(job.overrides)

    def identity(job: Job) -> str:
        return str(build(composed(job.overrides), job.overrides).identity["run"])

    launcher = Launcher(identity, ready, start)
    overrides, sources = _overrides(config, parser), _sources(config)
    check_counts(overrides, orders)
    if orders.search is None:
        for one in overrides:
            if one.is_interval_sweep():
                raise ValueError(f"{one.input_line}: needs search=optuna, which chooses values in a range")
        [settings] = BasicSweeper.split_arguments(overrides, None)
        do_sweep(root, place, settings, sources, orders, launcher)
        return
    check_optuna()
    search, before = Searching(orders.search, *to_choose(overrides), root), Sweep.read(root)
    for one_of_each in search.each_value():
        run = fits(one_of_each)
        if run is not None:
            search.check_table(run.experiment.tables)
    settings = search.more([]) if before is None else search.again(before)
    try:
        do_sweep(root, place, settings, sources, orders, launcher, list(search.space), search.more)
    finally:
        if (sweep := Sweep.read(root)) is not None:
            print(search.best(sweep.jobs))


def files_of_hydra(config: DictConfig) -> list[str]:
    """The files that Hydra itself writes into the folder of a run, by their names below it, and the lock."""
    folder, yamls = config.hydra.output_subdir, ("config.yaml", "hydra.yaml", "overrides.yaml")
    return [LOCK, f"{config.hydra.job.name}.log", *(str(Path(folder, name)) for name in yamls if folder is not None)]


def _start_ray(settings: DictConfig) -> None:
    """Before its launcher would: it handles SIGTERM for itself then, and would end the sweep before the jobs saved."""
    from hydra_plugins.hydra_ray_launcher._launcher_util import start_ray

    with keeping_handlers():
        start_ray(settings)


def _end_workers_of_joblib_with_this_process() -> None:
    """Without this, a worker that starts just when this process is killed waits for the rest of its first job for
    ever."""
    from joblib import register_parallel_backend
    from joblib.parallel import BACKENDS

    ended = functools.partial(BACKENDS["loky"], initializer=end_with_parent, initargs=(os.getpid(),))
    register_parallel_backend("loky", ended)


def _root(config: DictConfig, orders: Orders) -> Path:
    typed = [text for text in config.hydra.overrides.hydra if text.startswith("hydra.sweep.dir=")]
    if orders.sweep is None:
        return Path(config.hydra.sweep.dir)
    if typed:
        raise ValueError(f"sweep={orders.sweep}: names the folder of the sweep, leave {typed[0]} out")
    return results_folder() / "sweeps" / orders.sweep


def _is_of_model(override: str) -> bool:
    return re.split(r"[.=@]", override.lstrip("+~"))[0] in ("model", "data", "objective", "plugins")


def check_counts(overrides: Sequence[Override], orders: Orders) -> None:
    """Raise ValueError for a sweep over no values, or over more than `max_jobs`. No range is expanded for it."""
    counts = {str(one.input_line): _count(one) for one in overrides if one.is_sweep_override()}
    for text, count in counts.items():
        if not count:
            raise ValueError(f"{text}: holds no value; glob chooses options of a group, range(0,5) are 0 to 4")
    jobs = (math.prod if orders.search is None else max)([1, *counts.values()])
    if not jobs <= orders.max_jobs:
        raise ValueError(f"{' '.join(counts)}: are {jobs} jobs, must be at most max_jobs={orders.max_jobs}")


def _count(one: Override) -> float:
    values = one.value()
    if isinstance(values, RangeSweep):
        start, stop, step = values.start or 0, values.stop or 0, values.step
        return max(0, -((start - stop) // step)) if step else 0
    return 1 if isinstance(values, IntervalSweep) else sum(1 for _ in one.sweep_string_iterator())


def _overrides(config: DictConfig, parser: OverridesParser) -> list[Override]:
    """What was typed."""
    typed = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(typed, list)
    params = [f"{name}={value}" for name, value in (config.hydra.sweeper.get("params") or {}).items()]
    return parser.parse_overrides([*params, *typed])


def to_choose(overrides: Sequence[Override]) -> tuple[list[str], dict[str, list[str] | Range]]:
    """The settings that are typed for every job, and what the others may be."""
    space: dict[str, list[str] | Range] = {}
    for one in overrides:
        if one.is_sweep_override():
            values = one.value()
            if isinstance(values, IntervalSweep):
                low, high, log = values.start, values.end, "log" in values.tags
                if low is None or high is None or low >= high or (log and low <= 0):
                    raise ValueError(
                        f"{one.input_line}: must go from a number to a higher one, and be above 0 with tag(log,...)"
                    )
                space[one.get_key_element()] = Range(low, high, log)
            else:
                space[one.get_key_element()] = list(one.sweep_string_iterator())
    return [str(one.input_line) for one in overrides if not one.is_sweep_override()], space


def _sources(config: DictConfig) -> list[str]:
    """What decides settings beside those that were typed: the YAMLs, and the version of torch."""
    sources = config.hydra.runtime.config_sources
    folders = [conf_folder(), *(Path(source.path) for source in sources if source.schema == "file")]
    files = sorted({path.resolve() for folder in folders for path in folder.rglob("*.yaml")})
    return [str(torch.__version__), *(path.read_text() for path in files)]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
