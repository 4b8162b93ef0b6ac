"""Pruned models on examples of other kinds."""

from dataclasses import replace
from math import nan
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.api.parsing import named_scorers
from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.experiments.shift import (
    group_sentence,
    groups_of,
    held_out_sentences,
    held_out_table,
    shift_quality,
    shift_sentences,
    shift_table,
)
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.reporting.plots import draw, number
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import measure
from mhaprune.recoveries.refit import Refit
from mhaprune.schedules.one_shot import OneShot
from mhaprune.subjects.batches import Batches
from support.classifier import batches, classifier
from support.figures import check_legible
from support.models import gated_model


def about(removed: int, recovery: str = "nothing") -> dict[str, Any]:
    return {"scorer": "ablation", "recovery": recovery, "heads_removed": removed}


def lengths(splits: Splits) -> list[str]:
    return [f"{int(length)} symbols" for length in splits.report.lengths()]


def test_without_examples_of_another_kind_there_is_no_table(model: Seq2Seq, splits: Splits) -> None:
    own = Splits(**{name: part for name, part in splits.items() if name not in splits.shifts})
    assert list(shift_table(model, own, lengths(own), [(about(0), model)])) == ["groups"]


def test_a_row_is_a_model_on_a_kind_of_examples_beside_the_whole_model(splits: Splits, task: Sort) -> None:
    model = gated_model(task)
    with torch.no_grad():
        model.output.bias[:2] -= 100  # it writes neither padding nor begin
    assert list(task.shifts()) == [f"{task.max_length + 1} symbols", "repeated symbols"]
    # Its own answers are right, so that without some heads a part of them is wrong.
    both = Splits(**{name: model.answered(part) for name, part in {"report": splits.report, **task.shifts()}.items()})
    mask = HeadMask(model.grid).without(*model.grid.heads[:4])
    tables = shift_table(model, both, lengths(both), [(about(4), model.without(mask))])
    table = tables["shift"]
    means = tables["groups"].assign(of=lambda own: own["quality"] * own["examples"]).groupby("scorer", sort=False)
    assert list(means["of"].sum() / len(both.report)) == pytest.approx(table["quality"].iloc[[0, 3]].tolist())
    assert table["quality"].iloc[:3].min() > 0.9
    assert table["drop"].iloc[3:].max() > 0.1
    assert list(table["scorer"]) == ["dense"] * 3 + ["ablation"] * 3
    assert list(table["examples_of"]) == ["report split", *both.shifts] * 2
    for row in table.to_dict("records"):
        examples = both.shifts.get(row["examples_of"], both.report)
        gates = mask.gates() if row["heads_removed"] else None
        quality = measure(model, examples, gates).quality.mean().item()
        assert row["quality"] == pytest.approx(quality)
        assert row["drop"] == pytest.approx(measure(model, examples).quality.mean().item() - quality)
        assert row["quality_low"] <= row["quality"] <= row["quality_high"]
        assert row["drop_low"] <= row["drop"] <= row["drop_high"]
        smaller = model.without(mask) if row["heads_removed"] else model
        assert row["confidence"] == pytest.approx(
            smaller.confidence(examples, smaller.evaluate(examples)).mean().item(), rel=1e-4
        )
        assert 0 <= row["ece"] <= 1


def table(*models: tuple[dict[str, Any], float]) -> dict[str, pd.DataFrame]:
    rows = [
        {**names, "examples_of": kind, "quality": quality - 0.5 * (kind != "report split")}
        for names, quality in (({**about(0), "scorer": "dense"}, 1.0), *models)
        for kind in ("report split", "longer")
    ]
    frame = pd.DataFrame(rows)
    ends = {f"quality{end}": frame["quality"] + by for end, by in (("_low", -0.01), ("_high", 0.01))}
    return {"shift": frame.assign(**ends, drop=1.0 - frame["quality"])}


def test_a_sentence_compares_the_smallest_model_of_each_recovery_with_the_whole_one() -> None:
    several = table((about(4), 0.9), (about(6), 0.8), (about(9, "refit"), 0.7))
    (line,) = shift_sentences(several)
    for words in ("longer", "50.0 % with all", "30.0 % without 6", "20.0 % without 9 after refit"):
        assert words in line
    assert "without 4" not in line
    (plot,) = draw((shift_quality,), several)
    assert "80.0 points" in plot.figure.legends[0].get_title().get_text()
    check_legible(plot)


def test_a_quality_that_is_no_share_is_not_in_points() -> None:
    """A cosine is none, even if it is from 0 to 1."""
    cosines = {"shift": table((about(4), 0.9))["shift"].assign(quality_name="similarity")}
    (plot,) = draw((shift_quality,), cosines)
    assert plot.figure.legends[0].get_title().get_text() == "Most is lost on longer: 0.600 of similarity"


def test_if_no_head_could_be_removed_nothing_is_said() -> None:
    assert list(shift_sentences(table((about(0), 1.0)))) == []
    assert list(shift_sentences({})) == []


def grouped(*models: tuple[dict[str, Any], float]) -> dict[str, pd.DataFrame]:
    """Models that lose a share of the four examples of two symbols, and one in a hundred of the others."""
    rows = [
        {**names, "group": group, "examples": examples, "quality": 1 - drop, "drop": drop, "drop_low": drop - within}
        for names, lost in (({**about(0), "scorer": "dense"}, 0.0), *models)
        for group, examples, drop, within in (("2 symbols", 4, lost, 0.5), ("9 symbols", 500, min(lost, 0.01), 0.009))
    ]
    return {"groups": pd.DataFrame(rows).assign(drop_high=lambda own: own["drop"])}


def test_the_group_that_loses_most_is_named_with_its_size_if_it_loses_for_sure() -> None:
    assert list(group_sentence(grouped((about(6), 0.25), (about(17, "refit"), 1.0)))) == [
        "Of 2 kinds of examples 2 symbols lose most (4 of the report split): exact match 100.0 % with all heads, 0.0 %"
        " without 17 after refit (95 % interval of the loss 0.50 to 1.00)."
    ]
    (large,) = group_sentence(grouped((about(6), 0.25)))
    assert "9 symbols lose most" in large, "one lost example of four is an accident"
    assert not list(group_sentence(grouped((about(6), 0.0))))


def test_of_a_group_of_one_example_there_is_no_interval(model: Seq2Seq, splits: Splits) -> None:
    own = Splits(report=splits.report[:5])
    tables = shift_table(model, own, ["a", "a", "b", "b", "c"], [(about(4), model.without(HeadMask(model.grid)))])
    assert tables["groups"]["group"].tolist() == ["a", "b", "c"] * 2
    ends = tables["groups"][["quality_low", "drop_low", "drop_high"]]
    assert (ends.isna().all(axis=1) == (tables["groups"]["examples"] == 1)).all()
    assert not shift_table(model, own, ["a"] * 5, [])


def test_examples_of_a_pretrained_model_are_grouped_by_label_or_by_length() -> None:
    report = Batches.of([{"x": torch.zeros(2, width), "labels": torch.tensor([1, 0])} for width in (3, 4)], "report")
    assert groups_of(SimpleNamespace(task=None, splits=Splits(report=report))) == ["label 1", "label 0"] * 2
    widths = [9] * 8 + [3, 4] * 6 + [5] * 6 + [8] * 8
    texts = Batches.of([{"input_ids": torch.ones(1, width, dtype=torch.long)} for width in widths], "report")
    by_length = groups_of(SimpleNamespace(task=None, splits=Splits(report=texts)))
    assert dict(zip(widths, by_length, strict=True)) == {
        3: "3 to 4 tokens",
        4: "3 to 4 tokens",
        5: "5 tokens",
        8: "8 tokens",
        9: "9 tokens",
    }
    few = groups_of(SimpleNamespace(task=None, splits=Splits(report=texts[6:12])))
    assert set(few) == {"3 to 9 tokens"}, "too few for parts"


@pytest.fixture(scope="module")
def alike() -> Study:
    """A study of a wrapped model whose quality is any number up to 1, with texts of many lengths, longest last."""
    data = batches(12)
    drift = losses.Drift(represent=lambda output, batch: output["logits"])
    heads = mhaprune.wrap(classifier().eval(), drift, score=data[:8], choose=data[8:10], report=data[2:])
    return replace(Study.of(heads), recoveries={"refit": Refit(), "kept": Slow()})


class Slow(Refit):
    kept = True


def test_what_is_refitted_to_the_shorter_half_is_judged_on_the_longer_examples(alike: Study) -> None:
    """Beside a refit to as many of all lengths, so that only the lengths differ."""
    subject, read, report = alike.subject, alike.splits.train, alike.splits.report
    mask = HeadMask(subject.grid).without(*subject.grid.heads[:3])
    table = held_out_table(alike, [("refit", mask)])["held_out"]
    lengths = read.lengths().tolist()
    longest = sorted(lengths)[(len(lengths) - 1) // 2]
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(alike.seed)).tolist()
    shorter = [n for n in order if lengths[n] <= longest]
    drawn = order[: len(shorter)]
    assert len(shorter) < len(lengths)
    assert max(lengths[n] for n in drawn) > longest
    long = report[torch.tensor([n for n, length in enumerate(report.lengths().tolist()) if length > longest])]
    expected = []
    for rows in (shorter, drawn):
        fitted = replace(alike, splits=Splits(**{**alike.splits.given, "train": read[torch.tensor(rows)]}))
        small, _ = Refit()(fitted, subject.without(mask), 0, None, print)
        expected.append(measure(small, long).quality.mean().item())
    assert abs(expected[0] - expected[1]) > 1e-3, "the lengths matter"
    assert table["quality"].tolist() == pytest.approx(expected, abs=1e-5)
    assert table["fitted_to"].tolist() == [f"up to {longest} tokens", "all lengths"]
    assert table["examples"].tolist() == [len(long)] * 2
    assert table["lost"].tolist() == pytest.approx([expected[1] - expected[0], 0], abs=1e-5)
    (said,) = held_out_sentences({"held_out": table.assign(quality_name="similarity")})
    low, high = table.loc[0, ["lost_low", "lost_high"]]
    assert said == (
        f"Held out by length: on the {len(long)} longer examples the model without 3 heads keeps {expected[1]:.3f}"
        f" after a refit on all lengths, {expected[0]:.3f} after one on as many examples of up to {longest} tokens"
        f" (95 % interval of the difference {number(low, 3)} to {number(high, 3)})."
    )
    (said,) = held_out_sentences({"held_out": table.assign(lost_low=-0.012, lost_high=0.034)})
    assert said.endswith("(95 % interval of the difference −1.2 to 3.4 points)."), "of an exact match"
    (said,) = held_out_sentences({"held_out": table.assign(lost_low=nan)})
    assert said.endswith(f"up to {longest} tokens.")


def test_nothing_is_held_out_of_one_length_of_few_examples_or_beside_other_kinds(alike: Study) -> None:
    mask = HeadMask(alike.subject.grid).without(alike.subject.grid.heads[0])
    given, read = alike.splits.given, alike.splits.train
    even = {name: part[(part.lengths() == 9).nonzero().flatten().repeat(4)] for name, part in given.items()}
    assert len(even["score"]) >= 8
    few = {**given, "report": given["report"][:8], "score": read[: len(read) // 2]}
    for splits in (even, few, {**given, "tweets": given["choose"]}):
        assert held_out_table(replace(alike, splits=Splits(**splits)), [("refit", mask)]) == {}
    assert held_out_table(alike, []) == {}


def test_a_report_holds_out_what_quick_recoveries_do_not_read(alike: Study) -> None:
    """A recovery that the cache keeps takes too long to be made twice more."""
    study = replace(alike, scorers=named_scorers(alike.subject, ["magnitude"]), schedules={"one_shot": OneShot()})
    experiment = Ablate(budgets=(0.5,), tolerance=1.0, latency_rounds=1)
    tables = experiment(study).tables
    assert set(tables["recovered"]["recovery"]) == {"refit", "kept"}
    assert tables["held_out"]["recovery"].tolist() == ["refit", "refit"]
    assert sum("Held out by length" in line for line in experiment.say(tables)) == 1
