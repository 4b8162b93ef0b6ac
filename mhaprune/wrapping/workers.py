"""Masks that are handed to worker processes of Ray: on this machine, or on a cluster that runs.

Dimensions: M = masks, N = all heads.
"""

import importlib
import os
import sys
import uuid
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mhaprune.measure.outcomes import joined
from mhaprune.settings.refusals import foreign
from mhaprune.subject import Fallback
from mhaprune.wrapping.batches import Batches

TRIES = 3
"""Number of times that a worker that died is started again, and that an unfinished call is made again."""


class Worker:
    """A process that holds a copy of the subject that it was asked about last."""

    def __init__(self, path: list[str], threads: int) -> None:
        sys.path += [each for each in path if each not in sys.path]  # where the user's own modules are
        torch.set_num_threads(threads)
        self.key, self.subject = "", None

    def run(self, key: str, pickled: bytes, batch: Batches, gates: Tensor, fallback: Fallback | None) -> Any:
        if key != self.key:
            self.key, self.subject = key, importlib.import_module("ray.cloudpickle").loads(pickled)
        return self.subject.evaluate_masks(batch, gates, fallback)  # type: ignore[attr-defined]


@cache
def started(number: int) -> list[Any]:
    """Start Ray, if it does not run yet, and this number of workers. They serve all subjects in turn."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ValueError(f"workers={number}: needs ray, pip install 'mhaprune[ray]'") from None
    with foreign(f"workers={number}: Ray does not start"):
        cluster = "RAY_ADDRESS" in os.environ
        if not ray.is_initialized():
            ray.init(log_to_driver=False, **({} if cluster else {"include_dashboard": False}))
        kind = ray.remote(num_cpus=int(cluster), max_restarts=TRIES, max_task_retries=TRIES)(Worker)
        return [kind.remote(sys.path, torch.get_num_threads()) for _ in range(number)]


class Shared:
    """A subject that many workers evaluate."""

    def __init__(self, subject: Any, number: int) -> None:
        self.workers, self.key = started(number), uuid.uuid4().hex
        self.ray: Any = importlib.import_module("ray")
        with foreign(f"workers={number}: the model or a function given to wrap cannot go to another process"):
            self.pickled = self.ray.put(importlib.import_module("ray.cloudpickle").dumps(subject))

    def evaluate_masks(self, batch: Batches, gates: Tensor, fallback: Fallback | None) -> Any:
        """Return what the subject would, in every bit: each worker takes some of the rows of `gates` (M, N)."""
        number = min(len(self.workers), len(gates))
        # Every second row, say, because masks of late blocks, which stand together, take less time.
        rows = [torch.arange(first, len(gates), number) for first in range(number)]
        with foreign(f"workers={len(self.workers)}: a worker failed"):
            runs = [
                worker.run.remote(self.key, self.pickled, batch, gates[each], fallback)
                for worker, each in zip(self.workers, rows, strict=False)
            ]
            back = torch.cat(rows).argsort()
            return joined(self.ray.get(runs), lambda parts: torch.cat(parts)[back])
