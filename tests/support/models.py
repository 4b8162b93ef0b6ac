"""Tiny models, and what is given to recoveries and schedules."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from mhaprune.attention.gates import Softmax
from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.decoding import decode_greedily
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.training import Training
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import measure
from mhaprune.schedules.base import Evidence
from mhaprune.scorers.ablation import Ablation
from mhaprune.subject import Fallback, Subject


def gated_model(task: Sort) -> Seq2Seq:
    """Three sites of two layers, all of them with unequal learned gates; float64, so that equal means equal."""
    torch.manual_seed(0)
    config = Transformer(
        d_model=12, num_heads=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16, max_length=16
    )
    model = Seq2Seq(config, len(task.vocabulary), Softmax()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def study_with(dense: Seq2Seq, splits: Splits) -> Study:
    """For a recovery that takes a few steps, and can be interrupted after each."""
    training = Training(steps=3, batch_size=8, warmup_steps=1, evaluate_every=2, checkpoint_every=1)
    return Study(dense, splits, training, seed=0, extra_steps=2)


def loss_of_one(
    model: Seq2Seq, source: Tensor, target: Tensor, gates: Tensor | None = None, fallback: Fallback | None = None
) -> Tensor:
    """The mean cross-entropy of one example without any padding."""
    source, target = source[source != 0][None], target[target != 0][None]
    return F.cross_entropy(model.run_gated(Examples(source, target), gates, fallback)[0], target[0])


@torch.no_grad()
def decoded_plainly(
    model: Seq2Seq, source: Tensor, max_tokens: int, gates: Tensor | None = None, *, stop: bool = False
) -> Tensor:
    """Greedy answers without a cache: the whole model is run again for every token."""
    with model.gated(len(source), gates):
        return decode_greedily(lambda tokens: model(source, tokens)[:, -1], source, max_tokens, stop=stop)


def loss_of(model: Seq2Seq, splits: Splits, mask: HeadMask) -> float:
    """With the heads masked, which is quicker than to remove them and loses the same."""
    return float(measure(model, splits.score, mask.gates()).loss.mean())


def evidence_of(model: Seq2Seq, splits: Splits) -> Evidence:
    """For schedules: what ablation and the loss say of the model."""

    def score(left: Subject) -> Tensor:
        return Ablation()(left, splits.score, 0).values[0]

    def loss(masks: Sequence[HeadMask]) -> Tensor:
        return torch.tensor([loss_of(model, splits, mask) for mask in masks])

    return Evidence(model, score, loss)


def judged(model: Seq2Seq, scores_N: Tensor) -> Evidence:
    """For schedules that ask once: these scores."""

    def no_loss(masks: Sequence[HeadMask]) -> Tensor:
        raise AssertionError("no loss was to be measured")

    return Evidence(model, lambda left: scores_N, no_loss)


OF_ONE_KIND = Examples(torch.zeros(1, 1).long(), torch.zeros(1, 1).long())
"""Examples of which no kinds are told apart."""
