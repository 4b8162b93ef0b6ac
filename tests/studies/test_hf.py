"""Folders of transformers on the command line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import mhaprune
from mhaprune.front.command_line import main
from mhaprune.runs.run import Run, build
from mhaprune.storage.store import read_status
from support.commands import run_here
from support.composing import compose
from support.sizes import slow

pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
from support.guests import write_models, write_texts

pytestmark = [pytest.mark.filterwarnings("ignore")]
SIZES = ("model.score=16", "model.choose=16", "model.report=16")

OUTPUTS = [f"bert.encoder.layer.{layer}.attention.output.dense" for layer in range(2)]


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guests")
    write_models(folder, "bert", "masked", "gpt2", "bart")
    write_texts(folder)
    return folder


@pytest.fixture
def here(guests: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the folder of the models, so that no machine's path is typed."""
    monkeypatch.chdir(guests)
    return guests


def asked(cache: Path, *overrides: str, experiment: str = "ablate") -> Run:
    return build(compose(f"experiment={experiment}", "model=hf", *SIZES, f"cache={cache}", *overrides))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "overrides", "task", "objective", "quality"),
    [
        ("bert", ["data=texts.csv"], "sequence-classification", "classification", "accuracy"),
        ("bert", ["data=texts.txt", "objective=drift"], "sequence-classification", "drift", "similarity"),
        ("bert", ["data=texts.txt", "model.task=feature-extraction"], "feature-extraction", "drift", "similarity"),
        *slow(
            ("masked", ["data=texts.txt", "model.task=feature-extraction"], "feature-extraction", "drift", "similarity")
        ),
        ("gpt2", ["data=texts.txt"], "causal-lm", "likelihood", "next token accuracy"),
        ("bart", ["data=texts.csv"], "seq2seq-lm", "likelihood", "token accuracy"),
    ],
)
def test_a_folder_is_studied_as_what_it_is(
    name: str, overrides: list[str], task: str, objective: str, quality: str, cache: Path
) -> None:
    run = asked(cache, f"model.path={name}", *overrides)
    assert len(run.source.grid) == (12 if name == "bart" else 8)
    assert {key: run.identity[key] for key in ("task", "model_task", "objective")} == {
        "task": name,
        "model_task": task,
        "objective": objective,
    }
    study = run.study()
    assert study.words["quality_name"] == quality
    outcome = study.subject.evaluate(study.splits.report)
    assert outcome.loss.shape == outcome.quality.shape == (16,)
    assert outcome.quality.std() > 0 or objective == "drift"
    assert outcome.quality.max() <= 1 + 1e-6
    assert study.tokens is not None
    assert study.tokens(study.splits.report[:1])[0][0] == "[CLS]"


@pytest.mark.usefixtures("here")
def test_a_whole_run_leaves_its_folder_and_names_no_machine(cache: Path, tmp_path: Path) -> None:
    arguments = ["experiment=ablate", "model=hf", "model.path=bert", "data=texts.txt", "objective=drift", *SIZES]
    arguments += ["scorer=[ablation,gate]", "experiment.budgets=[2,4]", "experiment.latency_rounds=2"]
    done = run_here(main, *arguments, f"hydra.run.dir={tmp_path / 'run'}", f"cache={cache}")
    assert done.returncode == 0, done.stderr
    status = read_status(tmp_path / "run")
    assert status["status"] == "done"
    assert status["checks"]["max_difference_masked_removed"] <= 1e-9
    assert {"heads.csv", "pruning.csv", "recovered.csv", "summary.csv", "report.html"} <= set(status["files"])
    heads = pd.read_csv(tmp_path / "run" / "heads.csv")
    assert set(heads["scorer"]) == {"ablation"}
    assert heads["run"].nunique() == 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert "similarity" in page
    assert str(Path.cwd()) not in page


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=texts.csv"], "model.path=null: must name the folder of a model"),
        (["model.path=bert"], "data=null: must name a file of texts"),
        (["model.path=nowhere", "data=texts.csv"], "model.path=nowhere: no such folder; .* model.hub=true"),
        (["model.path=.", "data=texts.csv"], "model.path=.: has no config.json"),
        (["model.path=bert", "data=none.csv"], "data=none.csv: cannot be read"),
        (["model.path=bert", "data=texts.txt"], "data=texts.txt: line 1 has no label, it has text; objective=drift"),
        (["model.path=bart", "data=texts.txt"], "data=texts.txt: line 1 has no target"),
        (["model.path=bert", "data=texts.csv", "model.score=99"], "data=texts.csv: has .* different texts, model.sc"),
        (["model.path=bert", "data=texts.csv", "model.score=1"], "model.score=1: must be 2 or more"),
        (
            ["model.path=bert", "data=texts.csv", "objective=likelihood"],
            "objective=likelihood: model.task=sequence-classification is judged by classification or drift",
        ),
        (["model.path=bert", "data=texts.csv", "model.task=poetry"], "model.task='poetry': must be feature-extraction"),
        (
            ["model.path=bert", "data=texts.csv", "model.task=seq2seq-lm"],
            "model.task=seq2seq-lm: a Bert can be made for feature-extraction, sequence-classification",
        ),
        (
            ["model.path=gpt2", "data=texts.csv", "model.task=sequence-classification"],
            "model.path=gpt2: is no model for model.task=sequence-classification, missing keys: score.weight",
        ),
        (["model.path=masked", "data=texts.txt"], "model.task: holds a BertForMaskedLM, name one of feature"),
    ],
)
def test_what_cannot_be_studied_is_refused_in_one_line(overrides: list[str], message: str, cache: Path) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        _ = asked(cache, *overrides)
    assert "\n" not in str(refused.value)


def test_labels_are_names_or_numbers(here: Path, cache: Path) -> None:
    table = pd.read_csv(here / "texts.csv")
    table.assign(label=[f"LABEL_{label}" for label in table["label"]]).to_csv(here / "named.csv", index=False)
    table.assign(label=[f"{label + 5}" for label in table["label"]]).to_csv(here / "wrong.csv", index=False)
    named, numbers = (asked(cache, "model.path=bert", f"data={name}.csv").source.splits for name in ("named", "texts"))
    assert torch.equal(named.score.tensors()["labels"], numbers.score.tensors()["labels"])
    with pytest.raises(
        ValueError,
        match=r"^data=wrong.csv: line \d+: the label '[56]' of '.*' is none of the model's, LABEL_0, LABEL_1",
    ):
        _ = asked(cache, "model.path=bert", "data=wrong.csv")


@pytest.mark.usefixtures("here")
def test_a_run_is_told_by_weights_and_data_not_by_their_place(here: Path, cache: Path) -> None:
    shutil.copytree(here / "gpt2", here / "copy" / "gpt2")
    shutil.copy(here / "texts.txt", here / "other.txt")
    runs = [
        asked(cache, f"model.path={path}", f"data={data}", *more).identity["run"]
        for path, data, *more in (
            ("gpt2", "texts.txt"),
            ("copy/gpt2", "other.txt"),
            ("gpt2", "texts.txt", "model.max_length=5"),
            ("gpt2", "texts.txt", "seed=1"),
        )
    ]
    assert runs[0] == runs[1]
    assert len(set(runs)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_pruned_models_are_saved_where_that_is_asked_for(cache: Path, tmp_path: Path) -> None:
    settings = ["model=hf", "model.path=bert", "data=texts.csv", *SIZES, f"cache={cache}", "schedule=[one_shot]"]
    settings += ["experiment=prune", "experiment.budgets=[4]", "experiment.latency_rounds=1", "recovery=[refit]"]
    settings += ["experiment.tolerance=1.0"]  # so that the smaller model is one of those that can go
    found = mhaprune.run(*settings, "model.save=true", folder=tmp_path / "run")
    row = found.tables["smallest"].iloc[0]
    folders = [path for path in (tmp_path / "run" / "models").iterdir() if path.is_dir()]
    assert folders
    again: Any = mhaprune.load(folders[0])
    columns = {path: again.get_submodule(path).in_features for path in OUTPUTS}
    assert sum(columns.values()) == 16 * 2 * row["heads_kept"] / row["heads_total"]
    without = mhaprune.run(*settings)
    assert not without.files


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["gpt2", *slow("bart", "bert")])
def test_attention_maps_can_be_had(name: str, cache: Path) -> None:
    data = "texts.txt" if name == "gpt2" else "texts.csv"
    run = asked(cache, f"model.path={name}", f"data={data}", "scorer=[ablation]", experiment="explain")
    tables = run.results().tables
    sums = tables["attention"].groupby(["site", "layer", "head", "query"])["weight"].sum()
    assert sums.to_numpy() == pytest.approx(1.0, abs=1e-5)
    if name == "gpt2":  # no token looks ahead
        assert (tables["attention"].query("key > query")["weight"] == 0).all()
        assert tables["patterns"].query("pattern == 'i+1'")["mass"].isna().all()
