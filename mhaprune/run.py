"""One run: the whole configuration as plain values; called with a folder it does what they say."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd
import torch

from mhaprune.cache import source_digests
from mhaprune.experiments.base import Experiment, Setup, figures_of
from mhaprune.model.gates import Gate
from mhaprune.model.network import Transformer
from mhaprune.recoveries.base import Recovery
from mhaprune.reporting.page import proof_sentences, render
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import naming
from mhaprune.store import RunFolder, describe, fingerprint, option_name, target
from mhaprune.tasks.base import Task
from mhaprune.trained import Recipe, Study
from mhaprune.training import Training


@dataclass(frozen=True)
class Run:
    """Nothing is computed until the call. `gate` None trains a model without gates; `cache` is a folder; `model_file`
    brings a trained model, of which `task`, `model`, `gate` and `training` then say what it is; `example` is a source
    of one's own, for the experiment to look at (a number is a text of digits)."""

    task: Task
    model: Transformer
    training: Training
    experiment: Experiment
    schedule: dict[str, Schedule] = field(default_factory=dict)
    scorer: dict[str, Scorer] = field(default_factory=dict)
    recovery: dict[str, Recovery] = field(default_factory=dict)
    gate: Gate | None = None
    seed: int = 0
    device: str = "cpu"
    num_threads: int = 1
    cache: str = "results/cache"
    model_file: str | None = None
    example: str | int | None = None

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise ValueError(f"num_threads={self.num_threads}: must be 1 or more")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be 0 or more")
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        allowed = ["cpu", *(["cuda", *gpus] if gpus else [])]
        if self.device not in allowed:
            raise ValueError(f"device={self.device}: not to be had on this machine, allowed is {' or '.join(allowed)}")
        grid = self._recipe.grid
        if self.recovery and not self.experiment.recovers:
            raise ValueError(
                f"recovery=[{','.join(self.recovery)}]: experiment={option_name(self.experiment)} recovers nothing,"
                " experiment=prune does"
            )
        example = None if self.example is None else self._read(self.example)
        if not len(grid) and self.scorer:
            raise ValueError(
                f"model_file={self.model_file}: has no heads left to score, allowed is scorer=[] as in"
                " experiment=evaluate"
            )
        # What is left of a model has its gates folded into its weights.
        again = any(schedule.asks() == "again" for schedule in self.schedule.values())
        again |= any(recovery.between for recovery in self.recovery.values())
        gated = self.gate is not None and not again
        for name, scorer in self.scorer.items():
            with naming(name):
                scorer.check(len(grid), gated)
        self.experiment.check(Setup(grid, self.task, self.gate, self.scorer, self.schedule, example))
        self._recipe.read_sources()
        for plug_in in (*self.scorer.values(), *self.recovery.values()):
            source_digests(type(plug_in).__module__)

    @property
    def identity(self) -> dict[str, Any]:
        """What every row of every table carries: a fingerprint of the whole run, and what tells runs apart."""
        shape = ("d_model", "num_heads", "num_encoder_layers", "num_decoder_layers", "dim_feedforward")
        saved = self._recipe.saved
        decisive = {"cache": None, "model_file": saved and saved.digest, "torch": torch.__version__}
        return {
            "run": fingerprint(describe(self) | decisive),
            "task": option_name(self.task),
            "gate": option_name(self.gate),
            "seed": self.seed,
            **{name: getattr(self.model, name) for name in shape},
        }

    def __call__(self, folder: RunFolder) -> list[str]:
        """Train or load, run the experiment, write tables, figures and report; returns the findings in sentences."""
        folder.note(experiment=target(self.experiment), identity=self.identity)
        environment = self._recipe.environment()
        folder.write_json("environment.json", environment)
        findings = self.experiment(self.study())
        folder.note(checks=findings.checks)
        for name, frame in findings.tables.items():
            folder.write_table(name, self._identified(frame))
        for name, content in findings.files.items():
            folder.write(name, content)
        figures = list(figures_of(type(self.experiment), findings.tables))
        folder.write_figures(figures)
        lines = list(self.experiment.say(findings.tables))
        title = f"{option_name(self.experiment)} on {option_name(self.task)}"
        facts = {
            "command": environment["command"],
            "folder": folder.path,
            "vocabulary": " ".join(self.task.vocabulary.symbols),
            **self.identity,
            **environment["versions"],
        }
        page = render(title, lines, figures, findings.tables, facts, proof_sentences(findings.checks))
        folder.write("report.html", page.encode())
        folder.note(findings=lines)
        return lines

    def study(self) -> Study:
        """The trained model and all that an experiment may do with it."""
        example = None if self.example is None else self._read(self.example)
        return self._recipe.study(self.scorer, self.schedule, self.recovery, self.identity, example)

    @cached_property
    def _recipe(self) -> Recipe:
        return Recipe(
            task=self.task,
            model=self.model,
            training=self.training,
            gate=self.gate,
            seed=self.seed,
            device=self.device,
            num_threads=self.num_threads,
            cache=self.cache,
            model_file=self.model_file,
        )

    def _read(self, example: str | int) -> list[str]:
        if not self.experiment.reads_example:
            raise ValueError(
                f"example={example!r}: experiment={option_name(self.experiment)} looks at no example,"
                " experiment=explain does"
            )
        source = self.task.read(str(example))
        if len(source) >= self.model.max_length:
            raise ValueError(
                f"example={example!r}: has {len(source)} symbols, model.max_length={self.model.max_length} allows"
                f" {self.model.max_length - 1} and the end of sequence"
            )
        return source

    def _identified(self, frame: pd.DataFrame) -> pd.DataFrame:
        identity = pd.DataFrame([self.identity] * len(frame), index=frame.index)
        return pd.concat([identity, frame.drop(columns=list(identity), errors="ignore")], axis=1)
