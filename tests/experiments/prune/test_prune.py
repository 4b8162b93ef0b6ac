"""`experiment=prune` on a model that has learnt something, against plain twins of what it does."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from mhaprune.heads import HeadGrid, HeadId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.prune import trials
from mhaprune.lab.experiments.prune.prune import _ways, best_of_each_size, choose_next, smallest_table
from mhaprune.lab.model.checkpoint import load
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder, read_status
from mhaprune.lab.tasks.sequences import AnswerOutcome, Examples
from mhaprune.measure.accuracy import by_group
from mhaprune.measure.outcomes import Diverged, ProofFailed, measure
from mhaprune.progress import under_way
from mhaprune.recoveries.fine_tune import FineTune
from mhaprune.recoveries.from_scratch import FromScratch
from mhaprune.recoveries.refit import Refit
from mhaprune.scorers.ablation import Ablation
from mhaprune.statistics.intervals import paired_interval
from mhaprune.storage.cache import no_memory
from mhaprune_literature.subset import Subset
from support.composing import compose, tables_in
from support.sizes import LEARNT, PRUNE

FEW_ROUNDS = ("experiment.latency_rounds=2", "experiment.latency_batch=4")
CLOCK = ("seconds", "latency_ms", "speedup", "speedup_q1", "speedup_q3")


def run(path: Path, cache: Path, settings: Sequence[str] = PRUNE) -> dict[str, pd.DataFrame]:
    with RunFolder(path).recorded() as folder:
        build(compose("experiment=prune", *LEARNT, *settings, f"cache={cache}"))(folder)
    return tables_of(path)


def tables_of(path: Path) -> dict[str, pd.DataFrame]:
    texts = ("removed", "kept", "note")
    return {
        name: frame.assign(**{t: frame[t].astype(object).where(frame[t].notna(), "") for t in texts if t in frame})
        for name, frame in tables_in(path).items()
    }


@pytest.fixture(scope="module")
def folder(ran: Callable[[str], Path]) -> Path:
    return ran("prune")


@pytest.fixture(scope="module")
def tables(folder: Path) -> Mapping[str, pd.DataFrame]:
    return tables_of(folder)


@pytest.fixture(scope="module")
def study(cache: Path, folder: Path) -> Study:
    return build(compose("experiment=prune", *LEARNT, *PRUNE, f"cache={cache}")).study()


def mask_of(study: Study, removed: str) -> HeadMask:
    return HeadMask(study.subject.grid, frozenset(map(HeadId.parse, removed.split())))


def exact(model: Seq2Seq, examples: Examples) -> float:
    return float(measure(model, examples).quality.double().mean())


def loss_of(model: Seq2Seq, examples: Examples) -> float:
    return float(measure(model, examples).loss.double().mean())


def study_with(study: Study, extra_steps: int = 0) -> Study:
    return replace(study, extra_steps=extra_steps)


def trials_of(study: Study, **recoveries: Any) -> trials.Trials:
    return trials.Trials(replace(study, recoveries=recoveries, remember=no_memory))


def one(table: pd.DataFrame, **values: Any) -> pd.Series:
    for name, value in values.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_every_way_has_every_size(tables: Mapping[str, pd.DataFrame]) -> None:
    table = tables["recovery"]
    assert set(table["recovery"]) == {"nothing", "refit", "fine_tune", "refit_between", "from_scratch"}
    ways = table[~table["control"]].groupby(["schedule", "recovery"])["heads_kept"].apply(sorted)
    assert len(ways) == 8
    assert all(kept == [3, 5, 6] for kept in ways)


def test_without_training_it_is_the_removed_model(tables: Mapping[str, pd.DataFrame], study: Study) -> None:
    rows = tables["recovery"].query("recovery == 'nothing'")
    assert rows["quality"].nunique() > 2, "the fixture must tell masks apart"
    for row in rows.to_dict("records"):
        left = study.subject.without(mask_of(study, row["removed"]))
        assert row["quality"] == pytest.approx(exact(left, study.splits.report))
        assert row["choose_quality"] == pytest.approx(exact(left, study.splits.choose))
        pair = (measure(one, study.splits.choose).quality.numpy() for one in (study.subject, left))
        assert [row["choose_drop_low"], row["choose_drop_high"]] == pytest.approx(paired_interval(*pair))
        assert row["parameters"] == left.count_parameters()
        assert row["kept"].split() == [str(head) for head in left.grid]


def test_fine_tuning_is_training_that_goes_on(tables: Mapping[str, pd.DataFrame], study: Study) -> None:
    row = one(tables["recovery"], schedule="greedy", recovery="fine_tune", heads_kept=3)
    left = study.subject.without(mask_of(study, row["removed"]))
    before = copy.deepcopy(left.state_dict())
    recipe = replace(study.training, steps=30, learning_rate=1e-3, warmup_steps=3)
    torch.manual_seed(study.seed)
    recipe(left, study.splits.train, study.splits.valid, None, study.seed)
    assert any(not torch.equal(value, before[name]) for name, value in left.state_dict().items())
    assert row["quality"] == pytest.approx(exact(left, study.splits.report))
    assert row["loss"] == pytest.approx(loss_of(left, study.splits.report), rel=1e-5)
    assert row["steps"] == 30


def test_seconds_are_those_of_the_recovery_and_nothing_takes_none(tables: Mapping[str, pd.DataFrame]) -> None:
    table = tables["recovery"]
    assert (table.loc[table["recovery"] == "nothing", "seconds"] == 0).all()
    assert (table.loc[(table["recovery"] != "nothing") & (table["heads_removed"] > 0), "seconds"] > 0).all()
    history = tables["recovery_training"].query("recovery == 'fine_tune'").groupby("heads_kept")["seconds"].max()
    tuned = table.query("recovery == 'fine_tune' and heads_removed > 0").groupby("heads_kept")["seconds"].max()
    pd.testing.assert_series_equal(tuned, history.loc[tuned.index], check_names=False)
    for _, rounds in table.query("recovery == 'refit_between'").groupby(["schedule", "scorer"]):
        in_all = rounds.set_index("heads_kept")["seconds"]
        assert in_all[3] > in_all[5] > in_all[6] == 0, "those of all rounds"


def test_of_several_controls_one_stands_beside_the_rows(tables: Mapping[str, pd.DataFrame]) -> None:
    table = tables["recovery"]
    other = table[table["control"]].assign(recovery="of_a_plug_in", quality=-7.0)
    both = smallest_table(pd.concat([table, other]), tables["latency"], 0.01)
    alone = smallest_table(table, tables["latency"], 0.01)
    columns = [name for name in alone if name.startswith("control_")]
    pd.testing.assert_frame_equal(both[both["recovery"] != "of_a_plug_in"][columns], alone[columns])
    assert set(both["recovery"]) - set(alone["recovery"]) == {"of_a_plug_in"}


def test_between_budgets_the_recovered_model_chooses_what_goes_next(
    tables: Mapping[str, pd.DataFrame], study: Study
) -> None:
    left, gone = study.subject, 0
    for kept in (5, 3):
        scores = Ablation()(left, study.splits.score, study.seed).values[0]
        lowest = scores.argsort(stable=True)[: 6 - kept - gone].tolist()
        left = left.without(HeadMask(left.grid, frozenset(left.grid.heads[n] for n in lowest)))
        gone = 6 - kept
        left = Refit()(study, left, 0, None, lambda state: None)[0]
        row = one(tables["recovery"], schedule="one_shot", recovery="refit_between", heads_kept=kept)
        assert row["kept"].split() == [str(head) for head in left.grid]
        assert row["steps"] == 0
        assert row["loss"] == pytest.approx(loss_of(left, study.splits.report), rel=1e-5)


def test_the_control_has_the_shape_of_the_best_and_nothing_else_of_it(
    tables: Mapping[str, pd.DataFrame], study: Study
) -> None:
    table = tables["recovery"]
    control, own = table[table["control"]], table[~table["control"]]
    assert sorted(control["heads_kept"]) == [3, 3, 5, 5]
    for kept, rows in control.groupby("heads_kept"):
        best = own[own["heads_kept"] == kept].sort_values(
            ["choose_quality", "choose_loss"], ascending=[False, True], kind="stable"
        )
        assert set(rows["removed"]) == {best.iloc[0]["removed"]}
        assert list(rows["draw"]) == [0, 1]
        assert set(rows["steps"]) == {study.training.steps + 30}, "as long as the longest"
    row = one(control, heads_kept=3, draw=1)
    left = study.subject.without(mask_of(study, row["removed"]))
    twins = [FromScratch()(study_with(study, 30), left, draw, None, lambda state: None)[0] for draw in (0, 1)]
    assert exact(twins[1], study.splits.report) == pytest.approx(row["quality"])
    assert twins[1].grid.sizes == left.grid.sizes
    assert not torch.equal(twins[0].output.bias, twins[1].output.bias)


def test_the_smallest_is_within_tolerance_and_nothing_smaller_is(tables: Mapping[str, pd.DataFrame]) -> None:
    table, smallest = tables["recovery"], tables["smallest"]
    dense = table[(table["recovery"] == "nothing") & (table["heads_kept"] == 6)].iloc[0]
    bar = dense["choose_quality"] - 0.01
    assert len(smallest) == 9
    assert np.allclose(table["choose_drop"], dense["choose_quality"] - table["choose_quality"])
    assert (smallest["heads_removed_sure"].isna() == smallest["control"]).all()
    means = table[table["control"]].groupby("heads_kept")[["quality", "choose_quality"]].mean()
    fits = means.index[means["choose_quality"] >= bar]
    control = one(smallest, control=True)
    assert (control["schedule"], control["recovery"]) == ("best of each size", "from_scratch")
    assert control["heads_kept"] == min(fits, default=6)
    if len(fits):
        assert control["quality"] == pytest.approx(means.loc[min(fits), "quality"])
    for row in smallest[~smallest["control"]].to_dict("records"):
        mine = table[(table["schedule"] == row["schedule"]) & (table["recovery"] == row["recovery"])]
        fits = mine.loc[mine["choose_quality"] >= bar, "heads_kept"]
        assert row["heads_kept"] == min(fits, default=6)
        control = table[table["control"] & (table["heads_kept"] == row["heads_kept"])]["quality"]
        assert row["control_draws"] == len(control)
        if len(control):
            assert row["control_quality"] == pytest.approx(control.mean())


def test_the_saved_models_are_those_of_the_table(
    folder: Path, tables: Mapping[str, pd.DataFrame], study: Study
) -> None:
    smallest = tables["smallest"].query("heads_removed > 0 and not control")
    assert len(smallest) > 1
    for row in smallest.to_dict("records"):
        words = dict.fromkeys((row["schedule"], row["scorer"], row["recovery"], str(row["heads_kept"])))
        saved = load(str(folder / "models" / f"{'-'.join(words)}.pt"))
        assert " ".join(map(str, saved.heads)) == row["kept"]
        left = study.subject.without(mask_of(study, row["removed"]))
        left.load_state_dict(saved.weights)
        assert exact(left, study.splits.report) == pytest.approx(row["quality"])
    assert len(list((folder / "models").iterdir())) == len(smallest)


def test_gates_trained_on_what_is_left_are_kept_for_what_is_left(study: Study) -> None:
    asked: list[Any] = []

    def remember(kind: str, what: dict[str, Any], make: Any) -> dict[str, Any]:
        asked.append(what)
        return make(None, None)

    trained = replace(study, scorers={"subset": Subset(steps=1)}, remember=remember)
    for gone in ("cross.0.0", "cross.0.1"):
        left = study.subject.without(mask_of(study, gone))
        plan = choose_next(trained, "subset", "one_shot", left, 3)
        assert len(plan.mask.removed) == 2
    first, second = asked
    assert first["left"] != second["left"]


@pytest.mark.slow
def test_what_was_trained_before_counts_for_the_control_and_how_far_the_controls_are_is_known(
    study: Study, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, seen = FromScratch.__call__, []

    def spied(self: FromScratch, *arguments: Any) -> Any:
        seen.append([(step.what, step.total) for step in under_way])
        return plain(self, *arguments)

    monkeypatch.setattr(FromScratch, "__call__", spied)
    (file, *_) = (folder / "models").glob("greedy-fine_tune-*.pt")
    assert load(str(file)).steps_since == 30
    settings = ["experiment=prune", f"model_file={file}", "schedule=greedy", "recovery=[fine_tune,from_scratch]"]
    small = ["recovery.fine_tune.steps=4", "recovery.from_scratch.draws=1", "experiment.budgets=[1]", *FEW_ROUNDS]
    with RunFolder(tmp_path / "run").recorded() as recorded:
        build(compose(*settings, *small, f"cache={tmp_path / 'cache'}"))(recorded)
    control = tables_of(tmp_path / "run")["recovery"].query("control")
    assert list(control["steps"]) == [study.training.steps + 30 + 4]
    (steps,) = seen
    assert steps[1:3] == [("controls", 1), ("from_scratch", 1)]


def test_a_control_that_diverged_is_not_taken_for_one(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FromScratch, "__call__", diverge)
    plan = trials.Plan("a", 0, "one", mask_of(study, "cross.0.0"))
    work = trials_of(study, scratch=FromScratch(draws=1))
    (best,) = work.after([plan])
    (control,) = work.controls("scratch", [best])
    assert np.isnan(control.columns["quality"])
    assert control.columns["note"].startswith("diverged")
    assert not np.isnan(best.columns["quality"])


def diverge(*_: Any) -> Any:
    raise Diverged("the loss is nan")


def test_ten_comes_after_nine() -> None:
    outcome = AnswerOutcome(*(torch.tensor([1.0, 0.0, 1.0]) for _ in AnswerOutcome._fields))
    assert list(by_group(outcome, ["10 symbols", "9 symbols", "10 symbols"])["group"]) == ["9 symbols", "10 symbols"]


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_ends_in_the_same_tables(
    cache: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine_tuned = [one for one in PRUNE if "from_scratch" not in one and "schedule" not in one]
    fine_tuned += ["schedule=[one_shot]", "recovery=[fine_tune]"]
    tables = run(tmp_path / "whole", cache, fine_tuned)
    made: list[str] = []
    plain = FineTune.__call__

    def counted(self: FineTune, study: Study, left: Seq2Seq, *rest: Any) -> Any:
        made.append(" ".join(map(str, left.grid)))
        if len(made) == 2:
            raise KeyboardInterrupt
        return plain(self, study, left, *rest)

    monkeypatch.setattr(FineTune, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", tmp_path / "cache", fine_tuned)
    assert read_status(tmp_path / "run")["status"] == "failed"
    again = run(tmp_path / "run", tmp_path / "cache", fine_tuned)
    assert made[1] == made[2], "it goes on with what was interrupted"
    assert made[0] not in made[2:]
    for name, table in tables.items():
        clock = [column for column in CLOCK if column in table]
        pd.testing.assert_frame_equal(table.drop(columns=clock), again[name].drop(columns=clock))


def test_equal_masks_are_recovered_once(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    grid: HeadGrid = study.subject.grid
    plan = trials.Plan("a", 0, "one", HeadMask(grid, frozenset(grid.heads[:2])))
    calls: list[Any] = []
    plain = trials.recover
    monkeypatch.setattr(trials, "recover", lambda *rest: calls.append(rest) or plain(*rest))
    work = trials_of(study, tuned=FineTune(steps=1))
    rows = list(work.after([plan, plan._replace(scorer="b")]))
    assert [row.columns["scorer"] + row.columns["recovery"] for row in rows] == [
        "anothing",
        "atuned",
        "bnothing",
        "btuned",
    ]
    assert len(calls) == 1


@pytest.mark.usefixtures("bias_lost_with_the_heads")
def test_a_removal_that_is_not_the_mask_fails_at_the_end_and_between(study: Study) -> None:
    grid = study.subject.grid
    plan = trials.Plan("a", 0, "one", HeadMask(grid, frozenset(grid)))
    work = trials_of(study, tuned=Refit(when="between"))
    with pytest.raises(ProofFailed):
        list(work.after([plan]))
    with pytest.raises(ProofFailed):
        list(work.between("tuned", lambda left, budget: plan, [6]))


@pytest.mark.parametrize("order", [1, -1])
def test_of_equal_qualities_the_smaller_loss_is_chosen(order: int, study: Study) -> None:
    heads = study.subject.grid.heads
    cases = [(heads[0], 0.9, 0.2), (heads[1], 0.9, 0.1), (heads[2], 0.8, 0.0)]
    found: Any = [
        SimpleNamespace(
            plan=trials.Plan("a", 0, "one", HeadMask(study.subject.grid).without(head)),
            columns={"choose_quality": quality, "choose_loss": loss},
        )
        for head, quality, loss in cases
    ]
    [best] = best_of_each_size(found[::order])
    assert best.columns == {"choose_quality": 0.9, "choose_loss": 0.1}


def test_controls_of_several_kinds_stand_beside_the_whole_model_on_one() -> None:
    draws = {"quality": [0.85, 0.25], "dense_quality": [0.9, 0.3], "kind": ["one", "other"]}
    way = {"schedule": "greedy", "scorer": "greedy", "recovery": "from_scratch", "control": True, "heads_kept": 2}
    same = {**way, "choose_quality": 0.5, "choose_drop": 0.05}
    ((_, rows),) = _ways(pd.DataFrame(draws).assign(**same, draw=[0, 1]))
    assert rows["quality"].tolist() == pytest.approx([0.85]), "each loses 0.05 of its own"
    assert rows["dense_quality"].tolist() == [0.9]
