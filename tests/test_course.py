"""The course runs, and what it says in words is what its numbers say."""

import io
import json
import re
import time
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import course
import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

import mhaprune.progress
from support import ROOT
from support.figures import drawing
from support.sizes import options, slow

LAYER, IMPORTANCE, PRUNING, YOUR_OWN = NOTEBOOKS = ("1_the_layer", "2_importance", "3_pruning", "your_own_model")
FIGURES = {LAYER: 8, IMPORTANCE: 5, PRUNING: 3, YOUR_OWN: 2}
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
                given = {"PROGRESS": True} | settings  # hidden progress would stay hidden in other tests
                names |= {name: value for name, value in given.items() if name in names}
        plt.close("all")
    return names


def softmax_of_random_scores(sizes: Sequence[int]) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Return the mean and the median entropy of the weights and the mean norm of their derivative, for each size of a
    head; the norm is that of Jacobians from autograd."""
    draw, found = torch.Generator().manual_seed(0), {}
    for size in sizes:
        queries = torch.randn(400, size, generator=draw, dtype=torch.float64)
        keys = torch.randn(400, 10, size, generator=draw, dtype=torch.float64)
        for name, divisor in (("not divided", 1.0), ("divided by √d", size**0.5)):
            scores = (keys @ queries[..., None])[..., 0] / divisor
            weights = scores.softmax(dim=1)
            entropy = -weights.xlogy(weights).sum(dim=1)
            jacobians = torch.vmap(torch.func.jacrev(lambda each: each.softmax(dim=0)))(scores)
            middle = entropy.sort().values[199:201].mean()
            norm = jacobians.square().sum(dim=(1, 2)).sqrt().mean()
            found[name, size] = (float(entropy.mean()), float(middle), float(norm))
    return found


def test_every_cell_of_the_layer_runs() -> None:
    printed = dict[str, str]()
    names = run(LAYER, SMALL, printed, without={"help", "trained-heads"})  # which trains
    assert issubclass(names["Attention"], torch.nn.Module)
    assert printed["causal"].endswith("[3, 4, 5]\n")
    assert "nan" in printed["lengths-check"].splitlines()[1]
    assert "[0.0, 0.0, 0.0]" in printed["lengths-check"].splitlines()[2]
    spread = names["scaling"]["spread of the scores"]
    assert (spread["divided by √d"] < 2).all()
    assert spread["not divided"][512] > 10
    for (scores, size), row in softmax_of_random_scores((2, 32, 512)).items():
        assert names["scaling"].loc[(scores, size)].iloc[1:].tolist() == pytest.approx(row), (scores, size)
    assert names["slower"]["ratio"]["additive"] > 1
    assert names["most"]["q1"] > names["control"]["q3"], "heads are not free"


@pytest.mark.slow
def test_many_heads_help_where_two_places_are_read(tmp_path: Path) -> None:
    other = {cell["id"] for cell in cells(LAYER)} - {"settings", "imports", "help", "trained-heads"}
    helped = run(LAYER, {"CACHE": str(tmp_path)}, without=other)["helped"]
    assert helped["4 heads"].min() > 0.9
    assert helped["1 head"].max() < 0.5


EXERCISES = [
    (notebook, cell["id"].removeprefix("write-"))
    for notebook in NOTEBOOKS
    for cell in cells(notebook)
    if cell["id"].startswith("write-")
]


def test_each_notebook_of_the_course_has_exercises_to_write() -> None:
    assert all([notebook for notebook, _ in EXERCISES].count(each) >= 2 for each in (LAYER, IMPORTANCE, PRUNING))


@pytest.mark.parametrize(("notebook", "exercise"), EXERCISES)
def test_the_check_of_an_exercise_tells_right_from_wrong(
    notebook: str, exercise: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {cell["id"]: "".join(cell["source"]) for kind in ("code", "markdown") for cell in cells(notebook, kind)}
    names = run(notebook, {}, without=source.keys() - {"settings", "imports"})
    for cell in ("write", "check"):
        exec(source[f"{cell}-{exercise}"], names)
    assert "still empty" in capsys.readouterr().out, "as it is kept"

    [answer] = re.findall(r"```python\n(.*?)```", source[f"answer-{exercise}"], re.DOTALL)
    exec(answer, names)
    asked = []
    exec(source[f"check-{exercise}"], names | {"check": lambda *given: asked.append(given)})
    [(function, inputs, right, mistakes)] = asked
    assert course.check(function, inputs, right, mistakes), "the folded answer"
    assert capsys.readouterr().out.endswith(": right\n")
    for sentence, wrong in mistakes.items():
        assert not course.check(lambda *_, wrong=wrong: wrong, inputs, right, mistakes)
        assert sentence in capsys.readouterr().out
    for number in (0, torch.full_like(torch.as_tensor(right).double(), 7.5)):
        assert not course.check(lambda *_, number=number: number, inputs, right, mistakes)
        assert "not yet" in capsys.readouterr().out


def test_a_check_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    right = torch.tensor([1.0, 2.0])
    for answer, said in {
        (lambda: right): "right",
        (lambda: right[:, None]): "The shape is (2, 1) and should be (2,).",
        (lambda: right > 1): "The numbers are torch.bool and should be torch.float32.",
        (lambda: right + torch.tensor([0, 1])): "1 of 2 numbers are wrong.",
        (lambda: 1 / 0): "raises ZeroDivisionError: division by zero",
    }.items():
        assert course.check(answer, (), right) is (said == "right")
        assert said in capsys.readouterr().out


def test_progress_is_hidden_until_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mhaprune.progress, "EVERY", 0.01)

    def lines() -> str:
        with mhaprune.progress.shown(stream=(stream := io.StringIO())), mhaprune.progress.doing("work"):
            time.sleep(0.1)
        return stream.getvalue()

    with course.QUIET:
        course.hide_progress()
        assert lines() == ""
    assert "work" in lines()


@pytest.mark.parametrize("notebook", [IMPORTANCE, PRUNING])
def test_the_cells_before_the_first_training_run(notebook: str) -> None:
    """All that they import is there, and the settings are those that the tests make small."""
    ids = [cell["id"] for cell in cells(notebook)]
    names = run(notebook, SMALL, without=ids[ids.index("model") :])
    assert callable(names["measure"])
    assert names["STEPS"] == SMALL["STEPS"]


OF_THE_REPORT = ("report", "map")
"""The cells of the report, which takes longest; tests/wrapping/test_wrap.py has a small one."""


@pytest.mark.slow
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
    ours = [cell["source"] for cell in code if "plugins=" not in "".join(cell["source"])]
    scorers = re.findall(r"scorer=\[([\w,]+)\]", json.dumps(ours))
    assert set(",".join(scorers).split(",")) <= {"", *options("scorer")}, "of a package that it does not install"
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
    start, printed = time.process_time(), dict[str, str]()
    names = run(IMPORTANCE, {"CACHE": str(tmp_path)}, printed)
    assert time.process_time() - start < 180, "two minutes on a quiet machine"
    for cell in cells(IMPORTANCE):
        kept = ["".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"]
        (kept_words, kept_numbers), (words, numbers) = map(in_parts, ("".join(kept), printed[cell["id"]]))
        assert kept_words == words, cell["id"]
        # Another processor rounds otherwise, so the models that are trained there differ a little.
        assert numbers == pytest.approx(kept_numbers, rel=0.05, abs=0.02), cell["id"]
    careful, quick, slowly, naively = names["trained"].to_dict("records")
    assert names["trained"]["exact match"].min() > 0.98
    assert careful["ρ with ablation"] > max(each["ρ with ablation"] for each in (slowly, naively)) + 0.1
    assert quick["ρ with start"] < 0.5 < 0.8 < min(each["ρ with start"] for each in (slowly, naively))
    order = names["worst"].drop_duplicates(["site", "layer", "head"])[["site", "layer", "head"]].to_numpy().tolist()
    assert order == names["closed"].head(3)[["site", "layer", "head"]].to_numpy().tolist()
    assert names["left"]["whole split"] < names["left"]["taylor_batch"] < 0.5, "most cancels"
    best = names["closed"].iloc[0]
    assert best["name"] == "reverse position", "found by its profile"
    assert best["quality"] < 0.05, "and confirmed by ablation"
    plain, failing = (names["regret"](names[frame]).iloc[:, 0] for frame in ("plain", "failing"))
    assert plain["ablation"] < 0.2 * plain["random"]
    assert plain["whole split"] > max(plain["taylor"], plain["taylor_batch"]), "it loses at the low end"
    assert failing["ablation"] > failing["random"], "a score of single heads fails"
    assert failing["greedy"] < 2 < failing["shapley"] < failing["random"], "and scoring again does not"
    twins = names["ranks"].iloc[[names["first"], names["second"]]]
    assert (twins["ablation"] >= 9).all()
    assert (twins[["taylor", "shapley"]].diff().iloc[1].abs() == 1).all(), "side by side"
    assert twins["greedy"].tolist() == [2, 12]
    where = names["failing"]
    assert ((where["shapley"] < 0.5) & (where["best subset"] > 0.9)).any()


@pytest.mark.slow
def test_what_pruning_says_is_so(tmp_path: Path) -> None:
    names = run(PRUNING, {"CACHE": str(tmp_path)}, printed := dict[str, str]())
    assert names["many"] >= 6
    assert names["equal"] < 1e-9 < names["bite"]
    assert names["speed"].loc["removed", "q1"] > names["speed"].loc["masked", "q3"]
    exact = names["table"]
    few = exact.index.min()
    assert exact["nothing"][few] < 0.5 < exact["refit"][few]
    assert exact["fine_tune"][few] > 0.9
    assert (exact["from_scratch"].dropna() > exact["fine_tune"][exact["from_scratch"].notna()] - 0.01).all()
    assert names["right"] > 0.9
    if not names["missing"]:
        _, (*_, as_they_are) = in_parts(printed["real-half"].splitlines()[0])
        _, (*_, refitted) = in_parts(printed["real-half"].splitlines()[1])
        assert 0.8 < as_they_are < refitted < 1
    ids = [cell["id"] for cell in cells(PRUNING)]
    short = run(PRUNING, {"CACHE": str(tmp_path), "STEPS": 600}, without=ids[ids.index("model") + 1 :])
    assert short["many"] < names["many"], "training longer frees heads"


@pytest.mark.slow
def test_a_refit_frees_heads_of_your_own_model() -> None:
    summary = run(YOUR_OWN, {}, without={"map", "torch", "masks-run"})["found"].tables["summary"]
    can_go = summary.groupby("recovery")["heads_removed"].max()
    assert 0 < can_go["nothing"] < can_go["refit"]
    assert summary.query("recovery == 'refit'")["speedup_q1"].max() > 1


def in_parts(text: str) -> tuple[str, list[float]]:
    """The text without its numbers, and the numbers."""
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    return re.sub(rf"\s*{number}", " #", text), [float(each) for each in re.findall(number, text)]
