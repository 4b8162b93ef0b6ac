"""Many masks in one pass, beside one pass per mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from benches.sides import DEFAULT, VOCABULARY_SIZE, Pair
from mhaprune.attention.gates import Softmax
from mhaprune.data import Examples
from mhaprune.heads import Block, HeadGrid, HeadMask, Site
from mhaprune.measure.outcomes import measure, measure_masks
from mhaprune.model.network import AttentionSublayer, EncoderLayer, FeedForward, Transformer
from mhaprune.model.shared_prefixes import Branches, depth_first
from mhaprune.model.transformer import TOKENS_AT_ONCE, Seq2Seq
from mhaprune.schedules.base import Evidence
from mhaprune.schedules.greedy import Greedy
from mhaprune.subject import Subject
from mhaprune.tasks.sort import Sort
from mhaprune.wrapping.blocks import block_of
from mhaprune.wrapping.gating import hooked


def ablation() -> list[Pair]:
    """Ablation of all heads with what masks share, against the plain loop of one pass per head: of the default model,
    and of an encoder of 6 layers and 12 heads."""
    model, examples = Seq2Seq(Transformer(), VOCABULARY_SIZE, Softmax()), Sort().splits().score
    default = shared_and_plain(model, examples, each_closed(len(model.grid)))
    encoder, x_BTD = Encoder(num_layers=6, num_heads=12, d_model=192), torch.randn(32, 32, 192)
    gates_MN = each_closed(6 * 12)
    return [
        ("ablation default model", *default),
        (
            "ablation encoder",
            lambda: encoder.many(x_BTD, gates_MN),
            lambda: [encoder(x_BTD, gates_N) for gates_N in gates_MN],
        ),
    ]


def pairs_of_heads(config: Transformer = DEFAULT, num_examples: int = 64) -> list[Pair]:
    """The loss with every two heads of the default model closed, on 64 examples, against one pass per pair."""
    model, examples = Seq2Seq(config, VOCABULARY_SIZE, Softmax()), Sort().splits().score[:num_examples]
    every = HeadMask(model.grid)
    gates = torch.stack([every.without(*pair).gates() for pair in combinations(model.grid, 2)])
    return [("pairs of heads", *shared_and_plain(model, examples, gates))]


def oracle() -> list[Pair]:
    """All 4096 masks of a model with 12 heads, on 8 examples, against one mask a pass."""
    model = Seq2Seq(Transformer(num_heads=2), VOCABULARY_SIZE, Softmax())
    gates = torch.cartesian_prod(*[torch.tensor([1.0, 0.0])] * len(model.grid))
    return [("oracle", *shared_and_plain(model, Sort().splits().choose[:8], gates))]


def greedy(config: Transformer = DEFAULT, num_examples: int = 64) -> list[Pair]:
    """The greedy schedule from all heads of the default model to none, on 64 examples, against the same with one pass
    per candidate."""
    model, examples = Seq2Seq(config, VOCABULARY_SIZE, Softmax()), Sort().splits().score[:num_examples]

    def no_score(left: Subject) -> Tensor:
        raise AssertionError("greedy reads no score")

    def shared(masks: Sequence[HeadMask]) -> Tensor:
        return measure_masks(model, examples, torch.stack([mask.gates() for mask in masks])).loss.mean(dim=1)

    def plain(masks: Sequence[HeadMask]) -> Tensor:
        return torch.stack([measure(model, examples, mask.gates()).loss.mean() for mask in masks])

    budgets = range(len(model.grid) + 1)
    ours, peer = (partial(Greedy(), Evidence(model, no_score, loss), budgets) for loss in (shared, plain))
    return [("greedy", ours, peer)]


def shared_and_plain(
    model: Seq2Seq, examples: Examples, gates: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    return (
        lambda: measure_masks(model, examples, gates),
        lambda: [measure(model, examples, gates_N) for gates_N in gates],
    )


def each_closed(heads: int) -> Tensor:
    """Gates (1 + heads, heads): all open, then each head closed."""
    return torch.cat([torch.ones(1, heads), 1 - torch.eye(heads)])


class Encoder(nn.Module):
    """Nothing but encoder layers; called with x (B, T, D) and gates (N,), or with many gates (M, N) at once."""

    def __init__(self, num_layers: int, num_heads: int, d_model: int) -> None:
        super().__init__()
        self.grid = HeadGrid.full([Block(Site.ENCODER_SELF, layer) for layer in range(num_layers)], num_heads)
        layers = [
            EncoderLayer(
                AttentionSublayer(block, d_model, num_heads, d_model // num_heads, 0.0, Softmax()),
                FeedForward(d_model, 2 * d_model, 0.0),
            )
            for block in self.grid.blocks
        ]
        self.layers = layers
        self.parts = nn.ModuleList(layers)

    def forward(self, x_BTD: Tensor, gates_N: Tensor) -> Tensor:
        bias, paths = torch.zeros(len(x_BTD), 1, 1, x_BTD.shape[1]), {m: path for path, m in self.named_modules()}
        sublayers = [layer.self_attention for layer in self.layers]
        blocks = {each.block: block_of(each.attention, paths[each.attention]) for each in sublayers}
        with hooked(self, blocks, len(x_BTD), self.grid.split(gates_N)):
            for layer in self.layers:
                x_BTD = layer(x_BTD, bias)
        return x_BTD

    def many(self, x_BTD: Tensor, gates_MN: Tensor) -> list[Tensor]:
        ends = []
        for part_BTD in x_BTD.split(16):
            steps: list[Callable[[Branches], Branches]] = []
            bias = torch.zeros(len(part_BTD), 1, 1, x_BTD.shape[1])
            for layer, gates_MH in zip(self.layers, self.grid.split(gates_MN).values(), strict=True):
                steps.append(partial(Branches.attend, sublayer=layer.self_attention, gates=gates_MH.numpy(), bias=bias))
                steps.append(partial(Branches.apply, function=layer.feed_forward))
            at_most = TOKENS_AT_ONCE // part_BTD[..., 0].numel()
            ends += [end.states for end in depth_first(Branches.root(part_BTD, len(gates_MN)), steps, at_most)]
        return ends
