"""`experiment=learn`: when a training has reached its target, and what one run and many say and draw of it."""

import io
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba

from mhaprune.experiments.learn.report import paired_ratios
from mhaprune.experiments.learn.study import Learn, time_to
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import measure
from mhaprune.model.checkpoint import to_bytes
from mhaprune.reporting.plots import draw
from mhaprune.runs.run import Run, build
from mhaprune.settings.options import ConfigError
from mhaprune.statistics.intervals import geometric_mean
from mhaprune.tables import Tables
from support.composing import compose
from support.figures import check_legible
from support.sizes import TINY, chosen, slow, small

EVERY, STEPS = 10, 100


def history(*exact: float, every: int = EVERY, ms_per_step: float = 20) -> pd.DataFrame:
    """What training leaves of these evaluations, the first one before training."""
    steps = [every * i for i in range(len(exact))]
    table = pd.DataFrame({"step": steps, "seconds": [step * ms_per_step / 1000 for step in steps]})
    return table.assign(loss=1.0, valid_loss=1.0, valid_token_accuracy=exact, valid_quality=exact)


def tables_of(learning: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Those of one run."""
    last = {f"{name}{end}": 0.9 for name in ("token_accuracy", "quality") for end in ("", "_low", "_high")}
    reached = pd.DataFrame([time_to(learning, 0.99) | {"parameters": 212000} | last])
    return {"training": learning, "reached": reached}


def run_at(
    at: int | None, target: float = 0.99, ms_per_step: float = 20, steps: int = STEPS
) -> dict[str, pd.DataFrame]:
    """A run that reaches its target at a step, or never."""
    exact = [0.93 * i * EVERY / steps if at is None else min(0.999, i * EVERY / at) for i in range(steps // EVERY + 1)]
    return tables_of(history(*exact, ms_per_step=ms_per_step))


def collected(runs: Iterable[tuple[str, str, int, dict[str, pd.DataFrame]]]) -> Tables:
    """The tables of runs with their task, setting and seed."""
    parts: dict[str, list[pd.DataFrame]] = {"training": [], "reached": []}
    for task, setting, seed, own in runs:
        label = ", ".join(filter(None, [setting, f"seed={seed}"]))
        for name, frame in own.items():
            parts[name].append(frame.assign(label=label, setting=setting, task=task, seed=seed))
    return {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}


def sweep(**steps: list[int | None]) -> Tables:
    """One task, for every value of the setting `rate` the steps that its runs take with seed 0, 1 and so on."""
    return collected(
        ("sort", f"rate={name}", seed, run_at(at)) for name, own in steps.items() for seed, at in enumerate(own)
    )


def overrides(cache: Path) -> list[str]:
    return [*TINY, *small("task", "sort"), *chosen("experiment", "learn"), f"cache={cache}"]


@pytest.fixture(scope="module")
def run(cache: Path) -> Run:
    return build(compose(*overrides(cache)))


@pytest.mark.parametrize(
    ("exact", "place"),
    [
        ((0.0, 0.2, 0.5, 0.5, 0.9), 2),
        ((0.0, 0.6, 0.4, 0.5, 0.9), 3),  # it was there before, and did not stay
        ((0.0, 0.2, 0.3, 0.4, 0.5), 4),
        ((0.0, 0.9, 0.9, 0.9, 0.4), None),
        ((0.0, 0.1, 0.1, 0.1, 0.1), None),
        ((0.9, 0.9, 0.9, 0.9, 0.9), 1),  # what is so before training takes no training
    ],
)
def test_a_target_is_reached_where_no_later_evaluation_is_below_it(exact: tuple[float, ...], place: int | None) -> None:
    found = time_to(history(*exact, ms_per_step=20), 0.5)
    step = EVERY * (4 if place is None else place)
    assert found["reached"] is (place is not None)
    assert found["steps"] == step, "of a run that does not get there, those of the whole training"
    assert found["seconds"] == pytest.approx(0.02 * step)
    assert found["ms_per_step"] == pytest.approx(20)
    assert found["best_valid_quality"] == max(exact[1:])
    assert found["last_valid_quality"] == exact[-1]


def test_a_share_in_single_precision_counts_as_what_it_is() -> None:
    """450 of 500 examples."""
    share = float(torch.tensor([1.0] * 450 + [0.0] * 50).mean())
    assert share < 0.9
    assert time_to(history(0.0, share), 0.9)["reached"]
    assert not time_to(history(0.0, 449 / 500), 0.9)["reached"]


def test_a_run_tells_what_its_training_has_left(run: Run) -> None:
    study = run.study()
    tables = run.experiment(study).tables
    reached = tables["reached"].iloc[0]
    pd.testing.assert_frame_equal(tables["training"], study.history.assign(learnt=0.99))
    assert reached["target"] == study.trained.task.learnt == 0.99
    assert reached["parameters"] == study.subject.count_parameters()
    outcome = measure(study.subject, study.splits.report)
    assert reached["quality"] == pytest.approx(float(outcome.quality.mean()))
    assert reached["quality_low"] <= reached["quality"] <= reached["quality_high"]


def test_a_model_from_the_cache_or_a_file_brings_its_seconds(run: Run, cache: Path) -> None:
    study = run.study()
    table = run.experiment(study).tables["reached"]
    pd.testing.assert_frame_equal(run.experiment(run.study()).tables["reached"], table)
    path = cache.parent / "whole.pt"
    path.write_bytes(study.trained.save(study.subject))
    again = build(compose("experiment=learn", f"model_file={path}", f"cache={cache}"))
    pd.testing.assert_frame_equal(again.experiment(again.study()).tables["reached"], table)


def test_a_target_of_its_own_goes_before_that_of_the_task(run: Run) -> None:
    study = run.study()
    for target in (0.0, 0.25, 1.0):
        found = replace(run, experiment=Learn(target=target)).experiment(study).tables["reached"].iloc[0]
        assert found["target"] == target
        assert found["reached"] == (study.history["valid_quality"].iloc[-1] >= target)
    assert build(compose("experiment=learn", "task=inflection")).task.learnt == 0.88


def test_the_history_of_a_file_must_be_that_of_its_model(run: Run, cache: Path) -> None:
    study = run.study()
    pruned = study.subject.without(HeadMask(study.subject.grid).without(study.subject.grid.heads[0]))
    old = study.history.drop(columns="seconds").to_dict("records")
    settings = torch.load(io.BytesIO(study.trained.save(study.subject)), weights_only=True)["settings"]
    for name, content, message in (
        ("pruned", study.trained.save(pruned), "was pruned or trained again since its training"),
        ("tuned", study.trained.save(study.subject, steps=3), "was pruned or trained again since its training"),
        ("old", to_bytes(study.subject, settings, old, {}), "has no seconds of its training"),
    ):
        path = cache.parent / f"{name}.pt"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^model_file={path}: {message}, must be [^\n]*$"):
            build(compose("experiment=learn", f"model_file={path}", f"cache={cache}"))


def test_what_is_said(snapshot: Any) -> None:
    tasks = [
        (task, f"task={task}, rate={name}", seed, run_at(at * factor))
        for task, factor in (("sort", 1), ("copy", 2))
        for name, at in (("slow", 40), ("fast", 10 * factor))
        for seed in (0, 1, 2)
    ]
    one = {
        "a run that stays at its target": tables_of(
            history(0, 0.1, 0.995, 0.97, 0.99, 1.0, every=100, ms_per_step=18.5)
        ),
        "a run that does not": tables_of(history(0, 0.1, 0.995, 0.93, every=100)),
        "a run that ends just below it": tables_of(history(0, 0.9896)),
    }
    several = {
        "settings with three seeds": sweep(slow=[40, 60, 80], fast=[20, 30, 40]),
        "runs that never get there": sweep(first=[40, None, 60], second=[20, 30, None], third=[None, None, None]),
        "two runs of each setting": sweep(a=[60, 40], b=[20, 20]),
        "several tasks": collected(tasks),
    }
    cases = {name: list(Learn.say(found)) for name, found in one.items()}
    cases |= {name: list(Learn.say_in_common(found)) for name, found in several.items()}
    assert not any("nan" in line for lines in cases.values() for line in lines)
    snapshot("learn", cases)


def test_pairs_are_matched_by_seed_and_each_time_is_compared_for_itself() -> None:
    """In whatever order the runs come; the geometric mean of runs that were repeated counts."""
    slow, fast = {3: 40, 4: 80, 5: 60}, {5: 30, 3: 20, 4: 40, 9: 100}
    runs = [("sort", "a=1", seed, run_at(at)) for seed, at in slow.items()]
    runs += [("sort", "a=2", seed, run_at(at, ms_per_step=40)) for seed, at in fast.items()]
    found = collected([*runs, ("sort", "a=2", 3, run_at(80, ms_per_step=40)), ("sort", "a=2", 5, run_at(None))])
    first, other = (found["reached"].query("setting == @name") for name in ("a=1", "a=2"))
    assert dict(paired_ratios(other, first, "steps")) == pytest.approx({3: math.sqrt(20 * 80) / 40, 4: 0.5})
    assert dict(paired_ratios(other, first, "seconds")) == pytest.approx({3: math.sqrt(20 * 80) / 20, 4: 1})


def circles(axes: Axes, still_open: bool) -> list[tuple[float, float]]:
    """The places of the circles that are open, or of those that are not."""
    lines = [line for line in axes.get_lines() if line.get_marker() == "o"]
    own = [line for line in lines if (to_rgba(line.get_markerfacecolor()) == to_rgba("white")) == still_open]
    return [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in own]


def test_times_stand_in_the_rows_of_their_settings() -> None:
    """A run that does not get there is open; a mean with its interval is drawn only where all runs get there."""
    found = sweep(zeta=[40, 60, 80], alpha=[20, None, None], mid=[None, None, None])
    [plot] = draw(Learn.figures_over_runs, found)
    reached, rows = found["reached"], ["rate=zeta", "rate=alpha", "rate=mid"]
    assert [label.get_text() for label in plot.figure.axes[0].get_yticklabels()] == rows
    for axes, name, unit in zip(plot.figure.axes, ("steps", "seconds"), (1, 0.02), strict=True):
        for there in (True, False):
            own = reached[reached["reached"] == there]
            expected = [(time, rows.index(row)) for time, row in zip(own[name], own["setting"], strict=True)]
            assert [(time, round(row)) for time, row in circles(axes, still_open=not there)] == expected
        assert axes.get_xlim()[0] < reached[name].min() < reached[name].max() < axes.get_xlim()[1]
        [segment] = axes.collections[0].get_segments()
        np.testing.assert_allclose(segment[:, 0], unit * np.array(geometric_mean([40, 60, 80])[1:]))


@pytest.mark.parametrize("settings", [1, 12, *slow(2, 7, 30)])
def test_few_and_many_settings_can_be_read(settings: int) -> None:
    names = [f"training.learning_rate={0.001 * i:g}, training.label_smoothing={0.01 * i:g}" for i in range(settings)]
    runs = [
        (task, name, seed, run_at(10 * (i + 2 + seed), ms_per_step=20 + i, steps=300) if i < 25 else run_at(None))
        for task in ("sort", "copy")[: 1 + (settings < 10)]
        for i, name in enumerate(names)
        for seed in range(3)
    ]
    [plot] = draw(Learn.figures_over_runs, collected(runs))
    check_legible(plot)
    shown = [label.get_text().replace("\n", " ") for label in plot.figure.axes[0].get_yticklabels()]
    assert shown == names
