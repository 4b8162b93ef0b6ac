from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from mhaprune.data import Splits
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.agreement import rank_agreement, spearman, with_reference
from mhaprune.scorers.gate import Gate
from mhaprune.scorers.random import Random
from mhaprune.scorers.scoring import Scoring, heads_table


@pytest.mark.parametrize("digits", [9, 1, 0])
@pytest.mark.parametrize("seed", range(4))
def test_the_correlation_is_scipys_with_any_number_of_ties(seed: int, digits: int) -> None:
    first, noise = np.random.default_rng(seed).normal(size=(2, 13))
    first, second = np.round(first, digits), np.round(first + noise, digits)
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert spearman(pd.Series(first, index=range(13, 0, -1)), second.tolist()) == spearman(first, second)
    assert spearman(np.exp(first), second**3) == spearman(first, second)
    assert spearman(first, first) == 1


def test_a_constant_column_agrees_with_nothing() -> None:
    varied = np.arange(6.0)
    for pair in ((varied, np.ones(6)), (np.ones(6), varied), (np.ones(6), np.ones(6)), ([1.0], [2.0]), ([], [])):
        assert math.isnan(spearman(*pair))
    assert spearman(varied, -varied) == -1


def test_agreement_is_between_the_scorers_that_draw_once(model: Seq2Seq, splits: Splits) -> None:
    scorers = {"gate": Gate(), "ablation": Ablation(), "random": Random(draws=2)}
    heads = heads_table(Scoring(model, splits.score, 0), scorers)
    agreement = rank_agreement(heads)
    assert agreement[["scorer", "other"]].to_numpy().tolist() == [["gate", "ablation"]]
    gate, ablation = (heads.loc[heads["scorer"] == name, "score"].to_numpy() for name in ("gate", "ablation"))
    assert with_reference(agreement, "gate") == pytest.approx(stats.spearmanr(gate, ablation).statistic)
    assert math.isnan(with_reference(agreement, "ablation"))
    assert math.isnan(with_reference(agreement, "random"))
