"""A folder of transformers from a stranger: no code runs, nothing waits, and all that does not fit is one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mhaprune
from mhaprune.front.command_line import main
from mhaprune.runs.run import build
from mhaprune.studies.hf import Folder
from support.commands import run_here
from support.composing import compose

pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
from support.guests import write_models, write_texts

pytestmark = [pytest.mark.filterwarnings("ignore")]
CODE = """
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification as M
Path({marker!r}).touch()
class C(BertConfig):
    model_type = "unheard_of"
class M(M):
    config_class = C
"""


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strange")
    write_models(folder, "bert")
    write_texts(folder)
    return folder / "bert"


@pytest.fixture
def folder(guest: Path, tmp_path: Path) -> Path:
    """One to change."""
    return Path(shutil.copytree(guest, tmp_path / "bert"))


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


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*words: object) -> str:
        raise AssertionError("a question")

    monkeypatch.setattr("builtins.input", answer)


@pytest.mark.usefixtures("nobody_answers")
def test_code_in_a_folder_runs_only_where_it_is_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = with_code(folder)
    said = refused(folder)
    assert said.startswith(f"{folder}: ")
    assert "trust_remote_code=True" in said
    assert not marker.exists()
    assert type(mhaprune.load(folder, trust_remote_code=True)).__name__ == "M"
    assert marker.exists()


@pytest.mark.usefixtures("nobody_answers")
def test_on_the_command_line_a_setting_trusts_it(
    folder: Path, guest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = with_code(folder)
    settings = ["experiment=ablate", "model=hf", f"model.path={folder}", f"data={guest.parent / 'texts.csv'}"]
    settings += ["model.score=8", "model.choose=8", "model.report=8"]
    done = run_here(main, *settings, f"cache={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert f"error: model.path={folder}: " in done.stderr
    assert "model.trust_remote_code=true" in done.stderr
    assert not marker.exists()
    assert len(build(compose(*settings, "model.trust_remote_code=true")).source.grid) == 8
    assert marker.exists()


@pytest.mark.usefixtures("nobody_answers")
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


FORGED = [
    {"architectures": 5},
    {"hidden_size": "x"},
    {"num_attention_heads": 0},
    {"num_hidden_layers": 10**9},
    {"hidden_act": "nosuch"},
]


@pytest.mark.parametrize("settings", FORGED, ids=str)
def test_a_forged_config_is_refused_in_one_line_that_names_the_folder(folder: Path, settings: dict[str, Any]) -> None:
    change(folder, **settings)
    assert refused(folder).startswith(f"{folder}: ")


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, '{"model_type": ["bert"]}'])
def test_a_config_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert refused(folder).startswith(f"{folder}: its config.json cannot be read, ")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_folder_blocks_nothing(folder: Path, name: str, tmp_path: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert f"{name} is no regular file" in refused(folder)
