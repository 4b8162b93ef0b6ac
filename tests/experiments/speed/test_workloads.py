"""What is timed: parts of a model, of every size."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import Examples
from mhaprune.experiments.speed.matchup import What, Workload, evenly, scaled, time_parts
from mhaprune.heads import Site
from mhaprune.model.network import FeedForward, Transformer
from mhaprune.model.transformer import Seq2Seq

SHAPE = Transformer(d_model=12, num_heads=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=20)
WORKLOADS = [Workload("encoder", 3, 7, 0), Workload("decoder", 3, 7, 5), Workload("both", 3, 7, 5)]


@pytest.mark.parametrize("removed", [0, 9, 18])
def test_flops_of_an_encoder_are_two_for_each_multiply_add(removed: int) -> None:
    """Of queries, keys, values and output, of scores and weighted values, and of two feed-forward maps per layer."""
    dense, [work, *_] = Seq2Seq(WORKLOADS[0].shape(SHAPE), 11), WORKLOADS
    mask = evenly(dense.grid, removed)
    width = 4 * (6 - sum(head.site == Site.ENCODER_SELF for head in mask.removed))
    multiply_adds = 3 * 7 * (width * (4 * 12 + 2 * 7) + 2 * 2 * 12 * 20)
    assert work.count_flops(dense.without(mask), work.batch(11, torch.device("cpu"))) == 2 * multiply_adds


def test_batches_have_their_size_and_no_special_symbols() -> None:
    for work in WORKLOADS:
        batch = work.batch(11, torch.device("cpu"))
        assert batch.source.shape == (3, 7)
        assert batch.target.shape == (3, work.target_length)
        assert batch.source.min() >= 3


@pytest.mark.parametrize(("what", "heads"), [("encoder", 6), ("decoder", 12), ("both", 18)])
def test_a_part_has_its_own_heads(what: What, heads: int) -> None:
    assert len(Workload(what, 1, 1, 1).grid(Seq2Seq(SHAPE, 11).grid)) == heads


def test_a_decoder_alone_has_the_decoder_of_the_whole() -> None:
    decoder, whole = Seq2Seq(WORKLOADS[1].shape(SHAPE), 11), Seq2Seq(SHAPE, 11)
    assert len(decoder.encoder) == 0
    names = [name for name, _ in decoder.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters() if not name.startswith("encoder.")]


def test_heads_go_evenly() -> None:
    grid = Seq2Seq(SHAPE, 11).grid
    for count in range(len(grid) + 1):
        left = grid.without(evenly(grid, count).removed).sizes
        assert sum(left) == len(grid) - count
        assert max(left) - min(left) <= 1


def test_another_width_keeps_the_proportions() -> None:
    wide = scaled(SHAPE, 24, 99)
    assert (wide.d_model, wide.dim_feedforward, wide.max_length) == (24, 40, 99)
    assert (wide.num_heads, wide.num_encoder_layers, wide.num_decoder_layers) == (3, 2, 2)


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
