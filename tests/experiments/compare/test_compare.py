from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from mhaprune.heads import BlockId, HeadGrid, HeadMask
from mhaprune.lab.experiments.compare import compare_report as report
from mhaprune.lab.experiments.compare.compare import Compare, Regrets, winner_table
from mhaprune.lab.model.sites import Site
from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.lab.tasks.sequences import AnswerOutcome
from mhaprune.progress import under_way
from mhaprune.pruning.plans import Plan
from mhaprune.scorers.ablation import Ablation
from mhaprune.statistics.intervals import difference_interval, mean_interval, student_interval
from mhaprune.tables import ENDS
from support.composing import EXAMPLES, compose, registered, tables_in
from support.sizes import LEARNT


def overrides(cache: Path) -> list[str]:
    """Trained for longer than the learnt model of other tests, whose scores agree too well."""
    longer = ["training.steps=300", "training.learning_rate=0.01"]
    scorers = ["scorer=[gate,ablation,taylor,fisher,subset,random]", "scorer.subset.steps=5"]
    schedules = ["schedule=[one_shot,greedy,greedy_refit]", "experiment.budgets=[1,2,3,4,5,6]"]
    return [EXAMPLES, "experiment=compare", *LEARNT, *longer, *scorers, *schedules, f"cache={cache}"]


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    with registered([EXAMPLES]), RunFolder(cache.parent / "run").recorded() as folder:
        build(compose(*overrides(cache)))(folder)
    return cache.parent / "run"


@pytest.fixture(scope="module")
def tables(folder: Path) -> Mapping[str, pd.DataFrame]:
    return tables_in(folder)


def test_regret_is_what_the_oracle_has_more_on_the_report_split(tables: Mapping[str, pd.DataFrame]) -> None:
    pruning, oracle = tables["pruning"], tables["oracle"]
    assert set(oracle["kind"]) == {"exact"}
    assert set(oracle["masks_evaluated"]) == {64}
    for objective, sign in (("loss", 1), ("quality", -1)):
        best = oracle[oracle["objective"] == objective].set_index("heads_removed")
        regret = sign * (pruning[objective] - pruning["heads_removed"].map(best[objective]))
        np.testing.assert_allclose(pruning[f"regret_{objective}"], regret, atol=1e-5)
        # On the split that it was chosen on nothing is better than the oracle.
        first = pruning[pruning["draw"] == 0]
        chosen = sign * (first[f"choose_{objective}"] - first["heads_removed"].map(best[f"choose_{objective}"]))
        assert (chosen > -1e-5).all()
    assert not (pruning["regret_loss_low"] > pruning["regret_loss"] + 1e-9).any()


def test_methods_are_means_over_the_budgets_that_leave_a_choice(tables: Mapping[str, pd.DataFrame]) -> None:
    pruning, methods = tables["pruning"], tables["methods"].set_index("scorer")
    assert pruning["quality"].nunique() > 10, "the fixture must tell right from wrong"
    inner = pruning[pruning["heads_removed"].between(1, 5)]
    for name, rows in inner.groupby("scorer"):
        assert methods.loc[name, "regret_quality"] == pytest.approx(rows["regret_quality"].mean())
        assert methods.loc[name, "regret_loss"] == pytest.approx(rows["regret_loss"].mean(), abs=1e-5)
        for column in ("choose_quality", "choose_loss"):
            assert methods.loc[name, column] == pytest.approx(rows.loc[rows["draw"] == 0, column].mean())
    assert methods.loc["ablation", "forward_passes"] == 7
    assert methods.loc["taylor", ["forward_passes", "backward_passes"]].tolist() == [1, 1]
    # Asked once for each of the five budgets; for none and for all heads there is nothing to ask. Of 60 examples every
    # second batch of 32 has 28.
    assert methods.loc["subset", "forward_passes"] == pytest.approx(5 * (3 * 32 + 2 * 28) / 60)
    assert methods.loc["taylor", "settings"] == "level=token batch_size=32"


def test_the_winner_is_chosen_on_the_choose_split(tables: Mapping[str, pd.DataFrame]) -> None:
    methods, winner = tables["methods"], tables["winner"].iloc[0]
    order = methods[methods["family"] != "control"].sort_values(
        ["choose_quality", "choose_loss"], ascending=[False, True], kind="stable"
    )
    first, *others = order["scorer"]
    assert winner["first"] == first
    cells = [winner[column] for column in ("tied", "worse", "better")]
    assert sorted(name for cell in cells if isinstance(cell, str) for name in cell.split(", ")) == sorted(others)
    cost = methods.set_index("scorer")["forward_passes"] + 2 * methods.set_index("scorer")["backward_passes"]
    tied = [first, *(winner["tied"].split(", ") if isinstance(winner["tied"], str) else [])]
    assert cost[winner["choice"]] == cost[tied].min()
    assert winner["regret_quality"] == methods.set_index("scorer")["regret_quality"][winner["choice"]]


def two(first: torch.Tensor, second: torch.Tensor) -> tuple[pd.DataFrame, Regrets]:
    """Two scorers with these outcomes of every example; the first is better on the choose split and dearer."""
    grid = HeadGrid.full([BlockId(Site.CROSS, 0)], 2)
    masks = [HeadMask(grid, frozenset([head])) for head in grid]
    reported = {mask: AnswerOutcome(right, right, right) for mask, right in zip(masks, (first, second), strict=True)}
    plans = [Plan(name, 0, "one_shot", mask) for name, mask in zip("ab", masks, strict=True)]
    best = [Plan(name, 0, "exact", masks[0]) for name in ("loss", "quality")]
    methods = pd.DataFrame(
        {"scorer": ["a", "b"], "family": "x", "choose_quality": [0.9, 0.8], "choose_loss": 1.0}
        | {"forward_passes": [20, 25], "backward_passes": [6, 0], "seconds": [2.0, 1.0]}
    )
    return methods, Regrets(plans, best, reported)


def winner_of(first: torch.Tensor, second: torch.Tensor) -> dict[str, Any]:
    """What is best at any cost."""
    winners = winner_table(*two(first, second), 30).to_dict("records")
    return {str(name): value for name, value in winners[0].items()}


def test_the_best_at_few_passes_stands_beside_the_best_at_any_cost() -> None:
    """A backward pass counts two: the first costs 32. A control is never the best."""
    methods, regrets = two(torch.ones(80), torch.zeros(80))
    winners = {few: winner_table(methods, regrets, few) for few in (24, 30, 32)}
    found = {few: dict(zip(table["most_passes"], table["choice"], strict=True)) for few, table in winners.items()}
    assert found == {24: {np.inf: "a"}, 30: {np.inf: "a", 30: "b"}, 32: {np.inf: "a", 32: "a"}}
    columns = ["forward_passes", "backward_passes", "seconds", "worse", "tied"]
    assert winners[30][columns].iloc[0].tolist() == [20, 6, 2.0, "b", ""]
    assert winners[30][columns].iloc[1].tolist() == [25, 0, 1.0, "", ""]
    assert winner_table(methods.assign(family=["x", "control"]), regrets, 30)["first"].tolist() == ["a"]


def test_searches_compete_with_the_scorers(tables: Mapping[str, pd.DataFrame]) -> None:
    """Greedy measures every head that is left, 6 + 5 + ... + 1 masks."""
    methods = tables["methods"].set_index("scorer")
    searches = methods[methods["family"] == "search"]
    assert searches.index.tolist() == ["greedy", "greedy_refit"]
    assert methods.index.is_unique
    costs = methods[["forward_passes", "backward_passes"]]
    assert costs.loc["greedy"].tolist() == [21, 0]
    # Once over one half of the examples, the dense model; a step for every head refits and measures on a half each.
    assert costs.loc["greedy_refit", "forward_passes"] >= (1 + 6 * 2) / 2
    assert costs.loc["greedy_refit", "backward_passes"] == 0
    assert (searches["seconds"] > 0).all()
    assert searches["settings"].str.contains("keep_at_least=0").all()
    assert set(tables["pruning"]["scorer"]) == set(methods.index)
    assert set(tables["heads"]["scorer"]) == set(methods.index) - set(searches.index)
    assert np.isfinite(searches["choose_loss"]).all()


@pytest.mark.parametrize(("change", "side"), [(1.0, "worse"), (-1.0, "better"), (0.0, "tied")])
def test_the_verdict_has_three_ways(change: float, side: str) -> None:
    """Two scorers whose choices differ on one example in four, in favour of the first, of the second, of neither."""
    right = torch.full((80,), 0.5)
    right[:20] += change / 2
    right[20:24] += torch.tensor([0.5, -0.5, 0.5, -0.5])
    winner = winner_of(right, 1 - right)
    assert winner["first"] == "a"
    assert {column: winner[column] for column in ("worse", "better", "tied")} == {
        column: "b" if column == side else "" for column in ("worse", "better", "tied")
    }
    assert winner["choice"] == ("b" if side == "tied" else "a"), "of two that tie the cheaper one"


def test_a_regret_is_against_the_best_of_its_own_size_with_the_interval_of_its_objective() -> None:
    """One scorer removes head 0, then 1; by loss the best are 2, then 1 and 2."""
    grid, draw = HeadGrid.full([BlockId(Site.CROSS, 0)], 3), torch.Generator().manual_seed(0)
    masks = [HeadMask(grid, frozenset(grid.heads[n] for n in gone)) for gone in ((), (0,), (0, 1), (2,), (1, 2))]
    loss, exact = torch.rand(5, 40, generator=draw), (torch.rand(5, 40, generator=draw) < 0.6).float()
    reported = {mask: AnswerOutcome(loss[i], exact[i], exact[i]) for i, mask in enumerate(masks)}
    best = [Plan(name, 0, "exact", mask) for name in ("loss", "quality") for mask in masks[3:]]
    regrets = Regrets([Plan("mine", 0, "one_shot", mask) for mask in masks[:3]], best, reported)
    inner = regrets.of("mine")
    columns = regrets.columns(inner)
    assert [len(plan.mask.removed) for plan in inner] == [1, 2]
    rise, fall = (loss[1:3] - loss[3:]).double().mean(0).numpy(), (exact[3:] - exact[1:3]).double().mean(0).numpy()
    for name, values, interval in (("loss", rise, mean_interval), ("quality", fall, difference_interval)):
        expected = [values.mean(), *interval(values)]
        assert [columns[f"regret_{name}{end}"] for end in ENDS] == pytest.approx(expected, rel=1e-4), name


def test_many_comparisons_are_corrected() -> None:
    """Six examples of one sign have p = 1/32 alone: noise among five comparisons."""
    grid = HeadGrid.full([BlockId(Site.CROSS, 0)], 6)
    masks = [HeadMask(grid, frozenset([head])) for head in grid]
    right = torch.ones(80)
    worse = right.index_fill(0, torch.arange(6), 0.0)
    reported = {mask: AnswerOutcome(*3 * [right if i == 0 else worse]) for i, mask in enumerate(masks)}
    plans = [Plan(name, 0, "one_shot", mask) for name, mask in zip("abcdef", masks, strict=True)]
    best = [Plan(name, 0, "exact", masks[0]) for name in ("loss", "quality")]
    methods = pd.DataFrame({"scorer": list("abcdef"), "family": "x", "choose_quality": np.linspace(0.9, 0.4, 6)})
    methods = methods.assign(choose_loss=1.0, forward_passes=range(6, 0, -1), backward_passes=0, seconds=1.0)
    (row,) = winner_table(methods, Regrets(plans, best, reported), 0).to_dict("records")
    assert (row["tied"], row["choice"]) == ("b, c, d, e, f", "f")
    (row,) = winner_table(methods[:2], Regrets(plans, best, reported), 0).to_dict("records")
    assert (row["worse"], row["choice"]) == ("b", "a")


def test_what_is_said(snapshot: Any) -> None:
    """`dear` costs more than 30 passes in one of the runs, and `once` is in one run alone."""
    few = {
        "first": "fisher", "tied": "", "worse": "taylor", "better": "", "choice": "fisher", "most_passes": 30.0,
        "forward_passes": 1, "backward_passes": 1, "seconds": 0.31, "regret_quality": 0.004,
        "regret_quality_low": -0.001, "regret_quality_high": 0.009, "oracle": "exact",
    }  # fmt: skip
    any_cost = few | {
        "first": "swap", "tied": "greedy, all", "worse": ", ".join(f"s{i}" for i in range(9)), "choice": "greedy",
        "most_passes": np.inf, "forward_passes": 300, "backward_passes": 0, "regret_quality": 0.001, "oracle": "bound",
    }  # fmt: skip
    better = few | {"worse": float("nan"), "better": "taylor", "backward_passes": 0}
    runs = pd.DataFrame(
        {"task": task, "label": f"{task} {seed}", "scorer": scorer, "family": "control" if scorer == "random" else "x"}
        | {"choose_quality": chosen, "regret_quality": regret + 0.001 * seed}
        | {"forward_passes": 29 + seed if scorer == "dear" else 10, "backward_passes": 0}
        for task, seeds in (("sort", range(3)), ("copy", range(1)))
        for seed in seeds
        for scorer, chosen, regret in (
            *(("a", 0.7, 0.02), ("b", 0.8, 0.03), ("dear", 0.85, 0.01), ("random", 0.9, 0.0), ("once", 0.99, 0.0)),
        )
        if scorer != "once" or seed == 0
    )
    winners = pd.DataFrame({"task": "sort", "most_passes": [np.inf, 30.0] * 3})
    noisy = runs.copy()
    noisy.loc[(runs["scorer"] == "a") & (runs["label"] == "sort 0"), "regret_quality"] = 0.06
    cases = {
        "no winner at any cost, one at few passes": [any_cost, few],
        "the same at any cost and at few passes": [few | {"most_passes": np.inf}, few],
        "another is better on the report split": [better],
    }
    methods = pd.DataFrame({"scorer": ["swap", "all", "greedy"], "forward_passes": [4000, 900, 300]})
    methods = methods.assign(backward_passes=0)
    snapshot(
        "compare",
        {name: Compare.say({"winner": pd.DataFrame(rows), "methods": methods}) for name, rows in cases.items()}
        | {"over runs": report.say_over_runs({"methods": runs, "winner": winners})}
        | {"over runs, within the noise": report.say_over_runs({"methods": noisy, "winner": winners})},
    )
    low, high = student_interval([0.03, 0.031, 0.032])
    assert f"3.1 points ({100 * low:.1f} to {100 * high:.1f})" in next(
        report.say_over_runs({"methods": runs, "winner": winners})
    )


@pytest.mark.slow
def test_a_scorer_with_a_second_schedule_goes_by_both_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps what it was with the first; what the second measures is counted, and what its score took as well. The
    progress line knows what is scored, and how far that is."""
    plain, seen = Ablation.__call__, []

    def spied(self: Ablation, *arguments: Any) -> Any:
        seen.append([(step.what, step.total, step.on and step.on()) for step in under_way])
        return plain(self, *arguments)

    monkeypatch.setattr(Ablation, "__call__", spied)
    scorers = ["scorer=[ablation,random]", "scorer.random.draws=2", "schedule=[one_shot,iterative]"]
    kept = [override for override in overrides(folder.parent / "cache") if not override.startswith(("sc", "plugins="))]
    tables = build(compose(*kept, *scorers)).results().found
    assert {steps[1][0] for steps in seen} == {"score"}
    assert seen[0][2:4] == [("schedule", 2, None), ("one_shot", 2, "ablation")]
    methods = tables["methods"].set_index("scorer")
    assert methods.index.tolist() == ["ablation", "random", "ablation + iterative", "random + iterative"]
    assert methods["schedule"].tolist() == ["one_shot", "one_shot", "iterative", "iterative"]
    assert set(tables["pruning"].groupby("scorer")["draw"].nunique()[["random", "random + iterative"]]) == {2}
    # Ablation takes a pass per head and one more: of six heads, then of five and so on down to one.
    assert methods.loc[["ablation", "ablation + iterative"], "forward_passes"].tolist() == [7, 7 + 6 + 5 + 4 + 3 + 2]
    assert methods.loc["ablation + iterative", "seconds"] > methods.loc["ablation", "seconds"]
