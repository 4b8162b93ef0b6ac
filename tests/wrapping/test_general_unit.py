"""A unit is anything that one linear map reads: neurons beside heads, without a line of code of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mhaprune
from mhaprune.api.wrap import Heads
from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.hooks.blocks import Block, Rows, Source, block_of, neighbours
from mhaprune.measure.outcomes import output_difference
from mhaprune_literature.attention import Entropy

WIDTH, HIDDEN, NEURONS = 8, 12, 4
"""Three neighbouring neurons are one unit."""


class Layer(nn.Module):
    """Attention, and a feed-forward part with a factor for every neuron (SwiGLU)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(WIDTH, 2)
        self.up, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.num_heads = NEURONS  # which counts no neurons, though it is the same number

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return x + down


@pytest.fixture(scope="module")
def heads() -> Heads:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, 3)).eval()
    units = neighbours(HIDDEN, NEURONS)
    blocks = []
    for n in (0, 1):
        layer: Any = model[n]
        made_by = tuple(Source(Rows(f"{n}.{name}", units), tuple(range(NEURONS))) for name in ("gate", "up"))
        names = tuple(range(NEURONS))
        blocks.append(block_of(layer.attention, f"{n}.attention"))
        blocks.append(Block(f"{n}", f"{n}.down", units, made_by, "neuron", attends=False, names=names))
    batches = [(torch.randn(6, 5, WIDTH), torch.randint(3, (6, 5))) for _ in range(2)]

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.mT, batch[1], reduction="none").mean(dim=1)

    return mhaprune.wrap(model, loss, score=batches, choose=batches, report=batches, blocks=blocks)


def test_neurons_stand_in_one_grid_with_heads_and_all_are_proved(heads: Heads) -> None:
    assert repr(heads).endswith("12 units in 4 blocks, all with an effect, all removable")
    assert heads.grid.sizes == (2, 4, 2, 4)


@pytest.mark.parametrize("by", ["ablation", "taylor", "gate_output", "magnitude", "refit_error", "greedy"])
def test_they_are_chosen_closed_and_removed_as_heads_are(by: str, heads: Heads) -> None:
    if by == "magnitude":
        with pytest.raises(ValueError, match="needs the weights of the values, which are not known for 0;"):
            heads.score(by)
        return
    mask = heads.mask(keep=7, by=by)
    double = heads.subject.in_double()
    batch = heads.splits.score
    assert output_difference(double, double.without(mask), batch, mask.gates()) < 1e-12
    assert output_difference(double, double, batch, mask.gates(), mask.gates() * 0 + 1) > 1e-6


def test_a_removal_takes_rows_of_both_sources_and_leaves_what_counts_no_neurons(heads: Heads) -> None:
    neurons = [str(head) for head in heads.grid if head.block == heads.grid.blocks[1]]
    small: Any = heads.prune(mask=neurons[1:3], refit=True)
    assert [small[0].up.out_features, small[0].gate.out_features, small[0].down.in_features] == [6, 6, 6]
    assert small[0].num_heads == NEURONS
    plain: Any = heads.prune(mask=neurons[1:3])
    kept = [0, 1, 2, 9, 10, 11]
    torch.testing.assert_close(plain[0].up.weight, heads.subject.model[0].up.weight[kept])  # type: ignore[index]
    held = heads.subject.held_weights()
    taken = heads.subject.count_parameters() - sum(weight.numel() for weight in plain.parameters())
    assert taken == float(held[3:5].sum()) == 2 * 3 * (2 * (WIDTH + 1) + WIDTH)


def test_by_cost_the_cheap_go_where_scores_are_equal(heads: Heads) -> None:
    """A head of four columns holds 140 weights, a unit of three neurons 78."""
    mask = heads.mask(keep=0.5, by=[1.0] * 12, of="weights")
    held = heads.subject.held_weights()
    assert float(held @ mask.gates()) <= float(held.sum()) / 2
    assert all(head in mask.removed for head, weights in zip(heads.grid, held, strict=True) if weights == held.max())


def test_they_have_no_attention_weights(heads: Heads) -> None:
    with pytest.raises(ValueError, match="needs attention weights, which 0 does not compute; leave it out"):
        heads.score(Entropy())
