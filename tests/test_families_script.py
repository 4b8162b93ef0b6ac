"""The trial of many families of models, on few of them; its checks must notice what is wrong."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")

import families
import families_report
import mhaprune
import read_folders
import tiny_models
from families_report import Row
from mhaprune.api.wrap import Heads
from support import ROOT
from support.commands import run_here, run_script

pytestmark = pytest.mark.filterwarnings("ignore")


def again(place: Path, alone: bool = False) -> float:
    """The difference of a saved model that is read in this process."""
    before = torch.load(f"{place}.pt")
    model = read_folders.read_alone(place) if alone else read_folders.read(place, before["name"], before["kind"])
    return read_folders.difference(read_folders.outputs(model, before["batch"]), before["outputs"])


def test_half_of_the_heads_are_removed_and_equal_to_hooks_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    found = [*families.tried(["llama", "mpnet", "nn.TransformerEncoder"], tmp_path)]
    assert [(row.kind, row.outcome) for row in found] == [
        ("eager", "removable"),
        ("sdpa", "removable"),
        ("eager", "removable"),
        ("sdpa", "not offered"),
        ("", "removable"),
    ]
    for row in found:
        if row.outcome == "removable":
            assert row.found == row.expected == 8
            assert row.difference < 1e-5 < 0.01 < row.effect
            row.loaded = again(tmp_path / f"{row.model}-{row.kind}")
            row.alone = again(tmp_path / f"{row.model}-{row.kind}", alone=True) if row.kind else row.alone
        assert not row.is_wrong
    assert found[-1].loaded == 0


@pytest.mark.parametrize("wrong", ["removal", "columns", "no hook", "loading"])
def test_what_is_not_equal_is_called_wrong(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prune, columns, read = Heads.prune, families.columns, mhaprune.load
    if wrong == "removal":
        monkeypatch.setattr(Heads, "prune", lambda self, keep, by: prune(self, keep, -by))
    if wrong == "columns":
        monkeypatch.setattr(families, "columns", lambda heads, K: (columns(heads, K) + K // 2) % 32)
    if wrong == "no hook":
        monkeypatch.setattr(families, "columns", lambda heads, K: columns(heads, K)[:0])
    if wrong == "loading":

        def other(*given: Any, **named: Any) -> Any:
            model = read(*given, **named)
            model.classify.bias.data += 0.01
            return model

        monkeypatch.setattr(mhaprune, "load", other)
    row = families.row_of("three maps", "", tmp_path)
    row.loaded = again(tmp_path / "three maps-")
    assert row.outcome == "removable"
    assert row.is_wrong


def test_an_error_is_refused_only_if_it_is_a_line_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = families.row_of("mamba", "eager", tmp_path)
    assert (row.outcome, row.is_wrong) == ("refused", False)
    assert row.reason.startswith("MambaForCausalLM: no attention found")
    wrap = mhaprune.wrap

    def raising(*given: Any, **named: Any) -> Any:
        raise ValueError("one line, but not of mhaprune")

    monkeypatch.setattr(mhaprune, "wrap", raising)
    row = families.row_of("three maps", "", tmp_path)
    assert (row.outcome, row.is_wrong) == ("raw", True)
    monkeypatch.setattr(mhaprune, "wrap", wrap)
    monkeypatch.setattr(Heads, "prune", lambda self, keep, by: self.mask(keep=99))
    row = families.row_of("three maps", "", tmp_path)
    assert row.outcome == "raw", "what was called removable must be removed"


@pytest.mark.parametrize(
    ("error", "ours"), [("ValueError('x')", True), ("ValueError('x\\ny')", False), ("KeyError('x')", False)]
)
def test_only_one_line_errors_of_the_package_are_its_own(error: str, ours: bool) -> None:
    code = compile(f"raise {error}", str(Path(mhaprune.__file__).parent / "made_up.py"), "exec")
    with pytest.raises((ValueError, KeyError)) as raised:
        exec(code)
    assert families.is_ours(raised.value) is ours


def test_folders_are_read_alone_where_mhaprune_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mhaprune", mhaprune)
    assert run_here(read_folders.main, str(tmp_path), "--alone").returncode == 0
    with pytest.raises(ImportError):
        importlib.import_module("mhaprune")


def test_heads_that_are_missing_without_a_word_are_wrong() -> None:
    led = rows()[2]
    assert not led.is_wrong
    led.reason = ""
    assert led.is_wrong


def test_a_model_whose_package_is_missing_is_skipped_with_its_name(tmp_path: Path) -> None:
    tiny = tiny_models.Tiny(8, lambda: torch.nn.Linear(1, 1), lambda: None, needs=("no_such_package",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.MODELS, "three maps", tiny)
        row = families.row_of("three maps", "", tmp_path)
    assert (row.outcome, row.reason) == ("skipped", "needs the package no_such_package")
    done = run_here(families.main, "lama")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: NAME=lama: no such model, did you mean llama? ")
    done = run_here(families.main, "llama", "--page", "page.md")
    assert done[::2] == (1, "error: --page=page.md: has all models, leave out llama\n")


def rows() -> list[Row]:
    cut: dict[str, Any] = {"found": 8, "outcome": "removable", "difference": 2e-7, "effect": 0.5}
    return [
        Row("llama", "eager", 8, **cut, loaded=1e-7, alone=0.0),
        Row("llama", "sdpa", 8, **cut, loaded=0.0, alone=0.0),
        Row("led", "eager", 24, **cut | {"found": 16, "reason": "not seen: x"}, loaded=0.0, alone=0.0),
        Row("led", "sdpa", 24, outcome="not offered"),
        Row("sam", "eager", 8, outcome="refused", reason="Sam: no attention found: no call. Name it"),
        Row("sam", "sdpa", 8, **cut, loaded=0.0, alone=0.0),
        Row("mamba", "eager", 0, outcome="refused", reason="Mamba: no attention found: no call. Name it"),
        Row("mamba", "sdpa", 0, outcome="not offered"),
        Row("three maps", "", 8, **cut, loaded=0.0),
        Row("einops", "", 8, outcome="skipped", reason="needs the package einops"),
    ]


def test_the_page_and_the_summary_count_what_was_found() -> None:
    said = list(families_report.summary(rows()))
    assert said[:2] == [
        "2 of 4 families of transformers can be cut, 1 partly, 1 refused.",
        "1 of 1 other models can be cut.",
    ]
    assert said[4:] == [
        "5 of 5 saved models are equal in a new process, by mhaprune.load.",
        "4 of 4 saved models are equal in a new process, without mhaprune.",
        "Only a part of the heads is found in led.",
        "Skipped: einops needs the package einops.",
    ]
    frame = "before\n<!-- tables by research/families.py -->\nold\n<!-- end -->\nafter"
    lines = families_report.page(frame, rows()).splitlines()
    assert "old" not in lines
    assert {"before", "after", "<!-- end -->"} <= {*lines}
    assert lines[7:11] == [
        "| cut |  | 2 | 1 | [all rows](tables/all-families.csv) |",
        "| cut with one kind of attention only | no attention that mhaprune can find | 1 | 0 | sam |",
        "| refused | no attention that mhaprune can find | 1 | 0 | mamba |",
        "| skipped | needs the package einops | 0 | 1 | einops |",
    ]
    wrong = Row("llama", "eager", 8, outcome="raw", reason="KeyError: 'x'")
    assert any(line.startswith("WRONG: Row(model='llama'") for line in families_report.summary([wrong]))
    with pytest.raises(ValueError, match="has no lines <!-- tables by research/families.py -->"):
        families_report.page("nothing", rows())


def test_the_page_is_that_of_its_rows() -> None:
    place = ROOT / "docs/findings/families.md"
    found = families_report.read(place.parent / families_report.ALL)
    assert families_report.page(place.read_text(), found) == place.read_text()
    assert not [row for row in found if row.is_wrong]


def test_a_page_is_written_from_the_rows_of_a_file(tmp_path: Path) -> None:
    file, place = tmp_path / "found.csv", tmp_path / "page.md"
    pd.DataFrame(rows()).to_csv(file, index=False)
    place.write_text("<!-- tables by research/families.py -->\n<!-- end -->\n")
    assert families_report.main([str(file), "--page", str(place)]) == 0
    assert families_report.page(place.read_text(), rows()) == place.read_text()
    found = families_report.read(tmp_path / families_report.ALL)
    assert [(row.model, row.kind, row.reason, row.loaded) for row in found[:2]] == [
        ("llama", "eager", "", 1e-7),
        ("llama", "sdpa", "", 0.0),
    ]


@pytest.mark.slow
def test_all_families_are_built_and_three_are_tried_in_processes_of_their_own(tmp_path: Path) -> None:
    assert len(tiny_models.families()) == 125
    for name, tiny in tiny_models.families().items():
        assert torch.isfinite(read_folders.outputs(tiny.make("eager"), tiny.batch())).all(), name
    done = run_script("families.py", "llama", "siglip_vision", "three maps", "--csv", str(tmp_path / "found.csv"))
    assert done.returncode == 0, done.stderr
    assert "5 of 5 saved models are equal in a new process, by mhaprune.load." in done.stdout
    assert "2 of 2 saved models are equal in a new process, without mhaprune." in done.stdout
    table = pd.read_csv(tmp_path / "found.csv")
    assert set(table["outcome"]) == {"removable"}
    assert (table["difference"] < 1e-5).all()
