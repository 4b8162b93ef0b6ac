"""`experiment=learn`: when a training has reached its target, and what a run says of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from learnt import EVERY, history
from mhaprune.experiments.learn.study import Learn, time_to
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import measure
from mhaprune.model.checkpoint import to_bytes
from mhaprune.runs.run import Run, build
from mhaprune.settings.options import ConfigError
from support.composing import compose
from support.sizes import TINY, chosen, small


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
    pd.testing.assert_frame_equal(tables["training"], study.history)
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
