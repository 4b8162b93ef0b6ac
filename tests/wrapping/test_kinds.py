"""Splits by kind: every number beside that of a model wrapped with this kind alone."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import mhaprune
from mhaprune import losses
from mhaprune.api.promise import fastest_within
from mhaprune.api.wrap import Heads
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.experiments.ablate import accuracy_curves
from mhaprune.recoveries.refit import Refit
from mhaprune.recoveries.refitting import correct, show
from support.classifier import batches, classifier

Given = dict[str, list[dict[str, Tensor]]]


def low_and_high(count: int, seed: int) -> Given:
    """Texts of small numbers and of large ones; of the large ones, fewer."""
    kinds: Given = {"low": [], "high": []}
    for n, batch in enumerate(batches(count, seed)):
        kinds["low"].append({**batch, "input_ids": batch["input_ids"] % 5 + 1})
        if n:
            kinds["high"].append({**batch, "input_ids": batch["input_ids"] % 5 + 6})
    return kinds


GIVEN: dict[str, Any] = {"score": low_and_high(3, 1), "choose": low_and_high(6, 2), "report": low_and_high(4, 3)}


def wrapped(**given: Any) -> Heads:
    return mhaprune.wrap(classifier(), losses.classification, **given)


@pytest.fixture(scope="module")
def heads() -> Heads:
    return wrapped(**GIVEN)


@pytest.fixture(scope="module")
def alone() -> dict[str, Heads]:
    return {kind: wrapped(**{name: split[kind] for name, split in GIVEN.items()}) for kind in ("low", "high")}


@pytest.fixture(scope="module")
def of_all() -> Heads:
    """Of both kinds, which are not told apart."""
    return wrapped(**{name: [*split["low"], *split["high"]] for name, split in GIVEN.items()})


def test_evaluate_has_a_row_per_kind_as_if_it_were_alone_and_names_the_worst(
    heads: Heads, alone: dict[str, Heads]
) -> None:
    masks = [{0: [0]}, {1: [1, 2]}, {0: [1, 2, 3], 1: [0, 3]}]
    table = heads.evaluate(*masks)
    assert len(table) == 8
    for kind, other in alone.items():
        rows = table[table["kind"] == kind].drop(columns=["kind", "worst"]).reset_index(drop=True)
        pd.testing.assert_frame_equal(rows, other.evaluate(*masks))
    quality = table.pivot_table(index="removed", columns="kind", values="quality", sort=False)
    worst = table[table["worst"]].set_index("removed")["kind"]
    for removed, row in (quality - quality.iloc[0]).iloc[1:].iterrows():
        assert row[worst[removed]] == row.min()
    assert set(worst) == {"low", "high"}, "else nothing is told"


@pytest.mark.parametrize("scorer", ["ablation", "gate_output", "taylor", "surgeon", "taylor_batch"])
def test_a_score_has_rows_per_kind_as_if_it_were_alone(
    heads: Heads, alone: dict[str, Heads], of_all: Heads, scorer: str
) -> None:
    table = heads.score(scorer)
    assert table["kind"].unique().tolist() == ["all", "low", "high"]
    for kind, one in {"all": of_all, **alone}.items():
        rows, other = table[table["kind"] == kind].reset_index(drop=True), one.score(scorer)
        for column in ("score", "score_low", "score_high"):
            torch.testing.assert_close(*(torch.tensor(each[column]) for each in (rows, other)), equal_nan=True)
        assert rows["rank"].tolist() == other["rank"].tolist()


def test_a_score_that_reads_no_examples_has_no_kinds(heads: Heads) -> None:
    assert "kind" not in heads.score("magnitude")


@pytest.mark.parametrize("scorer", ["ablation", "surgeon"])
def test_over_the_worst_kind_a_head_stays_that_one_kind_needs(
    heads: Heads, alone: dict[str, Heads], scorer: str
) -> None:
    scores = torch.stack([torch.tensor(other.score(scorer)["score"]) for other in alone.values()])
    worst = scores.amax(dim=0)
    for keep in range(1, 8):
        kept = {heads.grid.heads[n] for n in worst.argsort(descending=True)[:keep].tolist()}
        assert set(heads.mask(keep, by=scorer, over="worst").kept) == kept
    assert any(heads.mask(n, by=scorer, over="worst") != heads.mask(n, by=scorer) for n in range(1, 8))
    again = heads.mask(3, by=scorer, over="worst", rescore_every=2)
    assert len(again.kept) == 3


@pytest.mark.slow
def test_within_holds_for_every_kind(heads: Heads, alone: dict[str, Heads]) -> None:
    order = torch.rand(8, generator=torch.Generator().manual_seed(0)).tolist()
    masks = heads.masks(list(range(7, 0, -1)), by=order)

    def kept(found: Heads, within: float) -> int:
        own = [HeadMask(found.grid, mask.removed) for mask in masks]
        try:
            return len(fastest_within(found, within, lambda *_, **__: own, found.without).grid)
        except ValueError:  # not met by any
            return 8

    decides = set()
    for within in (0.05, 0.08, 0.1, 0.14, 0.2):
        each = {kind: kept(other, within) for kind, other in alone.items()}
        assert kept(heads, within) == max(each.values())
        decides |= {kind for kind, count in each.items() if count > min(each.values())}
    assert decides == {"low", "high"}, "else one of them decides nothing"
    small = heads.prune(within=0.9, by="ablation", over="worst")
    assert sum(layer.num_heads for layer in small.attention) < 8  # type: ignore[union-attr,misc]
    with pytest.raises(ValueError, match=r"of accuracy is lost on (low|high), and [\d.]+ is not excluded"):
        heads.prune(within=0.0, by=order)


@pytest.mark.parametrize("contrary", [False, True])
@torch.no_grad()
def test_the_ridge_of_a_refit_is_the_best_on_kinds_that_were_left_out(contrary: bool) -> None:
    """Also if one kind asks for the contrary and lacks little: each error counts as a share."""
    draw = torch.Generator().manual_seed(0)
    truth, noise = torch.randn(12, 3, generator=draw).double(), 0.3 if contrary else 3.0
    kinds, parts = ["a", "a", "b", "b", "b", "c"], []
    for kind in kinds:
        A = torch.randn(5, 12, generator=draw).double()
        own = truth + {"a": 0.0, "b": 0.5, "c": -0.5}[kind] * (not contrary)
        own, scale = (-truth, 0.1) if contrary and kind == "c" else (own, 1.0)
        parts.append((A, scale * (A @ own + noise * torch.randn(5, 3, generator=draw).double())))
    ridges = [1e-3, 0.1, 1.0, 10.0, 1000.0]

    def fitted(of: list[int], ridge: float) -> Tensor:
        weight = torch.zeros(3, 12).double()
        correct(weight, None, [parts[n] for n in of], ridge)
        return weight

    def error(ridge: float, shares: bool = True) -> float:
        total = 0.0
        for kind in "abc":
            held = [n for n, each in enumerate(kinds) if each == kind]
            weight = fitted([n for n in range(6) if n not in held], ridge)
            lacking = sum(float((parts[n][0] @ weight.T - parts[n][1]).square().sum()) for n in held)
            total += lacking / (sum(float(parts[n][1].square().sum()) for n in held) if shares else 1)
        return total

    best = min(ridges, key=error)
    told = best != min(ridges, key=lambda ridge: error(ridge, shares=False)) if contrary else best in ridges[1:-1]
    assert told, "else it says little"
    chosen = torch.zeros(3, 12).double()
    correct(chosen, None, parts, ridges, kinds)
    torch.testing.assert_close(chosen, fitted([*range(6)], best))


def test_a_refit_reads_as_many_of_each_kind(heads: Heads) -> None:
    split = heads.splits.score
    assert [len(rows) for rows in split.evenly(1).by_kind().values()] == [1, 0]
    for number in (8, 20, 24, 29, 30, 100):
        counts = [len(rows) for rows in split.evenly(number).by_kind().values()]
        assert counts == [min(18, max(number // 2, number - 12)), min(12, number // 2)], number
    targets = show(heads.subject, split)
    read = [
        sum(len(b) for b, k in zip(targets.batches, targets.kinds, strict=True) if k == kind)
        for kind in ("low", "high")
    ]
    assert read == [18, 12], "no batch holds both kinds"
    study = Study.of(heads)
    small, _ = Refit(examples=20)(study, heads.without({0: [1]}), 0, None, print)
    assert len(small.grid) == 7


@pytest.mark.slow
def test_a_report_has_the_worst_kind_and_a_row_for_each(heads: Heads) -> None:
    found = heads.report(by=["ablation", "random"], budgets=[0.25, 0.5], rounds=2)
    pruning, groups = found.tables["pruning"], found.tables["groups"]
    assert {*pruning["kind"], *pruning["choose_kind"].dropna()} == {"low", "high"}
    assert groups["group"].unique().tolist() == ["high", "low"]
    assert "Numbers are of the kind of examples that loses most, of low, high." in found.sentences
    assert all(
        f"with all heads, on {kind})" in " ".join(found.sentences) for kind in found.tables["summary"]["kind"][:1]
    )
    for removed, kind, quality in pruning[["removed", "kind", "quality"]].itertuples(index=False):
        table = heads.evaluate(removed.split() if removed else HeadMask(heads.grid)).iloc[2:]
        row = table[table["worst"]]
        assert row["kind"].item() == kind
        assert row["quality"].item() == pytest.approx(quality)
    drawn = next(iter(accuracy_curves(found.tables)))
    assert "beside the whole model on the kind of examples that loses most" in drawn.caption
    assert drawn.figure.axes[0].get_ylabel() == "change of accuracy, worst kind"
    heights = {y for line in drawn.figure.axes[0].lines for x, y in line.get_xydata() if x > 0}
    assert heights >= {*(pruning["quality"] - pruning["dense_quality"])[pruning["heads_removed"] > 0]}
    summary = found.tables["summary"]
    assert (summary["choose_drop"] <= summary["tolerance"]).all()
    for row in summary.to_dict("records"):
        own = (pruning["heads_removed"] == row["heads_removed"]) & (pruning["scorer"] == row["scorer"])
        kind = pruning[own]["kind"].iloc[0]
        if row["recovery"] == "nothing":
            whole = heads.evaluate().query("kind == @kind")["quality"].item()
            assert row["dense_quality"] == pytest.approx(whole), "on the same kind"


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    more = {name: torch.nn.functional.pad(batch[name], (0, 2)) for name in ("input_ids", "attention_mask")}
    return {**batch, **more, "labels": (batch["labels"] + 1) % 3}


LOW = low_and_high(2, 4)["low"]
REFUSED: dict[str, tuple[Any, str]] = {
    "one example": (
        {"low": LOW, "high": [{name: x[:1] for name, x in LOW[0].items()}]},
        "^score=high: has one example, a kind must have 2 or more",
    ),
    "the same text, padded": (
        {"low": LOW, "high": [padded(LOW[1])]},
        "^score=high: an example is one of low too, kinds must share none",
    ),
    "other tensors": (
        {"low": LOW, "high": [{"ids": torch.ones(3, 2).long()}]},
        "^score=high: must have batches like those of low, with attention_mask, input_ids, labels",
    ),
    "no name": ({"low": LOW, "": LOW}, "^score='': the name of a kind must be a text, and neither empty nor all"),
    "a number": ({"low": LOW, 1: LOW}, "^score=1: the name of a kind must be a text"),
    "the name of all": ({"low": LOW, "all": LOW}, "^score='all': the name of a kind must be a text"),
    "nothing": ({"low": LOW, "high": None}, "^score=high: is a NoneType, must be a list of batches or a DataLoader"),
    "kinds of kinds": ({"low": {"lower": LOW}, "high": LOW}, "^score=low: lower is a list with tensors in it"),
    "no batches": ({"low": LOW, "high": []}, "^score"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_kind_is_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        wrapped(score=given)


def test_what_kinds_cannot_decide_is_refused(heads: Heads, alone: dict[str, Heads]) -> None:
    with pytest.raises(ValueError, match=r"^over=worst: needs two kinds or more, wrap\(..., score="):
        alone["low"].mask(3, over="worst")
    with pytest.raises(ValueError, match="^over=worst: magnitude has no score on one kind of examples, leave it out"):
        heads.mask(3, by="magnitude", over="worst")
    with pytest.raises(ValueError, match="^over=worst: by= of your own has no score on one kind"):
        heads.mask(3, by=[1.0] * 8, over="worst")
    with pytest.raises(ValueError, match="^by=greedy: is a schedule that uses no scores, leave over= out"):
        heads.mask(3, by="greedy", over="worst")
    with pytest.raises(ValueError, match="^over='best': must be all or worst"):
        heads.mask(3, over="best")


def test_one_batch_that_is_a_dict_is_no_kind() -> None:
    assert len(wrapped(score=LOW[0]).splits.score) == 6
    assert not wrapped(score=LOW).splits.score.by_kind()
    kinds = wrapped(score={"low": LOW[0], "high": low_and_high(2, 4)["high"][0]}).splits.score.by_kind()
    assert {kind: len(rows) for kind, rows in kinds.items()} == {"low": 6, "high": 6}


def test_examples_that_are_lists_are_told_apart() -> None:
    def words(kind: str) -> list[dict[str, Any]]:
        return [{"text": [f"{kind} {n}" for n in range(6)], "labels": batch["labels"]} for batch in LOW[:1]]

    def call(model: Any, batch: Any) -> Any:
        ids = torch.tensor([[len(text), ord(text[0]) % 9 + 1, 3, 4] for text in batch["text"]])
        return model(ids, torch.ones_like(ids))

    heads = wrapped(score={"a": words("a"), "b": words("b")}, call=call)
    assert [*heads.splits.score.by_kind()] == ["a", "b"]
    with pytest.raises(ValueError, match="^score=b: an example is one of a too, kinds must share none"):
        wrapped(score={"a": words("a"), "b": words("a")}, call=call)


def test_corrupt_counterparts_have_the_kinds_of_score() -> None:
    score = {kind: given[:1] for kind, given in low_and_high(2, 7).items()}
    corrupt = {kind: [{**b, "input_ids": b["input_ids"].roll(1, 0)} for b in given] for kind, given in score.items()}
    heads = wrapped(score=score, corrupt=corrupt)
    assert heads.score("attribution_patching")["kind"].nunique() == 3
    with pytest.raises(ValueError, match="^corrupt: must have the kinds of score, each with as many examples"):
        wrapped(score=score, corrupt=dict(reversed(corrupt.items())))


def test_what_was_fitted_to_one_kind_alone_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """In print once, in the card and in the report; not if numbers are of kinds that were not read."""
    said, sentence = "nothing is measured on examples unlike those", " numbers are of examples like those that"
    kinds = {name: low_and_high(2, seed) for seed, name in enumerate(GIVEN)}
    plain: dict[str, Any] = {name: [*split["low"], *split["high"]] for name, split in kinds.items()}
    for given, unknown in ((kinds, True), (plain, True), ({**plain, "report": kinds["report"]}, False)):
        caplog.clear()
        heads = wrapped(**given)
        heads.prune(mask={0: [0]})
        assert said not in caplog.text, "nothing was fitted"
        for _ in range(2):
            mhaprune.save(heads.prune(mask={0: [0]}, refit=True), tmp_path)
        assert caplog.text.count(said) == unknown
        assert "On kinds of examples that are unlike them" in (tmp_path / "README.md").read_text()
        found = heads.report(by=["ablation"], budgets=[0.5], rounds=1)
        assert any(sentence in each for each in found.sentences) == unknown
        assert ("held_out" in found.tables) == any(each.startswith("All other") for each in found.sentences)
    mhaprune.save(heads.prune(mask={0: [0]}), tmp_path)
    assert "unlike them" not in (tmp_path / "README.md").read_text()


def test_a_refit_that_reads_a_part_of_the_examples_says_so(caplog: pytest.LogCaptureFixture) -> None:
    few = [{name: x.repeat(180, *[1] * (x.dim() - 1)) for name, x in batches(1, 1)[0].items()}]
    heads = wrapped(score=batches(2, 2), train=few)
    heads.prune(mask={0: [0]}, refit=True)
    assert 'refit: reads 1024 of the 1080 examples, refit={"examples": 1080} reads all' in caplog.text
    caplog.clear()
    heads.prune(mask={0: [0]}, refit={"examples": 20})
    assert "refit: reads" not in caplog.text, "as it was told"
    with pytest.raises(ValueError, match="^refit=steps: must be examples, ridge, feed_forward"):
        heads.prune(mask={0: [0]}, refit={"steps": 3})
