"""What a shell offers while a command is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mhaprune.front.command_line import main
from mhaprune.front.completion import typed
from support.commands import run_here


def offered(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COMP_LINE", f"python scripts/run.py {line}")
    done = run_here(main, "-sc", "query=bash")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("experiment=an", ["experiment=anatomy"]),
        ("training.", ["training.batch_size=", "training.steps="]),
        ("scorer.ablation.", ["scorer.ablation.replace="]),
        ("seed=1 gate=", ["gate=none", "gate=softmax"]),
        ("scorer=[", ["scorer=[gate", "scorer=[ablation"]),
        ("scorer=[gate,abl", ["scorer=[gate,ablation", "scorer=[gate,ablation_mean"]),
    ],
)
def test_options_and_settings_are_offered(line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = offered(line, monkeypatch)
    assert set(expected) <= set(found)
    assert all(each.startswith(line.rpartition(" ")[2]) for each in found)
    assert not [each for each in found if "_target_" in each]


def test_what_a_list_has_already_is_not_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = offered("scorer=[gate,", monkeypatch)
    assert "scorer=[gate,gate_output" in found
    assert "scorer=[gate,gate" not in found


@pytest.mark.parametrize("line", ["plugins=[nowhere] gate=", "experiment=nowhere training.", "seed=[1 gate.", "'"])
def test_a_line_that_is_wrong_so_far_brings_no_error_into_the_shell(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(line, monkeypatch) == []


def test_plug_ins_that_were_named_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_heads" / "conf" / "scorer").mkdir(parents=True)
    (tmp_path / "my_heads" / "conf" / "scorer" / "steady.yaml").write_text("# @package scorer.steady\nx: 1\n")
    monkeypatch.setattr("mhaprune.settings.plugins._allowed", {"mhaprune"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert offered("plugins=[my_heads] scorer=[st", monkeypatch) == ["scorer=[steady"]


def test_a_setting_that_is_called_query_is_refused_as_every_key_that_there_is_not() -> None:
    done = run_here(main, "query=3")
    assert done.returncode == 1
    assert "query" in done.stderr


def test_without_a_list_the_line_is_asked_as_it_is() -> None:
    assert typed("python run.py gate=no").line() == "python run.py gate=no"
    assert typed("run.py scorer=[a,b").line() == "run.py scorer="
