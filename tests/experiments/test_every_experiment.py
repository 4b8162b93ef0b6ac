"""What must hold for every experiment of conf/experiment, a new one too."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mhaprune.lab.experiments.base import Experiment, figures_of, functions_of
from mhaprune.lab.experiments.train import Train
from mhaprune.lab.reporting.head_map import heads_that_matter, in_small
from mhaprune.lab.reporting.headline import against_settings
from mhaprune.lab.reporting.plots import draw, lay_out
from mhaprune.lab.reporting.sentences import Aside, if_poor
from mhaprune.lab.reporting.settings import setting
from mhaprune.lab.reporting.words import words
from mhaprune.lab.runs.results import Results
from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder, read_status
from mhaprune.lab.runs.run_reader import read_run
from mhaprune.settings.options import ConfigError
from mhaprune.tables import Tables
from support.composing import compose, run_of, tables_in
from support.made_tables import said_over_runs
from support.sizes import options


class Done(NamedTuple):
    """A run of an experiment."""

    folder: Path
    kind: type[Experiment]
    tables: Tables


@pytest.fixture(scope="module", params=options("experiment"))
def done(request: pytest.FixtureRequest, ran: Callable[[str], Path], shared: Path) -> Done:
    folder = ran(request.param)
    return Done(folder, type(run_of(request.param, shared / "cache").experiment), tables_in(folder))


def test_it_ends_in_sentences_that_the_tables_alone_give(done: Done) -> None:
    """And in the tables that words.yaml lists for it; every row says of which run it is, and every column has a
    meaning."""
    said = list(done.kind.say(done.tables))
    assert said
    lines = [*if_poor(done.tables), *said]
    assert all(line.strip() == line and line and "\n" not in line and "nan" not in line.split() for line in lines)
    brief = [line for line in lines if not isinstance(line, Aside)]
    assert brief[0] == lines[0]
    assert len(brief) <= 8, "a terminal shows the answer, not the whole report"
    assert not [line for line in brief if "counted from 0" in line or "means:" in line]
    status = read_status(done.folder)
    assert (status["status"], status["findings"]) == ("done", lines)
    for name in status["files"]:
        assert (done.folder / name).stat().st_size > 0
    assert status["checks"].get("max_difference_masked_removed", 0.0) < 1e-9
    assert status["checks"].get("smallest_gate_effect", 1.0) > 0
    experiment = {"evaluate": "train"}.get(done.folder.name, done.folder.name)  # one class under two names
    listed = {name for name, about in words().tables.items() if experiment in about["experiments"]}
    assert set(done.tables) == listed - {"held_out"}, "which is for examples of one kind"
    for name, frame in done.tables.items():
        assert set(frame["run"]) <= {status["identity"]["run"]}, name
        assert [column for column in frame if not words().column(column)] == [], name


def test_its_progress_line_counts_its_steps(done: Done) -> None:
    assert read_status(done.folder)["steps"] == list(done.kind.steps)
    assert len(done.kind.seconds) == len(done.kind.steps), "by which the first run tells the time left"


def test_every_figure_has_something_to_draw_and_a_name_of_its_own(done: Done) -> None:
    verdict = done.kind.head_map(done.tables)
    plots = [] if verdict is None else [heads_that_matter(verdict)]
    for figure in done.kind.figures:
        drawn = list(draw((figure,), done.tables))
        assert drawn, f"{figure.__name__} finds nothing to draw"
        assert not list(draw((figure,), {}))
        plots += drawn
    assert not all(plot.appendix for plot in plots)
    for plot in plots:
        assert re.fullmatch(r"[\w.-]+", plot.name)
        assert plot.caption
        assert plot.tables, f"{plot.name} names no table"
        assert set(plot.tables) <= set(done.tables)
        lay_out(plot.figure)
    assert len({plot.name for plot in plots}) == len(plots)


@pytest.mark.slow
@pytest.mark.figures
def test_the_report_has_every_figure_in_both_forms(done: Done, shared: Path, tmp_path: Path) -> None:
    """That of ablate is read in test_run.py too."""
    with RunFolder(tmp_path / "run").recorded() as folder:
        run_of(done.folder.name, shared / "cache")(folder)
    names = [plot.name for plot in figures_of(done.kind, tables_in(folder.path))]
    files = {path.name for path in (folder.path / "figures").glob("*")}
    assert files == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    page = (folder.path / "report.html").read_text()
    assert page.count("<img ") == page.count(' alt="') == len(names)


@pytest.mark.slow
@pytest.mark.figures
def test_every_figure_is_drawn_in_the_place_of_axes(done: Done) -> None:
    plots = {plot.name: plot for plot in figures_of(done.kind, done.tables)}
    results = Results("", {}, plots, [], {}, {}, done.tables, functions=functions_of(done.kind))
    whole = Figure(layout="constrained")
    for (name, plot), axes in zip(plots.items(), list(whole.subplots(1, 1 + len(plots)))[1:], strict=True):
        results.plot(name, axes)
        both = (whole.subfigs[-1], plot.figure)
        assert len({(len(of.findobj(Axes)), "".join(of.get_suptitle().split())) for of in both}) == 1, name


def test_two_runs_are_compared(done: Done) -> None:
    """In a sentence for each, at least, and by every figure that it has for that."""
    both = {
        name: pd.concat([frame.assign(label=label, setting="") for label in ("one", "other")], ignore_index=True)
        for name, frame in done.tables.items()
    }
    assert len(list(said_over_runs(done.kind, both))) >= 2
    drawn = [[plot.name for plot in draw((figure,), both)] for figure in done.kind.figures_over_runs]
    assert all(drawn)
    names = [name for mine in drawn for name in mine]
    assert len(set(names)) == len(names)


def test_its_headline_is_drawn_against_what_varies(done: Done) -> None:
    """For an experiment that has one."""
    numbers = list(done.kind.headline(done.tables))
    assert len({number.name for number in numbers}) == len(numbers)
    for number in numbers:
        assert math.isnan(number.value) or number.least <= number.value <= number.most
    rows = [number._asdict() | {"label": value, "x": value} for value in ("1", "2") for number in numbers]
    measured = [number for number in numbers if not math.isnan(number.value)]
    plots = list(draw((lambda _: against_settings(pd.DataFrame(rows), [setting("x", "12")]),), {})) if rows else []
    assert [plot.name for plot in plots] == ["headline"] * bool(measured)


def test_its_folder_is_read_as_it_was_written(done: Done) -> None:
    found, verdict = read_run(done.folder), done.kind.head_map(done.tables)
    assert found.why_not is None
    assert found.status["head_map"] == (None if verdict is None else in_small(verdict)._asdict())


def test_what_a_training_says(snapshot: Any) -> None:
    row = {"quality": 0.9, "quality_low": 0.85, "quality_high": 0.94, "token_accuracy": 0.99}
    row |= {"symbol_error_rate": 0.025, "symbol_error_rate_low": 0.01, "symbol_error_rate_high": 0.04}
    snapshot("train", {"a model": Train.say({"accuracy": pd.DataFrame([row])})})


OF_24 = "left in every block only 18 of 24 may go"
REFUSED = {
    "ablate": [
        ("shift=[longer]", "shift=[longer]: task sort has 11 symbols, repeated symbols"),
        ("shift=[11 symbols]; model.max_length=11", "shift=[11 symbols]: has sequences of 12 tokens, model.max_length"),
        ("recovery=[refit,refit_between]", "recovery=[refit_between]: experiment=ablate recovers models that"),
        ("example=3 1", "example='3 1': experiment=ablate looks at no example, experiment=explain does"),
    ],
    "compare": [
        ("experiment.oracle=exact", "experiment.oracle=exact: 24 heads have 16777216 subsets, exact takes up to 16"),
        ("experiment.budgets=[24]", "experiment.budgets=[24]: none of them leaves a choice between heads"),
        ("gate=none", "scorer=gate: needs learned gates"),
        ("schedule=[greedy,greedy_refit]", "schedule=[greedy,greedy_refit]: must name at least one that uses scores"),
        ("schedule=[]", "schedule=[]: must name at least one that uses scores, for example one_shot"),
        ("schedule.greedy.keep_at_least=2", "left in every block only 12 of 24 may go"),
        (
            "schedule=iterative",
            "scorer=gate: needs learned gates, one number per head for all inputs: gate=softmax and a schedule",
        ),
        ("scorer=[random]", "scorer=['random']: must name at least one scorer beside a control"),
        ("recovery=refit", "recovery=[refit]: experiment=compare recovers nothing, experiment=prune does"),
    ],
    "explain": [
        ("example=3 x x", "example='3 x x': x is not in the vocabulary, allowed are 0 1 2"),
        ("example=''", "example='': is empty, allowed are 0 1 2"),
        (f"example={'1 ' * 70}", "has 70 symbols, model.max_length=64 allows 63 and the end of sequence"),
        ("scorer=[gate]", "scorer=[gate]: must name ablation, which says what heads are worth"),
    ],
    "prune": [
        ("schedule=[]", "schedule=[]: must name at least one schedule"),
        ("scorer=[]", "scorer=[]: must name at least one scorer"),
        ("schedule=one_shot; schedule.one_shot.keep_at_least=1", OF_24),
        ("experiment.budgets=[30]", "experiment.budgets=30: the model has 24 heads, allowed are 0 to 24"),
        ("experiment.budgets=[3 ms]", "experiment.budgets[0]='3 ms': must be a whole number or a finite number"),
        ("recovery=refit_between; scorer=gate; schedule=one_shot", "scorer=gate: needs learned gates"),
    ],
    "speed": [
        ("experiment.d_models=[66]", "experiment.d_models=66: must be even and a multiple of 4, the heads of a block"),
        ("experiment.d_models=[15]; model.num_heads=1", "experiment.d_models=15: must be even"),
        ("experiment.d_models=[15]; model.head_dim=8", "experiment.d_models=15: must be even"),
        ("experiment.budgets=[25]", "experiment.budgets=25: the model has 24 heads, allowed are 0 to 24"),
        ("schedule.one_shot.keep_at_least=1", OF_24),
        ("schedule=[greedy,one_shot]", "schedule=[greedy,one_shot]: must name exactly one"),
        ("scorer=[]", "scorer=[]: must name at least one scorer"),
    ],
}
"""By experiment: settings with a semicolon between them, and what is said."""


@pytest.mark.parametrize(
    ("experiment", "settings", "message"),
    [(experiment, *case) for experiment, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_is_refused_before_training(experiment: str, settings: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(compose(f"experiment={experiment}", *settings.split("; ")))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
