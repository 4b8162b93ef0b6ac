"""`experiment=ablate` on a model that has learnt something: what a recovery brings back."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from mhaprune.heads import BlockId, HeadId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.ablate import Ablate, summary_table
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.runs.run import build
from mhaprune.measure.outcomes import measure
from mhaprune.recoveries.refit import Refit
from mhaprune.statistics.intervals import paired_interval
from support.composing import compose
from support.sizes import LEARNT, small

SETTINGS = (*LEARNT, *small("experiment", "ablate"), "scorer=[gate,ablation,random]", "scorer.random.draws=3")


def tables_of(cache: Path, *settings: str) -> Mapping[str, pd.DataFrame]:
    return build(compose("experiment=ablate", *SETTINGS, *settings, f"cache={cache}")).results().tables


@pytest.fixture(scope="module")
def tables(cache: Path) -> Mapping[str, pd.DataFrame]:
    torch.set_num_threads(1)
    return tables_of(cache)


@pytest.fixture(scope="module")
def study(cache: Path, tables: Mapping[str, pd.DataFrame]) -> Study:
    return build(compose("experiment=ablate", *SETTINGS, f"cache={cache}")).study()


def test_heads_of_single_calls_are_refused_before_anything_is_scored() -> None:
    calls: Any = SimpleNamespace(grid=SimpleNamespace(blocks=[BlockId("attention@0", 0)]), schedules={"one_shot": None})
    with pytest.raises(ValueError, match="not removed: set model.calls=false$"):
        Ablate().check(calls)


def left_by(row: Any, study: Study, recovery: str = "nothing") -> Seq2Seq:
    """The model of a row, made anew."""
    removed = frozenset(map(HeadId.parse, row["removed"].split()))
    left = study.subject.without(HeadMask(study.subject.grid, removed))
    if removed and recovery == "refit":
        left, _ = Refit()(study, left, 0, None, lambda state: None)
    return left


@pytest.mark.slow
def test_the_recovered_models_are_those_of_the_scorer_that_goes_furthest(
    tables: Mapping[str, pd.DataFrame], study: Study
) -> None:
    pruning, recovered, summary = (tables[name] for name in ("pruning", "recovered", "summary"))
    plain = summary[summary["recovery"] == "nothing"]
    (scorer,) = recovered["scorer"].unique()
    assert plain.set_index("scorer")["heads_removed"][scorer] == plain["heads_removed"].max()
    own = pruning[(pruning["scorer"] == scorer) & (pruning["draw"] == 0)]
    same = ["heads_removed", "removed", "parameters", "flops", "speedup"]
    pd.testing.assert_frame_equal(recovered[same], own[same].reset_index(drop=True))
    assert set(recovered) - set(pruning) == {"recovery", "note"}
    assert (recovered["heads_removed"] > 0).any()
    for row in recovered.to_dict("records"):
        left = left_by(row, study, "refit")
        for prefix, examples in (("", study.splits.report), ("choose_", study.splits.choose)):
            assert row[f"{prefix}loss"] == pytest.approx(float(measure(left, examples).loss.double().mean()), rel=1e-5)


def test_its_budget_is_chosen_as_that_of_every_other(tables: Mapping[str, pd.DataFrame]) -> None:
    """On the choose split, against the dense model; what is reported is the report split."""
    summary, recovered = tables["summary"], tables["recovered"]
    (row,) = summary[summary["recovery"] == "refit"].to_dict("records")
    bar = recovered.loc[recovered["heads_removed"] == 0, "choose_quality"].item() - row["tolerance"]
    fits = recovered[recovered["choose_quality"] >= bar]
    assert row["heads_removed"] == fits["heads_removed"].max()
    report = recovered.set_index("heads_removed")["quality"]
    assert row["quality"] == report[row["heads_removed"]]
    smaller = (recovered["heads_removed"] > 0).astype(float)
    for drop, quality, removed in ((smaller, 1.0, 0), (0.0, 1 - smaller, recovered["heads_removed"].max())):
        turned = recovered.assign(choose_drop=drop, quality=quality)
        assert summary_table(turned, 0.01)["heads_removed"].tolist() == [removed]


@pytest.mark.parametrize("name", ["pruning", "recovered"])
def test_what_is_lost_on_the_choose_split_has_its_paired_interval(
    name: str, tables: Mapping[str, pd.DataFrame], study: Study
) -> None:
    table = tables[name]
    whole = measure(study.subject, study.splits.choose).quality.numpy()
    first = table[table["draw"] == 0]
    assert first["choose_drop"].nunique() > 2
    for row in first.to_dict("records"):
        left = left_by(row, study, "refit" if name == "recovered" else "nothing")
        exact = measure(left, study.splits.choose).quality.numpy()
        assert row["choose_drop"] == pytest.approx((whole - exact).mean())
        assert [row["choose_drop_low"], row["choose_drop_high"]] == pytest.approx(paired_interval(whole, exact))
    if name == "pruning":
        assert table.loc[table["draw"] > 0, "choose_drop_high"].isna().all(), "nothing is chosen among them"


def test_the_summary_says_how_many_surely_can_go(tables: Mapping[str, pd.DataFrame]) -> None:
    assert tables["summary"]["heads_removed_sure"].notna().all()
    pruning = tables["pruning"]
    highest = [0.0 if n <= 2 else 1.0 for n in pruning["heads_removed"]]
    table = summary_table(pruning.assign(choose_drop=0.0, choose_drop_most=highest), 0.01)
    most = pruning["heads_removed"].max()
    sure = pruning.loc[pruning["heads_removed"] <= 2, "heads_removed"].max()
    assert 0 < sure < most
    assert table[["heads_removed", "heads_removed_sure"]].drop_duplicates().to_numpy().tolist() == [[most, sure]]
    best = pruning[(pruning["draw"] == 0) & (pruning["heads_removed"] == most)]
    assert table["choose_drop_low"].tolist() == best["choose_drop_low"].tolist()


@pytest.mark.slow
def test_several_recoveries_have_rows_of_their_own(cache: Path) -> None:
    few = "experiment.budgets=[2]"
    several = tables_of(cache, "recovery=[refit,fine_tune]", "recovery.fine_tune.steps=2", few)
    assert list(several["recovered"]["recovery"]) == ["refit", "refit", "fine_tune", "fine_tune"]
    dense = several["recovered"].query("heads_removed == 0")
    assert dense["loss"].nunique() == 1, "a recovery leaves the dense model as it is"
    assert list(several["summary"]["recovery"]) == ["nothing"] * 3 + ["refit", "fine_tune"]
    none = tables_of(cache, "recovery=[]", few)
    assert set(several) - set(none) == {"recovered"}
    exact = ["scorer", "draw", "heads_removed", "quality", "choose_loss"]
    pd.testing.assert_frame_equal(none["pruning"][exact], several["pruning"][exact])
