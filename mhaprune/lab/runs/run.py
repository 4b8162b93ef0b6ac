"""One run: all its settings as plain values, checked. Calling it with a folder runs the experiment."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch

from mhaprune.attention.gates import GateConfig
from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Experiment, Setup
from mhaprune.lab.model.checkpoint import SavedModel, load
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.training import Training
from mhaprune.lab.runs.clock import timed
from mhaprune.lab.runs.results import Results, present
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.lab.runs.sweep_settings import SWEEP_SETTINGS, SweepSettings
from mhaprune.lab.sources.pretrained import Pretrained, PretrainedSource
from mhaprune.lab.sources.source import ModelSource
from mhaprune.lab.sources.trained import TrainedSource, parts_of
from mhaprune.lab.tasks.base import Task
from mhaprune.progress import doing, track
from mhaprune.recoveries.base import Recovery
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import naming
from mhaprune.settings import options
from mhaprune.settings.options import describe, modules_of, option_name, short_target, target
from mhaprune.settings.plugins import allow, find_class, results_folder
from mhaprune.settings.ranges import Checked, Within
from mhaprune.storage.cache import code_of
from mhaprune.storage.store import as_json, fingerprint

log = logging.getLogger(__name__)

MODEL, SHOW = "model", "figures and page"
"""The first and the last step of a run, in the progress line."""


@dataclass(frozen=True)
class Run(Checked):
    """All settings of a run. The constructor checks them; nothing is trained before the call."""

    task: Task | None
    """The task that the model learns. None for a pretrained model."""
    model: Transformer | Pretrained
    """The sizes of a model to train, or a pretrained model."""
    training: Training | None
    """The settings of the training. A pretrained model has none."""
    experiment: Experiment
    """The experiment that studies the model."""
    schedule: dict[str, Schedule] = field(default_factory=dict)
    """The methods that choose heads to remove, by name."""
    scorer: dict[str, Scorer] = field(default_factory=dict)
    """The methods that score heads, by name."""
    recovery: dict[str, Recovery] = field(default_factory=dict)
    """The methods that recover a model after a removal, by name."""
    gate: GateConfig | None = None
    """The learned gates of the heads. None means a model without gates."""
    seed: Annotated[int, Within(0, 2**32 - 1)] = 0
    """The seed of the weights at the start of training and of all later random draws. The task has its own seed."""
    device: str = "cpu"
    """The device of the tensors: `cpu`, `cuda` or, for example, `cuda:1`."""
    num_threads: Annotated[int, Within(1, 1024)] = 1
    """Number of processor threads for tensor operations."""
    cache: str = field(default_factory=lambda: str(results_folder() / "cache"))
    """The folder of the cache: models and scores that were computed before."""
    model_file: str | None = None
    """The file of a trained model to load. The file contains the settings `task`, `model`, `gate` and `training`, which
    replace those of the run."""
    plugins: tuple[str, ...] = ()
    """Names of plug-in packages. Settings may name classes of these packages, as well as classes of mhaprune."""
    data: str | None = None
    """The file of texts that a pretrained model reads: `.txt` with a text in each line, `.csv` or `.jsonl`."""
    objective: str | None = None
    """The loss and quality of a pretrained model, see the option `objective`. None means the loss and quality that are
    usual for this kind of model."""
    example: str | int | None = None
    """A source sequence of the user's own, for the experiment to look at. A number is read as a text of digits."""
    shift: tuple[str, ...] | None = None
    """Examples of other kinds, to measure pruned models on too. Names of kinds that the task has; None means all of
    them. For a pretrained model, files as in `data`; the name of a file is the name of its kind."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cache.strip():
            raise ValueError(f"cache={self.cache!r}: must name a folder")
        check_device(self.device)
        self.experiment.refuse_unread(option_name(self.experiment), self.source, self.shift or (), self.recovery)
        self.source.check()
        grid = self.source.grid
        if not len(grid) and self.scorer:
            raise ValueError(
                f"model_file={self.model_file}: has no heads left to score, allowed is scorer=[] as in"
                " experiment=evaluate"
            )
        scorers, recoveries = self.usable
        self.experiment.check(Setup(self.source, scorers, self.schedule, recoveries, self._symbols))
        # A pruned model has its gates folded into its weights.
        again = any(schedule.scoring == "repeated" for schedule in self.schedule.values())
        again |= any(recovery.between for recovery in recoveries.values())
        gated = self.gate is not None and not again
        for name, scorer in scorers.items():
            with naming(name):
                scorer.check(len(grid), gated)
        code_of(self.packages)  # now, before files may be edited

    @property
    def identity(self) -> dict[str, Any]:
        """The first columns of every table: a fingerprint of the whole run, and the settings that identify runs."""
        settings = describe(self, short_target)
        if self.shift is None:
            del settings["shift"]  # so that runs have the fingerprints that they had before there were shifts
        return {"run": fingerprint(settings | self.source.decisive), **self.source.identity}

    @property
    def packages(self) -> list[str]:
        """The packages whose code decides the results: mhaprune and the packages of plug-ins."""
        return sorted({module.split(".")[0] for module in modules_of(self)})

    def __call__(self, folder: RunFolder) -> Results:
        """Run the experiment and write its tables, figures and report into the folder."""
        folder.note(experiment=target(self.experiment), identity=self.identity, code=code_of(self.packages))
        environment = self.source.environment()
        folder.write("environment.json", as_json(environment))
        with self._timed():
            results = self._results()
            folder.note(checks=results.checks, trained_with=dict(results.trained_with))
            for name, frame in results.tables.items():
                folder.write_table(name, frame)
            for name, content in results.files.items():
                folder.write(name, content)
            with doing(SHOW):
                folder.write_figures(track(results.figures.values(), "figures", name=lambda plot: plot.name))
                trained_with = ", ".join(f"{name} {value}" for name, value in results.trained_with.items())
                facts = {
                    "command": environment["command"],
                    "started": folder.status.get("started"),
                    **({"git commit": commit} if (commit := environment["git_commit"]) else {}),
                    "folder": folder.path,
                    **self.source.facts,
                    **self.identity,
                    **environment["versions"],
                    **({"trained with": trained_with} if trained_with else {}),
                }
                folder.write("report.html", results.page(facts).encode())
            folder.note(findings=results.sentences, head_map=results.small_map and results.small_map._asdict())
        return results

    def results(self) -> Results:
        """Train or load the model, run the experiment, return its results. Only the cache is written."""
        with self._timed():
            return self._results()

    def _results(self) -> Results:
        with doing(MODEL):
            study = self.study()
        findings = self.experiment(study)
        with doing(SHOW):
            return present(self.experiment, study, findings, self._title, self.identity)

    def _timed(self) -> AbstractContextManager[None]:
        """Show the run in the progress line. The usual seconds of steps are those of models of the default size."""
        usual = self.experiment.seconds if isinstance(self.source, TrainedSource) else ()
        return timed(self._title, self.experiment.steps, usual, Path(self.cache))

    @property
    def _title(self) -> str:
        return f"{option_name(self.experiment)} on {self.source.name}"

    def study(self) -> Study:
        """Return a study: the trained model and everything else that an experiment may use."""
        scorers, recoveries = self.usable
        study = self.source.study(self.identity)
        return replace(study, scorers=scorers, schedules=self.schedule, recoveries=recoveries)

    @cached_property
    def usable(self) -> tuple[dict[str, Scorer], dict[str, Recovery]]:
        """The scorers and recoveries that this model supports."""
        return self.source.usable(self.scorer, self.recovery)

    @cached_property
    def source(self) -> ModelSource:
        """The object that provides the model and its examples: a training, a file or a pretrained model."""
        own: dict[str, Any]
        where: Any = {name: getattr(self, name) for name in ("seed", "device", "num_threads", "cache")}
        if isinstance(self.model, Pretrained):
            assert self._symbols is None, "an example is refused"
            own = {name: getattr(self, name) for name in ("model", "data", "objective")}
            return PretrainedSource(**own, shift=self.shift or (), **where)
        for name in ("data", "objective"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)}: model=transformer is trained on a task that makes its own examples,"
                    " choose one with task=; model=hf reads data"
                )
        own = {name: getattr(self, name) for name in ("task", "model", "training", "gate", "model_file", "shift")}
        return TrainedSource(**own, **where, example=self._symbols)

    @cached_property
    def _symbols(self) -> list[str] | None:
        """The symbols of the user's example."""
        example = self.example
        if example is None:
            return None
        if not self.experiment.reads_example:
            raise ValueError(
                f"example={example!r}: experiment={option_name(self.experiment)} looks at no example,"
                " experiment=explain does"
            )
        if self.task is None or not isinstance(self.model, Transformer):
            raise ValueError(
                f"example={example!r}: only a model that is trained here reads one; data=FILE brings texts"
            )
        source = self.task.read(str(example))
        if len(source) >= self.model.max_length:
            raise ValueError(
                f"example={example!r}: has {len(source)} symbols, model.max_length={self.model.max_length} allows"
                f" {self.model.max_length - 1} and the end of sequence"
            )
        return source


def check_device(device: str) -> None:
    """Raise ValueError for a device that this machine does not have."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    allowed = ["cpu", *(["cuda", *gpus] if gpus else [])]
    if device not in allowed:
        raise ValueError(f"device={device}: not to be had on this machine, allowed is {' or '.join(allowed)}")


def build(config: Mapping[str, Any]) -> Run:
    """Return the `Run` that a config of plain values describes.

    Raises `ConfigError` for an invalid config. The task, model, gate and training in a `model_file` replace those of
    the config. Checking a config constructs the classes that it names, so it may name only classes of this package and
    its plug-ins.
    """
    plugins = config.get("plugins", ())
    if isinstance(plugins, list | tuple) and all(isinstance(name, str) for name in plugins):
        allow(plugins)
    if isinstance(file := config.get("model_file"), str):
        config = _with_what_a_file_brings(config, load(file))
    if is_pretrained(config):
        config = {**config, **dict.fromkeys(ONLY_TRAINED_HERE)}
    sweep_settings(config)
    return options.construct(Run, {name: value for name, value in config.items() if name not in SWEEP_SETTINGS})


def check(config: Mapping[str, Any], again: bool) -> None:
    """Raise `ConfigError` for settings that `build` would refuse. With `again`, a pretrained model is not read, because
    that takes seconds."""
    if not again or not is_pretrained(config):
        build(config)
        return
    given = {name: value for name, value in config.items() if name not in (*SWEEP_SETTINGS, *ONLY_TRAINED_HERE)}
    for name, value in given.items():
        options.build(get_type_hints(Run)[name], value, name)


def sweep_settings(config: Mapping[str, Any]) -> SweepSettings:
    """Return those settings of a config that control a sweep and do not change the result of a run."""
    return options.construct(SweepSettings, {name: value for name, value in config.items() if name in SWEEP_SETTINGS})


ONLY_TRAINED_HERE = ("task", "training", "gate")
"""The settings of mhaprune's own model that a pretrained model does not have."""


def is_pretrained(config: Mapping[str, Any]) -> bool:
    """Return True if the `model` of this config is a pretrained model."""
    return _class_in(config.get("model"), Pretrained) is not None


def _class_in(settings: Any, base: type) -> Any:
    """Return the class that settings name; None if they name no class of the kind `base`."""
    target = settings.get("_target_") if isinstance(settings, Mapping) else None
    return find_class(base, target) if isinstance(target, str) else None


GROUPS: dict[str, type] = {
    "task": Task,
    "model": Pretrained,
    "gate": GateConfig,
    "training": Training,
    "scorer": Scorer,
    "schedule": Schedule,
    "recovery": Recovery,
    "experiment": Experiment,
}
"""The groups of options that plug-ins can extend, with the base class of their options."""
SEVERAL = ("scorer", "schedule", "recovery")
"""The groups from which a run may have several options."""


def _with_what_a_file_brings(config: Mapping[str, Any], saved: SavedModel) -> dict[str, Any]:
    """Return the config with the task, model, gate and training of a saved file. If the saved model has no gates,
    scorers that need gates are left out, unless no other scorer remains."""
    parts_of(saved)
    scorers = config.get("scorer", {})
    if saved.settings["gate"] is None and isinstance(scorers, Mapping):
        dropped = [name for name, each in scorers.items() if getattr(_class_in(each, Scorer), "needs_gates", False)]
        kept = {name: settings for name, settings in scorers.items() if name not in dropped}
        if dropped and kept:
            log.warning("model_file has no learned gates, so scorer=[%s] is left out", ",".join(dropped))
            scorers = kept
    return {**config, "scorer": scorers, **saved.settings}
