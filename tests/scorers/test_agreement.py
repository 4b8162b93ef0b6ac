from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.agreement import rank_agreement, with_reference
from mhaprune.scorers.gate import Gate
from mhaprune.scorers.random import Random
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.tasks.base import Splits


def test_agreement_is_between_the_scorers_that_draw_once(model: Seq2Seq, splits: Splits) -> None:
    scorers = {"gate": Gate(), "ablation": Ablation(), "random": Random(draws=2)}
    heads = heads_table(Scoring(model, splits.score, 0), scorers)
    agreement = rank_agreement(heads)
    assert agreement[["scorer", "other"]].to_numpy().tolist() == [["gate", "ablation"]]
    row = with_reference(agreement, "gate")
    gate, ablation = (heads.loc[heads["scorer"] == name, "score"].to_numpy() for name in ("gate", "ablation"))
    lowest = [set(np.argsort(scores, kind="stable")[: len(gate) // 2]) for scores in (gate, ablation)]
    assert row["spearman"] == pytest.approx(stats.spearmanr(gate, ablation).statistic)
    assert row["kendall"] == pytest.approx(stats.kendalltau(gate, ablation).statistic)
    assert row["overlap"] == pytest.approx(len(lowest[0] & lowest[1]) / row["overlap_heads"])
    for name in ("spearman", "kendall", "overlap"):
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert with_reference(agreement, "ablation") == with_reference(agreement, "random") == {}
