"""Time models in turn: dense, with heads removed, built without these heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import SPECIAL, Examples
from mhaprune.measure import times
from mhaprune.tables import DENSE, DENSE_AGAIN


@dataclass(frozen=True)
class Workload:
    """The work of one timed call: greedy decoding with a KV cache, after one pass of the encoder."""

    batch_size: int
    source_length: int
    target_length: int

    def batch(self, vocabulary_size: int, device: torch.device) -> Examples:
        """Return random symbols without special ones, so that nothing is padding."""
        draw = torch.Generator().manual_seed(0)
        source, target = (
            torch.randint(len(SPECIAL), vocabulary_size, (self.batch_size, length), generator=draw)
            for length in (self.source_length, self.target_length)
        )
        return Examples(source, target).to(device)

    def count_flops(self, model: Seq2Seq, batch: Examples) -> int:
        """Return the floating-point operations of one call, as torch counts them: two for each multiply-add of a matrix
        product."""
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model.predict(batch)
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

    `shape` is the shape of the dense model, `masks` are its masks; the first mask removes nothing.
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
            makers[pruned] = partial(dense.without, mask)
            makers[built] = partial(fresh, grid=dense.grid.without(mask.removed))
        made = times.copies(makers)
        self.models = {name: [model.to(device) for model in models] for name, models in made.items()}

    def speed(self, work: Workload, rounds: int) -> pd.DataFrame:
        """Return a row per mask, with the columns of `speed_columns` and three ratios. `built_ratio` is the time with
        heads removed / the time of the model built without them. `aa_ratio` is the time of the dense model / the time
        of its copy. `flop_ratio` is the operations of the dense model / the operations with heads removed."""
        batch = work.batch(self.vocabulary_size, self.device)
        calls = {name: [partial(model.predict, batch) for model in models] for name, models in self.models.items()}
        turns = {name: times.taking_turns(copies) for name, copies in calls.items()}
        timed = times.in_turn(turns, rounds, times.COPIES, self.device, times.clock_for(self.device))
        flops = [work.count_flops(self.models[pruned][0], batch) for pruned, _ in self.names.values()]
        rows = []
        for (mask, (pruned, built)), own_flops in zip(self.names.items(), flops, strict=True):
            row = {
                **vars(work),
                "timed_d_model": self.models[pruned][0].config.d_model,
                "heads_total": len(mask.grid),
                "heads_removed": len(mask.removed),
                **times.speed_columns(timed, DENSE, pruned),
                **times.ratio_columns("built_ratio", timed, pruned, built),
                **times.ratio_columns("aa_ratio", timed, DENSE, DENSE_AGAIN),
                "flop_ratio": flops[0] / own_flops,
                "parameters": self.models[pruned][0].count_parameters(),
            }
            rows.append(row)
        return pd.DataFrame(rows)
