"""The model whose weights are set by hand does what its heads are said to do."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from mhaprune_models.by_hand import ByHand

import mhaprune
from mhaprune.api.wrap import Heads
from mhaprune.inputs import Known, Study
from mhaprune.lab.experiments.truth.truth import Truth, recall, recall_twice
from mhaprune.lab.runs.run import build
from mhaprune.scorers.base import Scorer
from mhaprune.settings.options import option
from mhaprune.subjects.batches import Batches
from mhaprune.tables import named
from support.composing import compose

SCORES = ("patching", "shortlist", "ablation", "attribution_patching", "taylor", "gate_output", "random")


@pytest.fixture(scope="module", params=[0, 3])
def read(request: pytest.FixtureRequest) -> Any:
    return ByHand(draw=request.param).read(None, None, "")


@pytest.fixture(scope="module")
def heads(read: Any) -> Heads:
    loss, quality = read.objective
    report = Batches.of(read.splits["report"], "report").with_corrupt(read.corrupt["report"])
    given: Any = {"score": read.splits["score"], "choose": read.splits["choose"], "report": report}
    return mhaprune.wrap(read.model, loss, quality=quality, corrupt=read.corrupt["score"], call=read.call, **given)


def of_role(read: Any, heads: Heads, role: str) -> list[Any]:
    return [head for head in heads.grid if read.known.roles[str(head)] == role]


def losses_of(heads: Heads, *closed: Any) -> tuple[float, float]:
    gates = torch.tensor([[1.0] * len(heads.grid), [float(head not in closed) for head in heads.grid]])
    with torch.no_grad():
        outcome = heads.subject.evaluate_masks(heads.splits.report.first(64), gates)
    loss, quality = outcome.loss.mean(dim=1), outcome.quality.mean(dim=1)
    return float(loss[1] - loss[0]), float(quality[1])


def test_it_is_right_and_each_head_does_what_it_is_said_to_do(read: Any, heads: Heads) -> None:
    assert losses_of(heads) == (0.0, 1.0)
    for head in of_role(read, heads, "needed"):
        rise, quality = losses_of(heads, head)
        assert rise > 0.3
        assert quality < 0.3, "a symbol is guessed"
    either = of_role(read, heads, "either")
    assert len(either) == 4
    for head in either:
        rise, quality = losses_of(heads, head)
        assert 0 < rise < 0.02
        assert quality == 1.0
    first, second, *others = sorted(either)
    assert losses_of(heads, first, second)[1] < 0.3, "both of a pair"
    assert losses_of(heads, first, others[0])[1] == 1.0, "one of each pair"
    for head in of_role(read, heads, "decoy"):
        assert abs(losses_of(heads, head)[0]) < 1e-5
    for head in of_role(read, heads, "hurts"):
        assert losses_of(heads, head)[0] < -0.005
    assert losses_of(heads, *of_role(read, heads, "noise"))[0] < 0.1


def role_of(read: Any, heads: pd.DataFrame) -> list[str]:
    """The role of the head of each row."""
    return [read.known.roles[str(head)] for head in named(heads)]


def truth(read: Any, heads: Heads, known: Known | None, *scores: str, top: int = 8) -> Any:
    study = Study.of(heads)
    chosen = {name: option(name, {"scorer": Scorer}) for name in scores}
    vars(study).update(known=known, scorers=chosen)  # a frozen dataclass
    return Truth(top=top, redraws=20)(study).tables


def test_scores_that_patch_find_what_was_set_by_hand_and_norms_fall_for_decoys(read: Any, heads: Heads) -> None:
    tables = truth(read, heads, read.known, *SCORES)
    found = tables["truth"].set_index("scorer")
    assert (found["heads_known"] == 8).all()
    assert set(found["known_from"]) == {"construction"}
    for name in ("patching", "shortlist", "ablation"):
        assert found.loc[name, ["auroc", "recall", "auroc_low"]].tolist() == [1, 1, 1]
    scores = tables["heads"].assign(role=role_of(read, tables["heads"])).groupby(["scorer", "role"])["score"].mean()
    assert scores["attribution_patching"]["either"] < 0.01 * scores["patching"]["either"], "where it is saturated"
    assert scores["attribution_patching"]["needed"] > 0.02 * scores["patching"]["needed"]
    assert found.loc["gate_output", "recall"] < 0.5
    low, high = found.loc["random", ["auroc_low", "auroc_high"]]
    assert low < 0.5 < high
    assert found["spearman"].isna().all(), "no effects were measured"
    roles = tables["heads"].assign(role=role_of(read, tables["heads"]))
    ranks = roles[roles["scorer"] == "taylor"].groupby("role")["rank"].mean()
    assert ranks["hurts"] < ranks["either"], "without a sign what hurts looks important"
    last = roles[(roles["scorer"] == "ablation") & (roles["role"] == "hurts")]["rank"]
    assert sorted(last) == [23, 24]


def test_recall_is_the_share_among_as_many_or_twice_as_many() -> None:
    scores, matters = np.array([5.0, 4.0, 3.0, 2.0, 1.0]), np.array([True, False, False, True, False])
    assert (recall(scores, matters), recall_twice(scores, matters)) == (0.5, 1.0)


def test_without_names_the_heads_are_those_of_exact_patching_on_the_report_split(read: Any, heads: Heads) -> None:
    tables = truth(read, heads, None, "patching", "shortlist", "magnitude", top=6)
    known, found = tables["known"], tables["truth"].set_index("scorer")
    assert known["known_from"].eq("patching").all()
    roles = known["role"].groupby(role_of(read, known)).agg(set)
    assert roles["needed"] == {"known"}
    assert roles["hurts"] <= {"hurts", ""}, "only if it is sure"
    assert known["known"].sum() == 6
    assert ((known["effect_low"] <= known["effect"]) | known["effect_low"].isna()).all()
    assert found.loc["patching", "auroc"] == 1, "on other examples"
    assert 0 < found.loc["patching", "spearman"] < 1, "the order of decoys is chance"
    assert found.loc["patching", "as_patching"] == found.loc["shortlist", "as_patching"] == 1
    assert found.loc["magnitude", "as_patching"] < 0.5


def test_what_cannot_be_is_refused_in_one_line(read: Any, heads: Heads) -> None:
    with pytest.raises(ValueError, match=r"^data=some.txt: model=by_hand has sequences of its own, leave it out$"):
        ByHand().read("some.txt", None, "")
    with pytest.raises(ValueError, match=r"^known=nobody.0.0: is no head of the model, its heads are attention.0.0, "):
        truth(read, heads, Known({"nobody.0.0": "needed"}, ("needed",), "publication"), "magnitude")
    with pytest.raises(ValueError, match=r"^experiment.known: none of the model.s 24 heads matters, must be some"):
        truth(read, heads, Known({}, ("needed",), "publication"), "magnitude")


def test_the_command_line_finds_the_model_and_its_known_heads(tmp_path: Path) -> None:
    settings = ("plugins=[mhaprune_models]", "experiment=truth", "model=by_hand", "scorer=[patching,magnitude]")
    run = build(compose(*settings, f"cache={tmp_path}", "experiment.redraws=20"))
    first, *_ = run.experiment.say(run.experiment(run.study()).tables)
    assert first.startswith(
        "patching is best at finding the 8 of 24 heads that were set by hand to matter: area under ROC 1.00"
    )
