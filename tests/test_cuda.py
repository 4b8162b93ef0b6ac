"""The same numbers on a GPU as on the processor. The tests marked `cuda` run where there is one."""

import copy
from pathlib import Path
from typing import Literal

import pandas as pd
import pytest
import torch

from mhaprune.attention.gates import Softmax
from mhaprune.data import Splits
from mhaprune.heads import HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.training import Training
from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import gate_gradients, measure, measure_masks
from mhaprune.pruning.pruned import proofs
from support.composing import compose, every
from support.models import gated_model
from support.sizes import TINY, chosen, options

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_gpu])]
"""The processor too, so that the tests themselves are run everywhere."""


def close(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first.cpu(), second.cpu(), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def single(task: Sort) -> Seq2Seq:
    """In float32, as models are trained."""
    return gated_model(task).float()


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_computes_the_same(single: Seq2Seq, splits: Splits, device: str) -> None:
    there, batch = copy.deepcopy(single).to(device), splits.report.to(device)
    close(there.call(batch), single.call(splits.report))
    close(measure(there, batch).loss, measure(single, splits.report).loss)
    close(gate_gradients(there, batch), gate_gradients(single, splits.report))
    assert torch.equal(there.predict(batch).cpu(), single.predict(splits.report))
    masks = [HeadMask(single.grid).without(head) for head in single.grid]
    here = measure_masks(single, splits.report, torch.stack([mask.gates() for mask in masks]))
    close(measure_masks(there, batch, torch.stack([mask.gates(device) for mask in masks])).loss, here.loss)
    left = there.without(masks[0])
    close(left.call(batch), single.run_gated(splits.report, masks[0].gates()))
    assert proofs(there, batch)["smallest_gate_effect"] > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_training_goes_the_same_way(
    single: Seq2Seq, splits: Splits, device: str, optimiser: Literal["adamw", "muon"]
) -> None:
    recipe = Training(optimiser=optimiser, steps=5, batch_size=16, warmup_steps=1, evaluate_every=5)
    ends = []
    for where in ("cpu", device):
        model = copy.deepcopy(single).to(where)
        data = Splits(**{name: examples.to(where) for name, examples in splits.items()})
        ends.append(recipe(model, data.train, data.valid, Softmax(), seed=0))
    columns = [name for name in ends[0] if name != "seconds"]
    pd.testing.assert_frame_equal(ends[0][columns], ends[1][columns], rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("name", sorted(every("scorer")))
def test_a_score_is_the_same(single: Seq2Seq, splits: Splits, name: str) -> None:
    scorer = every("scorer")[name]
    here = scorer(single, splits.score, 0)
    there = scorer(copy.deepcopy(single).to("cuda"), splits.score.to("cuda"), 0)
    torch.testing.assert_close(there.values.cpu(), here.values, rtol=1e-3, atol=1e-4, check_dtype=False)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_runs(tmp_path: Path, name: str) -> None:
    overrides = [*TINY, *chosen("experiment", name), "device=cuda", f"cache={tmp_path / 'cache'}"]
    with RunFolder(tmp_path / "run").recorded() as folder:
        build(compose(*overrides))(folder)
    assert (tmp_path / "run" / "report.html").exists()
