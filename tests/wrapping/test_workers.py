"""Masks handed to processes of Ray."""

import importlib.util
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mhaprune import losses
from mhaprune.api.wrap import Heads, wrap
from mhaprune.subjects.ray_workers import seen_by_a_worker, started
from support.classifier import batches, classifier

pytestmark = [  # Ray leaves its handles of /dev/null open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def heads(loss: Any = losses.classification, workers: int = 2) -> Heads:
    return wrap(classifier(), loss, score=batches(3), workers=workers)


@pytest.mark.skipif(bool(importlib.util.find_spec("ray")), reason="ray is there")
def test_without_ray_the_extra_is_named() -> None:
    with pytest.raises(ValueError, match=r"workers=2: needs ray, pip install 'mhaprune\[ray\]'"):
        heads().score("ablation")


@pytest.mark.ray
@pytest.mark.parametrize("name", ["ablation", "ablation_mean", "taylor"])
def test_scores_are_equal_in_every_bit(name: str) -> None:
    ours, theirs = (heads(workers=workers).score(name)["score"].tolist() for workers in (2, 0))
    assert ours == theirs


@pytest.mark.ray
def test_searches_and_sets_of_heads_are_spread_too() -> None:
    for how in ({"by": "greedy"}, {"by": "ablation", "rescore_every": 2}, {"by": "ablation", "unit": "block"}):
        ours, theirs = (heads(workers=workers).mask(keep=0.5, **how) for workers in (3, 0))
        assert ours.removed == theirs.removed


class Dies:
    """A loss that ends its process if it is a worker, as often as it is told."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times, self.main = folder, times, os.getpid()

    def __call__(self, output: Any, batch: Any) -> Tensor:
        if os.getpid() != self.main and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            os._exit(1)
        return losses.classification(output, batch)


@pytest.mark.ray
def test_a_worker_that_dies_is_started_again_and_its_part_is_done_again(tmp_path: Path) -> None:
    found = heads(Dies(tmp_path, 1)).score("ablation")["score"].tolist()
    assert list(tmp_path.iterdir()), "none died"
    assert found == heads(workers=0).score("ablation")["score"].tolist()


@pytest.mark.ray
def test_workers_that_die_again_and_again_are_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers=4: a worker failed, .*died") as refused:
        heads(Dies(tmp_path, 99), workers=4).score("ablation")
    assert "\n" not in str(refused.value)


@pytest.mark.ray
def test_what_cannot_go_to_another_process_is_said() -> None:
    lock = threading.Lock()

    def loss(output: Any, batch: Any) -> Tensor:
        with lock:
            return losses.classification(output, batch)

    with pytest.raises(
        ValueError, match="workers=2: the model or a function given to wrap cannot go to another process"
    ):
        heads(loss).score("ablation")


class OnGPUs(torch.nn.Module):
    """A model that says that it is on these devices."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.devices = [SimpleNamespace(device=torch.device(name)) for name in names]

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self.devices)


def test_a_worker_counts_its_own_gpus_from_0() -> None:
    assert seen_by_a_worker(OnGPUs("cuda:10", "cpu", "cuda:2")) == {"cuda:2": "cuda:0", "cuda:10": "cuda:1"}
    assert seen_by_a_worker(OnGPUs("cpu")) == {}


@pytest.mark.ray
def test_more_gpus_than_there_are_are_refused_and_not_waited_for() -> None:
    started(1, 0)  # Ray runs, with the GPUs of this machine
    here = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"workers=2: needs {2 * here + 2} GPUs, .* and Ray has {here} free"):
        started(2, here + 1)


@pytest.mark.ray
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_workers_have_gpus_of_their_own() -> None:
    number = torch.cuda.device_count()

    def scores(workers: int) -> list[float]:
        model = classifier().to("cuda")
        return wrap(model, losses.classification, score=batches(3), workers=workers).score("ablation")["score"].tolist()

    assert scores(number) == scores(0)
