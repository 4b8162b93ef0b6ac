"""The notebook about other people's models runs, and was run before it was kept."""

from __future__ import annotations

import json
from typing import Any

import matplotlib
import pytest

from support import ROOT

NOTEBOOK = ROOT / "notebooks" / "your_own_model.ipynb"
CODE = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
SMALL = {"STEPS": 3, "EXAMPLES": 32}


REPORT = ("report", "map")
"""The cells of the report, which takes longest; tests/wrapping/test_wrap.py has a small one."""


def run(cells: list[dict[str, Any]]) -> None:
    names: dict[str, object] = {}
    with matplotlib.rc_context({"backend": "Agg"}):
        for cell in cells:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            if "parameters" in cell["metadata"].get("tags", []):
                assert SMALL.keys() <= names.keys()
                names |= SMALL


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_every_cell_but_the_report_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run([cell for cell in CODE if cell["id"] not in REPORT])
    said = capsys.readouterr().out
    assert said.count("24 heads in 3 blocks, all with an effect, all removable") == 2  # ours, and that of torch
    assert "must be one number per example" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_every_cell_runs() -> None:
    assert {cell["id"] for cell in CODE} >= set(REPORT)
    run(CODE)


def test_it_was_run_before_it_was_kept() -> None:
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    shown = [kind for cell in CODE for output in cell["outputs"] for kind in output.get("data", {})]
    assert shown.count("image/png") == 2
    assert not any(output["output_type"] == "error" for cell in CODE for output in cell["outputs"])
