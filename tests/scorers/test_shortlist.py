"""`shortlist`: exact where it decides, an estimate elsewhere."""

import numpy as np
import pytest
import scipy.stats
import torch

from mhaprune import losses, wrap
from mhaprune.api.wrap import Heads
from mhaprune.measure.outcomes import all_open, gate_gradients, token_gradients
from mhaprune.scorers.attribution_patching import AttributionPatching
from mhaprune.scorers.replacing import corrupted
from mhaprune.scorers.shortlist import Shortlist
from support.classifier import batches, classifier


@pytest.fixture(scope="module")
def heads() -> Heads:
    clean = batches(3)
    corrupt = [{**batch, "input_ids": batch["input_ids"] % 10 + 1} for batch in clean]
    return wrap(classifier(), losses.classification, score=clean, corrupt=corrupt)


@pytest.mark.parametrize(("replace", "exact"), [("corrupt", "patching"), ("zero", "ablation")])
def test_what_is_measured_is_exact_and_the_rest_is_the_larger_estimate(heads: Heads, replace: str, exact: str) -> None:
    truth = heads.score(exact)
    data = heads.splits.score
    quarter = -gate_gradients(
        heads.subject, data, 0.75 * all_open(heads.subject, 1)[0], replacement=corrupted(data)
    ).mean(dim=0)
    ways = [*(heads.score(AttributionPatching(steps=steps))["score"].to_numpy() for steps in (1, 2)), quarter.numpy()]
    for checks in (2, 5, 8):
        found = heads.score(Shortlist(replace=replace, top=2, checks=checks, enough=1.0))  # type: ignore[arg-type]
        mine = found["exact"].astype(bool)
        assert mine.sum() == checks
        assert found.loc[mine, "score"].to_numpy() == pytest.approx(truth.loc[mine, "score"].to_numpy(), abs=1e-5)
        assert found.loc[mine, "stderr"].to_numpy() == pytest.approx(truth.loc[mine, "stderr"].to_numpy(), rel=1e-3)
        if replace == "corrupt":
            assert found.loc[~mine, "score"].to_numpy() == pytest.approx(np.max(ways, axis=0)[~mine], abs=1e-5)
        parts = 1 + (checks > 2)
        assert found["forward_passes"].iloc[0] == 3 + (replace == "corrupt") + parts + checks
        assert found["backward_passes"].iloc[0] == 3
    assert found["sure"].eq(1).all(), "all were measured"
    assert found["rank"].tolist() == truth["rank"].tolist()


def test_it_ends_as_soon_as_it_is_sure_enough(heads: Heads) -> None:
    least = heads.score(Shortlist(top=3, checks=8, enough=0.0))
    assert least["exact"].sum() == 3, "the top is always measured"
    assert 0 <= least["sure"].iloc[0] <= 1


def test_heads_whose_estimate_may_have_lost_most_are_measured_first(heads: Heads) -> None:
    """The order is that of the estimate plus the sum of the absolute derivatives by token."""
    data = heads.splits.score
    slopes, sizes = token_gradients(heads.subject, data, replacement=corrupted(data)).mean(dim=1)
    estimate = torch.tensor(heads.score(Shortlist(top=1, checks=1, enough=0.0))["score"].to_numpy())
    first = heads.score(Shortlist(top=3, checks=3))["exact"].astype(bool).to_numpy().nonzero()[0]
    [one] = heads.score(Shortlist(top=1, checks=1))["exact"].astype(bool).to_numpy().nonzero()[0]
    bounds = estimate + sizes
    bounds[one] = torch.inf  # measured, so no estimate of it is seen
    assert sorted(first) == sorted(bounds.argsort(descending=True)[:3].tolist())
    assert (sizes >= slopes.abs() - 1e-9).all()


def test_how_sure_it_is_depends_on_what_the_estimates_missed_in_proportion_to_their_parts() -> None:
    scorer, checked = Shortlist(top=2, checks=4), [0, 1, 2, 3]
    guess, sizes = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5, 0.2]), torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 4.0])

    def sure(*missed: float) -> float:
        return scorer.sure(guess, sizes, guess + torch.tensor([0.0, 0.0, *missed, 0.0, 0.0]), checked)

    spread = (0.5 / 4) ** 0.5
    expected = scipy.stats.t.cdf((3.0 - guess[4:]) / (spread * sizes[4:]), 3).prod()
    assert sure(0.5, -0.5) == pytest.approx(expected, rel=1e-5)
    assert sure(0.1, -0.1) > sure(0.5, -0.5) > sure(2.0, -0.5)
    assert sure(0.0, 0.0) == 1.0
    dead, parts = torch.tensor([0.0, 0.0, -1.0, -2.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert scorer.sure(dead, parts, dead, [0, 1]) == 1.0
    assert scorer.sure(dead, parts, dead + torch.tensor([1.0, 0, 0, 0]), [0, 1]) == 0.0, "unknown"
    assert scorer.sure(guess, sizes, guess, [0]) == 0.0, "fewer than the top"


def test_fewer_checks_than_heads_at_the_top_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^checks=5: must be top=10 or more$"):
        Shortlist(checks=5)


def test_examples_without_counterparts_are_refused_but_for_zeros() -> None:
    heads = wrap(classifier(), losses.classification, score=batches(2))
    with pytest.raises(ValueError, match=r"^scorer=shortlist: needs a corrupt counterpart of every example"):
        heads.score("shortlist")
    assert heads.score(Shortlist(replace="zero"))["exact"].any()
