"""Options of a package of the user's own: a class needs no YAML, and a YAML need not repeat its fields."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mhaprune.front.command_line import described
from mhaprune.settings import plugins
from test_additions import SCORE

STUDY = '''
from dataclasses import dataclass
from mhaprune.experiments.ablate.study import Ablate

@dataclass(frozen=True)
class More(Ablate):
    """More of it."""
    extra: int = 3
    """How much more."""
'''
VARIANT = "# @package scorer.peak_square\ndefaults: [peak@_here_, _self_]\npower: 2.0\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package in the working folder, of another name for each test: Hydra keeps what it has seen."""
    name = f"heads_of_{request.node.name.partition('[')[0]}"
    files = {"peak.py": SCORE, "more.py": STUDY, "conf/experiment/more.yaml": f"_target_: {name}.more.More\n"}
    for path, text in (files | {"conf/scorer/peak_square.yaml": VARIANT}).items():
        (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr(plugins, "_allowed", {"mhaprune"})
    return f"plugins=[{name}]"


def test_a_class_needs_no_yaml(package: str) -> None:
    run = described(package, "scorer=[peak,ablation]", "scorer.peak.power=3.0")
    assert (type(run.scorer["peak"]).__name__, run.scorer["peak"].power) == ("Peak", 3.0)  # type: ignore[attr-defined]


def test_a_yaml_may_leave_out_fields_which_can_be_set_all_the_same(package: str) -> None:
    run = described(package, "experiment=more", "experiment.budgets=[2]", "experiment.extra=5")
    assert (run.experiment.budgets, run.experiment.extra) == ((2,), 5)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^experiment.budget=3: no such key, did you mean budgets\?.*extra$"):
        described(package, "experiment=more", "experiment.budget=3")


def test_a_yaml_may_start_from_a_class_without_one(package: str) -> None:
    run = described(package, "scorer=[peak,peak_square]")
    assert [each.power for each in run.scorer.values()] == [1.0, 2.0]  # type: ignore[attr-defined]


def test_a_yaml_without_its_place_is_refused(package: str) -> None:
    name = package[len("plugins=[") : -1]
    (Path.cwd() / name / "conf" / "scorer" / "peak_square.yaml").write_text(f"_target_: {name}.peak.Peak\n")
    with pytest.raises(ValueError, match=r"scorer._target_=.*: stands one level too high, its YAML must begin with"):
        described(package, "scorer=[peak_square]")


def test_a_module_that_cannot_be_imported_is_named_in_one_line(package: str) -> None:
    name = package[len("plugins=[") : -1]
    (Path.cwd() / name / "broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(
        ValueError, match=rf"^plugins={name}: {name}.broken cannot be imported \(ModuleNotFoundError: No"
    ):
        described(package)
