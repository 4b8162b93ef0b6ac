"""One run: the whole configuration as plain values; called with a folder it does what they say."""

from __future__ import annotations

import logging
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch

from mhaprune.cache import Cache, data_digest, source_digest, weights_digest
from mhaprune.experiments.base import Experiment, Study
from mhaprune.figures import draw
from mhaprune.heads import HeadGrid
from mhaprune.model.checkpoint import BROUGHT, SavedModel, load, to_bytes
from mhaprune.model.gates import Gate
from mhaprune.model.transformer import Seq2Seq, Transformer
from mhaprune.pruning.costs import MEASURED_BY
from mhaprune.pruning.oracle import CHOSEN_BY
from mhaprune.ranges import Checked, Within
from mhaprune.recoveries.base import Recovery
from mhaprune.report import answers, check_answers, render
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import Make, naming
from mhaprune.store import RunFolder, describe, fingerprint, option_name
from mhaprune.tasks.base import Splits, Task
from mhaprune.timing import device_name
from mhaprune.training import Training

log = logging.getLogger(__name__)

TRAINED_BY = (
    "heads",
    "model.gates",
    "model.attention",
    "model.layers",
    "data",
    "subject",
    "model.network",
    "measure",
    "training",
)
"""The modules whose code decides what a training ends in; of a task its examples do."""
for _name in (*TRAINED_BY, *CHOSEN_BY, *MEASURED_BY, "scorers.gate_training", "scorers.base", "recoveries.base"):
    source_digest(f"mhaprune.{_name}")  # now, before anybody edits them


@dataclass(frozen=True)
class Run(Checked):
    """Everything that decides a run. Construction checks it all; nothing is trained until the call."""

    task: Task
    """What the model learns."""
    model: Transformer
    """The sizes of the model."""
    training: Training
    """How the model is trained."""
    experiment: Experiment
    """What is done with the trained model."""
    schedule: dict[str, Schedule] = field(default_factory=dict)
    """The ways to choose which heads go, by name."""
    scorer: dict[str, Scorer] = field(default_factory=dict)
    """The ways to score heads, by name."""
    recovery: dict[str, Recovery] = field(default_factory=dict)
    """The ways to train a pruned model, by name."""
    gate: Gate | None = None
    """The learned gates of the heads. None trains a model without gates."""
    seed: Annotated[int, Within(0, 2**32 - 1)] = 0
    """Fixes the weights at the start of training and all later random draws. The task has its own seed."""
    device: str = "cpu"
    """Where tensors are: `cpu`, `cuda` or, for example, `cuda:1`."""
    num_threads: Annotated[int, Within(1, 1024)] = 1
    """Number of processor threads for tensor operations."""
    cache: str = "results/cache"
    """The folder of what was computed before."""
    model_file: str | None = None
    """A trained model to load. `task`, `model`, `gate` and `training` then describe that model."""
    example: str | int | None = None
    """A source of the user's own, for the experiment to look at. A number is read as a text of digits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        allowed = ["cpu", *(["cuda", *gpus] if gpus else [])]
        if self.device not in allowed:
            raise ValueError(f"device={self.device}: not to be had on this machine, allowed is {' or '.join(allowed)}")
        full = HeadGrid.full(self.model.blocks, self.model.num_heads)
        grid = full if self._saved is None else HeadGrid(full.blocks, self._saved.heads)
        if self.recovery and not self.experiment.recovers:
            raise ValueError(
                f"recovery=[{','.join(self.recovery)}]: experiment={option_name(self.experiment)} recovers nothing,"
                " experiment=prune does"
            )
        if self.example is not None:
            self._read(self.example)
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
            source_digest(type(scorer).__module__)
        for recovery in self.recovery.values():
            source_digest(type(recovery).__module__)
        self.experiment.check(grid, self.scorer, self.schedule)

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

    @cached_property
    def _saved(self) -> SavedModel | None:
        return None if self.model_file is None else load(self.model_file)

    @property
    def _trained_seed(self) -> int:
        """Of a model that was brought, not that of this run."""
        return self.seed if self._saved is None else int(self._saved.facts.get("seed", self.seed))

    @property
    def identity(self) -> dict[str, Any]:
        """What every row of every table carries: a fingerprint of the whole run, and what tells runs apart."""
        shape = ("d_model", "num_heads", "num_encoder_layers", "num_decoder_layers", "dim_feedforward")
        return {
            "run": fingerprint(describe(self) | {"cache": None, "model_file": self._saved and self._saved.digest}),
            "task": option_name(self.task),
            "gate": option_name(self.gate),
            "seed": self.seed,
            **{name: getattr(self.model, name) for name in shape},
        }

    def __call__(self, folder: RunFolder) -> list[str]:
        """Train or load, run the experiment, write tables, figures and report; gives the findings in sentences."""
        folder.note(identity=self.identity)
        environment = self._environment()
        folder.write_json("environment.json", environment)
        study = self.study()
        findings = self.experiment(study)
        folder.note(checks=findings.checks)
        tables = {name: self._identified(frame) for name, frame in findings.tables.items()}
        for name, frame in tables.items():
            folder.write_table(name, frame)
        for name, content in findings.files.items():
            folder.write(name, content)
        plots = list(draw(findings.tables))
        folder.write_figures(plots)
        lines = answers(findings.tables)
        title = f"{option_name(self.experiment)} on {option_name(self.task)}"
        facts = {
            "command": environment["command"],
            "folder": folder.path,
            "vocabulary": " ".join(self.task.vocabulary.symbols),
            **self.identity,
            **environment["versions"],
        }
        page = render(title, lines, plots, findings.tables, facts, check_answers(findings.checks))
        folder.write("report.html", page.encode())
        folder.note(findings=lines)
        return lines

    def study(self) -> Study:
        """The trained model, from the cache where it is there, and all that an experiment may do with it."""
        torch.set_num_threads(self.num_threads)
        if self.device != "cpu":
            torch.cuda.set_device(self.device if ":" in self.device else "cuda:0")
        splits = self._splits()
        for source, target in zip(splits.report.source[:2].tolist(), splits.report.target[:2].tolist(), strict=True):
            log.info("%s, for example: %s", option_name(self.task), self.task.show(source, target))
        model, history = self._trained(splits) if self._saved is None else self._loaded(self._saved)
        recipe = self._recipe(splits) | {"weights": weights_digest(model), "heads": list(map(str, model.grid))}

        def remember(kind: str, what: dict[str, Any], make: Make) -> dict[str, Any]:
            return Cache(self.cache).get(kind, recipe | what, make)

        steps_since = 0 if self._saved is None else self._saved.steps_since

        def save(one: Seq2Seq, steps: int = 0) -> bytes:
            settings = {name: describe(getattr(self, name)) for name in BROUGHT}
            if one.learned_gates() is None:
                settings["gate"] = None
            facts = self.identity | {"seed": self._trained_seed}
            return to_bytes(one, settings, history.to_dict("records"), facts, steps_since + steps)

        return Study(
            subject=model,
            task=self.task,
            splits=splits,
            history=history,
            scorers=self.scorer,
            schedules=self.schedule,
            recoveries=self.recovery,
            training=self.training,
            steps_since=steps_since,
            seed=self.seed,
            remember=remember,
            save=save,
            gate=self.gate,
            retrain=lambda gate: replace(self, gate=gate, seed=self._trained_seed)._trained(splits),
            example=None if self.example is None else self._read(self.example),
        )

    def _splits(self) -> Splits:
        splits = self.task.splits()
        longest = max(ids.shape[1] for _, examples in splits.items() for ids in (examples.source, examples.target))
        if longest > self.model.max_length:
            raise ValueError(
                f"model.max_length={self.model.max_length}: task {option_name(self.task)} has sequences of"
                f" {longest} tokens, so {longest} or more"
            )
        return Splits(**{name: examples.to(self.device) for name, examples in splits.items()})

    def _trained(self, splits: Splits) -> tuple[Seq2Seq, pd.DataFrame]:
        torch.manual_seed(self.seed)
        model = self.model(len(self.task.vocabulary), self.gate).to(self.device)

        def make(state: dict[str, Any] | None, save: Any) -> dict[str, Any]:
            history = self.training(model, splits.train, splits.valid, self.gate, self.seed, state, save)
            return {
                "model": model.state_dict(),
                "history": history.to_dict("records"),
                "environment": self._environment(),
            }

        content = Cache(self.cache).get("trained", self._recipe(splits), make)
        model.load_state_dict(content["model"])
        return model, pd.DataFrame(content["history"])

    def _loaded(self, saved: SavedModel) -> tuple[Seq2Seq, pd.DataFrame]:
        grid = HeadGrid(self.model.blocks, saved.heads)
        model = self.model(len(self.task.vocabulary), self.gate, grid).to(self.device)
        try:
            model.load_state_dict(saved.weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"model_file={self.model_file}: damaged, its weights do not fit ({reason})") from None
        if weights_digest(model) != saved.digest:
            raise ValueError(f"model_file={self.model_file}: damaged, its weights are not those that were saved")
        return model, pd.DataFrame(saved.history)

    def _recipe(self, splits: Splits) -> dict[str, Any]:
        """All that decides what training ends in: the settings, the code and the data."""
        return {
            **{name: describe(getattr(self, name)) for name in ("model", "gate", "training", "seed")},
            "vocabulary_size": len(self.task.vocabulary),
            "data": [data_digest(splits.train), data_digest(splits.valid)],
            "sources": [source_digest(f"mhaprune.{name}") for name in TRAINED_BY],
        }

    def _identified(self, frame: pd.DataFrame) -> pd.DataFrame:
        identity = pd.DataFrame([self.identity] * len(frame), index=frame.index)
        return pd.concat([identity, frame.drop(columns=list(identity), errors="ignore")], axis=1)

    def _environment(self) -> dict[str, Any]:
        packages = ("mhaprune", "torch", "hydra-core", "pandas", "numpy", "matplotlib")
        return {
            "command": shlex.join(["python", *sys.argv]),
            "git_commit": _git_commit(),
            "seed": self.seed,
            "num_threads": self.num_threads,
            "device": device_name(self.device),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        }


def _git_commit() -> str | None:
    """The commit of the working copy that this package is imported from, with `+` where it has changes; None outside
    git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], stderr=subprocess.DEVNULL, text=True)
        changes = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changes else "")
