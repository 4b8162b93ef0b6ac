"""Relevance against the rules that hand it from layer to layer, written out for one example without padding."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mhaprune.data import Examples, Splits, shift_right
from mhaprune.heads import Block
from mhaprune.model.network import AttentionSublayer, FeedForward
from mhaprune.model.relevance import with_relevance
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.lrp import Lrp

Rule = Callable[[Tensor], Tensor]
"""From the relevance of what a part puts out, (T, D), to that of what it took."""


def linear(module: nn.Linear, x: Tensor, epsilon: float) -> tuple[Tensor, Rule]:
    z = module(x)

    def rule(relevance: Tensor) -> Tensor:
        received = torch.zeros_like(x)
        for j in range(z.shape[1]):
            share = relevance[:, j] / (z[:, j] + epsilon * torch.where(z[:, j] < 0, -1.0, 1.0))
            received += x * module.weight[j] * share[:, None]
        return received

    return z, rule


def norm(module: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Rule]:
    z, spread = module(x), (x.var(-1, correction=0, keepdim=True) + module.eps).sqrt()

    def rule(relevance: Tensor) -> Tensor:
        slope = relevance / z * module.weight / spread
        return x * (slope - slope.mean(-1, keepdim=True))

    return z, rule


def feed_forward(module: FeedForward, x: Tensor, epsilon: float) -> tuple[Tensor, Rule]:
    normed, through_norm = norm(module[0], x)  # type: ignore[arg-type]
    up, through_up = linear(module[1], normed, epsilon)  # type: ignore[arg-type]
    down, through_down = linear(module[4], up.relu(), epsilon)  # type: ignore[arg-type]
    total = x + down

    def rule(relevance: Tensor) -> Tensor:
        return relevance * x / total + through_norm(through_up(through_down(relevance * down / total)))

    return total, rule


def attention(
    sublayer: AttentionSublayer, x: Tensor, memory: Tensor | None, causal: bool, epsilon: float
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """Its rule gives the relevance of x, of the memory (of x itself where there is none) and of the heads (H,)."""
    layer, normed = sublayer.attention, norm(sublayer.norm, x)
    read = normed[0] if memory is None else memory
    values, through_values = linear(layer.v_proj, read, epsilon)
    queries, keys = layer.q_proj(normed[0]), layer.k_proj(read)
    K, parts, weights = layer.head_dim, [], []
    for h in range(layer.num_heads):
        scores = queries[:, h * K : (h + 1) * K] @ keys[:, h * K : (h + 1) * K].T / math.sqrt(K)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        weights.append(scores.softmax(-1))
        parts.append(weights[h] @ values[:, h * K : (h + 1) * K])
    context = torch.cat(parts, dim=1)
    written, through_output = linear(layer.out_proj, context * layer.head_scale().repeat_interleave(K), epsilon)
    total = x + written

    def rule(relevance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_context = through_output(relevance * written / total)
        of_values = torch.zeros_like(values)
        for h, weight in enumerate(weights):
            at = slice(h * K, (h + 1) * K)
            for t in range(len(x)):
                for u in range(len(read)):
                    of_values[u, at] += weight[t, u] * values[u, at] / context[t, at] * of_context[t, at]
        of_read = through_values(of_values)
        of_x = relevance * x / total
        if memory is None:
            of_x = of_x + normed[1](of_read)
        return of_x, of_read, of_context.unflatten(1, (-1, K)).sum((0, 2))

    return total, rule


@torch.no_grad()
def relevance_by_hand(model: Seq2Seq, source: Tensor, target: Tensor, epsilon: float) -> dict[Block, Tensor]:
    """Of every head (H,) for the top logits of one example, from the output down to the first layer."""
    scale = math.sqrt(model.config.d_model)
    x = model.source_embedding(source) * scale + model.positions[: len(source)]
    encoder = []
    for below in model.encoder:
        x, of_attention = attention(below.self_attention, x, None, False, epsilon)
        x, of_ff = feed_forward(below.feed_forward, x, epsilon)
        encoder.append((below.self_attention.block, of_attention, of_ff))
    memory, through_encoder_norm = norm(model.encoder_norm, x)
    prefix = shift_right(target[None])[0]
    x = model.target_embedding(prefix) * scale + model.positions[: len(prefix)]
    decoder = []
    for layer in model.decoder:
        x, of_self = attention(layer.self_attention, x, None, True, epsilon)
        x, of_cross = attention(layer.cross, x, memory, False, epsilon)
        x, of_ff = feed_forward(layer.feed_forward, x, epsilon)
        decoder.append((layer.self_attention.block, of_self, layer.cross.block, of_cross, of_ff))
    normed, through_decoder_norm = norm(model.decoder_norm, x)
    logits, through_output = linear(model.output, normed, epsilon)
    torch.testing.assert_close(logits, model.call(Examples(source[None], target[None]))[0])

    heads: dict[Block, Tensor] = {}
    top = torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), logits.amax(1, keepdim=True))
    relevance = through_decoder_norm(through_output(top))
    of_memory = torch.zeros_like(memory)
    for self_block, of_self, cross_block, of_cross, of_ff in reversed(decoder):
        relevance, read, heads[cross_block] = of_cross(of_ff(relevance))
        of_memory += read
        relevance, _, heads[self_block] = of_self(relevance)
    relevance = through_encoder_norm(of_memory)
    for block, of_attention, of_ff in reversed(encoder):
        relevance, _, heads[block] = of_attention(of_ff(relevance))
    return {block: heads[block] for block in model.grid.blocks}


def test_the_copy_computes_the_same_and_the_model_stays(model: Seq2Seq, batch: Examples) -> None:
    copy = with_relevance(model, 0.01)
    torch.testing.assert_close(copy.call(batch), model.call(batch))
    gates = torch.rand(len(model.grid), dtype=torch.float64)
    torch.testing.assert_close(copy.run_gated(batch, gates), model.run_gated(batch, gates))
    assert [type(module).__name__ for module in model.modules()].count("LayerNorm") == 12
    assert copy.output.weight is copy.target_embedding.weight


def test_relevance_of_all_heads_is_the_rules_written_out(model: Seq2Seq, batch: Examples) -> None:
    one, epsilon = batch[:1], 0.01
    gates = torch.ones(1, len(model.grid), dtype=torch.float64, requires_grad=True)
    with_relevance(model, epsilon).run_gated(one, gates).amax(-1).sum().backward()
    assert gates.grad is not None
    expected = relevance_by_hand(model, one.source[0], one.target[0], epsilon)
    torch.testing.assert_close(model.grid.split(gates.grad[0]), expected)


@pytest.mark.parametrize("epsilon", [1e-3, 0.3])
def test_the_score_is_the_share_in_the_block_at_the_epsilon_asked_for(
    model: Seq2Seq, splits: Splits, epsilon: float
) -> None:
    few, shares = splits.score[:3], []
    for source, target in zip(few.source, few.target, strict=True):
        by_hand = relevance_by_hand(model, source[source != 0], target[target != 0], epsilon)
        shares.append(torch.cat([R.abs() / R.abs().sum() for R in by_hand.values()]))
    scores = Lrp(epsilon=epsilon)(model, few, seed=0)
    torch.testing.assert_close(scores.values[0], torch.stack(shares).mean(0))
