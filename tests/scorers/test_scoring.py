from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mhaprune.data import Examples, Splits
from mhaprune.heads import HeadMask
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.scorers.gate import Gate
from mhaprune.scorers.random import Random
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.scorers.shapley import Shapley
from mhaprune.scorers.subset import Subset
from mhaprune.storage.cache import Cache, Remember, weights_digest
from mhaprune.subject import Subject


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


def in_cache(folder: Path, **recipe: Any) -> Remember:
    return lambda kind, what, make: Cache(folder).get(kind, recipe | what, make)


def test_a_score_that_is_not_finite_is_named_every_time(model: Seq2Seq, splits: Splits) -> None:
    scoring = Scoring(model, splits.score, 0)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"scorer=broken: gives head encoder_self.0.2 the score nan, which is not finite"
        ):
            scoring("broken", Broken())


def test_what_is_not_finite_does_not_come_into_the_cache(model: Seq2Seq, splits: Splits, tmp_path: Path) -> None:
    with torch.no_grad():
        model.decoder_norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"scorer.subset.learning_rate=0.1: the loss of the gates is nan"):
        Scoring(model, splits.score, 0, in_cache(tmp_path))("subset", Subset(steps=2))
    assert not list(tmp_path.glob("*.pt"))


def test_what_a_scorer_refuses_is_said_with_the_key_that_is_at_fault(model: Seq2Seq, splits: Splits) -> None:
    scoring = Scoring(model.without(HeadMask(model.grid)), splits.score, 0)
    with pytest.raises(ValueError, match=r"^scorer.mine.evaluations=5: one permutation of 18 heads and its reverse"):
        scoring("mine", Shapley(evaluations=5))
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


@pytest.mark.parametrize("changed", ["model", "split", "seed", "settings", "heads"])
def test_whatever_decides_a_score_is_a_recipe_of_its_own(
    model: Seq2Seq, splits: Splits, tmp_path: Path, changed: str
) -> None:
    examples, seed, scorer = splits.score, 0, Subset(keep=5, steps=2)
    weights = weights_digest(model)
    Scoring(model, examples, seed, in_cache(tmp_path, weights=weights))("subset", scorer)
    if changed == "model":
        with torch.no_grad():
            model.output.bias[3] += 1e-6
        weights = weights_digest(model)
    elif changed == "split":
        examples = splits.choose
    elif changed == "seed":
        seed = 1
    elif changed == "settings":
        scorer = Subset(keep=5, steps=2, learning_rate=0.2)
    else:
        model = model.without(HeadMask(model.grid, frozenset(model.grid.heads[:1])))
    Scoring(model, examples, seed, in_cache(tmp_path, weights=weights))("subset", scorer)
    assert len(list(tmp_path.glob("gates-*.pt"))) == 2


def test_code_that_has_changed_scores_anew(
    model: Seq2Seq, splits: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for digest in ("old", "new", "new"):
        monkeypatch.setattr("mhaprune.storage.cache._digest", lambda room, digest=digest: digest)
        Scoring(model, splits.score, 0, in_cache(tmp_path))("subset", Subset(steps=2))
    assert len(list(tmp_path.glob("gates-*.pt"))) == 2
