from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from conftest import TINY, TINY_COMPARE, TINY_SEQUENCES, compose
from mhaprune.config import ConfigError, build
from mhaprune.report import answers
from mhaprune.statistics import area
from mhaprune.store import RunFolder, read_status


def overrides(cache: Path) -> list[str]:
    tiny = ["experiment=compare", *TINY, *TINY_SEQUENCES, *TINY_COMPARE, f"cache={cache}"]
    return [*tiny, "task.report=40", "training.steps=60", "experiment.budgets=[1,2,3,4,5,6]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare")
    with RunFolder(path / "run").recorded() as folder:
        build(compose(*overrides(path / "cache")))(folder)
    return path / "run"


@pytest.fixture(scope="module")
def tables(folder: Path) -> Mapping[str, pd.DataFrame]:
    return {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}


def test_tables_and_figures_are_there(folder: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    assert set(tables) == {"winner", "methods", "heads", "pruning", "oracle", "agreement", "training"}
    figures = {path.stem for path in (folder / "figures").glob("*.svg")}
    assert figures == {"accuracy", "regret", "cost", "agreement", "heads", "training"}
    assert all("run" in frame and frame["run"].nunique() == 1 for frame in tables.values())
    assert read_status(folder)["checks"]["max_difference_masked_removed"] < 1e-9


def test_regret_is_what_the_oracle_has_more_on_the_report_split(tables: Mapping[str, pd.DataFrame]) -> None:
    pruning, oracle = tables["pruning"], tables["oracle"]
    assert set(oracle["kind"]) == {"exact"}
    assert set(oracle["masks_evaluated"]) == {64}
    for objective, sign in (("loss", 1), ("sequence_accuracy", -1)):
        best = oracle[oracle["objective"] == objective].set_index("heads_removed")
        regret = sign * (pruning[objective] - pruning["heads_removed"].map(best[objective]))
        np.testing.assert_allclose(pruning[f"regret_{objective}"], regret, atol=1e-6)
        # On the split that it was chosen on nothing is better than the oracle.
        first = pruning[pruning["draw"] == 0]
        chosen = sign * (first[f"choose_{objective}"] - first["heads_removed"].map(best[f"choose_{objective}"]))
        assert (chosen > -1e-5).all()
    assert (pruning["regret_loss_low"] <= pruning["regret_loss"] + 1e-9).all()


def test_methods_are_means_over_the_budgets_that_leave_a_choice(tables: Mapping[str, pd.DataFrame]) -> None:
    pruning, methods = tables["pruning"], tables["methods"].set_index("scorer")
    inner = pruning[pruning["heads_removed"].between(1, 5)]
    for name, rows in inner.groupby("scorer"):
        assert methods.loc[name, "regret_sequence_accuracy"] == pytest.approx(rows["regret_sequence_accuracy"].mean())
        assert methods.loc[name, "regret_loss"] == pytest.approx(rows["regret_loss"].mean(), abs=1e-6)
        whole = pruning[pruning["scorer"] == name].groupby("heads_removed")["sequence_accuracy"].mean()
        assert methods.loc[name, "area"] == pytest.approx(area(list(whole.index), whole.to_numpy()))
    assert methods.loc["ablation", "forward_passes"] == 7
    assert methods.loc["taylor", ["forward_passes", "backward_passes"]].tolist() == [1, 1]
    # Asked once for each of the five budgets; for none and for all heads there is nothing to ask.
    assert methods.loc["subset", "forward_passes"] == pytest.approx(6 * 5 * 32 / 16)
    assert methods.loc["taylor", "settings"] == "level=token batch_size=32"
    assert methods["reliability"].drop("random").between(-1, 1).all()


def test_the_winner_is_chosen_on_the_choose_split(tables: Mapping[str, pd.DataFrame]) -> None:
    methods, winner = tables["methods"], tables["winner"].iloc[0]
    order = methods[methods["family"] != "control"].sort_values(
        ["choose_area", "choose_loss"], ascending=[False, True], kind="stable"
    )
    assert [winner["winner"], winner["runner_up"]] == order["scorer"].tolist()[:2]
    regrets = order["regret_sequence_accuracy"].tolist()
    assert winner["margin"] == pytest.approx(regrets[1] - regrets[0], abs=1e-6)
    assert winner["beyond_noise"] == (winner["margin_low"] > 0)
    assert -1 <= winner["leak"] <= 1
    assert 0 <= winner["prunable_heads"] <= 6


def test_the_answer_names_winner_margin_and_leak(tables: Mapping[str, pd.DataFrame]) -> None:
    winner = tables["winner"].assign(
        winner="fisher", regret_sequence_accuracy=0.004, regret_sequence_accuracy_low=-0.001,
        regret_sequence_accuracy_high=0.009, runner_up="taylor", margin=0.012, margin_low=0.002, margin_high=0.02,
        beyond_noise=True, leak=0.004, prunable_heads=3, heads_total=6, prunable_tolerance=0.01,
    )  # fmt: skip
    lines = answers({"winner": winner})
    assert lines[0] == (
        "fisher chooses best: on average over the budgets its heads cost 0.4 points of exact match against the best"
        " subset (95 % interval -0.1 to 0.9); taylor comes next, 1.2 points behind (0.2 to 2.0), which is beyond the"
        " noise."
    )
    assert lines[1].startswith("3 of 6 heads are prunable one at a time")
    assert "+0.4 points" in lines[2]
    assert "within the noise" in answers({"winner": winner.assign(beyond_noise=False)})[0]
    alone = answers({"winner": winner.assign(runner_up=None)})[0]
    assert alone.endswith("(95 % interval -0.1 to 0.9).")
    methods = pd.concat([tables["methods"].assign(label=f"seed={seed}") for seed in (0, 1)])
    assert answers({"methods": methods})[0].startswith("Over 2 runs the least mean regret in exact match")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment.oracle=exact"], "experiment.oracle=exact: 24 heads have 16777216 subsets, exact takes up to 16"),
        (["experiment.budgets=[24]"], r"experiment.budgets=\[24\]: none of them leaves a choice between heads"),
        (["experiment.beam_width=0"], "experiment.beam_width=0: must be 1 or more"),
        (["experiment.tolerance_nats=-1.0"], "experiment.tolerance_nats=-1.0: must be 0 or more"),
        (["gate=none"], "scorer=gate: needs learned gates"),
        (["scorer.subset.keep=25"], "scorer.subset.keep=25: of 24 heads these are 25, allowed are 1 to 24"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_training(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(compose("experiment=compare", *arguments))


def test_a_split_too_small_for_halves_is_refused(tmp_path: Path) -> None:
    run = build(compose(*overrides(tmp_path), "task.score=3"))
    with (
        pytest.raises(ValueError, match="task.score=3: halves of the split need 4 or more examples"),
        RunFolder(tmp_path / "run").recorded() as folder,
    ):
        run(folder)
