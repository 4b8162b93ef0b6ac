"""`experiment=anatomy`: the steps shown are the steps taken, of a call of the model."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from mhaprune.attention.gates import Softmax
from mhaprune.attention.layer import MultiHeadAttention, causal_bias, padding_bias
from mhaprune.data import Examples
from mhaprune.experiments.anatomy import walkthrough
from mhaprune.experiments.anatomy.study import Anatomy, scaling_table, softmax_gradient
from mhaprune.experiments.anatomy.walkthrough import (
    LayerCall,
    head_by_head,
    largest_difference,
    steps_table,
    values_table,
    walk,
)
from mhaprune.experiments.base import figures_of
from mhaprune.heads import HeadId, Site
from mhaprune.measure.outcomes import ProofFailed
from mhaprune.runs.run import Run, build
from support.composing import compose
from support.sizes import TINY, chosen, small


@pytest.fixture(scope="module")
def run(cache: Path) -> Run:
    settings = [*chosen("experiment", "anatomy"), *TINY, *small("task", "sort"), f"cache={cache}", "example=3 1 2"]
    return build(compose(*settings))


@pytest.mark.parametrize("head", ["encoder_self.0.1", "decoder_self.0.1", "cross.0.1"])
def test_the_call_that_is_followed_is_that_of_the_head(run: Run, head: str) -> None:
    """Its numbers are those of the model's own pass."""
    study = run.study()
    model = study.subject
    one = replace(run, experiment=Anatomy(head=head))
    tables = one.experiment(study).tables
    name = HeadId.parse(head)
    source = torch.tensor([study.trained.task.vocabulary.encode("312")])
    answer = model.decode_greedily(source, model.config.max_length, stop=True)
    batch = Examples(source, answer[:, answer[0] != 0])
    values = tables["values"].set_index("step")
    steps = tables["tensors"].set_index("tensor")["step"]
    lengths = {"T": batch.source if name.site == Site.ENCODER_SELF else batch.target}
    queries = lengths["T"].shape[1]
    keys = (batch.target if name.site == Site.DECODER_SELF else batch.source).shape[1]

    def picture(tensor: str) -> np.ndarray:
        return values.loc[steps[tensor]].pivot(index="row", columns="column", values="value").to_numpy()

    weights = model.attention_maps(batch)[name.block].weights[0, 1]
    np.testing.assert_allclose(picture("weights")[:queries, :keys], weights.detach(), atol=1e-5)
    outputs = model.head_outputs(batch)[name.block][0, 1]
    np.testing.assert_allclose(picture("head outputs")[:queries], outputs.detach(), atol=1e-5)


def test_a_layer_that_is_not_its_heads_one_by_one_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhaprune.experiments.anatomy.study.largest_difference", lambda call: math.nan)
    with pytest.raises(ProofFailed, match="a layer and its heads one by one differ by nan, allowed is"):
        run.experiment(run.study())


def test_what_is_compared_has_one_scale(run: Run) -> None:
    """The scores before and after the division, and what comes out of a head before and after its gate."""
    plots = {plot.name: plot for plot in figures_of(Anatomy, run.experiment(run.study()).tables)}
    shown = [axes for axes in plots["tensors"].figure.axes if axes.images]
    scales = {axes.get_title(loc="left"): axes.images[0].get_clim() for axes in shown}
    assert len(scales) == 18
    low, high = scales.pop("13. weights")
    [weights] = [axes for axes in shown if axes.get_title(loc="left") == "13. weights"]
    assert (low, high) == (0, 1), "even attention is not as dark as a head that looks at one place"
    assert len(weights.texts) == 3, "three values are written"
    assert all(low == -high for low, high in scales.values()), "else a colour has no sign"
    assert scales["10. scores"] == scales["11. scaled scores"] == scales["12. masked scores"]
    assert scales["14. head outputs"] == scales["16. gated outputs"] != scales["10. scores"]


def test_the_gradient_is_the_norm_of_the_jacobian() -> None:
    scores = torch.randn(6, dtype=torch.double)
    jacobian = torch.autograd.functional.jacobian(lambda x: x.softmax(dim=0), scores)
    torch.testing.assert_close(softmax_gradient(scores.softmax(dim=0)), jacobian.norm())  # type: ignore[union-attr]
    assert softmax_gradient(torch.tensor([1.0, 0.0, 0.0])) == 0


def test_scores_spread_by_the_root_of_the_size_unless_they_are_divided_by_it() -> None:
    table = scaling_table([4, 64, 256]).set_index(["head_dim", "scaled"])
    for head_dim in (4, 64, 256):
        assert table.loc[(head_dim, True), "score_std"] == pytest.approx(1, abs=0.1)
        assert table.loc[(head_dim, False), "score_std"] == pytest.approx(math.sqrt(head_dim), rel=0.1)
    assert table.loc[(256, False), "gradient"] < 0.1 * table.loc[(256, True), "gradient"]
    assert table.loc[(256, False), "entropy"] < 0.1 < table.loc[(256, True), "entropy"] < math.log(10)
    assert (table["entropy_q1"] <= table["entropy"]).all()
    assert (table["entropy"] <= table["entropy_q3"]).all()
    skewed = table.loc[(256, False)]
    assert skewed["entropy_mean"] > 5 * skewed["entropy"], "so a median alone would say little"


def test_what_is_said(snapshot: Any) -> None:
    values = pd.DataFrame([{"site": "cross", "layer": 0, "head": 1}])
    examples = pd.DataFrame([{"source": "3 1 2", "answer": "1 2 3"}])
    rows = [(2, True, 1.9, 0.2), (2, False, 1.7, 0.1), (512, True, 1.8, 0.3), (512, False, 0.02, 2e-3)]
    scaling = pd.DataFrame(rows, columns=["head_dim", "scaled", "entropy_mean", "gradient_mean"])
    tables = {"values": values, "tensors": pd.DataFrame({"step": [1, 18]}), "examples": examples}
    snapshot("anatomy", {"a call": Anatomy.say(tables | {"scaling": scaling})})


@pytest.fixture
def calls() -> dict[str, LayerCall]:
    """Self-attention with padding, causal, and sizes that differ, with unequal gates; float64."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 4, gate=Softmax(init="rand")).double()
    other = MultiHeadAttention(8, 4, qdim=5, kdim=7, vdim=3, gate=Softmax(init="rand")).double()
    for one in (layer, other):
        for parameter in one.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(3, 6, 8, dtype=torch.double)
    padding = padding_bias(torch.arange(6) >= torch.tensor([[6], [4], [2]]), torch.double)
    causal = causal_bias(6, 6, torch.double, torch.device("cpu"))[None, None]
    sizes = [torch.randn(2, 4, 5), torch.randn(2, 6, 7), torch.randn(2, 6, 3)]
    return {
        "padded": LayerCall(layer, x, x, x, padding),
        "causal": LayerCall(layer, x, x, x, causal),
        "sizes of its own": LayerCall(other, *(tensor.double() for tensor in sizes)),
    }


@pytest.mark.parametrize("which", ["padded", "causal", "sizes of its own"])
def test_steps_layer_and_heads_one_by_one_are_the_same(calls: dict[str, LayerCall], which: str) -> None:
    call = calls[which]
    output, _ = call.layer(call.query, call.key, call.value, attn_mask=call.bias)
    torch.testing.assert_close(walk(call)[-1].value, output)
    torch.testing.assert_close(head_by_head(call), output)
    assert largest_difference(call) < 1e-12


@pytest.mark.parametrize("name", ["walk", "head_by_head"])
def test_each_way_is_held_against_the_layer(
    calls: dict[str, LayerCall], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With one of the two on another value, only that one differs."""
    plain = getattr(walkthrough, name)
    monkeypatch.setattr(walkthrough, name, lambda call: plain(call._replace(value=call.value + 1)))
    assert largest_difference(calls["padded"]) > 1e-3


def test_a_query_that_may_look_at_nothing_and_a_layer_without_biases(calls: dict[str, LayerCall]) -> None:
    call = calls["padded"]
    assert call.bias is not None
    nothing = call.bias.expand(-1, -1, 6, -1).clone()
    nothing[1, :, 2] = -math.inf
    assert largest_difference(call._replace(bias=nothing)) < 1e-12
    bare = MultiHeadAttention(8, 4, bias=False).double()
    assert largest_difference(call._replace(layer=bare)) < 1e-12


def test_a_difference_is_noticed(calls: dict[str, LayerCall], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that forgets to divide by the root of the head's size."""

    def undivided(self: MultiHeadAttention, query: Tensor, *arguments: object, **named: object) -> object:
        return plain(self, query * math.sqrt(self.head_dim), *arguments, **named)  # type: ignore[arg-type]

    plain = MultiHeadAttention.attend
    monkeypatch.setattr(MultiHeadAttention, "attend", undivided)
    assert largest_difference(calls["padded"]) > 1e-3


def test_the_table_gives_every_shape_in_symbols_and_numbers(calls: dict[str, LayerCall]) -> None:
    call = calls["sizes of its own"]
    table = steps_table(walk(call)).set_index("tensor")
    sizes = {"B": 2, "T": 4, "U": 6, "H": 4, "K": 2, "D": 8, "H·K": 8, "qdim": 5, "kdim": 7, "vdim": 3, "1": 1}
    for _, row in table.iterrows():
        assert row["shape"] == " × ".join(str(sizes[axis]) for axis in row["axes"].split(" × "))
    assert list(table["step"]) == list(range(1, len(table) + 1))


def test_the_values_are_those_of_the_first_example_and_the_head(calls: dict[str, LayerCall]) -> None:
    steps = walk(calls["causal"])
    values = values_table(steps, head=2)
    for number, step in enumerate(steps, 1):
        mine = values[values["step"] == number].pivot(index="row", columns="column", values="value")
        expected = step.value[0, 2] if "H" in step.axes else step.value[0]
        if step.name == "gate":
            expected = step.value[0, 2]
        pd.testing.assert_frame_equal(mine, pd.DataFrame(expected.tolist()), check_names=False, check_dtype=False)
