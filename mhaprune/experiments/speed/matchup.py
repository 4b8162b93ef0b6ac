"""Time models in turn: dense, with heads removed, built without these heads. Also time attention and feed-forward."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mhaprune.data import SPECIAL, Examples
from mhaprune.heads import HeadGrid, HeadMask, Site
from mhaprune.measure import times
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.tables import DENSE, DENSE_AGAIN

What = Literal["encoder", "decoder", "both"]
"""The part of the model to time: one pass of the encoder; greedy decoding with a KV cache from the encoder's output; or
both in turn, the time that a user waits."""


@dataclass(frozen=True)
class Workload:
    """The work of one timed call. For the encoder alone the target length is 0."""

    what: What
    batch_size: int
    source_length: int
    target_length: int

    def shape(self, whole: Transformer) -> Transformer:
        """Return the shape of a model that does only this work.

        A decoder alone has an encoder without layers. It reads the embedded source, which has the shape of an encoder's
        output and costs almost nothing.
        """
        return replace(whole, num_encoder_layers=0) if self.what == "decoder" else whole

    def batch(self, vocabulary_size: int, device: torch.device) -> Examples:
        """Return random symbols without special ones, so that nothing is padding."""
        draw = torch.Generator().manual_seed(0)
        source, target = (
            torch.randint(len(SPECIAL), vocabulary_size, (self.batch_size, length), generator=draw)
            for length in (self.source_length, self.target_length)
        )
        return Examples(source, target).to(device)

    def call(self, model: Seq2Seq, batch: Examples) -> Callable[[], object]:
        return partial(model.encode, batch.source) if self.what == "encoder" else partial(model.predict, batch)

    def grid(self, grid: HeadGrid) -> HeadGrid:
        """Return the heads of a model that take part in this work."""
        sites = {"encoder": [Site.ENCODER_SELF], "decoder": [Site.DECODER_SELF, Site.CROSS], "both": list(Site)}
        blocks = tuple(block for block in grid.blocks if block.site in sites[self.what])
        return HeadGrid(blocks, tuple(head for head in grid if head.block in blocks))

    def count_flops(self, model: Seq2Seq, batch: Examples) -> int:
        """Return the floating-point operations of one call, as torch counts them: two for each multiply-add of a matrix
        product."""
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.call(model, batch)()
        return counter.get_total_flops()


def scaled(shape: Transformer, d_model: int, max_length: int) -> Transformer:
    """Return the shape with another width and the same layers and heads. The feed-forward is scaled in proportion."""
    dim_feedforward = max(1, round(shape.dim_feedforward * d_model / shape.d_model))
    return replace(shape, d_model=d_model, dim_feedforward=dim_feedforward, max_length=max_length)


def evenly(grid: HeadGrid, count: int) -> HeadMask:
    """Return a mask that removes `count` heads evenly over the blocks. In each block the first heads are removed."""
    blocks = len(grid.blocks)
    shares = [(i + 1) * count // blocks - i * count // blocks for i in range(blocks)]
    taken = [n for block, share in zip(grid.blocks, shares, strict=True) for n in grid.positions(block)[:share]]
    return HeadMask(grid, frozenset(grid.heads[n] for n in taken))


class Matchup:
    """Timing of dense models, pruned models and models built small, in turn, with several copies and random weights.

    `masks` are masks of the whole model; the first mask removes nothing. `shape` is the shape of this model, or of its
    decoder alone.
    """

    def __init__(
        self, shape: Transformer, vocabulary_size: int, masks: Sequence[HeadMask], device: torch.device
    ) -> None:
        self.device, self.vocabulary_size = device, vocabulary_size
        fresh = partial(Seq2Seq, shape, vocabulary_size)
        dense = fresh()
        makers: dict[str, Callable[[], Seq2Seq]] = {DENSE: fresh, DENSE_AGAIN: fresh}
        less = {mask: f"without {len(mask.removed)} heads" for mask in masks}
        self.names = {mask: (name, f"built {name}") for mask, name in less.items()}
        for mask, (pruned, built) in self.names.items():
            present = HeadMask(dense.grid, mask.removed & frozenset(dense.grid))
            makers[pruned] = partial(dense.without, present)
            makers[built] = partial(fresh, grid=dense.grid.without(present.removed))
        made = times.copies(makers)
        self.models = {name: [model.to(device) for model in models] for name, models in made.items()}

    def speed(self, work: Workload, rounds: int) -> pd.DataFrame:
        """Return a row per mask, with the columns of `speed_columns` and three ratios. `built_ratio` is the time with
        heads removed / the time of the model built without them. `aa_ratio` is the time of the dense model / the time
        of its copy. `flop_ratio` is the operations of the dense model / the operations with heads removed."""
        batch = work.batch(self.vocabulary_size, self.device)
        calls = {name: [work.call(model, batch) for model in models] for name, models in self.models.items()}
        turns = {name: times.taking_turns(copies) for name, copies in calls.items()}
        timed = times.in_turn(turns, rounds, times.COPIES, self.device)
        flops = [work.count_flops(self.models[pruned][0], batch) for pruned, _ in self.names.values()]
        rows = []
        for (mask, (pruned, built)), own_flops in zip(self.names.items(), flops, strict=True):
            grid = work.grid(mask.grid)
            row = {
                "model_heads": len(mask.grid),
                "model_heads_removed": len(mask.removed),
                "heads_total": len(grid),
                "heads_removed": len(mask.removed & frozenset(grid)),
                **times.speed_columns(timed, DENSE, pruned),
                **times.ratio_columns("built_ratio", timed, pruned, built),
                **times.ratio_columns("aa_ratio", timed, DENSE, DENSE_AGAIN),
                "flop_ratio": flops[0] / own_flops,
                "parameters": self.models[pruned][0].count_parameters(),
            }
            rows.append(self._identity(work) | row)
        return pd.DataFrame(rows)

    def parts(self, work: Workload, rounds: int) -> pd.DataFrame:
        """Return the median time of attention, feed-forward and the rest of the dense model, and the share of each."""
        batch, model = work.batch(self.vocabulary_size, self.device), self.models[DENSE][0]
        spent = time_parts(model, lambda watched: work.call(watched, batch)(), rounds, device=self.device)
        medians = spent.median()
        parts = {"part": list(spent), "part_ms": medians.to_numpy(), "share": (medians / medians.sum()).to_numpy()}
        return pd.DataFrame(self._identity(work) | parts)

    def _identity(self, work: Workload) -> dict[str, Any]:
        return {**vars(work), "timed_d_model": self.models[DENSE][0].config.d_model}


ATTENTION, FEED_FORWARD, REST = "attention", "feed_forward", "rest"


@torch.no_grad()
def time_parts(
    model: Seq2Seq, run: Callable[[Seq2Seq], object], rounds: int, warmup: int = 2, device: times.Device = "cpu"
) -> pd.DataFrame:
    """Return milliseconds of attention, feed-forward and the rest (columns) in each round (row) of `run` on a copy of
    `model`.

    The time of attention includes normalisation, the residual addition, and computing keys and values from the
    encoder's output. The rest is embedding, output, choice of a token, and Python between the parts; on a GPU, also the
    wait for the end of each part.
    """
    watched, spent = copy.deepcopy(model), dict[str, float]()

    def timed(part: str, function: Callable[..., Any]) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            results = []
            spent[part] += times.milliseconds(lambda: results.append(function(*arguments, **named)), device)
            return results[0]

        return call

    prepare = timed(ATTENTION, watched.attention_step)

    def watched_step(*arguments: Any) -> Callable[[Tensor], Tensor]:
        return timed(ATTENTION, prepare(*arguments))

    watched.attention_step = watched_step  # type: ignore[assignment]
    watched.project_memory = timed(ATTENTION, watched.project_memory)  # type: ignore[method-assign]
    for sublayer in watched.attention_sublayers().values():
        sublayer.forward = timed(ATTENTION, sublayer.forward)  # type: ignore[method-assign]
    for layer in (*watched.encoder, *watched.decoder):
        feed_forward: Any = layer.feed_forward
        feed_forward.forward = timed(FEED_FORWARD, feed_forward.forward)
    rows = []
    for _ in range(warmup + rounds):
        spent |= {ATTENTION: 0.0, FEED_FORWARD: 0.0}
        whole = times.milliseconds(lambda: run(watched), device)
        rows.append({**spent, REST: whole - spent[ATTENTION] - spent[FEED_FORWARD]})
    return pd.DataFrame(rows[warmup:])
