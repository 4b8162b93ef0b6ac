from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mhaprune.cache import Cache
from mhaprune.data import Examples
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.gate import Gate
from mhaprune.scorers.random import Random
from mhaprune.scorers.subset import Subset
from mhaprune.scoring import Make, Scoring, heads_table
from mhaprune.subject import Subject
from mhaprune.tasks.base import Splits
from mhaprune.transformer import Seq2Seq


@dataclass(frozen=True)
class Broken(Scorer):
    family: ClassVar[str] = "none"

    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        values = torch.zeros(1, len(subject.grid))
        values[0, 2] = float("nan")
        return Scores(values)


def test_a_row_per_scorer_draw_and_head(model: Seq2Seq, splits: Splits) -> None:
    scorers = {"gate": Gate(), "ablation": Ablation(), "random": Random(draws=2)}
    heads = heads_table(Scoring(model, splits.score, 0), scorers)
    assert len(heads) == 4 * len(model.grid)
    ablation = heads[heads["scorer"] == "ablation"].reset_index()
    assert [f"{r.site}.{r.layer}.{r.head}" for r in ablation.itertuples()] == [str(head) for head in model.grid]
    assert ablation.loc[ablation["rank"] == 1, "score"].item() == ablation["score"].max()
    assert sorted(ablation["rank"]) == list(range(1, len(model.grid) + 1))
    assert ablation["stderr"].notna().all()
    assert heads.loc[heads["scorer"] == "gate", "stderr"].isna().all()
    assert (heads["seconds"] > 0).all()


def test_a_score_that_is_not_finite_is_named(model: Seq2Seq, splits: Splits) -> None:
    with pytest.raises(
        ValueError, match=r"scorer=broken: gives head encoder_self.0.2 the score nan, which is not finite"
    ):
        Scoring(model, splits.score, 0)("broken", Broken())


def test_a_scorer_that_trains_is_remembered_and_no_other(model: Seq2Seq, splits: Splits, tmp_path: Path) -> None:
    cache = Cache(tmp_path)

    def remember(kind: str, what: dict[str, Any], make: Make) -> dict[str, Any]:
        return cache.get(kind, {"model": 1} | what, make)

    first, second = (Scoring(model, splits.score, 0, remember) for _ in range(2))
    for keep in (5, 9):
        one = first("subset", Subset(keep=keep, steps=3))
        assert torch.equal(one.scores.values, second("subset", Subset(keep=keep, steps=3)).scores.values)
        assert one.seconds == second("subset", Subset(keep=keep, steps=3)).seconds > 0
    first("ablation", Ablation())
    assert len(list(tmp_path.glob("*.pt"))) == len(list(tmp_path.glob("gates-*.pt"))) == 2
    cost = first.cost([Subset(keep=5, steps=3), Subset(keep=9, steps=3), Subset(keep=9, steps=3), Gate()])
    assert cost["forward_passes"] == cost["backward_passes"] == 2 * 3 * 32 / len(splits.score)
