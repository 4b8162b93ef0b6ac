"""The course runs, and what it says in words is what its numbers say."""

import io
import json
import re
import time
from collections.abc import Collection
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from support import ROOT
from support.figures import drawing
from support.sizes import slow

LAYER, IMPORTANCE, PRUNING, YOUR_OWN = NOTEBOOKS = ("1_the_layer", "2_importance", "3_pruning", "your_own_model")
FIGURES = {LAYER: 7, IMPORTANCE: 5, PRUNING: 2, YOUR_OWN: 2}
SMALL = {"SEED": 0, "ROUNDS": 2, "STEPS": 20, "EXAMPLES": 40}


@cache
def cells(notebook: str, kind: str = "code") -> list[dict[str, Any]]:
    every = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    return [cell for cell in every if cell["cell_type"] == kind]


def run(
    notebook: str, settings: dict[str, Any], printed: dict[str, str] | None = None, without: Collection[str] = ()
) -> dict[str, Any]:
    """All names that the cells leave behind, with other settings than in the cell that is for them; what they print
    goes into `printed`. Cells with the ids `without` are left out."""
    names: dict[str, Any] = {}
    printed = {} if printed is None else printed
    with matplotlib.rc_context({"backend": "Agg"}), drawing():
        for cell in (cell for cell in cells(notebook) if cell["id"] not in without):
            with redirect_stdout(io.StringIO()) as words:
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            printed[cell["id"]] = words.getvalue()
            if "parameters" in cell["metadata"].get("tags", []):
                names |= {name: value for name, value in settings.items() if name in names}
        plt.close("all")
    return names


def test_every_cell_of_the_layer_runs() -> None:
    printed = dict[str, str]()
    names = run(LAYER, SMALL, printed)
    assert issubclass(names["Attention"], torch.nn.Module)
    assert printed["causal"].endswith("[3, 4, 5]\n")
    assert "nan" in printed["lengths-check"].splitlines()[1]
    assert "[0.0, 0.0, 0.0]" in printed["lengths-check"].splitlines()[2]
    spread = names["scaling"]["spread of the scores"]
    assert (spread["divided by √d"] < 2).all()
    assert spread["not divided"][512] > 10
    assert names["slower"]["ratio"]["additive"] > 1


@pytest.mark.parametrize("notebook", [IMPORTANCE, PRUNING])
def test_the_cells_before_the_first_training_run(notebook: str) -> None:
    """All that they import is there, and the settings are those that the tests make small."""
    ids = [cell["id"] for cell in cells(notebook)]
    names = run(notebook, SMALL, without=ids[ids.index("model") :])
    assert callable(names["measure"])
    assert names["STEPS"] == SMALL["STEPS"]


OF_THE_REPORT = ("report", "map")
"""The cells of the report, which takes longest; tests/wrapping/test_wrap.py has a small one."""


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize("without", [OF_THE_REPORT, *slow(((),))])
def test_every_cell_of_your_own_model_runs(without: tuple[str, ...]) -> None:
    assert {cell["id"] for cell in cells(YOUR_OWN)} >= set(OF_THE_REPORT)
    run(YOUR_OWN, {"STEPS": 3, "EXAMPLES": 32}, printed := dict[str, str](), without)
    said = "".join(printed.values())
    assert said.count("24 heads in 3 blocks, all with an effect, all removable") == 2  # ours, and that of torch
    assert "must be one number per example" in said
    left = re.search(r"\[(.*)\] heads of each layer came back", said)
    assert left is not None
    assert sum(map(int, left[1].split(","))) == 12


@pytest.mark.slow
def test_every_cell_of_importance_runs_on_a_small_model(tmp_path: Path) -> None:
    names = run(IMPORTANCE, SMALL | {"CACHE": str(tmp_path)})
    assert len(names["plain"]) == 13
    assert (names["plain"]["best subset"] >= 0).all()


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_it_was_run_before_it_was_kept(notebook: str) -> None:
    code = cells(notebook)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert [kind for output in outputs for kind in output.get("data", {})].count("image/png") == FIGURES[notebook]
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)


@pytest.mark.parametrize("notebook", [LAYER, IMPORTANCE, PRUNING])
def test_numbers_come_from_the_run_and_not_from_the_text(notebook: str) -> None:
    for cell in cells(notebook, "markdown"):
        words = re.sub(r"`[^`]*`", "", "".join(cell["source"]))
        assert not re.search(r"\d[.,]\d|\d ?%", words), cell["id"]


@pytest.mark.slow
def test_what_importance_says_is_so(tmp_path: Path) -> None:
    """And what was kept with it is what it says today."""
    start, printed = time.monotonic(), dict[str, str]()
    names = run(IMPORTANCE, {"CACHE": str(tmp_path)}, printed)
    assert time.monotonic() - start < 400
    for cell in cells(IMPORTANCE):
        kept = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
        (kept_words, kept_numbers), (words, numbers) = map(in_parts, ("".join(kept), printed[cell["id"]]))
        assert kept_words == words, cell["id"]
        # Another processor rounds otherwise, so the models that are trained there differ a little.
        assert numbers == pytest.approx(kept_numbers, rel=0.05, abs=0.02), cell["id"]
    gates = names["rows"]
    assert all(right > 0.98 for _, _, right, *_ in gates)
    naive = [row for row in gates if row[0] == "naively"]
    careful = [row for row in gates if row[0] == "with care"]
    assert all(start > 0.8 for *_, start, _ in naive), "gates follow their start"
    assert min(row[-1] for row in careful) > max(row[-1] for row in naive)
    best = names["closed"].iloc[0]
    assert best["name"] == "reverse position", "found by its profile"
    assert best["quality"] < 0.05, "and confirmed by ablation"
    plain, failing = (names["regret"](names[frame]).iloc[:, 0] for frame in ("plain", "failing"))
    assert plain["ablation"] < 0.2 * plain["random"]
    assert failing["ablation"] > failing["random"], "a score of single heads fails"
    assert failing["greedy"] < 2, "and scoring again does not"
    assert (names["ranks"]["ablation"].iloc[[names["first"], names["second"]]] >= 9).all()


@pytest.mark.slow
def test_what_pruning_says_is_so(tmp_path: Path) -> None:
    names = run(PRUNING, {"CACHE": str(tmp_path)})
    assert names["many"] >= 6
    assert names["equal"] < 1e-9 < names["bite"]
    assert names["speed"].loc["removed", "q1"] > names["speed"].loc["masked", "q3"]
    exact = names["table"]
    few = exact.index.min()
    assert exact["nothing"][few] < 0.5 < exact["refit"][few]
    assert exact["fine_tune"][few] > 0.9
    assert names["right"] > 0.9


def in_parts(text: str) -> tuple[str, list[float]]:
    """The text without its numbers, and the numbers."""
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    return re.sub(rf"\s*{number}", " #", text), [float(each) for each in re.findall(number, text)]
