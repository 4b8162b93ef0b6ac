"""The tutorial runs, and what it says in words is what its numbers say."""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from conftest import ROOT
from mhaprune.tasks.reverse import Reverse

TUTORIAL = ROOT / "notebooks" / "importance_of_a_head.ipynb"
CELLS = json.loads(TUTORIAL.read_text())["cells"]
SMALL = {"STEPS": 20, "EXAMPLES": 40, "ROUNDS": 2}


def run(
    settings: dict[str, Any], printed: dict[str, str] | None = None, cells: list[dict[str, Any]] = CELLS
) -> dict[str, Any]:
    """All names that the cells leave behind, with other settings than in the cell that is for them; what they print
    goes into `printed`."""
    names: dict[str, Any] = {}
    printed = {} if printed is None else printed
    with matplotlib.rc_context({"backend": "Agg"}):
        for cell in cells:
            if cell["cell_type"] == "code":
                with redirect_stdout(io.StringIO()) as words:
                    exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
                printed[cell["id"]] = words.getvalue()
                if "parameters" in cell["metadata"].get("tags", []):
                    assert settings.keys() <= names.keys()
                    names |= settings
        plt.close("all")
    return names


def test_the_cells_before_the_first_training_run() -> None:
    """Those with the imports, and the layer beside that of the package and of torch."""
    first = next(i for i, cell in enumerate(CELLS) if "run = Run(" in "".join(cell["source"]))
    names = run(SMALL, cells=CELLS[:first])
    assert issubclass(names["Attention"], torch.nn.Module)


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reverse, "splits", functools.cache(Reverse.splits))  # seven models, one set of examples
    names = run(SMALL | {"CACHE": str(tmp_path)})
    assert len(names["oracle"].outcomes) == 4096
    assert (names["curves"]["best subset"] >= 0).all()
    assert set(names["times"]) == {"all heads", "all heads again", "masked", "removed"}


def test_it_was_run_before_it_was_kept() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [kind for cell in code for output in cell["outputs"] for kind in output.get("data", {})]
    assert shown.count("image/png") == 4
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])


def test_numbers_come_from_the_run_and_not_from_the_text() -> None:
    for cell in CELLS:
        if cell["cell_type"] == "markdown":
            assert not re.search(r"\d[.,]\d|\d ?%", "".join(cell["source"])), cell["id"]


def test_the_layer_has_forty_lines_at_most() -> None:
    source = next("".join(cell["source"]) for cell in CELLS if "class Attention" in "".join(cell["source"]))
    layer = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    assert (layer.end_lineno or 0) - layer.lineno < 40


@pytest.mark.slow
def test_what_it_says_is_so(tmp_path: Path) -> None:
    """And what was kept with it is what it says today."""
    start, printed = time.monotonic(), dict[str, str]()
    names = run({"CACHE": str(tmp_path)}, printed)
    assert time.monotonic() - start < 180
    for cell in CELLS:
        if cell["cell_type"] == "code":
            kept = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
            # Differences that are rounding alone are other ones on another machine.
            assert without_tiny("".join(kept)) == without_tiny(printed[cell["id"]]), cell["id"]
    ranks = names["ranks"].set_index("trained")
    assert (ranks["exact match"] > 0.98).all()
    assert (ranks.loc["naively", "ρ with start"] > 0.8).all(), "gates follow their start"
    assert ranks.loc["with care", "ρ with ablation"].min() > ranks.loc["naively", "ρ with ablation"].max()
    best = names["closed"].iloc[0]
    assert best["name"] == "reverse position", "found by its profile"
    assert best["quality"] < 0.05, "and confirmed by ablation"
    assert names["points"]["ablation"] < 0.2 * names["points"]["random"]
    assert names["speed"].loc["removed", "q1"] > names["speed"].loc["masked", "q3"]
    assert names["many"] >= 3


def without_tiny(text: str) -> str:
    return re.sub(r"\d\.\de-\d+", "tiny", text)
