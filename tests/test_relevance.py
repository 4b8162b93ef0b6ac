"""Relevance against the ε-rule written out with loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mhaprune.data import Examples
from mhaprune.heads import Block, Site
from mhaprune.relevance import with_relevance
from mhaprune.transformer import Seq2Seq

EPSILON = 0.01


def epsilon_rule(x: Tensor, weight: Tensor, z: Tensor, relevance: Tensor) -> Tensor:
    """Relevance of the inputs (I,) of z = W x + b from that of its outputs (J,)."""
    received = torch.zeros_like(x)
    for j in range(len(z)):
        share = relevance[j] / (z[j] + EPSILON * (1.0 if z[j] >= 0 else -1.0))
        for i in range(len(x)):
            received[i] += x[i] * weight[j, i] * share
    return received


def test_the_copy_computes_the_same_and_the_model_stays(model: Seq2Seq, batch: Examples) -> None:
    copy = with_relevance(model, EPSILON)
    torch.testing.assert_close(copy.logits(batch), model.logits(batch))
    gates = torch.rand(len(model.grid), dtype=torch.float64)
    torch.testing.assert_close(copy.logits(batch, gates), model.logits(batch, gates))
    assert [type(module).__name__ for module in model.modules()].count("LayerNorm") == 12
    assert copy.output.weight is copy.target_embedding.weight


@pytest.mark.filterwarnings("ignore")
def test_relevance_of_the_last_heads_is_the_rule_written_out(model: Seq2Seq, batch: Examples) -> None:
    """From the top logit through output, norm, feed-forward, residual sums and W_O to the heads, token by token."""
    one = batch[:1]
    block = Block(Site.CROSS, 1)
    layer, sublayer = model.decoder[1], model.attention_sublayers()[block]
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(
            lambda m, inputs, out, name=name: seen.update({name: out, f"{name} in": inputs[0]})
        )
        for name, module in {
            "cross": sublayer,
            "norm": layer.feed_forward[0],
            "up": layer.feed_forward[1],
            "relu": layer.feed_forward[2],
            "down": layer.feed_forward[4],
            "ff": layer.feed_forward,
            "out_proj": sublayer.attention.out_proj,
            "final": model.decoder_norm,
            "output": model.output,
        }.items()
    ]
    logits = model.logits(one)
    for hook in hooks:
        hook.remove()
    expected = torch.zeros(3, dtype=torch.float64)

    def through_norm(x: Tensor, norm: torch.nn.LayerNorm, relevance: Tensor, z: Tensor) -> Tensor:
        # Relevance is value times gradient, and the gradient of (x - mean) / constant · w is all that passes.
        gradient = torch.where(z != 0, relevance / z, 0.0) * norm.weight / (x.var(correction=0) + norm.eps).sqrt()
        return x * (gradient - gradient.mean())

    for t in range(logits.shape[1]):
        top = int(logits[0, t].argmax())
        start = torch.zeros_like(logits[0, t])
        start[top] = logits[0, t, top]
        # The copy's relevance of a logit z is z itself times its ε-share, hence the rule applies to it as to any other.
        relevance = epsilon_rule(seen["output in"][0, t], model.output.weight, seen["output"][0, t], start)
        relevance = through_norm(seen["final in"][0, t], model.decoder_norm, relevance, seen["final"][0, t])
        total = seen["final in"][0, t]
        to_ff, to_skip = relevance * (total - seen["ff in"][0, t]) / total, relevance * seen["ff in"][0, t] / total
        hidden = epsilon_rule(seen["down in"][0, t], layer.feed_forward[4].weight, seen["down"][0, t], to_ff)
        normed = epsilon_rule(seen["up in"][0, t], layer.feed_forward[1].weight, seen["up"][0, t], hidden)
        x = seen["ff in"][0, t]
        relevance = to_skip + through_norm(x, layer.feed_forward[0], normed, seen["norm"][0, t])
        written = relevance * seen["out_proj"][0, t] / x
        attention = sublayer.attention
        from_heads = epsilon_rule(seen["out_proj in"][0, t], attention.out_proj.weight, seen["out_proj"][0, t], written)
        expected += from_heads.view(3, -1).sum(1)

    gates = torch.ones(1, len(model.grid), dtype=torch.float64, requires_grad=True)
    with_relevance(model, EPSILON).logits(one, gates).amax(-1).sum().backward()
    assert gates.grad is not None
    torch.testing.assert_close(model.grid.split(gates.grad[0])[block], expected)
