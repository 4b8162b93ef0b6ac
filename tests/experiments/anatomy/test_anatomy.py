"""`experiment=anatomy`: the call that it follows is one of the model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import TINY, compose
from mhaprune.config import build
from mhaprune.data import Examples
from mhaprune.experiments.anatomy.study import Anatomy, call_of_other_sizes
from mhaprune.experiments.anatomy.walkthrough import walk
from mhaprune.experiments.base import figures_of
from mhaprune.heads import HeadId, Site
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.pruning.removal import ProofFailed
from mhaprune.running import Run
from tiny import chosen, small


@pytest.fixture(scope="module")
def run(cache: Path) -> Run:
    settings = [*chosen("experiment", "anatomy"), *TINY, *small("task", "sort"), f"cache={cache}", "example=3 1 2"]
    return build(compose(*settings))


@pytest.mark.parametrize("head", ["encoder_self.0.1", "decoder_self.0.1", "cross.0.1"])
def test_the_call_that_is_followed_is_that_of_the_head(run: Run, head: str) -> None:
    """Its numbers are those of the model's own pass, its query's scores those of the table."""
    study = run.study()
    model = study.subject
    one = replace(run, experiment=Anatomy(head=head))
    tables = one.experiment(study).tables
    name = HeadId.parse(head)
    source = torch.tensor([study.trained.task.vocabulary.encode("312")])
    answer = model.decode_greedily(source, model.config.max_length, stop=True)
    batch = Examples(source, answer[:, answer[0] != 0])
    values = tables["values"].set_index("step")
    steps = tables["tensors"].iloc[:18].set_index("tensor")["step"]
    lengths = {"T": batch.source if name.site == Site.ENCODER_SELF else batch.target}
    queries = lengths["T"].shape[1]
    keys = (batch.target if name.site == Site.DECODER_SELF else batch.source).shape[1]

    def picture(tensor: str) -> np.ndarray:
        return values.loc[steps[tensor]].pivot(index="row", columns="column", values="value").to_numpy()

    weights = model.attention_maps(batch)[name.block].weights[0, 1]
    np.testing.assert_allclose(picture("weights")[:queries, :keys], weights.detach(), atol=1e-5)
    outputs = model.head_outputs(batch)[name.block][0, 1]
    np.testing.assert_allclose(picture("head outputs")[:queries], outputs.detach(), atol=1e-5)
    here = tables["scaling_here"]
    np.testing.assert_allclose(here["weight"], weights[here["query"][0]][here["key"].tolist()].detach(), atol=1e-5)
    said = ["<bos>", *tables["examples"]["answer"].item().split()]
    names = said if name.site == Site.DECODER_SELF else ["3", "1", "2", "<eos>"]
    assert list(here["looks_at"]) == [names[key] for key in here["key"]]
    if name.site == Site.DECODER_SELF:
        assert len(here) == here["query"][0] + 1, "only what is written already"


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
    assert scales.pop("13. weights") == (0, 1)
    assert all(low == -high for low, high in scales.values()), "else a colour has no sign"
    assert scales["10. scores"] == scales["11. scaled scores"] == scales["12. masked scores"]
    assert scales["14. head outputs"] == scales["16. gated outputs"] != scales["10. scores"]


def test_the_call_of_other_sizes_has_the_heads_of_the_model() -> None:
    """Also five heads of two columns each, where five does not divide the width."""
    config = Transformer(d_model=12, num_heads=5, head_dim=2, num_encoder_layers=1, num_decoder_layers=1)
    call = call_of_other_sizes(Seq2Seq(config, 8))
    assert (call.layer.num_heads, call.layer.head_dim) == (5, 2)
    assert walk(call)[-1].value.shape == (2, 4, 12)
