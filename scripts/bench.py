"""Two things side by side in one process: `python scripts/bench.py training removal --json`. Ratios, never promises of
time."""

from __future__ import annotations

import argparse
import copy
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune.command_line import described
from mhaprune.data import PAD, Examples, shift_right
from mhaprune.heads import Block, HeadGrid, HeadMask, Site
from mhaprune.measure import measure, measure_masks
from mhaprune.model.gates import Softmax
from mhaprune.model.layers import AttentionSublayer, Call, EncoderLayer, FeedForward, sinusoids
from mhaprune.model.network import Transformer
from mhaprune.model.shared_prefixes import Branches, depth_first
from mhaprune.model.sublayers import sublayers
from mhaprune.model.transformer import TOKENS_AT_ONCE, Seq2Seq
from mhaprune.recoveries.least_squares import correct
from mhaprune.recoveries.refitting import refit as refit_all
from mhaprune.recoveries.refitting import ridges, show
from mhaprune.schedules.base import Evidence
from mhaprune.schedules.budgets import removing
from mhaprune.schedules.greedy import Greedy
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.racing import Racing
from mhaprune.scorers.shapley import Shapley
from mhaprune.studies.trained import Recipe
from mhaprune.subject import Subject
from mhaprune.tasks.sort import Sort
from mhaprune.timing import COPIES, in_turn, ratios, taking_turns
from mhaprune.training.loop import Training, training_step

RUN = Path(__file__).with_name("run.py")
VOCABULARY_SIZE = 13
DEFAULT = Transformer()
Pair = tuple[str, Callable[[], object], Callable[[], object]]
Row = dict[str, Any]


class TorchSeq2Seq(nn.Module):
    """The peer of `Seq2Seq`: the same shape around `torch.nn.Transformer`, pre-LN and batch first."""

    positions: Tensor

    def __init__(self, config: Transformer) -> None:
        super().__init__()
        self.config = config
        self.source_embedding = nn.Embedding(VOCABULARY_SIZE, config.d_model)
        self.target_embedding = nn.Embedding(VOCABULARY_SIZE, config.d_model)
        self.register_buffer("positions", sinusoids(config.max_length, config.d_model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that pre-LN has no nested-tensor path
            self.transformer = nn.Transformer(
                config.d_model,
                config.num_heads,
                config.num_encoder_layers,
                config.num_decoder_layers,
                config.dim_feedforward,
                config.dropout,
                norm_first=True,
                batch_first=True,
            )
        self.output = nn.Linear(config.d_model, VOCABULARY_SIZE)
        self.output.weight = self.target_embedding.weight

    def logits(self, batch: Examples) -> Tensor:
        source_BSD = self._embed(self.source_embedding, batch.source)
        target_BTD = self._embed(self.target_embedding, shift_right(batch.target))
        length, padding = batch.target.shape[1], batch.source == PAD
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        x_BTD = self.transformer(
            source_BSD,
            target_BTD,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.output(x_BTD)

    def _embed(self, embedding: nn.Embedding, ids_BT: Tensor) -> Tensor:
        return embedding(ids_BT) * math.sqrt(self.config.d_model) + self.positions[: ids_BT.shape[1]]


def training() -> list[Pair]:
    """A training step of ours, gates included, against the same step of torch.nn.Transformer; AdamW and clipping
    alike."""
    config, batch, recipe = Transformer(), random_examples(64, 10), Training(optimiser="adamw")
    ours = Seq2Seq(config, VOCABULARY_SIZE, Softmax())
    peer = TorchSeq2Seq(config)
    ours_optimisers = recipe.optimisers(ours, Softmax())
    peer_optimiser = torch.optim.AdamW(peer.parameters(), lr=recipe.learning_rate, fused=True)

    def ours_step() -> None:
        ours.train()
        with torch.enable_grad():
            training_step(ours, batch, ours_optimisers)

    def peer_step() -> None:
        peer.train()
        with torch.enable_grad():
            loss = F.cross_entropy(peer.logits(batch).flatten(0, 1), batch.target.flatten(), ignore_index=PAD)
            peer_optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            peer_optimiser.step()

    return [("training", ours_step, peer_step)]


def recipes(count: int = 16) -> list[Pair]:
    """As many training steps by the default recipe of a task as by the one before it: AdamW, batches as drawn."""

    def steps(*overrides: str) -> Callable[[], None]:
        source = described("experiment=train", *overrides).source
        assert isinstance(source, Recipe)
        recipe, train = source.training, source.task.splits().train
        model = Seq2Seq(source.model, len(source.task.vocabulary), source.gate).train()
        optimisers = recipe.optimisers(model, source.gate)
        batches = train.shuffled_batches(recipe.batch_size, torch.Generator().manual_seed(0), recipe.sorted_batches)

        def call() -> None:
            with torch.enable_grad():
                for batch in islice(batches, count):
                    training_step(model, batch, optimisers)

        return call

    pairs: list[Pair] = []
    for task, before in (("sort", "adamw"), ("inflection", "adamw_inflection")):
        pairs.append((f"recipe of {task}", steps(f"task={task}"), steps(f"task={task}", f"training={before}")))
    return pairs


def removal() -> list[Pair]:
    """Half the heads removed, against a model built with half and against the dense one; forward and decoding."""
    pairs: list[Pair] = []
    for d_model, length, batch_size in ((64, 10, 64), (256, 128, 8)):
        config = Transformer(d_model=d_model, dim_feedforward=2 * d_model, max_length=length)
        gated = Seq2Seq(config, VOCABULARY_SIZE, Softmax())
        half = HeadMask(gated.grid, frozenset(head for head in gated.grid if head.head % 2))
        removed = [gated.without(half) for _ in range(COPIES)]
        peers = {
            "built": [Seq2Seq(config, VOCABULARY_SIZE, grid=removed[0].grid) for _ in range(COPIES)],
            "dense": [gated.without(HeadMask(gated.grid)) for _ in range(COPIES)],
        }
        batch = random_examples(batch_size, length)
        for what in ("logits", "predict"):
            pairs += [
                (f"removal {what} d_model={d_model} length={length} / {peer}", each(removed, what, batch), call)
                for peer, call in ((peer, each(models, what, batch)) for peer, models in peers.items())
            ]
    return pairs


def decode(length: int = 64) -> list[Pair]:
    """Greedy decoding of as many tokens as the source has, with keys and values kept or with the prefix run again."""
    pairs: list[Pair] = []
    for d_model, batch_size in ((64, 32), (256, 1), (64, 1)):
        batch = random_examples(batch_size, length)
        model = Seq2Seq(Transformer(d_model=d_model, dim_feedforward=2 * d_model), VOCABULARY_SIZE)
        ours, peer = (
            partial(model.decode_greedily, batch.source, length, use_cache=cached) for cached in (True, False)
        )
        pairs.append((f"decode d_model={d_model} batch_size={batch_size}", ours, peer))
    return pairs


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
        call, bias = Call(self.grid.split(gates_N)), torch.zeros(len(x_BTD), 1, 1, x_BTD.shape[1])
        for layer in self.layers:
            x_BTD = layer(x_BTD, bias, call)
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


def pairs_of_heads(config: Transformer = DEFAULT, num_examples: int = 64) -> list[Pair]:
    """The loss with every two heads of the default model closed, on 64 examples, against one pass per pair."""
    model, examples = Seq2Seq(config, VOCABULARY_SIZE, Softmax()), Sort().splits().score[:num_examples]
    every = HeadMask(model.grid)
    gates = torch.stack([every.without(*pair).gates() for pair in combinations(model.grid, 2)])
    return [("pairs of heads", *shared_and_plain(model, examples, gates))]


def refit(config: Transformer = DEFAULT, num_examples: int = 1024) -> list[Pair]:
    """Refit of the default model without half its heads, all sublayers in one pass, against one whole pass for each
    sublayer. What the dense model shows is there already for both."""
    dense = Seq2Seq(config, VOCABULARY_SIZE, Softmax())
    shown = show(dense, Sort(train=num_examples).splits().train)
    left = dense.without(HeadMask(dense.grid, frozenset(head for head in dense.grid if head.head % 2)))

    @torch.no_grad()
    def pass_by_pass() -> Seq2Seq:
        model = copy.deepcopy(left)
        for i, wanted in enumerate(shown.streams):
            whole = [list(sublayers(model, batch))[i] for batch in shown.batches]
            parts = [
                (one.hidden[one.valid], stream - one.output()[one.valid])
                for one, stream in zip(whole, wanted, strict=True)
            ]
            last, tokens = whole[0].last, sum(len(inputs) for inputs, _ in parts)
            correct(last.weight, last.bias, parts, ridges(1e-3, tokens, last.in_features))
        return model

    return [("refit", lambda: refit_all(left, shown, 1e-3), pass_by_pass)]


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

    budgets = removing(range(len(model.grid) + 1), model.grid)
    ours, peer = (partial(Greedy(), Evidence(model, no_score, loss), budgets) for loss in (shared, plain))
    return [("greedy", ours, peer)]


def shared_and_plain(
    model: Seq2Seq, examples: Examples, gates: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    return (
        lambda: measure_masks(model, examples, gates),
        lambda: [measure(model, examples, gates_N) for gates_N in gates],
    )


def shapley() -> list[Pair]:
    """Shapley values of the default model's heads at equal evaluations of the split, against captum's
    ShapleyValueSampling. Needs the extra `bench`."""
    from captum.attr import ShapleyValueSampling

    model, examples = Seq2Seq(Transformer(), VOCABULARY_SIZE, Softmax()), Sort().splits().score[:128]
    rounds, num_heads = 8, len(model.grid)

    def value(gates: Tensor) -> Tensor:
        return -measure(model, examples, gates[0]).loss.mean()[None]

    peer = ShapleyValueSampling(value)
    # Captum runs the model once per head and permutation, and once with all heads closed.
    evaluations = 1 + rounds * num_heads
    ours = Shapley(evaluations=evaluations)
    opened, closed = torch.ones(1, num_heads), torch.zeros(1, num_heads)
    return [
        (
            f"shapley {evaluations} evaluations",
            lambda: ours(model, examples, 0),
            lambda: peer.attribute(opened, closed, n_samples=rounds),
        )
    ]


def racing() -> list[Row]:
    """Not a time but a share: what racing takes of the example passes of full ablation, and in how many models of
    `sort`, one per seed, both remove the same heads."""
    rows: list[Row] = []
    studies = [described("task=sort", "experiment=train", f"seed={seed}").study() for seed in range(10)]
    for removed in (6, 12):
        same, shares = [], []
        for study in studies:
            full = Ablation()(study.subject, study.splits.score, study.seed)
            race = Racing(keep=len(study.subject.grid) - removed)(study.subject, study.splits.score, study.seed)
            lowest = [set(scores.values[0].argsort(stable=True)[:removed].tolist()) for scores in (full, race)]
            same.append(lowest[0] == lowest[1])
            shares.append(race.forward_passes / full.forward_passes)
        quartiles = np.quantile(shares, [0.25, 0.5, 0.75, 1.0])
        rows.append(
            {"name": f"racing, {removed} of {len(study.subject.grid)} removed", "models": len(same), "same": sum(same)}
            | dict(zip(("q1", "ratio", "q3", "largest"), quartiles, strict=True))
        )
    return rows


def sweep(rounds: int = 5) -> list[Row]:
    """Four jobs that train a model of `sort`: how much longer they take one after the other than two at once. A round
    takes minutes, so there are few."""
    command = [sys.executable, str(RUN), "-m", "experiment=train", "seed=0,1,2,3"]

    def jobs(launch: str) -> Callable[[], object]:
        def call() -> None:
            with TemporaryDirectory() as folder:
                places = [f"hydra.sweep.dir={folder}/sweep", f"cache={folder}/cache"]
                subprocess.run([*command, f"launch={launch}", *places], check=True, stdout=subprocess.DEVNULL)

        return call

    calls = {"basic": jobs("basic"), "joblib": jobs("joblib"), "basic again": jobs("basic")}
    times = in_turn(calls, rounds, warmup=0)
    return [
        {"name": "sweep of 4, basic over joblib", **ratios(times, "basic", "joblib")},
        {"name": "sweep of 4, A/A", **ratios(times, "basic again", "basic")},
    ]


def each(models: list[Seq2Seq], method: str, batch: Examples) -> Callable[[], object]:
    """Call a method of one model after the other."""
    return taking_turns([partial(getattr(model, method), batch) for model in models])


def random_examples(batch_size: int, length: int) -> Examples:
    draw = torch.Generator().manual_seed(0)
    source, target = (torch.randint(3, VOCABULARY_SIZE, (batch_size, length), generator=draw) for _ in range(2))
    return Examples(source, target)


TIMED = {
    bench.__name__: bench
    for bench in (training, recipes, removal, decode, ablation, pairs_of_heads, oracle, shapley, greedy, refit)
}
COUNTED = {bench.__name__: bench for bench in (racing, sweep)}
BENCHES = (*TIMED, *COUNTED)


def timed(pairs: list[Pair], rounds: int, clock: Callable[[], float] = time.perf_counter) -> list[Row]:
    """Two rows per pair: the ratio, and the peer against itself."""
    rows: list[Row] = []
    for name, ours, peer in pairs:
        # Both sides are called twice in a round: what is called more often would find more of itself in the caches.
        calls = {"ours": ours, "peer": peer, "ours again": ours, "peer again": peer}
        times = in_turn(calls, rounds, clock=clock)
        rows.append({"name": name, **ratios(times, "ours", "peer")})
        rows.append({"name": f"{name}, A/A", **ratios(times, "peer again", "peer")})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHES)}; default: all")
    parser.add_argument("--pairs", type=int, default=40, help="how often each is run, in turn: at least 20, default 40")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    chosen = parser.parse_args(arguments)
    if chosen.pairs < 20:
        parser.error(f"--pairs={chosen.pairs}: must be 20 or more")
    for name in chosen.names:
        if name not in BENCHES:
            parser.error(f"NAME={name}: no such bench, allowed are {', '.join(BENCHES)}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in chosen.names or BENCHES:
        rows += timed(TIMED[name](), chosen.pairs) if name in TIMED else COUNTED[name]()
    table = pd.DataFrame(rows)
    print(table.to_json(orient="records", indent=2) if chosen.json else table.round(3).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
