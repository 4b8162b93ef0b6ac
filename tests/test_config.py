import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.runs.run import build, is_pretrained
from mhaprune.lab.runs.run_folder import RunFolder, read_status
from mhaprune.lab.tasks.sort import Sort
from mhaprune.scorers.ablation import Ablation
from mhaprune.settings.options import ConfigError, describe
from support import ROOT
from support.composing import compose
from support.sizes import SEVERAL, TINY, chosen, options, small

GROUPS = sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "launch")


def of_others(name: str) -> bool:
    """Whether it is a pretrained model, which is trained already; they are in tests/sources."""
    return is_pretrained({"model": yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())})


SINGLE = [(group, name) for group in GROUPS if group not in (*SEVERAL, "experiment") for name in options(group)]
ALONE = [(group, name) for group, name in SINGLE if group != "model" or not of_others(name)]
"""Options that are run one by one, each in a training; experiments are in test_every_experiment.py."""
TOGETHER = [(group, *options(group)) for group in ("schedule", "recovery")]
"""Options that one run prunes with; all scorers are in a run of test_every_experiment.py."""


def tiny(group: str, *names: str) -> list[str]:
    """The overrides that run options small."""
    around = ["experiment=train"]
    if group in SEVERAL:
        around = ["experiment=prune", *small("experiment", "prune"), "scorer=[ablation]"]
        around += ["schedule=[greedy]", "recovery=[]"]
    around += small("task", "sort") if group != "task" else []
    return [*around, *TINY, *chosen(group, *names)]


@pytest.mark.parametrize(("group", "names"), [(group, names) for group, *names in (*ALONE, *TOGETHER)])
def test_every_yaml_is_composed_checked_and_run(group: str, names: list[str], cache: Path, tmp_path: Path) -> None:
    run = build(compose(*tiny(group, *names), f"cache={cache}"))
    assert group not in SEVERAL or list(getattr(run, group)) == names
    with RunFolder(tmp_path / "run").recorded() as folder:
        lines = run(folder).sentences
    assert lines
    status = read_status(tmp_path / "run")
    assert status["status"] == "done"
    assert status["findings"] == lines
    for name in status["files"]:
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_the_experiment_that_compares_scores_has_all_of_them() -> None:
    assert set(build(compose("experiment=compare")).scorer) == set(options("scorer"))


def test_a_config_becomes_plain_objects() -> None:
    run = build(compose("scorer=[gate,ablation]", "scorer.ablation.replace=mean", "experiment.budgets=[3,0.5]"))
    assert run.task == Sort()
    assert run.experiment == Ablate(budgets=(3, 0.5))
    assert list(run.scorer) == ["gate", "ablation"]
    assert run.scorer["ablation"] == Ablation(replace="mean")
    assert build(describe(run)["task"] and {k: v for k, v in describe(run).items() if k != "_target_"}) == run


MISSING = object()
"""In the place of a setting that is left out."""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The default config."""
    return {key: value for key, value in describe(build(compose())).items() if key != "_target_"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task._target_": "os.system"}, "task._target_=os.system: must name a frozen dataclass of mhaprune that is a"),
        ({"task._target_": "mhaprune.nowhere.Sort"}, "task._target_=mhaprune.nowhere.Sort: must name"),
        ({"task._target_": "mhaprune.attention.gates.Softmax"}, "task._target_=.*gates.Softmax: .* that is a Task"),
        ({"task": "sort"}, "task='sort': must be settings with a _target_ that names a Task"),
        ({"task.min_length": "2"}, "task.min_length='2': must be a whole number"),
        ({"training.learning_rate": "fast"}, "training.learning_rate='fast': must be a finite number"),
        ({"device": "cpu:0"}, "device=cpu:0: not to be had on this machine, allowed is cpu"),
        ({"model.num_heads": 3}, "model.num_heads=3: must divide d_model=64, so one of 1, 2, 4"),
        ({"gate": 3}, "gate=3: must be settings with a _target_ that names a GateConfig or null"),
        ({"gate.scale": "two"}, "gate.scale='two': must be heads or one"),
        ({"experiment.budgets": [0.5, "x"]}, r"experiment.budgets\[1\]='x': must be a whole number or a finite number"),
        ({"experiment.budgets": 0.5}, r"experiment.budgets=0.5: must be a list in brackets, each a whole number or"),
        ({"experiment.budgets": []}, r"experiment.budgets=\[\]: must name at least one"),
        ({"experiment.budgets": [1.5]}, r"experiment.budgets=1.5: a fraction must be from 0.0 to 1.0"),
        ({"scorer.ablation.replace": "one"}, "scorer.ablation.replace='one': must be zero or mean or resample"),
        ({"scorer": {}}, r"scorer=\[\]: must name at least one scorer"),
        ({"gate": None}, "scorer=gate: needs learned gates, one number per head for all inputs: gate=softmax"),
        ({"speed": 3}, "speed=3: no such setting, allowed are task, model, training"),
        ({"task": MISSING}, "task: is missing, must be settings with a _target_ that names a Task"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings: dict[str, Any], message: str, plain: dict[str, Any]) -> None:
    config = copy.deepcopy(plain)
    for key, value in settings.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
        if value is MISSING:
            del node[last]
    with pytest.raises(ConfigError, match=f"^{message}") as error:
        build(config)
    assert "\n" not in str(error.value)


def test_examples_of_other_kinds_are_part_of_a_run_only_if_they_are_named() -> None:
    """So that runs keep the fingerprints that they had before there were any."""
    plain, none, one = (
        build(compose(*given)).identity["run"] for given in ([], ["shift=[]"], ["shift=[repeated symbols]"])
    )
    assert len({plain, none, one}) == 3
    assert plain == build(compose("shift=null")).identity["run"]
