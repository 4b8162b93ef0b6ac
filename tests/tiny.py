"""How small an option runs in the tests: settings by its group and name, for those that would be slow as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CONF = Path(__file__).resolve().parents[1] / "conf"
SEQUENCES = {"train": 200, "max_length": 6}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "task": {
        "copy": SEQUENCES,
        "mirror_difference": SEQUENCES,
        "reverse": SEQUENCES,
        "running_sum": SEQUENCES,
        "sort": SEQUENCES,
    },
    "scorer": {
        "hard_concrete": {"steps": 5},
        "integrated_gradients": {"steps": 3},
        "integrated_gradients_all": {"steps": 3},
        "random": {"draws": 2},
        "shapley": {"evaluations": 80},
        "subset": {"steps": 5},
        "taylor_batch": {"batch_size": 8},
    },
    "recovery": {
        "fine_tune": {"steps": 2},
        "fine_tune_between": {"steps": 2},
        "fine_tune_distil": {"steps": 2},
        "fine_tune_refit": {"steps": 2},
        "from_scratch": {"draws": 2},
    },
    "experiment": {
        "ablate": {"latency_rounds": 2, "latency_batch": 4},
        "anatomy": {"head_dims": [2, 4]},
        "prune": {"budgets": [0.5], "latency_rounds": 2, "latency_batch": 4},
        "speed": {
            "d_models": [16, 24],
            "batch_sizes": [1, 3],
            "source_lengths": [4],
            "target_lengths": [5],
            "budgets": [1, 3],
            "rounds": 3,
        },
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
    for entry in (yaml.safe_load(path.read_text()) or {}).get("defaults", []):
        if isinstance(entry, dict):
            yield from ((key.removeprefix("override /"), value) for key, value in entry.items())


SEVERAL = {group for group, picked in _choices(CONF / "config.yaml") if isinstance(picked, list)}
"""The groups of which several options are chosen at once."""


def slow(*cases: Any) -> list[Any]:
    """Cases of a test beyond those that the default run makes; a tuple is the values of one case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
