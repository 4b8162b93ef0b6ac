"""Folders of transformers on the command line; of a stranger's no code runs, nothing waits, and errors are one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import mhaprune
from mhaprune.lab.cli.command_line import main
from mhaprune.lab.runs.run import Run, build
from mhaprune.lab.runs.run_folder import read_status
from mhaprune.lab.sources.hf import Folder
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
        ("masked", ["data=texts.txt", "model.task=feature-extraction"], "feature-extraction", "drift", "similarity"),
        ("gpt2", ["data=texts.txt"], "causal-lm", "likelihood", "next token accuracy"),
        ("bart", ["data=texts.csv"], "seq2seq-lm", "likelihood", "token accuracy"),
    ],
)
def test_a_folder_is_studied_as_what_it_is(
    name: str, overrides: list[str], task: str, objective: str, quality: str, cache: Path
) -> None:
    run = asked(cache, f"model.path={name}", *overrides)
    assert len(run.source.grid) == (12 if name == "bart" else 8)
    assert [run.identity[key] for key in ("task", "model_task", "objective")] == [name, task, objective]
    study = run.study()
    assert study.words["quality_name"] == quality
    outcome = study.subject.evaluate(study.splits.report)
    assert outcome.loss.shape == outcome.quality.shape == (16,)
    assert outcome.quality.std() > 0 or objective == "drift"
    assert outcome.quality.max() <= 1 + 1e-6
    assert study.tokens is not None
    assert study.tokens(study.splits.report[:1])[0][0] == "[CLS]"


def write_pairs(folder: Path, **changed: str) -> str:
    """A file of texts, counterparts and a word that follows; the first row has other columns where they are given."""
    found = [
        {"text": " ".join(words), "corrupt": " ".join([words[-1], *words[:-1]]), "target": words[0]}
        for words in map(str.split, pd.read_csv(folder / "texts.csv")["text"].str.removesuffix(" ."))
        if words[0] != words[-1]
    ]
    found[0] |= changed
    rows = [{key: value for key, value in row.items() if value} for row in found]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "data=pairs.jsonl"


def test_pairs_of_a_file_are_patched_and_a_target_alone_is_asked_for(here: Path, cache: Path) -> None:
    asks = ["model.path=gpt2", write_pairs(here), "experiment.top=2", "experiment.redraws=20"]
    run = asked(cache, *asks, "scorer=[patching,taylor]", experiment="truth")
    study = run.study()
    for split in (study.splits.score, study.splits.report):
        assert split.lengths().tolist() == split.counterpart().lengths().tolist()
        for batch, other in zip(split.batches(1), split.counterpart().batches(1), strict=True):
            ids, labels, length = (batch.fields[key][0] for key in ("input_ids", "labels", "attention_mask"))
            asked_for = labels[labels != -100]
            assert len(asked_for) == 2, "a word, and the end that this tokenizer writes"
            assert asked_for[0] == ids[1] != ids[int(length.sum()) - 3], "the first word of the text is asked for"
            assert sorted(ids.tolist()) == sorted(other.fields["input_ids"][0].tolist())
    table = run.experiment(study).tables["truth"].set_index("scorer")
    assert table.loc["patching", ["heads_known", "as_patching"]].tolist() == [2, 1]


def test_kinds_of_a_file_are_told_apart(here: Path, cache: Path) -> None:
    table = pd.read_csv(here / "texts.csv")
    table.assign(kind=["short" if len(text) < 30 else "long" for text in table["text"]]).to_csv(
        "kinds.csv", index=False
    )
    run = asked(cache, "model.path=bert", "data=kinds.csv", "objective=drift", experiment="skills")
    study = run.study()
    for split in (study.splits.score, study.splits.report):
        kinds = split.by_kind()
        assert {kind: len(rows) for kind, rows in kinds.items()} == {"long": 8, "short": 8}
        assert split.lengths()[kinds["short"]].float().mean() < split.lengths()[kinds["long"]].float().mean()
    found = run.experiment(study).tables
    assert set(found["profile"]["kind"]) == set(found["kinds"]["kind"]) == {"short", "long"}
    table.assign(kind=["a", "b", "c"] * (len(table) // 3) + ["a"] * (len(table) % 3)).to_csv("other.csv", index=False)
    given = ["model.path=bert", "data=kinds.csv", "objective=drift", "shift=[other.csv]"]
    other = asked(cache, *given).study().splits["other"]
    assert len(other) == 15, "five of each of its kinds"
    assert not other.by_kind(), "it is one kind, of another sort"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"corrupt": ""}, r"data=pairs.jsonl: \d+ of \d+ lines have a corrupt text, all or none must have one"),
        ({"corrupt": "dog"}, "data=pairs.jsonl: line 1: text and corrupt have .* and .* tokens, must have as many"),
    ],
)
def test_pairs_that_cannot_be_are_refused_in_one_line(changed: Any, message: str, here: Path, cache: Path) -> None:
    data = write_pairs(here, **changed)
    rows = len((here / "pairs.jsonl").read_text().splitlines())
    sizes = [f"model.score={rows - 4}", "model.choose=2", "model.report=2"]
    with pytest.raises(ValueError, match=f"^{message}$"):
        _ = asked(cache, "model.path=gpt2", data, *sizes, experiment="truth").study()


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


def study_key(run: Run) -> Any:
    """What the scores of a pretrained model are kept under."""
    return {name: value for name, value in run.source.decisive.items() if name != "shift"}


def test_files_of_another_kind_are_measured_too(here: Path, cache: Path) -> None:
    run = asked(cache, "model.path=bert", "data=texts.txt", "objective=drift", "shift=[texts.csv]", "model.report=8")
    assert list(run.source.splits.shifts) == ["texts"]
    assert len(run.source.splits.shifts["texts"]) == 8
    plain = asked(cache, "model.path=bert", "data=texts.txt", "objective=drift", "model.report=8")
    assert run.identity["run"] != plain.identity["run"]
    (here / "few.txt").write_text("one\ntwo\nthree")
    shutil.copy(here / "texts.csv", here / "a.csv")
    (here / "moved").mkdir()
    shutil.copy(here / "texts.csv", here / "moved")
    moved, renamed = (
        asked(
            cache, "model.path=bert", "data=texts.txt", "objective=drift", f"shift=[{file}.csv]", "model.report=8"
        ).identity["run"]
        for file in ("moved/texts", "a")
    )
    assert moved == run.identity["run"] != renamed, "a file may be anywhere, and has a name"
    assert study_key(run) == study_key(plain), "so that scores are taken from the cache"
    for shift, message in (
        ("score.csv", "score is taken"),
        ("report split.csv", "report split is taken"),
        ("a.csv,b/a.csv", "a is taken"),
        ("no.csv", "shift=no.csv: cannot be read"),
        ("few.txt", "shift=few.txt: has 3 different texts, .* need 12, ask for fewer"),
    ):
        with pytest.raises(ValueError, match=message):
            asked(cache, "model.path=bert", "data=texts.txt", "objective=drift", f"shift=[{shift}]", "model.report=8")


def test_labels_are_names_or_numbers(here: Path, cache: Path) -> None:
    table = pd.read_csv(here / "texts.csv")
    table.assign(label=[f"LABEL_{label}" for label in table["label"]]).to_csv(here / "named.csv", index=False)
    table.assign(label=[f"{label + 5}" for label in table["label"]]).to_csv(here / "wrong.csv", index=False)
    named, numbers = (asked(cache, "model.path=bert", f"data={name}.csv").source.splits for name in ("named", "texts"))
    assert all(map(torch.equal, named.score.tensors().values(), numbers.score.tensors().values()))
    assert any("labels" in name for name in named.score.tensors())
    none_of_them = r"^data=wrong.csv: line \d+: the label '[56]' of '.*' is none of the model's, LABEL_0, LABEL_1"
    with pytest.raises(ValueError, match=none_of_them):
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


CODE = """
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification as M
Path({marker!r}).touch()
class C(BertConfig):
    model_type = "unheard_of"
class M(M):
    config_class = C
"""


@pytest.fixture
def folder(guests: Path, tmp_path: Path) -> Path:
    """One to change."""
    return Path(shutil.copytree(guests / "bert", tmp_path / "bert"))


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def with_code(folder: Path) -> Path:
    """A folder that names code of its own; returns the file that the code leaves."""
    marker = folder.parent / "ran"
    (folder / "modeling_x.py").write_text(CODE.format(marker=str(marker)))
    named = {"AutoConfig": "modeling_x.C", "AutoModelForSequenceClassification": "modeling_x.M"}
    change(folder, model_type="unheard_of", auto_map=named, architectures=["M"])
    return marker


def refused(path: Any, **options: Any) -> str:
    """Return the answer of loading."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        mhaprune.load(path, **options)
    assert "weights_only" not in str(error.value)
    return str(error.value)


@pytest.fixture(autouse=True)
def nothing_is_asked_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*words: object) -> str:
        raise AssertionError("a question")

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_code_in_a_folder_runs_only_where_it_is_trusted(folder: Path) -> None:
    marker = with_code(folder)
    said = refused(folder)
    assert said.startswith(f"{folder}: ")
    assert "trust_remote_code=True" in said
    assert not marker.exists()
    assert type(mhaprune.load(folder, trust_remote_code=True)).__name__ == "M"
    assert marker.exists()


def test_on_the_command_line_a_setting_trusts_it(folder: Path, guests: Path, tmp_path: Path) -> None:
    marker = with_code(folder)
    settings = ["experiment=ablate", "model=hf", f"model.path={folder}", f"data={guests / 'texts.csv'}"]
    settings += ["model.score=8", "model.choose=8", "model.report=8"]
    done = run_here(main, *settings, f"cache={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert f"error: model.path={folder}: " in done.stderr
    assert "model.trust_remote_code=true" in done.stderr
    assert not marker.exists()
    assert len(build(compose(*settings, "model.trust_remote_code=true")).source.grid) == 8
    assert marker.exists()


def test_code_of_a_tokenizer_does_not_run(folder: Path, tmp_path: Path) -> None:
    """Transformers knows another for this model."""
    (folder / "tokens.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["tokens.T", None]}}))
    assert Folder(str(folder)).tokenizer().pad_token == "[PAD]"
    assert not (tmp_path / "ran").exists()


def test_a_pruned_folder_of_ours_needs_no_trust(folder: Path, tmp_path: Path) -> None:
    """Its code is for those without mhaprune."""
    batch = {"input_ids": torch.tensor([[2, 5, 6, 3]]), "labels": torch.tensor([1])}
    heads = mhaprune.wrap(mhaprune.load(folder), mhaprune.losses.classification, score=[batch])
    small = heads.subject.without(mhaprune.HeadMask(heads.grid).without(heads.grid.heads[0])).model
    mhaprune.save(small, tmp_path / "small")
    with (tmp_path / "small" / "modeling_mhaprune.py").open("a") as code:
        code.write("\nraise SystemExit\n")
    (tmp_path / "small" / "checksums.json").unlink()
    for trusted in (False, True):
        again = mhaprune.load(tmp_path / "small", trust_remote_code=trusted)
        assert again.state_dict().keys() == small.state_dict().keys()
    for forged in ({"forward": 5}, {"num_attention_heads": "3"}):
        noted = json.loads((tmp_path / "small" / "config.json").read_text())["mhaprune"]
        change(tmp_path / "small", mhaprune=noted | {"attributes": dict.fromkeys(noted["attributes"], forged)})
        assert refused(tmp_path / "small").startswith(f"{tmp_path / 'small'}: cannot be loaded, config.mhaprune: ")
        change(tmp_path / "small", mhaprune=noted)


def test_a_pickle_is_refused_in_our_words(folder: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "harm",)

    (folder / "model.safetensors").unlink()
    torch.save({"classifier.weight": Harmful()}, folder / "pytorch_model.bin")
    assert "plain content" in refused(folder)
    assert not (folder / "harm").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", 5),
        ("hidden_size", "x"),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 10**9),
        ("hidden_act", "nosuch"),
    ],
)
def test_a_forged_config_is_refused_in_one_line_that_names_the_folder(folder: Path, key: str, value: object) -> None:
    change(folder, **{key: value})
    assert refused(folder).startswith(f"{folder}: ")


def test_a_config_that_is_none_is_refused_and_a_pipe_in_a_folder_blocks_nothing(folder: Path) -> None:
    for text in ("[1]", "[" * 100_000, '{"model_type": ["bert"]}'):
        (folder / "config.json").write_text(text)
        assert refused(folder).startswith(f"{folder}: its config.json cannot be read, ")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert f"{name} is no regular file" in refused(folder)
        (folder / name).unlink()
