"""How much memory a call takes while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.profiler import profile

from mhaprune.timing import Device


def peak_bytes(call: Callable[[], object], device: Device = "cpu") -> int:
    """The most bytes that one call held at any moment, beyond what was held before it.

    On a GPU its allocator counts them; on a CPU they are added up from the allocations and releases that torch's
    profiler sees, those inside a kernel included. What the allocator keeps for later is not counted.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with _silent(), profile(profile_memory=True) as profiler:
        call()
    seen = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(seen, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def model_bytes(model: nn.Module) -> int:
    """What the weights and buffers of a model take; shared ones count once."""
    tensors = {*model.parameters(), *model.buffers()}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _silent() -> Iterator[None]:
    """Without the lines that the profiler of torch 2.13 writes to standard error past Python whenever it starts."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
