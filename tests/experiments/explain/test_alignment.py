"""Heads that look at the source symbols which the written symbol stands for."""

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from scipy import stats

from mhaprune.data import Splits
from mhaprune.heads import BlockId
from mhaprune.inputs import Known
from mhaprune.lab.experiments.explain.alignment import (
    OFFSETS,
    alignment_sentences,
    alignment_table,
    without_duplicates,
)
from mhaprune.lab.experiments.explain.patterns import ALIGNED, observe
from mhaprune.lab.experiments.truth.truth import aligning
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.reverse import Reverse
from mhaprune.lab.tasks.running_sum import RunningSum
from mhaprune.lab.tasks.sequences import SPECIAL, Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.subject import AttentionMap
from mhaprune.tables import HEAD

SIZES = {"num_symbols": 5, "train": 40, "valid": 20, "score": 40, "choose": 20, "report": 20, "max_length": 6}
REVERSE = Reverse(**SIZES)


def letters(row: torch.Tensor) -> int:
    return int((row >= len(SPECIAL)).sum())


def test_a_task_that_knows_no_alignment_has_none(splits: Splits) -> None:
    assert RunningSum(**SIZES).alignment(splits.score) is None


def test_the_places_are_those_of_the_task() -> None:
    examples = REVERSE.splits().score
    aligned = REVERSE.alignment(examples)
    assert aligned is not None
    places_BTS = aligned(examples)
    for places, source in zip(places_BTS, examples.source, strict=True):
        n = letters(source)
        expected = {(t, n - 1 - t) for t in range(n)}
        assert {(t, s) for t, s in places.nonzero().tolist()} == expected, "and nothing for the end of the sequence"


def scored(model: Seq2Seq) -> pd.DataFrame:
    heads = [(str(head.site), head.layer, head.head) for head in model.grid]
    frame = pd.DataFrame(heads, columns=HEAD).assign(scorer="ablation", draw=0)
    scores = torch.rand(len(heads), generator=torch.Generator().manual_seed(1)).tolist()
    return frame.assign(score=scores, rank=1)


@pytest.fixture
def found(model: Seq2Seq) -> tuple[pd.DataFrame, Examples]:
    examples = REVERSE.splits().score
    aligned = REVERSE.alignment(examples)
    assert aligned is not None
    patterns = observe(model, examples, aligned).patterns
    return alignment_table(aligned, examples, patterns, scored(model))["alignment"], examples


def test_accuracy_counts_the_symbols_whose_largest_weight_is_right(
    found: tuple[pd.DataFrame, Examples], model: Seq2Seq
) -> None:
    table, examples = found
    assert set(table["site"]) == {str(Site.CROSS)}
    maps = {block: seen.weights for block, seen in model.attention_maps(examples).items() if block.site == Site.CROSS}
    for row in table.to_dict("records"):
        (weights,) = (weights for block, weights in maps.items() if block.layer == row["layer"])
        hits, symbols = 0, 0
        for example, source in zip(weights[:, row["head"]], examples.source, strict=True):
            n = letters(source)
            hits += sum(int(example[t].argmax()) == n - 1 - t for t in range(n))
            symbols += n
        assert row["accuracy"] == pytest.approx(hits / symbols)
    assert table["accuracy"].nunique() > 1
    expected = stats.spearmanr(table["accuracy"], table["score"]).statistic
    assert table["spearman"].tolist() == pytest.approx([expected] * len(table))


def test_the_best_fixed_distance_is_the_control(found: tuple[pd.DataFrame, Examples]) -> None:
    table, examples = found
    sizes = [letters(source) for source in examples.source]
    shares = [sum(sum(t + by == n - 1 - t for t in range(n)) for n in sizes) / sum(sizes) for by in OFFSETS]
    assert table["offset_accuracy"].tolist() == pytest.approx([max(shares)] * len(table))
    assert min(shares) < max(shares)


def test_a_pattern_that_has_a_name_already_is_not_shown_twice(model: Seq2Seq, splits: Splits, task: Sort) -> None:
    plain = observe(model, splits.score).patterns
    aligned = task.alignment(splits.score)
    assert aligned is not None
    both = observe(model, splits.score, aligned).patterns
    assert ALIGNED in set(both["pattern"])
    pd.testing.assert_frame_equal(without_duplicates(both).reset_index(drop=True), plain)
    moved = both.assign(mass=both["mass"].where(both["pattern"] != ALIGNED, both["mass"] / 2))
    assert ALIGNED in set(without_duplicates(moved)["pattern"]), "of other places"


def test_the_best_head_is_named_beside_its_controls(found: tuple[pd.DataFrame, Examples]) -> None:
    table, _ = found
    best = table.loc[table["accuracy"].idxmax()]
    (first,) = alignment_sentences({"alignment": table})
    assert first.startswith(f"cross.{best['layer']}.{best['head']} aligns best: for {100 * best['accuracy']:.1f} % of")
    assert f"{100 * best['offset_accuracy']:.1f} % for a head" in first
    assert list(alignment_sentences({})) == []


def test_heads_that_align_are_known_heads(model: Seq2Seq, monkeypatch: pytest.MonkeyPatch) -> None:
    report, maps_of = REVERSE.splits().report, model.attention_maps

    def one_aligns(batch: Examples) -> dict[BlockId, AttentionMap]:
        maps = maps_of(batch)
        maps[BlockId(Site.CROSS, 1)].weights[:, 2] = REVERSE.alignment(report)(batch).float()  # type: ignore[misc]
        return maps

    monkeypatch.setattr(model, "attention_maps", one_aligns)
    study: Any = SimpleNamespace(subject=model, splits=SimpleNamespace(report=report), task=REVERSE)
    assert aligning(study) == Known({"cross.1.2": "aligns"}, ("aligns",), "alignment")
    study.task = RunningSum(**SIZES)
    with pytest.raises(ValueError, match=r"^experiment.known=alignment: needs a task that knows what the symbols"):
        aligning(study)
