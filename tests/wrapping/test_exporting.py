"""Models for other runtimes."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from support.classifier import Classifier, batches

pytestmark = [pytest.mark.filterwarnings("ignore")]


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module")
def small() -> Any:
    """Ragged: one layer has three heads, the other one."""
    torch.manual_seed(0)
    heads = mhaprune.wrap(Classifier(), losses.classification, score=batches(2))
    return heads.prune(mask={0: [1], 1: [0, 2, 3]})


def test_an_exported_program_computes_the_same_for_other_sizes(small: Any, tmp_path: Path) -> None:
    first, second = batches(2)
    assert mhaprune.export(small, tmp_path / "small.pt2", inputs(first)) < 1e-5
    assert [each.name for each in tmp_path.iterdir()] == ["small.pt2"]
    again: Any = torch.export.load(tmp_path / "small.pt2").module()
    longer = {name: value[:3] for name, value in inputs(second).items()}
    assert longer["input_ids"].shape != first["input_ids"].shape
    torch.testing.assert_close(again(**longer)["logits"], small(**longer)["logits"])


@pytest.mark.skipif(not importlib.util.find_spec("onnxruntime"), reason="pip install 'mhaprune[onnx]'")
def test_onnxruntime_computes_the_same(small: Any, tmp_path: Path) -> None:
    import onnxruntime  # type: ignore[import-not-found]

    first, second = batches(2)
    assert mhaprune.export(small, tmp_path / "small.onnx", inputs(first)) < 1e-5
    assert [each.name for each in tmp_path.iterdir()] == ["small.onnx"]
    session = onnxruntime.InferenceSession(str(tmp_path / "small.onnx"))
    longer = {name: value[:3] for name, value in inputs(second).items()}
    (logits,) = session.run(None, {name: value.numpy() for name, value in longer.items()})
    torch.testing.assert_close(torch.from_numpy(logits), small(**longer)["logits"].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(bool(importlib.util.find_spec("onnxruntime")), reason="onnxruntime is there")
def test_without_onnx_the_extra_is_named(small: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs onnx, onnxscript and onnxruntime: pip install 'mhaprune\[onnx\]'"):
        mhaprune.export(small, tmp_path / "small.onnx", inputs(batches(1)[0]))
    assert not list(tmp_path.iterdir())


class Masked(Classifier):
    """A model that also returns what is not finite, and what is no number."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = super().forward(input_ids, attention_mask, labels)["logits"]
        return {"logits": logits, "log": torch.zeros_like(logits).log(), "real": attention_mask == 1}


@pytest.mark.slow
def test_one_example_and_outputs_that_are_not_finite(tmp_path: Path) -> None:
    first, second = batches(2)
    one = {name: value[:1] for name, value in inputs(first).items()}
    assert mhaprune.export(Masked().eval(), tmp_path / "one.pt2", tuple(one.values())) == 0
    again: Any = torch.export.load(tmp_path / "one.pt2").module()
    assert again(*inputs(second).values())["logits"].shape == (6, 3)


class Branches(Classifier):
    """A model that looks at a number before it goes on."""

    def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
        return logits if logits.sum() > 0 else -logits


class Remembers(Classifier):
    """A model that is another one at each call, so that what was exported is not what it computes next."""

    calls = 0

    def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
        self.calls += 1
        return logits * self.calls


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (Branches(), "small.pt2", "Branches cannot be exported, "),
        (Remembers(), "small.pt2", "the exported model differs by "),
        (Classifier(), "small.bin", r"must be a file that ends in .onnx or .pt2, in a folder that exists"),
        (Classifier(), ".", r"must be a file"),
        (Classifier(), "nowhere/small.pt2", r"must be a file that ends in .onnx or .pt2, in a folder that exists"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line_and_leaves_no_file(
    model: Classifier, name: str, message: str, tmp_path: Path
) -> None:
    model.attention = model.feed_forward = nn.ModuleList()  # which take long to export
    with pytest.raises(ValueError, match=message) as refused:
        mhaprune.export(model.eval(), tmp_path / name, inputs(batches(1)[0]))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_an_export_needs_a_batch(small: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^batch=None: must be a dict by names, a tuple of inputs or a tensor$"):
        mhaprune.export(small, tmp_path / "small.pt2")
