"""Masks that are handed to worker processes of Ray: on this machine, or on a cluster that runs.

Dimensions: M = masks, N = all heads.
"""

import importlib
import io
import os
import sys
import uuid
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mhaprune.hooks.pytree import mapped
from mhaprune.measure.outcomes import joined
from mhaprune.settings.refusals import foreign
from mhaprune.subject import Fallback
from mhaprune.subjects.batches import Batches

TRIES = 3
"""Number of times that a worker that died is started again, and that an unfinished call is made again."""


class Worker:
    """A process that holds a copy of the subject that it was asked about last, on GPUs of its own if the subject is on
    some."""

    def __init__(self, path: list[str], threads: int) -> None:
        sys.path += [each for each in path if each not in sys.path]  # where the user's own modules are
        torch.set_num_threads(threads)
        self.key, self.subject = "", None

    def run(
        self, key: str, pickled: bytes, places: dict[str, str], batch: Batches, gates: Tensor, fallback: Fallback | None
    ) -> Any:
        if key != self.key:
            self.subject = torch.load(io.BytesIO(pickled), map_location=places, weights_only=False)
            self.key = key
        return on_cpu(self.subject.evaluate_masks(batch, gates, fallback))  # type: ignore[attr-defined]


@cache
def started(number: int, gpus: int) -> list[Any]:
    """Start Ray, if it does not run yet, and this number of workers with this number of GPUs each. They serve all
    subjects in turn."""
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ValueError(f"workers={number}: needs ray, pip install 'mhaprune[ray]'") from None
    with foreign(f"workers={number}: Ray does not start"):
        cluster = "RAY_ADDRESS" in os.environ
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of what it will do one day
        if not ray.is_initialized():
            ray.init(log_to_driver=False, **({} if cluster else {"include_dashboard": False}))
        free = int(ray.available_resources().get("GPU", 0))
    if free < number * gpus:  # Ray would wait for them without an end
        each = f"{gpus} for each worker" if gpus > 1 else "one for each worker"
        raise ValueError(f"workers={number}: needs {number * gpus} GPUs, {each}, and Ray has {free} free")
    again = {"max_restarts": TRIES, "max_task_retries": TRIES}
    with foreign(f"workers={number}: Ray does not start"):
        kind = ray.remote(num_cpus=int(cluster), num_gpus=gpus, **again)(Worker)
        return [kind.remote(sys.path, torch.get_num_threads()) for _ in range(number)]


class Shared:
    """A subject that many workers evaluate."""

    def __init__(self, subject: Any, number: int) -> None:
        self.places = seen_by_a_worker(subject.module)
        self.workers, self.key = started(number, len(self.places)), uuid.uuid4().hex
        self.ray: Any = importlib.import_module("ray")
        written = io.BytesIO()
        with foreign(f"workers={number}: the model or a function given to wrap cannot go to another process"):
            torch.save(subject, written, pickle_module=importlib.import_module("ray.cloudpickle"))
            self.pickled = self.ray.put(written.getvalue())

    def evaluate_masks(self, batch: Batches, gates: Tensor, fallback: Fallback | None) -> Any:
        """Return what the subject would, in every bit: each worker takes some of the rows of `gates` (M, N)."""
        number = min(len(self.workers), len(gates))
        # Every second row, say, because masks of late blocks, which stand together, take less time.
        rows = [torch.arange(first, len(gates), number) for first in range(number)]
        with foreign(f"workers={len(self.workers)}: a worker failed"):
            runs = [
                worker.run.remote(self.key, self.pickled, self.places, *on_cpu((batch, gates[each], fallback)))
                for worker, each in zip(self.workers, rows, strict=False)
            ]
            back = torch.cat(rows).argsort()
            return joined(self.ray.get(runs), lambda parts: torch.cat(parts)[back].to(gates.device))


def seen_by_a_worker(module: nn.Module) -> dict[str, str]:
    """Return the GPUs on which a model is, by name, each with the name that it has in a process that sees only as many:
    a worker has GPUs of its own, numbered from 0."""
    devices = {weight.device for weight in (*module.parameters(), *module.buffers())}
    gpus = sorted((device for device in devices if device.type == "cuda"), key=lambda device: device.index)
    return {str(device): f"cuda:{number}" for number, device in enumerate(gpus)}


def on_cpu(value: Any) -> Any:
    """Return the same with all tensors on the CPU, from where they can go to another process."""
    if isinstance(value, Batches):
        return value.on_cpu()
    return mapped(value, Tensor.cpu)
