"""Scorers against loops that a reader can check by eye."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import BlockId, HeadId, HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.measure.outcomes import measure
from mhaprune.scorers import replacing
from mhaprune.scorers.ablation import Ablation, resample
from mhaprune.scorers.gate import Gate
from mhaprune.scorers.gate_output import GateOutput
from mhaprune.scorers.magnitude import Magnitude
from mhaprune.scorers.random import Random
from mhaprune.subject import Fallback
from support.models import loss_of_one


def one_by_one(examples: Examples) -> Iterator[Examples]:
    """Each example alone, without padding."""
    for source, target in zip(examples.source, examples.target, strict=True):
        yield Examples(source[source != 0][None], target[target != 0][None])


def ablation_by_hand(model: Seq2Seq, examples: Examples, fallback: Fallback | None) -> tuple[Tensor, Tensor]:
    deltas = torch.zeros(len(examples), len(model.grid), dtype=torch.float64)
    for e in range(len(examples)):
        source, target = examples.source[e], examples.target[e]
        whole = loss_of_one(model, source, target)
        for n, head in enumerate(model.grid):
            gates = HeadMask(model.grid).without(head).gates()
            deltas[e, n] = loss_of_one(model, source, target, gates, fallback) - whole
    return deltas.mean(0), deltas.std(0) / len(examples) ** 0.5


@torch.no_grad()
def test_masks_of_many_heads_are_measured_a_few_at_a_time(
    model: Seq2Seq, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 100,000 neurons would need 40 GB."""
    together, sizes = Ablation()(model, splits.score, 0), list[int]()
    plain = replacing.measure_masks
    monkeypatch.setattr(replacing, "LARGEST", 5 * len(model.grid))
    monkeypatch.setattr(replacing, "measure_masks", lambda *given: sizes.append(len(given[2])) or plain(*given))
    assert torch.equal(Ablation()(model, splits.score, 0).values, together.values)
    assert sizes == [5, 5, 5, 4]


def test_ablation_by_zeros_and_by_means_is_the_loop(model: Seq2Seq, splits: Splits) -> None:
    examples = splits.score[:8]
    contexts = [[context[0] for context in model.head_outputs(one).values()] for one in one_by_one(examples)]
    means = [torch.cat(per_block, dim=1).mean(1, keepdim=True) for per_block in zip(*contexts, strict=True)]
    fallback = dict(zip(model.grid.blocks, means, strict=True))
    zero, mean = Ablation()(model, examples, seed=0), Ablation(replace="mean")(model, examples, seed=0)
    for scores, instead in ((zero, None), (mean, fallback)):
        expected, stderr = ablation_by_hand(model, examples, instead)
        torch.testing.assert_close(scores.values[0], expected)
        assert scores.stderr is not None
        torch.testing.assert_close(scores.stderr[0], stderr)
    assert zero.forward_passes == 1 + len(model.grid)
    assert not torch.allclose(zero.values, mean.values)


@torch.no_grad()
def test_gate_is_the_softmax_of_each_block(model: Seq2Seq, splits: Splits) -> None:
    expected = [3 * s.attention.gate.logits.softmax(0) for s in model.attention_sublayers().values()]  # type: ignore[union-attr]
    assert torch.equal(Gate()(model, splits.score, seed=0).values[0], torch.cat(expected))


@torch.no_grad()
def written_norms(model: Seq2Seq, examples: Examples) -> list[Tensor]:
    """For each head the norm, at every token, of what it writes into the residual stream: computed by closing all the
    others."""
    norms: dict[int, list[Tensor]] = {n: [] for n in range(len(model.grid))}
    for one in one_by_one(examples):
        for block, context in model.head_outputs(one).items():
            attention = model.attention_sublayers()[block].attention
            for head in (head for head in model.grid if head.block == block):
                only = F.one_hot(torch.tensor(head.head), 3).double()
                written = attention.merge(context, only) - attention.out_proj.bias
                norms[model.grid.index(head)].append(written[0].norm(dim=-1))
    return [torch.cat(norms[n]) for n in norms]


@torch.no_grad()
def test_gate_output_is_the_loop_over_tokens(model: Seq2Seq, splits: Splits) -> None:
    scores = GateOutput()(model, splits.score, seed=0)
    norms = written_norms(model, splits.score)
    torch.testing.assert_close(scores.values[0], torch.stack([each.mean() for each in norms]))
    folded = GateOutput()(model.without(HeadMask(model.grid)), splits.score, seed=0)
    torch.testing.assert_close(folded.stderr, scores.stderr)


def test_random_draws_are_orders_and_seeded(model: Seq2Seq, splits: Splits) -> None:
    values = Random(draws=4)(model, splits.score, seed=3).values
    assert values.shape == (4, len(model.grid))
    assert torch.equal(values.sort(dim=1).values, torch.arange(len(model.grid)).double().expand(4, -1))
    assert len(values.unique(dim=0)) == 4
    assert torch.equal(values, Random(draws=4)(model, splits.score, seed=3).values)
    assert not torch.equal(values, Random(draws=4)(model, splits.score, seed=4).values)


@torch.no_grad()
def test_resampling_puts_the_output_on_another_example_in_its_place(model: Seq2Seq, splits: Splits) -> None:
    examples = splits.score
    replacement = resample(examples, seed=0)
    at = torch.arange(len(examples))
    batch = examples[at]
    fallback, outputs = replacement(model, batch, at), model.head_outputs(batch)
    valid = model.queries(batch)
    first = BlockId(Site.ENCODER_SELF, 0)  # where each example's outputs are its own at every position
    for e in range(len(examples)):
        same = [torch.allclose(fallback[first][e, :, 0], output[:, 0]) for output in outputs[first]]
        (other,) = [o for o in range(len(examples)) if same[o]]
        assert other != e
        for block, given in fallback.items():
            for t in range(int(valid[block][e].sum())):
                there = min(t, int(valid[block][other].sum()) - 1)
                torch.testing.assert_close(given[e, :, t], outputs[block][other, :, there])
    expected = measure(model, examples, HeadMask(model.grid).without(model.grid.heads[4]).gates(), replacement).loss
    scores = Ablation(replace="resample")(model, examples, seed=0).values[0]
    torch.testing.assert_close(scores[4], (expected - measure(model, examples).loss).mean())


@torch.no_grad()
def test_magnitude_is_that_of_the_weights_and_survives_folding(model: Seq2Seq, splits: Splits) -> None:
    scores = Magnitude()(model, splits.score, seed=0).values
    head = HeadId(Site.DECODER_SELF, 1, 2)
    attention = model.attention_sublayers()[head.block].attention
    values, output = attention.v_proj.weight[8:12], attention.out_proj.weight[:, 8:12]
    expected = (values**2).sum().sqrt() * (output**2).sum().sqrt() * attention.head_scale()[2]
    torch.testing.assert_close(scores[0, model.grid.index(head)], expected)
    torch.testing.assert_close(Magnitude()(model.without(HeadMask(model.grid)), splits.score, seed=0).values, scores)
