"""Small settings for the tests: of each option by its group and name, and of whole runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import ROOT

CONF = ROOT / "conf"
SEQUENCES = {"train": 200, "max_length": 6}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "task": {
        **dict.fromkeys(("copy", "mirror_difference", "reverse", "running_sum", "sort"), SEQUENCES),
        "pronounce": {"train": 2000},
    },
    "scorer": {
        "hard_concrete": {"steps": 5},
        "integrated_gradients": {"steps": 3},
        "integrated_gradients_all": {"steps": 3},
        "mattr": {"steps": 5},
        "random": {"draws": 2},
        "shapley": {"evaluations": 80},
        "subset": {"steps": 5},
        "taylor_batch": {"batch_size": 8},
    },
    "recovery": {f"fine_tune{kind}": {"steps": 2} for kind in ("", "_distil", "_refit", "_unlabelled")}
    | {"from_scratch": {"draws": 2}},
    "experiment": {
        "ablate": {"latency_rounds": 2, "latency_batch": 4},
        "prune": {"budgets": [0.5], "latency_rounds": 2, "latency_batch": 4},
        "truth": {"top": 1, "redraws": 20},
        "speed": {"d_models": [16, 24], "batch_sizes": [1, 3], "source_lengths": [4], "target_lengths": [5]}
        | {"budgets": [1, 3], "rounds": 3},
    },
}


def options(group: str) -> list[str]:
    """The names of all options of a group."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def small(group: str, *names: str) -> list[str]:
    """What makes options small, as overrides: `experiment.rounds=3`, or `scorer.subset.steps=5` in a group of which
    several options are chosen at once."""
    found = []
    for name in names:
        key = f"{group}.{name}" if group in SEVERAL else group
        found += [f"{key}.{field}={value}" for field, value in SETTINGS.get(group, {}).get(name, {}).items()]
    return found


def chosen(group: str, *names: str) -> list[str]:
    """Overrides that choose options and make them small, and with them what their YAMLs choose in other groups."""
    overrides = [f"{group}=[{','.join(names)}]" if group in SEVERAL else f"{group}={names[0]}"]
    overrides += small(group, *names)
    for name in names:
        for other, picked in _choices(CONF / group / f"{name}.yaml"):
            overrides += small(other, *([picked] if isinstance(picked, str) else picked))
    return overrides


def _choices(path: Path) -> Iterator[tuple[str, Any]]:
    """The groups that a YAML chooses options of, and what it chooses."""
    content = yaml.safe_load(path.read_text()) if path.exists() else None  # an option of a plug-in needs no YAML
    for entry in (content or {}).get("defaults", []):
        if isinstance(entry, dict):
            yield from ((key.removeprefix("override /"), value) for key, value in entry.items())


SEVERAL = {group for group, picked in _choices(CONF / "config.yaml") if isinstance(picked, list)}
"""The groups of which several options are chosen at once."""


def once(*overrides: str) -> list[str]:
    """These overrides, of which a later one takes the place of an earlier one of the same setting."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def slow(*cases: Any) -> list[Any]:
    """Cases of a test beyond those that the default run makes; a tuple is the values of one case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def _in(group: str, **settings: object) -> list[str]:
    return [f"{group}.{name}={value}" for name, value in settings.items()]


TINY = (
    *_in("model", d_model=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16),
    *_in("training", steps=6, batch_size=8, warmup_steps=1, evaluate_every=3, checkpoint_every=2),
    *_in("task", valid=16, score=16, choose=16, report=16),
)
LEARNT = (
    *TINY,
    *_in("task", train=400, max_length=4, num_symbols=6, score=60, choose=60, report=60),
    *_in("training", steps=150, batch_size=32, learning_rate=0.02, warmup_steps=10, weight_decay=0.1),
    *_in("training", optimiser="adamw", sorted_batches=1, evaluate_every=100, checkpoint_every=100),
)
"""A model of six heads that has learnt to sort short sequences, so that every budget costs it something else."""
PRUNE = (
    *("schedule=[one_shot,greedy]", "recovery=[refit,fine_tune,refit_between,from_scratch]"),
    *("experiment.budgets=[1,3]", "experiment.latency_rounds=2", "experiment.latency_batch=4"),
    *("recovery.fine_tune.steps=30", "recovery.from_scratch.draws=2"),
)
TINY_SEQUENCES = tuple(small("task", "sort"))
TINY_ABLATE = tuple(small("experiment", "ablate"))
RUNS = {
    "explain": (*LEARNT, "example=3 1 2", "experiment.shown=2"),
    "prune": (*LEARNT, *PRUNE),
    "speed": (*TINY, *TINY_SEQUENCES, "scorer=[ablation,random]"),
}
"""The settings of an experiment's run that its own tests read too; the others are run tiny."""
