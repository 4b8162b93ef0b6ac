from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from mhaprune.experiments.speed.memory import model_bytes, peak_bytes


def test_the_peak_is_what_was_held_at_once_and_not_what_was_taken_in_all() -> None:
    one = torch.ones(1000)

    def call() -> torch.Tensor:
        for _ in range(3):
            two = torch.cat([one, one])  # 8000 bytes
            four = torch.cat([two, two])  # 16000 more
            del two, four
        return one + 1

    assert peak_bytes(call) == 24_000


def test_what_was_there_before_does_not_count() -> None:
    held, one = torch.ones(10_000), torch.ones(1)
    assert peak_bytes(lambda: held.add_(one)) == 0


def test_shared_weights_count_once_and_buffers_count() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False), nn.BatchNorm1d(5))
    model[1].weight = model[0].weight
    assert model_bytes(model) == 4 * (100 + 4 * 5) + 8  # the batch norm also counts its batches, in 8 bytes
    assert model_bytes(model.to(torch.bfloat16)) == 2 * (100 + 4 * 5) + 8


def test_nothing_is_said_and_standard_error_works_again() -> None:
    code = "import sys, mhaprune.experiments.speed.memory as m, torch; m.peak_bytes(lambda: torch.ones(3)); print('x', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "x\n")
