"""A pretrained model goes through the same experiments as our own. No transformers are needed for it."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mhaprune
from mhaprune import losses
from mhaprune.heads import HeadMask
from mhaprune.inputs import Known
from mhaprune.lab.experiments.base import Experiment, figures_of
from mhaprune.lab.runs.run import Results, Run, build
from mhaprune.lab.sources import pretrained
from mhaprune.lab.sources.pretrained import Pretrained, PretrainedModel
from mhaprune.measure.outcomes import measure
from mhaprune.settings import plugins
from mhaprune.settings.options import ConfigError, option
from support.classifier import Classifier, batches, classifier
from support.composing import compose
from support.sizes import chosen, options, slow

SPLITS = {name: batches(3, seed) for seed, name in enumerate(("score", "choose", "report"))}


def more(count: int) -> list[dict[str, torch.Tensor]]:
    """So many times three batches that are in no other split."""
    return [batch for seed in range(3, 3 + count) for batch in batches(3, seed)]


@dataclass(frozen=True)
class Guest(Pretrained):
    """A classifier of eight heads in two blocks, trained outside."""

    moved: float = 0.0
    """What is added to a weight, for another model of the same name."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        model = classifier()
        with torch.no_grad():
            model.output.bias[0] += self.moved
        return PretrainedModel(
            model=model,
            splits=SPLITS | ({"train": more(self.train)} if self.train else {}),
            objective=(losses.classification, losses.accuracy),
            facts={"model_task": "guessing", "objective": objective or "classification"},
            packages=(),
            tokens=tokens,
            known=Known({"attention.0.1": "does it", "attention.1.2": "waits"}, ("does it",), "publication"),
        )


def tokens(batch: dict[str, torch.Tensor]) -> list[list[str]]:
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [[f"t{i}" for i in row[real != 0].tolist()] for row, real in rows]


def described(experiment: str, cache: Path, *overrides: str, **model: Any) -> Run:
    """The run of an experiment with the settings of its own YAML, on the guest."""
    settings = [f"experiment={experiment}", *overrides] if overrides else chosen("experiment", experiment)
    config = compose(*settings, f"cache={cache}")
    return build({**config, "model": {"_target_": f"{Guest.__module__}.Guest", **model}})


@pytest.fixture(scope="module", autouse=True)
def allowed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "_allowed", {*plugins._allowed, Guest.__module__})
        yield


KINDS = {name: type(option(name, {"experiment": Experiment})) for name in options("experiment")}
STUDIES = [name for name, kind in KINDS.items() if not kind.needs_training]
QUICK = [name for name in STUDIES if name not in ("compare", "speed")]
EACH = [*QUICK, *slow(*(name for name in STUDIES if name not in QUICK))]
Done = Callable[[str], Results]


@pytest.fixture(scope="module")
def done(cache: Path) -> Done:
    """What an experiment found; it is run once."""
    return functools.cache(lambda name: described(name, cache).results())


def test_what_needs_no_training_runs_on_any_model() -> None:
    assert {"ablate", "compare", "explain", "prune", "speed"} <= set(STUDIES)


@pytest.mark.parametrize("name", EACH)
def test_every_study_ends_in_proofs_rows_that_name_their_run_and_words_of_its_own_quality(
    name: str, done: Done
) -> None:
    found = done(name)
    assert found.sentences
    assert all("nan" not in line.split() for line in found.sentences)
    assert found.checks["max_difference_masked_removed"] <= 1e-9
    assert found.checks["smallest_gate_effect"] > 0
    assert "training" not in found.tables
    for table in found.tables.values():
        assert list(table)[:4] == ["run", "task", "gate", "seed"]
        assert set(table["task"]) <= {"guest"}
        assert set(table["quality_name"]) <= {"accuracy"}
    plots = list(figures_of(KINDS[name], found.found))
    assert plots or name == "speed", "which draws fresh models, and tells the times of this one in tables"
    for text in (*found.sentences, *(plot.caption for plot in plots)):
        assert "xact match" not in text
        assert "decoding" not in text


@pytest.mark.parametrize("name", [name for name in options("experiment") if name not in STUDIES])
def test_what_needs_training_is_refused(name: str, cache: Path) -> None:
    with pytest.raises(ConfigError, match=f"^experiment={name}: looks into mhaprune's own model.* needs model=trans"):
        described(name, cache)


def test_scores_are_those_of_wrap(done: Done) -> None:
    """The command line and Python are one mechanism."""
    heads = mhaprune.wrap(classifier(), losses.classification, quality=losses.accuracy, **SPLITS)
    wanted = heads.score("ablation", "gate_output")
    found = done("ablate").tables["heads"]
    for scorer in ("ablation", "gate_output"):
        ours, theirs = (table.loc[table["scorer"] == scorer, "score"].tolist() for table in (found, wanted))
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_refit_is_that_of_wrap(done: Done) -> None:
    table = done("prune").tables["recovery"]
    row = table[(table["recovery"] == "refit") & (table["heads_removed"] == 4)].iloc[0]
    heads = mhaprune.wrap(classifier(), losses.classification, quality=losses.accuracy, **SPLITS)
    mask = HeadMask(heads.grid, frozenset(head for head in heads.grid if str(head) in row["removed"].split()))
    fitted, plain = (heads.without(mask, refit=refit) for refit in (True, False))
    losses_of = [float(measure(model, heads.splits["report"]).loss.mean()) for model in (fitted, plain)]
    assert row["loss"] == pytest.approx(losses_of[0], rel=1e-5)
    assert abs(losses_of[0] - losses_of[1]) > 1e-3


@pytest.mark.slow
def test_fine_tuning_brings_back_what_removal_cost(cache: Path) -> None:
    settings = ["recovery=fine_tune", "recovery.fine_tune.steps=120", "recovery.fine_tune.learning_rate=0.03"]
    small = ["schedule=one_shot", "scorer=[gate_output]", "experiment.budgets=[6]", "experiment.latency_rounds=2"]
    tables = described("prune", cache, *settings, *small, train=60).results().tables
    rows = tables["recovery"].query("heads_removed == 6").set_index("recovery")
    assert rows.loc["fine_tune", "loss"] < rows.loc["nothing", "loss"] - 0.02
    assert rows.loc["fine_tune", "steps"] == 120
    losses = tables["recovery_training"].groupby("step")["loss"].mean()
    assert losses[25] > losses[100]
    assert "training" not in tables


def test_what_it_has_not_is_left_out_with_a_notice(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = described("compare", cache)
        pruning = described("prune", cache)
    scorers, _ = run.usable
    pairs = {"patching", "attribution_patching", "attribution_patching_path", "shortlist"}
    assert set(scorers) == set(run.scorer) - {"gate", *pairs}
    assert list(pruning.usable[1]) == ["refit", "fine_tune"]
    assert "scorer=[gate] is left out: it needs learned gates, so it is not for guest" in caplog.text
    assert "recovery=[from_scratch] is left out: it trains as the model was trained" in caplog.text


@pytest.mark.parametrize(
    ("experiment", "overrides", "message"),
    [
        ("ablate", ["scorer=[gate]"], r"scorer=\[gate\]: needs learned gates, so it is not for guest; choose another"),
        ("prune", ["recovery=[from_scratch]"], r"recovery=\[from_scratch\]: trains as the model was trained"),
        ("ablate", ["experiment.budgets=[9]"], "experiment.budgets=9: the model has 8 heads"),
        ("explain", ["example=hello"], "example='hello': only a model that is trained here reads one"),
        ("explain", ["experiment.examples=[99]"], r"experiment.examples=99: the report split has examples 0 to 17"),
        ("compare", ["scorer=[ablation]", "schedule=[]"], r"schedule=\[\]: must name at least one"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    experiment: str, overrides: list[str], message: str, cache: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as refused:
        described(experiment, cache, *overrides)
    assert "\n" not in str(refused.value)


def test_other_weights_are_another_run_and_take_nothing_from_the_cache(cache: Path) -> None:
    """A run is told by what it studies, wherever that lies."""
    made: list[float] = []
    runs = [described("ablate", cache, moved=moved) for moved in (0.0, 0.0, 0.25)]
    for run, moved in zip(runs, (0.0, 0.0, 0.25), strict=True):
        run.study().remember("probe", {}, lambda state, save, moved=moved: made.append(moved) or {"x": 1})
    assert made == [0.0, 0.25]
    one, same, other, elsewhere = (run.identity["run"] for run in (*runs, described("ablate", cache / ".." / "cache")))
    assert one == same == elsewhere != other


def test_other_units_and_another_runtime_are_another_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, parts = Classifier(), [nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2)]
    model.feed_forward = nn.ModuleList(parts)  # with neurons
    monkeypatch.setitem(globals(), "classifier", lambda: model)
    monkeypatch.setattr(pretrained, "check_runtime", lambda subject, batches: None)  # onnxruntime may not be here
    others: list[dict[str, Any]] = [
        {},
        {"units": ["head", "neuron"]},
        {"units": ["neuron"]},
        {"runtime": "onnxruntime"},
    ]
    runs = [described("ablate", cache, **settings) for settings in others]
    assert len({run.identity["run"] for run in runs}) == len(others)
    assert runs[0].identity["run"] == described("ablate", cache, runtime="torch", units=["head"]).identity["run"]
    assert runs[3].source.heads.words["timed"] == "a forward pass in onnxruntime"


def test_heads_that_cannot_be_removed_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mhaprune.lab.sources import pretrained

    understand = pretrained.understand

    def only_gated(*arguments: Any, **named: Any) -> Any:
        heads = understand(*arguments, **named)
        return replace(heads, proven=heads.proven._replace(why_not="attention.0: its norm spans all heads"))

    monkeypatch.setattr(pretrained, "understand", only_gated)
    with pytest.raises(ConfigError, match="^model=guest: its heads can be gated, not removed: attention.0: its norm"):
        described("ablate", cache)


def test_settings_of_a_pretrained_model_do_not_fit_our_own(cache: Path) -> None:
    for name in ("data", "objective"):
        with pytest.raises(ConfigError, match=f"^{name}=x: model=transformer is trained on a task that makes its own"):
            build(compose("experiment=ablate", f"cache={cache}") | {name: "x"})
