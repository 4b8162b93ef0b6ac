"""Copies of a network, and networks that were pruned, down to their memory."""

import pytest
import torch
from torch import nn

from mhaprune.attention.gates import Softmax
from mhaprune.heads import HeadMask
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.surgery.removal import copied


@pytest.mark.parametrize("encoder_layers", [0, 2])
def test_a_copy_is_the_same_module_and_shares_nothing(encoder_layers: int) -> None:
    model = Seq2Seq(Transformer(d_model=8, num_heads=2, num_encoder_layers=encoder_layers), 11, Softmax())
    state = torch.get_rng_state()
    copy = model.copied()
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(copy) == repr(model)
    assert {id(module) for module in model.modules()}.isdisjoint(id(module) for module in copy.modules())
    assert copy.output.weight is copy.target_embedding.weight
    mine, other = model.state_dict(), copy.state_dict()
    assert list(mine) == list(other)
    for name in mine:
        assert torch.equal(mine[name], other[name])
        assert mine[name].data_ptr() != other[name].data_ptr()


def test_what_is_left_is_built_like_a_network_without_those_heads() -> None:
    """Down to the memory of its weights, so that neither is faster to run."""
    model = Seq2Seq(Transformer(d_model=12, num_heads=3), 11, Softmax())
    mask = HeadMask(model.grid, frozenset(head for n, head in enumerate(model.grid) if n % 3 < n // 5))
    left, built = model.without(mask), Seq2Seq(model.config, 11, None, model.grid.without(mask.removed))
    assert set(left.grid.sizes) == {0, 1, 2, 3}
    assert left.grid == built.grid
    assert repr(left) == repr(built)
    for (name, mine), (other, theirs) in zip(left.state_dict().items(), built.state_dict().items(), strict=True):
        assert (name, mine.shape, mine.stride()) == (other, theirs.shape, theirs.stride())
        assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    for mine, theirs in zip(left.modules(), built.modules(), strict=True):
        assert vars(mine).keys() - {"mhaprune"} == vars(theirs).keys()  # the note of what it lost


def test_a_copy_of_a_layer_that_stands_twice_stands_twice() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4)] * 2)
    copy = copied(model)
    assert copy[0] is copy[1]
    assert copy[0] is not model[0]
    assert torch.equal(copy[0].weight, model[0].weight)
