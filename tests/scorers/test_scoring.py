"""Scores, with what goes with a mean, in a table and in the cache, and how far two of them agree."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.reporting.agreement import rank_agreement, spearman, with_reference
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.gate import Gate
from mhaprune.scorers.random import Random
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.statistics.intervals import moments
from mhaprune.storage.cache import Cache, Remember, weights_digest
from mhaprune.subject import Subject
from mhaprune_literature.subset import Subset


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


def in_cache(folder: Path, **key: Any) -> Remember:
    return lambda kind, what, make: Cache(folder).get(kind, key | what, make)


def test_a_score_that_is_not_finite_is_named_every_time_and_not_kept(
    model: Seq2Seq, splits: Splits, tmp_path: Path
) -> None:
    scoring, nan = Scoring(model, splits.score, 0), "gives head encoder_self.0.2 the score nan, which is not finite"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"scorer=broken: {nan}"):
            scoring("broken", Broken())
    with torch.no_grad():
        model.decoder_norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"scorer.subset.learning_rate=0.1: the loss of the gates is nan"):
        Scoring(model, splits.score, 0, in_cache(tmp_path))("subset", Subset(steps=2))
    assert not list(tmp_path.glob("*.pt"))


def test_what_a_scorer_refuses_is_said_with_the_key_that_is_at_fault(model: Seq2Seq, splits: Splits) -> None:
    scoring = Scoring(model.without(HeadMask(model.grid)), splits.score, 0)
    with pytest.raises(ValueError, match=r"^scorer.mine.keep=19: of 18 heads these are 19, allowed are 1 to 18"):
        scoring("mine", Subset(keep=19))
    with pytest.raises(ValueError, match=r"^scorer.mine.replace=resample: needs another example"):
        Scoring(model, splits.score[:1], 0)("mine", Ablation(replace="resample"))
    with pytest.raises(ValueError, match=r"^scorer=mine: needs learned gates"):
        scoring("mine", Gate())


def test_a_share_of_the_heads_and_their_number_are_one_scorer(model: Seq2Seq, splits: Splits) -> None:
    scoring = Scoring(model, splits.score, 0)
    assert scoring("subset", Subset(keep=0.5, steps=3)) is scoring("subset", Subset(keep=9, steps=3))
    assert scoring("subset", Subset(keep=1, steps=3)) is not scoring("subset", Subset(keep=1.0, steps=3))
    assert scoring.cost([Subset(keep=0.5, steps=3), Subset(keep=9, steps=3)]) == scoring.cost([Subset(keep=9, steps=3)])


def test_a_scorer_that_trains_is_remembered_and_no_other(model: Seq2Seq, splits: Splits, tmp_path: Path) -> None:
    first, second = (Scoring(model, splits.score, 0, in_cache(tmp_path)) for _ in range(2))
    for keep in (5, 9):
        one = first("subset", Subset(keep=keep, steps=3))
        assert torch.equal(one.scores.values, second("subset", Subset(keep=keep, steps=3)).scores.values)
        assert one.seconds == second("subset", Subset(keep=keep, steps=3)).seconds > 0
    first("ablation", Ablation())
    assert len(list(tmp_path.glob("*.pt"))) == len(list(tmp_path.glob("gates-*.pt"))) == 2
    cost = first.cost([Subset(keep=5, steps=3), Subset(keep=9, steps=3), Subset(keep=9, steps=3), Gate()])
    assert cost["forward_passes"] == cost["backward_passes"] == 2 * 3


def test_whatever_decides_a_score_is_a_key_of_its_own(
    model: Seq2Seq, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights, the split, the seed, the settings, the heads that are left, and the code."""
    other, left = model.copied(), model.without(HeadMask(model.grid, frozenset(model.grid.heads[:1])))
    with torch.no_grad():
        other.output.bias[3] += 1e-6
    score, scorer = splits.score, Subset(keep=5, steps=2)
    slow = replace(scorer, learning_rate=0.2)
    cases = [(model, score, 0, scorer), (other, score, 0, scorer), (model, splits.choose, 0, scorer)]
    cases += [(model, score, 1, scorer), (model, score, 0, slow), (left, score, 0, scorer)]
    for digest in ("old", "new", "new"):
        monkeypatch.setattr("mhaprune.storage.cache._digest", lambda room, digest=digest: digest)
        monkeypatch.setattr("mhaprune.storage.cache._digest_with_imports", lambda module, digest=digest: digest)
        for subject, examples, seed, asked in cases:
            Scoring(subject, examples, seed, in_cache(tmp_path, weights=weights_digest(subject)))("subset", asked)
    assert len(list(tmp_path.glob("gates-*.pt"))) == 2 * len(cases)


def test_a_mean_over_examples_has_the_moments_that_its_interval_needs() -> None:
    values = torch.from_numpy(np.random.default_rng(0).lognormal(size=(50, 4)))
    values[:, 2] = 1.5
    scores = Scores.mean_over_examples(values, 1)
    assert scores.stderr is not None
    assert scores.skewness is not None
    found = torch.cat([scores.values, scores.stderr, scores.skewness]).numpy()
    np.testing.assert_allclose(found, moments(values.numpy()), atol=1e-12)
    np.testing.assert_allclose(scores.skewness[0, :2], stats.skew(values[:, :2]) / 50**0.5)
    assert scores.skewness[0, 2] == 0, "nothing differs"


@pytest.mark.parametrize("relation", [-1.0, 0.0, 1.0])
def test_a_mean_over_tokens_has_the_error_of_a_ratio(relation: float) -> None:
    """That of leaving out one example after the other, which knows that long examples count more and that what they
    give may depend on their length."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 12, size=300)
    values = draw.normal(relation * lengths[:, None, None] / 4 + 2.0, 1.0, size=(300, 2, 12))
    counted = np.arange(12) < lengths[:, None]
    batches = [
        [(torch.from_numpy(values[at]), torch.from_numpy(counted[at]))] for at in np.array_split(np.arange(300), 7)
    ]
    scores = Scores.mean_over_tokens(batches, 1)
    sums, counts = (values * counted[:, None]).sum(axis=2), counted.sum(axis=1)[:, None]
    np.testing.assert_allclose(scores.values[0], sums.sum(axis=0) / counts.sum())
    left_out = (sums.sum(axis=0) - sums) / (counts.sum() - counts)
    jackknife = np.sqrt(299 / 300 * ((left_out - left_out.mean(axis=0)) ** 2).sum(axis=0))
    assert scores.stderr is not None
    np.testing.assert_allclose(scores.stderr[0], jackknife, rtol=0.02)
    of_means, of_tokens = stats.sem(sums / counts), values.transpose(0, 2, 1)[counted].std(axis=0) / counts.sum() ** 0.5
    assert any((abs(naive / jackknife - 1) > 0.05).all() for naive in (of_means, of_tokens)), "it must be told apart"


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
