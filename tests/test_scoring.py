from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mhaprune.data import Examples
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.gate import Gate
from mhaprune.scorers.random import Random
from mhaprune.scoring import agreement_table, heads_table, score_heads
from mhaprune.subject import Subject
from mhaprune.tasks.base import Splits
from mhaprune.transformer import Seq2Seq


@dataclass(frozen=True)
class Broken(Scorer):
    def __call__(self, subject: Subject, examples: Examples, seed: int) -> Scores:
        values = torch.zeros(1, len(subject.grid))
        values[0, 2] = float("nan")
        return Scores(values)


def test_a_row_per_scorer_draw_and_head(model: Seq2Seq, splits: Splits) -> None:
    scored = score_heads(model, {"gate": Gate(), "ablation": Ablation(), "random": Random(draws=2)}, splits.score, 0)
    heads = heads_table(model, scored)
    assert len(heads) == 4 * len(model.grid)
    ablation = heads[heads["scorer"] == "ablation"].reset_index()
    assert [f"{r.site}.{r.layer}.{r.head}" for r in ablation.itertuples()] == [str(head) for head in model.grid]
    assert ablation.loc[ablation["rank"] == 1, "score"].item() == ablation["score"].max()
    assert sorted(ablation["rank"]) == list(range(1, len(model.grid) + 1))
    assert ablation["stderr"].notna().all()
    assert heads.loc[heads["scorer"] == "gate", "stderr"].isna().all()
    assert (heads["seconds"] > 0).all()


def test_agreement_is_between_the_scorers_that_draw_once(model: Seq2Seq, splits: Splits) -> None:
    scorers = {"gate": Gate(), "ablation": Ablation(), "random": Random(draws=2)}
    agreement = agreement_table(heads_table(model, score_heads(model, scorers, splits.score, 0)))
    assert agreement[["scorer", "other"]].to_numpy().tolist() == [["gate", "ablation"]]
    assert -1 <= agreement["spearman"].item() <= 1


def test_a_score_that_is_not_finite_is_named(model: Seq2Seq, splits: Splits) -> None:
    with pytest.raises(
        ValueError, match=r"scorer=broken: gives head encoder_self.0.2 the score nan, which is not finite"
    ):
        score_heads(model, {"broken": Broken()}, splits.score, 0)
