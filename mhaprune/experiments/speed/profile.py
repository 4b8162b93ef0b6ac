"""Profile of a model: the time of attention, of feed-forward and of the rest."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from mhaprune.measure.times import Device
from mhaprune.model.transformer import Seq2Seq

ATTENTION, FEED_FORWARD, REST = "attention", "feed_forward", "rest"
WHOLE = "whole"


class Stopwatch:
    """Adds up the time of the functions that it wraps, by the names of parts.

    On a GPU the marks are events in its stream. They are read at the end, so no call waits for a mark.
    """

    def __init__(self, device: Device) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self.laps: list[tuple[str, Any, Any]] = []

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = self._now()
            result = function(*arguments, **named)
            self.laps.append((part, start, self._now()))
            return result

        return timed

    def read(self) -> dict[str, float]:
        """Milliseconds of every part since the last reading."""
        if self.on_gpu:
            torch.cuda.synchronize()
        sums: dict[str, float] = {}
        for part, start, end in self.laps:
            lap = start.elapsed_time(end) if self.on_gpu else 1000 * (end - start)
            sums[part] = sums.get(part, 0.0) + lap
        self.laps.clear()
        return sums

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@torch.no_grad()
def time_parts(
    model: Seq2Seq, run: Callable[[Seq2Seq], object], rounds: int, warmup: int = 2, device: Device = "cpu"
) -> pd.DataFrame:
    """Milliseconds of each part (columns) in every round (rows) of `run` on a copy of the model.

    A part is all that its sublayer does: normalisation, the keys and values of the encoder's output, and the addition
    to what flows by are attention's too. The rest is embedding, output, choice of a token, and what Python takes in
    between.
    """
    watch, watched = Stopwatch(device), copy.deepcopy(model)
    for sublayer in watched.attention_sublayers().values():
        sublayer.forward = watch.around(ATTENTION, sublayer.forward)  # type: ignore[method-assign]
    watched.project_memory = watch.around(ATTENTION, watched.project_memory)  # type: ignore[method-assign]
    prepare = watch.around(ATTENTION, watched.attention_step)

    def watched_step(*arguments: Any) -> Callable[[Tensor], Tensor]:
        return watch.around(ATTENTION, prepare(*arguments))

    watched.attention_step = watched_step  # type: ignore[assignment]
    for layer in (*watched.encoder, *watched.decoder):
        feed_forward: Any = layer.feed_forward
        feed_forward.forward = watch.around(FEED_FORWARD, feed_forward.forward)
    whole = watch.around(WHOLE, run)
    rows = []
    for turn in range(-warmup, rounds):
        whole(watched)
        row = watch.read()
        if turn >= 0:
            rows.append(row)
    frame = pd.DataFrame(rows, columns=[ATTENTION, FEED_FORWARD, WHOLE]).fillna(0.0)
    frame[REST] = frame[WHOLE] - frame[ATTENTION] - frame[FEED_FORWARD]
    return frame[[ATTENTION, FEED_FORWARD, REST]]
