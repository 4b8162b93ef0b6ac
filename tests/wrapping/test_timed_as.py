"""What of a wrapped model is timed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.library.heads import Heads, wrap
from mhaprune.library.speed import timed_as
from mhaprune.pruning import removal
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
    table = wrapped(Classifier()).speed(keep=[0.5, 2], by="random", batch_sizes=(1, 3), rounds=3)
    assert table.groupby("batch_size")["heads_kept"].apply(list).to_dict() == {1: [4, 2, 8, 8], 3: [4, 2, 8, 8]}
    assert table["model"].tolist() == 2 * ["removed", "removed", "dense", "dense again"]
    assert (table["latency_ms"] > 0).all()
    assert (table["speedup_q1"] <= table["speedup_q3"]).all()
    assert set(table["timed"]) == {"a forward pass"}
    assert set(table["dtype"]) == {"float32"}


def test_generation_is_of_so_many_tokens_and_from_no_answer() -> None:
    heads = wrapped(Writes())
    split = heads.splits["report"]
    ids, how = timed_as(heads.subject, new_tokens=5).predict(split)
    assert torch.equal(ids, split.fields["input_ids"])
    assert how == {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1, "use_cache": True}
    table = heads.speed(keep=[0.5], by="random", batch_sizes=(2,), new_tokens=5, rounds=3)
    assert set(table["timed"]) == {"5 new tokens"}


def test_another_precision_is_that_of_all_models_and_the_users_stays() -> None:
    heads = wrapped(Classifier())
    timed = timed_as(heads.subject, dtype=torch.bfloat16)
    assert timed.predict(heads.splits["report"])["logits"].dtype == torch.bfloat16
    assert heads.subject.dtype == torch.float32
    assert set(heads.speed([0.5], "random", (1,), dtype=torch.bfloat16, rounds=3)["dtype"]) == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch compiles with parts of itself that it calls deprecated
def test_compiled_models_say_the_same_and_none_falls_back() -> None:
    heads = wrapped(Classifier())
    timed = timed_as(heads.subject, compiled=True)
    split = heads.splits["report"]
    for mask in heads.masks(list(range(9)), "random"):  # more shapes than torch compiles by default
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            said = timed.without(mask).predict(split)["logits"]
        torch.testing.assert_close(said, heads.subject.without(mask).predict(split)["logits"], atol=1e-4, rtol=1e-4)
    assert heads.speed([0.5], "random", (1,), compiled=True, rounds=3)["compiled"].all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_call_that_goes_around_the_model_is_not_compiled() -> None:
    def around(model: Any, batch: Any) -> Any:
        return model.forward(**batch)

    heads = wrap(Classifier(), losses.classification, score=batches(1), call=around)
    with pytest.raises(ValueError, match="compiled: `call` must call the model itself"):
        timed_as(heads.subject, compiled=True).predict(heads.splits["score"])


def test_so_many_rounds_are_timed_of_so_many_examples_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, seen = wrapped(Classifier()), []
    plain = removal.in_turn

    def watched(calls: Any, rounds: int, warmup: int, device: Any) -> Any:
        seen.append((len(next(iter(calls.values()))()["logits"]), rounds, device))
        return plain(calls, rounds, warmup, device)

    monkeypatch.setattr(removal, "in_turn", watched)
    table = heads.speed(0.5, "random", (2, 99), rounds=4)
    assert seen == [(2, 4, heads.subject.device), (6, 4, heads.subject.device)]
    assert table["batch_size"].tolist() == 3 * [2] + 3 * [6]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"new_tokens": 5}, "new_tokens=5: Classifier has no generate()"),
        ({"new_tokens": 0}, "new_tokens=0: must be 1 or more"),
        ({"batch_sizes": (1, 0)}, "batch_sizes=0: must be 1 or more"),
        ({"batch_sizes": ()}, "batch_sizes=[]: must be 1 or more"),
        ({"rounds": 0}, "rounds=0: must be 1 or more"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16': must be a dtype of torch"),
        ({"dtype": torch.int8}, "dtype=torch.int8: must be a torch.dtype of real numbers"),
        ({"keep": [1.5]}, "keep=1.5: must be a share of the heads"),
    ],
)
def test_what_cannot_be_timed_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        wrapped(Classifier()).speed(**({"by": "random", "rounds": 3} | given))
