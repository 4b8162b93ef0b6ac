"""A model in the runtime that serves it: written in int8, timed and judged there."""

import importlib.util
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mhaprune
from mhaprune import losses
from mhaprune.heads import HeadMask
from support.classifier import Classifier, batches, classifier

pytestmark = [pytest.mark.filterwarnings("ignore")]
HAS = bool(importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnxscript"))
needs = pytest.mark.skipif(not HAS, reason="pip install 'mhaprune[onnx]'")


def wrapped(model: torch.nn.Module | None = None) -> mhaprune.Heads:
    data = batches(6)
    splits: dict[str, Any] = {"score": data[:2], "choose": data[2:4], "report": data[4:]}
    return mhaprune.wrap(model or classifier().eval(), losses.classification, **splits)


@pytest.fixture(scope="module")
def heads() -> Any:
    return wrapped()


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@needs
def test_a_file_in_int8_has_a_card_that_says_what_it_changes(heads: Any, tmp_path: Path) -> None:
    model, first, *report = heads.subject.model, *map(inputs, batches(4))
    assert mhaprune.export(model, tmp_path / "whole.onnx", first) < 1e-5
    difference = mhaprune.export(model, tmp_path / "small.onnx", first, int8=True, report=report)
    assert 1e-6 < difference < 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["small.onnx", "small.onnx.md", "whole.onnx"]
    said = (tmp_path / "small.onnx.md").read_text()
    cosine, low, high, least = map(float, re.findall(r"[01]\.\d{4}", said))
    assert "Over 18 examples" in said
    assert "on the examples of the report only" in said
    assert 0.9 < least <= low <= cosine <= high <= 1
    assert cosine < 1


class OneNumber(Classifier):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(input_ids, attention_mask)["logits"][:, 0] + 5


@needs
def test_a_card_says_how_far_the_one_number_of_an_example_moves(tmp_path: Path) -> None:
    model, first, *report = OneNumber().eval(), *map(inputs, batches(4))
    mhaprune.export(model, tmp_path / "small.onnx", first, int8=True, report=report)
    said = (tmp_path / "small.onnx.md").read_text()
    moved, low, high, most = map(float, re.findall(r"\d\.\d{4}", said))
    assert f"Over 18 examples, the number of an example moves by {moved:.4f} standard deviations over examples" in said
    assert 1e-3 < low <= moved <= high <= most < 1
    one = {name: x[:1] for name, x in first.items()}
    mhaprune.export(model, tmp_path / "small.onnx", one, int8=True)
    said = (tmp_path / "small.onnx.md").read_text()
    assert re.search(r"Over 1 example, the number of an example moves by 0\.\d{4}\.\n", said)


@needs
def test_a_model_is_judged_and_timed_in_its_runtime(heads: Any) -> None:
    plain, same, rounded = (heads.evaluate({0: [0]}, runtime=name) for name in NAMES)
    torch.testing.assert_close(torch.tensor(same["loss"]), torch.tensor(plain["loss"]), rtol=1e-4, atol=1e-6)
    assert 1e-6 < (rounded["loss"] - plain["loss"]).abs().max() < 0.5
    for name, words in zip(
        NAMES, ("a forward pass", *(f"a forward pass in {each}" for each in NAMES[1:])), strict=True
    ):
        table = heads.speed(keep=0.5, by="magnitude", batch_sizes=1, rounds=2, runtime=name)
        assert table["model"].tolist() == ["removed", "dense", "dense again"]
        assert set(table["timed"]) == {words}
    assert heads.subject.runtime == "torch", "nothing is switched on"


@needs
def test_a_promise_names_its_runtime_and_the_model_is_one_of_torch(heads: Any) -> None:
    for how in ({"ms": 1000}, {"keep": mhaprune.Budget(ms=1000)}):
        assert type(heads.prune(by="magnitude", runtime="onnxruntime-int8", **how)) is Classifier
    with pytest.raises(ValueError, match="within=0: not met"):
        heads.prune(within=0, by="magnitude", runtime="onnxruntime-int8")


@needs
def test_what_within_judges_is_computed_by_the_runtime(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []

    def tried(served: Any, within: float, masks: Any, made: Any) -> Any:
        model = made(HeadMask(served.grid).without(served.grid.heads[0]))
        judged.append(model.runtime)
        return model

    monkeypatch.setattr("mhaprune.api.wrap.fastest_within", tried)
    heads.prune(within=0.5, by="magnitude", runtime="onnxruntime-int8")
    heads.prune(within=0.5, by="magnitude")
    assert judged == ["onnxruntime-int8", "torch"]


@needs
def test_heads_in_a_runtime_are_kept_and_their_sets_promise_as_they_do(heads: Any) -> None:
    served = heads._in("onnxruntime")
    assert served is heads._in("onnxruntime")
    assert served._in("torch").subject.runtime == "torch"
    assert served.units("block") is served.units("block")
    assert served.units("block").promised.rows is heads.promised.rows


@needs
def test_costs_in_time_are_those_of_the_runtime(heads: Any) -> None:
    for name in ("onnxruntime", "torch"):
        for choose in ("mask", "masks", "prune"):
            fresh = replace(heads)
            given: Any = {"mask": (0.5,), "masks": ([0.5],), "prune": ()}[choose]
            how: Any = {"within": 1.0} if choose == "prune" else {"of": "time"}
            with suppress(ValueError):  # a layer of ours without heads cannot be exported
                getattr(fresh, choose)(*given, by="magnitude", runtime=name, **how)
            assert ["'onnxruntime'" in known for known in fresh.promised.times] == [name == "onnxruntime"], choose


NAMES = ("torch", "onnxruntime", "onnxruntime-int8")


class Counts(Classifier):
    """A model that looks at its numbers before it goes on."""

    def judged(self, logits_BC: Tensor, ids_BT: Tensor) -> Tensor:
        return logits_BC if bool((logits_BC.sum() > 0).item()) else logits_BC * 1.0


class Decides(Classifier):
    """A model that computes something else when it is exported."""

    def judged(self, logits_BC: Tensor, ids_BT: Tensor) -> Tensor:
        return logits_BC * 2 if torch.compiler.is_exporting() else logits_BC


@needs
def test_a_model_that_another_runtime_computes_in_another_way_is_refused() -> None:
    other = wrapped(Decides().eval())
    for call in (other.evaluate, other.speed):
        with pytest.raises(ValueError, match=r"runtime=onnxruntime: outputs differ by .* from those of torch"):
            call(runtime="onnxruntime-int8")


class Scaled(Classifier):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None, by: float = 1.0) -> Any:
        return {"logits": super().forward(input_ids, attention_mask)["logits"] * by}


@needs
def test_arguments_that_are_no_tensors_must_stay() -> None:
    data = [{**batch, "by": 1.0 + n // 2} for n, batch in enumerate(batches(4))]
    heads = mhaprune.wrap(Scaled().eval(), losses.classification, score=data[:2], report=data[2:])
    with pytest.raises(ValueError, match="runtime: was made for other arguments that are no tensors"):
        heads.evaluate(runtime="onnxruntime")


@needs
def test_a_layer_without_heads_is_computed_too(heads: Any) -> None:
    plain, same = (heads.evaluate({0: [0, 1, 2, 3]}, runtime=name)["loss"].tolist() for name in NAMES[:2])
    assert same == pytest.approx(plain, rel=1e-4)
    assert abs(plain[1] - plain[0]) > 1e-4, "it mattered"


@needs
def test_what_a_runtime_does_not_compute_is_refused_by_name(heads: Any) -> None:
    refused = {
        "runtime=onnxruntime: Counts cannot be exported": lambda: wrapped(Counts()).evaluate(runtime="onnxruntime"),
        "runtime=onnxruntime: computes models in float32 on the cpu, not bfloat16, cpu": lambda: wrapped(
            Classifier().bfloat16()
        ).evaluate(runtime="onnxruntime"),
    }
    for why, call in refused.items():
        with pytest.raises(ValueError, match=why) as error:
            call()
        assert "\n" not in str(error.value)


def test_settings_that_do_not_go_together_are_refused(heads: Any, tmp_path: Path) -> None:
    one = inputs(batches(1)[0])
    refused = {
        'runtime=onnxruntime: times faster=, ms=, of="time" and within=': lambda: heads.prune(
            keep=4, by="magnitude", runtime="onnxruntime"
        ),
        "keep: is for a choice of heads, which mask= makes": lambda: heads.prune(keep=0.5, mask={0: [0]}),
        "by: is for a choice of heads, which mask= makes": lambda: heads.prune(by="taylor", mask={0: [0]}),
        "runtime: is for a choice of heads, which mask= makes": lambda: heads.prune(mask={0: [0]}, runtime="torch"),
        "new_tokens=4: is generated by torch alone, leave runtime=onnxruntime out": lambda: heads.speed(
            new_tokens=4, runtime="onnxruntime"
        ),
        "runtime='tensorrt': must be torch or onnxruntime or onnxruntime-int8": lambda: heads.speed(runtime="tensorrt"),
        "int8=True: is for files that end in .onnx": lambda: mhaprune.export(
            heads.subject.model, tmp_path / "a.pt2", one, int8=True
        ),
        "report: is for int8=True": lambda: mhaprune.export(heads.subject.model, tmp_path / "a.pt2", one, report=[one]),
    }
    for why, call in refused.items():
        with pytest.raises(ValueError, match=re.escape(why)):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(HAS, reason="onnxruntime is there")
def test_a_runtime_that_is_not_installed_is_named_with_the_line_that_installs_it(heads: Any) -> None:
    with pytest.raises(ValueError, match=r"needs onnx, onnxscript and onnxruntime: pip install 'mhaprune\[onnx\]'"):
        heads.speed(keep=0.5, by="magnitude", runtime="onnxruntime")
