"""Heads that stream: they see the first and the last tokens only."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads
from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.hooks.attention_calls import attention_in_window
from mhaprune.hooks.blocks import Unsupported
from mhaprune.hooks.windows import attend_in_windows, window_mask
from mhaprune.measure.outcomes import measure
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.taylor import Taylor
from support.classifier import batches

SINK, RECENT = 2, 3


def sees(query: int, key: int) -> bool:
    return key <= query and (key < SINK or query - key < RECENT)


@pytest.mark.parametrize("closed", [None, False, -torch.inf, -1e4, torch.finfo(torch.float32).min])
def test_a_window_is_the_first_tokens_and_the_last_up_to_itself(closed: float | None) -> None:
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    if isinstance(closed, float):
        mask = torch.zeros(1, 1, 9, 9).masked_fill(~mask, closed)
    mask = None if closed is None else mask
    found = window_mask(mask, 9, 9, SINK, RECENT).expand(1, 1, 9, 9)[0, 0]
    assert found.tolist() == [[sees(t, u) for u in range(9)] for t in range(9)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_moves_no_window(side: str) -> None:
    real = torch.tensor([False] * 3 + [True] * 6)
    real = real if side == "left" else real.flip(0)
    mask = (torch.ones(9, 9, dtype=torch.bool).tril() & real)[None, None]
    found = window_mask(mask, 9, 9, SINK, RECENT)[0, 0]
    assert found[real][:, real].tolist() == [[sees(t, u) for u in range(6)] for t in range(6)]
    assert not found[:, ~real].any()


def plain(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> tuple[Tensor, None]:
    """Attention as transformers computes it, with groups of equal size."""
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    causal = mask is None and query.shape[2] > 1
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal).transpose(1, 2), None


@pytest.mark.parametrize("of_kv", [None, [0, 0, 1, 2, 2, 2]], ids=["even groups", "uneven groups"])
@pytest.mark.parametrize("few", [[], [1], [0, 2], [0, 1, 2]], ids=str)
def test_some_groups_see_a_window_and_the_others_all(few: list[int], of_kv: list[int] | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 9, 4, dtype=torch.double) for heads in (6, 3, 3))
    module = SimpleNamespace(streams=[SINK, RECENT, *few])
    found, _ = attend_in_windows(plain, module, query, key, value, None, of_kv, None, {})
    for h, kv in enumerate(of_kv or [0, 0, 1, 1, 2, 2]):
        allowed = torch.tensor([[sees(t, u) if kv in few else u <= t for u in range(9)] for t in range(9)])
        expected = F.scaled_dot_product_attention(query[:, h], key[:, kv], value[:, kv], allowed)
        torch.testing.assert_close(found[:, :, h], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("length", [1, 4, 6])
def test_even_weights_are_seen_as_those_of_fused_attention_are(length: int) -> None:
    """The last query may see all tokens evenly; a query of padding on the left sees none."""
    real = torch.arange(length) >= length - 4
    mask = (torch.ones(length, length, dtype=torch.bool).tril() & real).expand(1, 2, -1, -1)
    queries, values = torch.zeros(1, 2, length, 4), torch.randn(1, 2, length, 4)

    class Eager(nn.Module):
        def forward(self) -> Tensor:
            scores = (queries @ queries.mT).masked_fill(~mask, torch.finfo(torch.float32).min)
            return scores.softmax(dim=-1) @ values

    with attention_in_window(model := Eager(), [""], (1, 2)) as found:
        model()
    window = window_mask(mask, length, length, 1, 2)
    expected = F.scaled_dot_product_attention(queries, queries, values, window)
    torch.testing.assert_close(found[""][1][:, :, real], expected[:, :, real])


@pytest.mark.parametrize("sink", [2.0, -7.0, None])
def test_a_sink_takes_its_part_of_a_window_too_and_a_gate_on_the_weights_none(sink: float | None) -> None:
    """A sink is as one more token that all see, with the value 0, also if it takes hardly anything."""
    gates = 1.0 if sink else torch.linspace(0.2, 3, 7, dtype=torch.double)[:, None]
    queries, keys, values = torch.randn(3, 1, 2, 7, 4, dtype=torch.double)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()

    def weights(seen: Tensor) -> Tensor:
        scores = (queries @ keys.mT).masked_fill(~seen, -torch.inf)
        sinks = [torch.full_like(scores[..., :1], sink)] if sink else []
        return torch.cat([scores, *sinks], dim=-1).softmax(dim=-1)[..., :7] * gates

    class Eager(nn.Module):
        def forward(self) -> Tensor:
            return weights(mask) @ values

    with attention_in_window(model := Eager(), [""], (1, 2)) as found:
        model()
    window = torch.tensor([[u <= t and (u < 1 or t - u < 2) for u in range(7)] for t in range(7)])
    torch.testing.assert_close(found[""], (weights(mask) @ values, weights(window) @ values))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.attention = nn.ModuleList(MultiHeadAttention(16, 4) for _ in range(2))
        self.causal = True

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        x = x + torch.linspace(-1, 1, 64)[: x.shape[1], None]
        for attention in self.attention:
            x = x + attention(x, x, x, key_padding_mask=attention_mask == 0, is_causal=self.causal)[0]
        logits: Tensor = self.output(x)
        return logits


@pytest.fixture(scope="module")
def made() -> list[dict[str, Tensor]]:
    found = [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in batches(10)[-3:]]
    found[1]["attention_mask"] = found[1]["attention_mask"].flip(1)  # padding on the left
    return found


@pytest.fixture(scope="module")
def causal(made: list[dict[str, Tensor]]) -> Heads:
    torch.manual_seed(0)
    return mhaprune.wrap(Causal(), losses.language_model, score=made)


def test_a_closed_gate_leaves_what_the_head_computes_with_a_window(
    causal: Heads, made: list[dict[str, Tensor]]
) -> None:
    subject, batch = causal.subject.streaming((SINK, RECENT)), causal.splits.score
    layer: Any = causal.subject.module.get_submodule("attention.1")
    gates = torch.ones(8)
    gates[[5, 7]] = torch.tensor([0.0, 0.25])
    model: Any = causal.subject.module
    expected = []
    with torch.no_grad():
        for each in made:
            ids, real = each["input_ids"], each["attention_mask"] != 0
            x = model.embedding(ids)
            x = x + torch.linspace(-1, 1, 64)[: x.shape[1], None]
            x = x + model.attention[0](x, x, x, key_padding_mask=~real, is_causal=True)[0]
            q, k, v = layer.project(x, x, x)
            at = real.cumsum(dim=1) - 1
            T = ids.shape[1]
            near = torch.tensor([[[sees(int(a[t]), int(a[u])) for u in range(T)] for t in range(T)] for a in at])
            far = torch.ones(T, T, dtype=torch.bool).tril() & real[:, None]
            every, window = (
                layer.attend(q, k, v, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[:, None])[0]
                for mask in (far, near & far)
            )
            scale = gates[4:, None, None]
            x = x + layer.merge(window + scale * (every - window))
            expected.append(losses.language_model(model.output(x), each))
    found = measure(subject, batch, gates)
    torch.testing.assert_close(found.loss, torch.cat(expected))
    assert not torch.allclose(found.loss, measure(causal.subject, batch, gates).loss, atol=1e-4), "zeros are another"
    all_of_it, dense = causal.subject.streaming((0, 64)), measure(causal.subject, batch).loss
    torch.testing.assert_close(measure(all_of_it, batch, torch.zeros(8)).loss, dense)


def test_scores_with_a_window_are_the_derivatives_and_the_rises_of_that_gate(causal: Heads) -> None:
    subject = causal.subject.streaming((1, 2))
    data = causal.splits.score
    rises = Ablation()(subject, data, 0).values[0]
    closed = torch.stack([measure(subject, data, 1 - torch.eye(8)[n]).loss.mean() for n in range(8)])
    dense = measure(subject, data).loss.mean()
    torch.testing.assert_close(rises, (closed - dense).double(), atol=1e-5, rtol=1e-5)
    assert (Taylor()(subject, data, 0).values[0] > 0).any()


def test_what_is_no_decoder_is_refused(causal: Heads, made: list[dict[str, Tensor]]) -> None:
    with pytest.raises(Unsupported, match=r"cannot stream: attention\.0: only attention of transformers can be given"):
        causal.streaming()
    bidirectional = Causal()
    bidirectional.causal = False
    heads = mhaprune.wrap(bidirectional, losses.language_model, score=made)
    with pytest.raises(ValueError, match=r"^attention\.0: its heads see more than earlier tokens"):
        measure(heads.subject.streaming((1, 2)), heads.splits.score, torch.zeros(8))


def test_budgets_that_streaming_does_not_change_are_refused(causal: Heads) -> None:
    heads = replace(causal, subject=causal.subject.streaming((1, 2)))
    for how in ({"of": "weights"}, {"of": "time"}, {"faster": 1.5}, {"ms": 1.0}):
        with pytest.raises(ValueError, match=r"heads that stream hold as many weights and read a text no faster"):
            heads.mask(**how)
    with pytest.raises(ValueError, match=r"^within=0\.1: .* read a text no faster; use cache_bytes=$"):
        heads.prune(within=0.1)
    with pytest.raises(ValueError, match=r"^context=9: needs cache_bytes=$"):
        causal.mask(context=9)
    for how in ({"sink": -1}, {"recent": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(how))}="):
            causal.streaming(**how)
