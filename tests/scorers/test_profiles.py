"""A profile says which kinds of examples need a head, and is seldom sure of what is not there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.scorers import profiles
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.statistics.intervals import holm, moments
from support.classifier import batches, classifier


def of_kinds(**seeds: int) -> dict[str, Any]:
    """Batches of each kind; their first tokens say the number of the kind."""
    kinds: dict[str, Any] = {}
    for number, (kind, seed) in enumerate(seeds.items()):
        kinds[kind] = batches(4, seed)
        for batch in kinds[kind]:
            batch["input_ids"][:, 0] = number + 1
    return kinds


@dataclass(frozen=True)
class Planted(Scorer):
    """Noise around a mean of its own for every kind and head."""

    means: tuple[tuple[float, ...], ...] = ()
    signed: ClassVar[bool] = True

    def __call__(self, subject: Any, examples: Any, seed: int) -> Scores:
        kinds = torch.cat([batch.as_given()["input_ids"][:, 0] for batch in examples.batches(1)]) - 1
        means_EN = torch.tensor(self.means, dtype=torch.float64)[kinds]
        noise = torch.randn(means_EN.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return Scores.mean_over_examples(means_EN + 0.1 * noise, 1)


def test_it_says_who_needs_a_head_and_whom_it_hurts() -> None:
    means = torch.zeros(3, 8)
    means[:, 0] = 1.0  # shared
    means[1, 1] = 1.0  # of one kind
    means[:2, 2] = 1.0
    means[2, 3] = -1.0
    heads = mhaprune.wrap(classifier(), losses.classification, score=of_kinds(code=1, news=2, poems=3))
    table = heads.profile(Planted(tuple(map(tuple, means.tolist()))))
    assert len(table) == 24
    found = table.pivot_table(index="kind", columns=["layer", "head"], values="verdict", aggfunc="first", sort=False)
    expected = np.array([["needed" if x > 0 else "hurts" if x < 0 else "" for x in row] for row in means.tolist()])
    assert (found.to_numpy() == expected).all()
    heads_only = table.drop_duplicates(["layer", "head"]).reset_index(drop=True)
    assert heads_only["kinds_in_need"].tolist() == [3, 1, 2, 0, 0, 0, 0, 0]
    assert heads_only["needed_by"].tolist() == ["all kinds", "one kind", "", "", "", "", "", ""]


def test_a_row_is_the_score_on_this_kind_alone() -> None:
    kinds = of_kinds(code=1, news=2)
    heads = mhaprune.wrap(classifier(), losses.classification, score=kinds)
    table = heads.profile("ablation")
    for kind, given in kinds.items():
        alone = mhaprune.wrap(classifier(), losses.classification, score=given).score("ablation")
        rows = table[table["kind"] == kind]
        for column in ("score", "score_low", "score_high"):
            np.testing.assert_allclose(rows[column], alone[column], atol=1e-12)


def test_attribution_estimates_an_ablation() -> None:
    heads = mhaprune.wrap(classifier(), losses.classification, score=batches(4))
    table = heads.score("attribution", "ablation").pivot_table(
        index=["layer", "head"], columns="scorer", values="score"
    )
    assert np.corrcoef(table["attribution"], table["ablation"])[0, 1] > 0.9
    row = heads.score("attribution").iloc[0]
    assert (row["forward_passes"], row["backward_passes"]) == (1, 1)
    small = mhaprune.wrap(
        classifier(), lambda output, batch: losses.classification(output, batch) * 1e-3, score=batches(4)
    )
    assert (np.sign(small.score("attribution")["score"]) == np.sign(heads.score("attribution")["score"])).all()


def test_short_and_long_examples_are_told_apart_if_nothing_else_is() -> None:
    heads = mhaprune.wrap(classifier(), losses.classification, score=batches(4))
    table = heads.profile()
    assert set(table["kind"]) == {"short", "long"}
    lengths = heads.splits.score.lengths()
    kinds = profiles.told_apart(heads.splits.score)
    assert lengths[kinds["short"]].max() < lengths[kinds["long"]].min()
    same = [{key: values[:, :5] if values.dim() == 2 else values for key, values in batches(3)[-1].items()}]
    same[0]["attention_mask"] = torch.ones_like(same[0]["input_ids"])
    with pytest.raises(ValueError, match="profile: needs kinds of examples"):
        mhaprune.wrap(classifier(), losses.classification, score=same).profile()


@pytest.mark.parametrize("scorer", ["taylor", "gate_output", "magnitude"])
def test_a_score_that_cannot_hurt_is_refused(scorer: str) -> None:
    heads = mhaprune.wrap(classifier(), losses.classification, score=of_kinds(code=1, news=2))
    with pytest.raises(ValueError, match=f"scorer={scorer}: cannot say what hurts, choose attribution, ablation"):
        heads.profile(scorer)


def test_p_is_of_as_many_examples_as_a_kind_has() -> None:
    kinds = of_kinds(code=1, news=2)
    heads = mhaprune.wrap(classifier(), losses.classification, score=kinds)
    table = heads.profile("ablation")
    rows = heads.score("ablation")
    own = rows[rows["kind"] != "all"][["score", "stderr", "skewness"]].to_numpy().T
    sides = [profiles._p_above(own * [[sign], [1.0], [sign]], np.full(16, 24)) for sign in (1.0, -1.0)]
    expected = holm(np.concatenate(sides)).reshape(2, 16).min(axis=0)
    np.testing.assert_allclose(table["p_together"], expected)
    assert profiles._p_above(np.array([[1.0], [0.01], [0.9]]), np.array([24])) == 1.0, "it depends on too few examples"


def test_a_score_without_scores_of_examples_is_refused() -> None:
    class Whole(Planted):
        def __call__(self, subject: Any, examples: Any, seed: int) -> Scores:
            return Scores(torch.ones(1, 8, dtype=torch.float64))

    heads = mhaprune.wrap(classifier(), losses.classification, score=of_kinds(code=1, news=2))
    with pytest.raises(ValueError, match="scorer=Whole: has no scores of single examples, choose another"):
        heads.profile(Whole())


NOISE: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda draw: draw.normal(size=(64, 100)),
    "skewed": lambda draw: draw.gamma(1.0, size=(64, 100)) - 1,
    "heavy tails": lambda draw: draw.standard_t(3, size=(64, 100)),
}


@pytest.mark.parametrize("kind", NOISE)
def test_of_noise_alone_it_is_seldom_sure(kind: str) -> None:
    """Of 200 draws about ten may have a verdict; 20 are unlikely. A normal distribution, or a correction for skewness
    alone, has up to 60."""
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        found = moments(NOISE[kind](draw))
        sides = [profiles._p_above(found * [[sign], [1.0], [sign]], np.full(100, 64)) for sign in (1.0, -1.0)]
        wrong += (holm(np.concatenate(sides)) < 0.05).any()
    assert wrong <= 20


def test_with_few_examples_it_warns(caplog: pytest.LogCaptureFixture) -> None:
    heads = mhaprune.wrap(classifier(), losses.classification, score=of_kinds(code=1, news=2))
    heads.profile()
    assert "profile: a kind has 24 examples; below 64" in caplog.text
