"""What of a wrapped model is timed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.front.heads import Heads, generating, wrap
from support.classifier import Classifier, batches


class Writes(Classifier):
    """Says what it was asked to generate from."""

    def can_generate(self) -> bool:
        return True

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **how: Any) -> tuple[Tensor, dict[str, Any]]:
        return input_ids, how


def wrapped(model: nn.Module) -> Heads:
    given = {name: batches(1, seed) for seed, name in enumerate(("score", "report"))}
    return wrap(model, losses.classification, **given)


def test_every_size_is_timed_in_turn_with_the_whole_model_twice() -> None:
    table = wrapped(Classifier()).speed(keep=[0.5, 2], by="random", batch_sizes=(1, 99), rounds=3)
    assert table.groupby("batch_size")["heads_kept"].apply(list).to_dict() == {1: [4, 2, 8, 8], 6: [4, 2, 8, 8]}, ()
    assert table["model"].tolist() == 2 * ["removed", "removed", "dense", "dense again"]
    assert (table["latency_ms"] > 0).all()
    assert (table["speedup_q1"] <= table["speedup_q3"]).all()
    assert set(table["timed"]) == {"a forward pass"}


def test_generation_is_of_so_many_tokens_and_from_no_answer() -> None:
    heads = wrapped(Writes())
    split = heads.splits["report"]
    ids, how = generating(heads.subject, 5).predict(split)
    assert torch.equal(ids, split.fields["input_ids"])
    assert how == {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1, "use_cache": True}
    table = heads.speed(keep=[0.5], by="random", batch_sizes=(2,), new_tokens=5, rounds=3)
    assert set(table["timed"]) == {"5 new tokens"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"new_tokens": 5}, "new_tokens=5: Classifier has no generate()"),
        ({"new_tokens": 0}, "new_tokens=0: must be 1 or more"),
        ({"batch_sizes": (1, 0)}, "batch_sizes=0: must be 1 or more"),
        ({"batch_sizes": ()}, "batch_sizes=[]: must be 1 or more"),
        ({"rounds": 0}, "rounds=0: must be 1 or more"),
        ({"keep": [1.5]}, "keep=1.5: must be a share of the heads"),
    ],
)
def test_what_cannot_be_timed_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        wrapped(Classifier()).speed(**({"by": "random", "rounds": 3} | given))
