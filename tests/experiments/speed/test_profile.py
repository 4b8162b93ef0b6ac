from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import Examples
from mhaprune.experiments.speed.matchup import time_parts
from mhaprune.model.network import FeedForward
from mhaprune.model.transformer import Seq2Seq


def test_each_part_gets_its_own_time(model: Seq2Seq, batch: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow down one kind of sublayer: its part, and no other, takes longer by that.

    The least round counts, as other work on the machine only adds.
    """
    plain = time_parts(model, lambda watched: watched.decode_greedily(batch.source, 5), rounds=5).min()
    for part, methods in (
        ("attention", [(F, "scaled_dot_product_attention"), (Seq2Seq, "project_memory")]),
        ("feed_forward", [(FeedForward, "forward")]),
    ):
        with monkeypatch.context() as patch:
            for owner, name in methods:
                method = getattr(owner, name)

                def slow(*arguments: object, method: object = method, **named: object) -> Tensor:
                    time.sleep(0.002)
                    return method(*arguments, **named)  # type: ignore[operator]

                patch.setattr(owner, name, slow)
            slowed = time_parts(model, lambda watched: watched.decode_greedily(batch.source, 5), rounds=5).min()
        assert list(slowed.index) == ["attention", "feed_forward", "rest"]
        for name in slowed.index:
            added = slowed[name] - plain[name]
            # Feed-forward is called twice by the encoder and ten times by the decoder, attention more often.
            assert added > 20 if name == part else added < 12, (part, name, added)


def test_the_model_itself_is_left_alone(model: Seq2Seq, batch: Examples) -> None:
    before = [dict(vars(module)) for module in model.modules()]
    time_parts(model, lambda watched: watched.predict(batch), rounds=1)
    assert all(vars(module) == old for module, old in zip(model.modules(), before, strict=True))


def test_a_model_without_feed_forward_calls_has_none(model: Seq2Seq) -> None:
    times = time_parts(model, lambda watched: torch.ones(3), rounds=2)
    assert times["attention"].tolist() == times["feed_forward"].tolist() == [0, 0]
    assert (times["rest"] > 0).all()
