from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from conftest import LEARNT, compose, tables_in
from mhaprune.config import build
from mhaprune.experiments.mistakes import mistakes
from mhaprune.experiments.mistakes.study import Mistakes
from mhaprune.experiments.mistakes.words import RANDOM_GATES
from mhaprune.measure import gate_gradients, measure
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.taylor import Taylor
from mhaprune.settings.options import ConfigError
from mhaprune.statistics.rankings import spearman
from mhaprune.storage.store import RunFolder, read_status
from mhaprune.tables import Tables
from mhaprune.tasks.base import Splits

EVERY = [*mistakes.GRADIENT_MISTAKES, RANDOM_GATES]


def scores_of(name: str, model: Seq2Seq, splits: Splits) -> torch.Tensor:
    return mistakes.GRADIENT_MISTAKES[name](model, splits.train[:64], 0).values[0]


def test_a_batch_is_that_of_the_scorer(model: Seq2Seq, splits: Splits) -> None:
    for name, size in (("per_batch", 32), ("whole_split", 64)):
        right = Taylor(level="batch", batch_size=size)(model, splits.train[:64], 0).values[0]
        torch.testing.assert_close(scores_of(name, model, splits), right)


def test_what_is_not_set_to_zero_is_what_autograd_adds_up(model: Seq2Seq, splits: Splits) -> None:
    """A loop as people write it, and forget `mask.grad.zero_()`."""
    for name, batch_size in (("not_zeroed", 32), ("not_zeroed_per_example", 1)):
        mask = torch.ones(len(model.grid), dtype=torch.double, requires_grad=True)
        importance = torch.zeros(len(model.grid), dtype=torch.double)
        for batch in splits.train[:64].batches(batch_size):
            model.evaluate(batch, mask).loss.sum().backward()
            assert mask.grad is not None
            importance += mask.grad.abs()
        torch.testing.assert_close(scores_of(name, model, splits), importance)


def test_every_block_weighs_the_same_once_normalised(model: Seq2Seq, splits: Splits) -> None:
    scores = scores_of("normalised_by_layer", model, splits)
    for scores_H in model.grid.split(scores).values():
        assert float(scores_H.norm()) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def folder(ran: Callable[[str], Path]) -> Path:
    return ran("mistakes")


@pytest.fixture(scope="module")
def tables(folder: Path) -> Tables:
    return tables_in(folder)


def test_the_cost_is_right_minus_wrong_on_the_report_split(cache: Path, tables: Tables) -> None:
    """Measured here with the heads masked: the run has removed them."""
    study = build(compose("experiment=mistakes", *LEARNT, f"cache={cache}")).study()
    subject, report = study.subject, study.splits.report
    right = mistakes.RIGHT(subject, study.splits.score, 0).values[0]
    pruning = tables["mistake_pruning"].set_index(["mistake", "heads_removed"])
    budgets = [1, 2, 3, 4, 5]
    for name, scorer in mistakes.GRADIENT_MISTAKES.items():
        wrong = scorer(subject, study.splits.score, 0).values[0]
        row = tables["mistakes"].set_index("mistake").loc[name]
        assert row["spearman"] == pytest.approx(spearman(right, wrong))
        assert row["cost_points"] == pytest.approx(pruning.loc[name]["cost_points"].mean())
        assert list(pruning.loc[name].index) == budgets
        for k in budgets:
            exact = []
            for scores in (right, wrong):
                gates = torch.ones(len(subject.grid))
                gates[scores.argsort(stable=True)[:k]] = 0
                exact.append(float(measure(subject, report, gates).quality.mean()))
            at = pruning.loc[name, k]
            assert [at["right_quality"], at["wrong_quality"]] == pytest.approx(exact)
            assert at["cost_points"] == pytest.approx(100 * (exact[0] - exact[1]))
    assert pruning["cost_points"].abs().max() > 0, "the model must tell right from wrong"


def test_random_gates_count_from_what_ablation_leaves(cache: Path, tables: Tables, tmp_path: Path) -> None:
    """The same two models, whichever of them the run is about."""
    assert list(tables["mistakes"]["mistake"]) == EVERY
    assert "retraining" in tables
    with RunFolder(tmp_path).recorded() as other:
        build(compose("experiment=mistakes", *LEARNT, f"cache={cache}", "gate.init=rand"))(other)
    mine, theirs = (
        table[table["mistake"] == RANDOM_GATES].drop(columns="run").reset_index(drop=True)
        for table in (tables["mistake_pruning"], pd.read_csv(tmp_path / "mistake_pruning.csv"))
    )
    pd.testing.assert_frame_equal(mine, theirs)
    expected = mine["right_quality"] - mine["wrong_quality"] - mine["handicap"]
    pd.testing.assert_series_equal(mine["cost_points"], 100 * expected, check_names=False, atol=1e-4)


@pytest.mark.parametrize("without", ["gate=none", "experiment.retrain=false"])
def test_without_a_second_model_random_gates_are_left_out_and_said_to_be(
    cache: Path, without: str, tmp_path: Path
) -> None:
    with RunFolder(tmp_path).recorded() as other:
        run = build(compose("experiment=mistakes", *LEARNT, f"cache={cache}", without))
        lines = run(other).sentences
    assert lines[-1] == "random_gate_init was not made: no second model was trained."
    assert list(pd.read_csv(tmp_path / "mistakes.csv")["mistake"]) == EVERY[:-1]


def test_the_run_proves_its_removals_and_says_what_it_found(folder: Path, tables: Tables) -> None:
    status = read_status(folder)
    assert status["checks"]["max_difference_masked_removed"] <= 1e-9
    assert set(status["checks"]) >= {"smallest_gate_effect", "greedy_decoding_disagreements"}
    assert status["findings"] == list(Mistakes.say(tables))
    for name in EVERY:
        assert name in status["findings"][-1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment.budgets=[0]"], "experiment.budgets=\\[0\\]: none of them leaves a choice between heads"),
        (["experiment.budgets=[7]"], "experiment.budgets=7: the model has 6 heads, allowed are 0 to 6"),
        (["schedule=greedy"], "schedule=greedy: must score the heads once, one_shot does"),
        (["scorer=[gate]"], "scorer=\\[gate\\]: must be \\[\\], this experiment brings its own scores"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(compose("experiment=mistakes", *LEARNT, *overrides))


def test_the_right_way_is_the_mean_of_absolute_gradients_of_examples(model: Seq2Seq, splits: Splits) -> None:
    gradients = gate_gradients(model, splits.score)
    torch.testing.assert_close(mistakes.RIGHT(model, splits.score, 0).values[0], gradients.abs().mean(dim=0))
