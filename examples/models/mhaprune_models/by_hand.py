"""A small transformer whose weights are set by hand, so that the work of every head is known.

Dimensions: B = batch, T = positions, D = width, F = fields of the answer, V = symbols.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from mhaprune import MultiHeadAttention, losses
from mhaprune.inputs import Known
from mhaprune.lab.sources.pretrained import BATCH, Pretrained, PretrainedModel, chosen
from mhaprune.lab.tasks.base import SplitSize
from mhaprune.settings.ranges import Ge

V, T = 8, 12
HEADS = 12
"""Heads of each of the two layers."""
SHARP = 30.0
"""The attention score of the position that a head reads; those of all others are 0."""
LOUD = 5.0
"""The logit that a needed head writes."""


class Job(NamedTuple):
    """What a head does: it copies the symbol at position `reads` to the place `writes` of the residual stream at
    position `at`, `strength` times."""

    role: str
    reads: int
    writes: str
    strength: float = LOUD
    at: int = T - 1
    of: str = "symbol"
    """The place that is read."""


FIRST = [
    Job("needed", 0, "field 0"),
    Job("needed", 1, "field 1"),
    Job("needed", 2, "between", 1.0, at=5),  # the second layer reads it there
    Job("either", 3, "field 3"),
    Job("either", 3, "field 3"),
    Job("hurts", 7, "field 0", 2.5),
    *(Job("decoy", place, f"unread {n}", 2 * LOUD) for n, place in enumerate((0, 1, 2))),
]
SECOND = [
    Job("needed", 5, "field 2", of="between"),
    Job("either", 4, "field 4"),
    Job("either", 4, "field 4"),
    Job("hurts", 8, "field 1", 2.5),
    *(Job("decoy", place, f"unread {n}", 2 * LOUD) for n, place in enumerate((3, 4, 6))),
]
ANSWER = (0, 1, 2, 3, 4)
"""The positions whose symbols are asked for."""
PLACES = ("symbol", "position", "between", *(f"field {n}" for n in range(5)), *(f"unread {n}" for n in range(3)))


@dataclass(frozen=True)
class ByHand(Pretrained):
    """Two layers of twelve heads that copy five symbols of a sequence to its end. Four heads are needed, of two pairs
    either head is enough, two heads hurt, six write where nobody reads, and the rest write a little noise. The order of
    the heads and the directions of the residual stream are drawn at random."""

    score: SplitSize = 64
    """Number of sequences that heads are scored on."""
    draw: Annotated[int, Ge(0)] = 0
    """The number of the draw of weights and sequences."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        if data is not None:
            raise ValueError(f"data={data}: model=by_hand has sequences of its own, leave it out")
        name, judged_by = chosen(objective, {"likelihood": (losses.seq2seq, losses.exact_match)}, "model=by_hand")
        draw = torch.Generator().manual_seed(self.draw)
        jobs = [shuffled(each, self.draw + n) for n, each in enumerate((FIRST, SECOND))]
        splits, corrupt = {}, {}
        for split, size in self.sizes.items():
            splits[split] = [examples(part, draw) for part in in_batches(size)]
            corrupt[split] = [examples(part, draw) for part in in_batches(size)]
        return PretrainedModel(
            model=Copier(jobs, draw).eval(),
            splits=splits,
            corrupt=corrupt,
            objective=judged_by,
            facts={"model_task": "by-hand", "objective": name},
            packages=(),
            call=lambda model, batch: model(batch["symbols"]),
            known=Known(
                {f"attention.{n}.{h}": job.role for n, each in enumerate(jobs) for h, job in enumerate(each)},
                useful=("needed", "either"),
                source="construction",
            ),
        )


def shuffled(jobs: Sequence[Job], seed: int) -> list[Job]:
    """Return the jobs of a layer in random order, with heads of noise to make it full."""
    noise = [Job("noise", 5 + n % 7, f"field {n % 5}", 0.1) for n in range(HEADS - len(jobs))]
    every = [*jobs, *noise]
    random.Random(seed).shuffle(every)
    return every


def in_batches(size: int) -> list[int]:
    return [min(BATCH, size - start) for start in range(0, size, BATCH)]


def examples(size: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Return random sequences (B, T) with their answers (B, F)."""
    symbols_BT = torch.randint(V, (size, T), generator=draw)
    return {"symbols": symbols_BT, "labels": symbols_BT[:, list(ANSWER)]}


class Layer(nn.Module):
    """Attention that adds to the residual stream."""

    def __init__(self, jobs: Sequence[Job], basis: Tensor) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(len(basis), len(jobs), head_dim=T, bias=False)
        with torch.no_grad():
            for weight in self.attention.parameters():
                weight.zero_()
            layer = self.attention
            for n, job in enumerate(jobs):
                rows = slice(n * T, (n + 1) * T)
                position = basis[start("position") : start("position") + T]
                layer.q_proj.weight[rows] = SHARP * T**0.5 * position[job.at].expand(T, -1) * unit(job.reads)[:, None]
                layer.k_proj.weight[rows] = position
                layer.v_proj.weight[rows][:V] = basis[start(job.of) : start(job.of) + V]
                into = basis[start(job.writes) : start(job.writes) + V]
                layer.out_proj.weight[:, rows][:, :V] = job.strength * into.T

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]


class Copier(nn.Module):
    """Symbols (B, T) become logits (B, F, V) at the last position."""

    def __init__(self, jobs: Sequence[Sequence[Job]], draw: torch.Generator) -> None:
        super().__init__()
        width = start("")
        basis = torch.linalg.qr(torch.randn(width, width, generator=draw))[0]  # orthonormal rows
        self.symbols, self.positions = nn.Embedding(V, width), nn.Embedding(T, width)
        self.layers = nn.Sequential(*(Layer(each, basis) for each in jobs))
        self.read = nn.Linear(width, len(ANSWER) * V, bias=False)
        with torch.no_grad():
            self.symbols.weight.copy_(basis[:V])
            self.positions.weight.copy_(basis[start("position") : start("position") + T])
            self.read.weight.copy_(basis[start("field 0") : start("field 0") + len(ANSWER) * V])

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbols(symbols) + self.positions.weight
        last: Tensor = self.read(self.layers(x)[:, -1])
        return last.unflatten(-1, (len(ANSWER), V))


def start(place: str) -> int:
    """Return the first of the directions of a place; for an unknown one, the number of all directions."""
    at = 0
    for name in PLACES:
        if name == place:
            return at
        at += T if name == "position" else V
    return at


def unit(n: int) -> Tensor:
    return torch.eye(T)[n]
