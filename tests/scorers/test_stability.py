"""How far the most important heads depend on the examples that were drawn."""

import math

import pytest
import torch

from mhaprune import losses, wrap
from mhaprune.scorers.stability import MOST, stability
from support.classifier import batches, classifier


def scores(spread: float, examples: int = 64, heads: int = 8) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.arange(heads, dtype=torch.double) + spread * torch.randn(examples, heads, generator=draw).double()


def test_equal_examples_agree_always_and_noise_rarely() -> None:
    assert stability(scores(0.0)) == {"top_shared": 1.0, "examples_needed": 1.0}
    assert all(math.isnan(value) for value in stability(scores(1.0, examples=1)).values()), "nothing is known"
    noise = stability(torch.randn(64, 400, generator=torch.Generator().manual_seed(0)).double())
    assert 0.25 < noise["top_shared"] < 0.8, "as many as by chance, and those that these examples happen to favour"
    equal = torch.ones(4, 8).double()
    equal[:, 1] += torch.tensor([1e-3, -1e-3, 1e-3, -1e-3])
    assert math.isnan(stability(equal)["examples_needed"])


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_as_many_examples_as_it_says_are_enough_and_half_of_them_are_not(spread: float) -> None:
    values, draw = scores(spread, examples=256), torch.Generator().manual_seed(7)
    needed = int(stability(values)["examples_needed"])
    assert 2 < needed < MOST
    top = set(values.mean(dim=0).topk(2).indices.tolist())

    def agree(n: int) -> float:
        redraws = [values[torch.randint(256, (n,), generator=draw)].mean(dim=0) for _ in range(400)]
        return sum(set(each.topk(2).indices.tolist()) == top for each in redraws) / 400

    assert agree(needed) > 0.9
    assert agree(needed // 2) < 0.97
    assert agree(needed // 4) < 0.95


def test_more_spread_needs_more_examples() -> None:
    needed = [stability(scores(spread, examples=256))["examples_needed"] for spread in (0.5, 1.0, 2.0, 4.0)]
    assert needed == sorted(needed)
    assert needed[0] < needed[-1]


def test_scores_that_are_means_say_it_in_their_table_and_others_leave_it_empty() -> None:
    heads = wrap(classifier(), losses.classification, score=batches(3))
    table = heads.score("ablation", "gate_output", "taylor_example", "magnitude").set_index("scorer")
    assert table.loc[["ablation", "gate_output", "taylor_example"], "top_shared"].between(0.1, 1).all()
    assert table.loc["magnitude", ["top_shared", "examples_needed"]].isna().all(axis=None)
