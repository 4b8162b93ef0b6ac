"""The calls that are followed step by step: one of a head's own layer, and one where all sizes differ."""

from __future__ import annotations

import math

import pandas as pd
import torch
from torch.nn.utils.rnn import pad_sequence

from mhaprune.data import PAD, Examples, shift_right
from mhaprune.experiments.anatomy.scaling import with_and_without
from mhaprune.experiments.anatomy.walkthrough import LayerCall, walk
from mhaprune.experiments.examples import tokens
from mhaprune.heads import HeadId, Site
from mhaprune.model.attention import MultiHeadAttention, causal_bias
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.scoring import head_columns
from mhaprune.subject import Subject
from mhaprune.tasks.base import Task


def call_in(subject: Seq2Seq, head: HeadId, example: Examples, report: Examples) -> LayerCall:
    """The call of a head's layer while the model writes an example, in a batch with the longest of the first 64 of the
    report split: a shorter one is padded."""
    some = report[:64]
    longest = int((some.source != PAD).sum(dim=1).argmax())
    rows = [(example.source[0], example.target[0]), (some.source[longest], some.target[longest])]
    batch = Examples(*(pad_sequence(list(ids), batch_first=True, padding_value=PAD) for ids in zip(*rows, strict=True)))
    query, key = subject.attention_inputs(batch)[head.block]
    bias = subject.bias(batch.source)
    if head.site == Site.DECODER_SELF:
        bias = causal_bias(query.shape[1], key.shape[1], query.dtype, query.device)[None, None]
    return LayerCall(subject.attention_sublayers()[head.block].attention, query, key, key, bias)


def call_of_other_sizes(subject: Seq2Seq) -> LayerCall:
    """A layer of fresh weights whose queries, keys and values have sizes of their own; always the same."""
    width, heads = subject.config.d_model, subject.config.num_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = MultiHeadAttention(
            width, heads, qdim=width + 2, kdim=width + 4, vdim=width + 6, head_dim=subject.head_dim
        )
        query, key, value = torch.randn(2, 4, width + 2), torch.randn(2, 6, width + 4), torch.randn(2, 6, width + 6)
    return LayerCall(layer, query, key, value)


def scaling_here(subject: Seq2Seq, task: Task, call: LayerCall, head: HeadId, example: Examples) -> pd.DataFrame:
    """What the division does to the middle query of the call's first example: a row per key that it may look at."""
    place = place_in_block(subject, head)
    steps = {step.name: step.value for step in walk(call)}
    ids = example.source if head.site == Site.ENCODER_SELF else example.target
    query = ids.shape[1] // 2
    open_U = steps["masked scores"][0, place, query] > -math.inf
    table = with_and_without(steps["queries, split"][0, place, query], steps["keys, split"][0, place], open_U)
    keys = shift_right(example.target) if head.site == Site.DECODER_SELF else example.source
    names = tokens(task, keys)
    table.insert(1, "looks_at", [names[key] for key in table["key"]])
    return table.assign(**head_columns(head), query=query, token=tokens(task, ids)[query])


def place_in_block(subject: Subject, head: HeadId) -> int:
    """Where a head stands among those of its layer that are left."""
    return subject.grid.index(head) - subject.grid.positions(head.block).start
