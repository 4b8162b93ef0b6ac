"""Folders of models of transformers: transformers alone reads exactly what was saved, however it was saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhaprune

transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")

TEXT = {"vocab_size": 11, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT |= {"initializer_range": 0.2}
IDS = {"input_ids": torch.arange(1, 9).reshape(2, 4)}
BARK = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "input_vocab_size": 11, "output_vocab_size": 11}
PIXELS = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "FalconH1ForCausalLM": (
        {
            **TEXT,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
        },
        IDS,
    ),
    "DPRQuestionEncoder": (TEXT, IDS),
    "ClapTextModel": (TEXT, IDS),
    "BarkSemanticModel": (BARK, IDS),
    "DPTForDepthEstimation": (
        {**TEXT, "image_size": 16, "patch_size": 4, "neck_hidden_sizes": [8, 8], "backbone_out_indices": [0, 1]}
        | {"reassemble_factors": [1, 1], "fusion_hidden_size": 8, "is_hybrid": False},
        PIXELS,
    ),
}


def made(name: str) -> Any:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**CASES[name][0])).eval()


def square(output: Any, batch: Any) -> Tensor:
    return output[0].flatten(1).square().mean(dim=1)


def pruned(name: str, mask: Any = ({0: [1], 1: [0, 3]},)) -> Any:
    return mhaprune.wrap(made(name), square, score=[CASES[name][1]]).prune(mask=mask[0])


@torch.no_grad()
def said(model: Any, name: str) -> Tensor:
    answer: Tensor = model(**CASES[name][1])[0]
    return answer


def read_alone(folder: Path) -> Any:
    """Read a folder as its README says, by the class of transformers."""
    auto = "AutoModelForCausalLM" if "AutoModelForCausalLM" in (folder / "README.md").read_text() else "AutoModel"
    for name in ("AutoModelForDepthEstimation",):
        auto = name if name in (folder / "README.md").read_text() else auto
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_by_transformers_alone_and_by_load(name: str, tmp_path: Path) -> None:
    """Buffers that are not saved, classes that no AutoModel knows, and keys that only contain the word head."""
    small = pruned(name)
    mhaprune.save(small, tmp_path / "small")
    assert not (tmp_path / "small" / "removal.json").exists()
    for again in (read_alone(tmp_path / "small"), mhaprune.load(tmp_path / "small")):
        assert torch.equal(said(again, name), said(small, name))
    mhaprune.save(made(name), tmp_path / "whole")
    assert torch.equal(said(mhaprune.load(tmp_path / "whole"), name), said(made(name), name))


def test_a_pruned_model_saves_itself_with_its_code(tmp_path: Path) -> None:
    """As a Trainer does; also after it was read, copied into another model, or pruned again."""
    name = "DPRQuestionEncoder"
    small = pruned(name)
    small.save_pretrained(tmp_path / "0")
    assert torch.equal(said(read_alone(tmp_path / "0"), name), said(small, name))
    loaded = mhaprune.load(tmp_path / "0")
    loaded.save_pretrained(tmp_path / "1")  # type: ignore[operator]
    assert torch.equal(said(read_alone(tmp_path / "1"), name), said(small, name))
    alone = read_alone(tmp_path / "1")
    alone.save_pretrained(tmp_path / "2")
    assert torch.equal(said(mhaprune.load(tmp_path / "2"), name), said(small, name))
    again = mhaprune.wrap(alone, square, score=[IDS]).prune(mask={1: [1]})
    again.save_pretrained(tmp_path / "3")  # type: ignore[operator]
    assert torch.equal(said(read_alone(tmp_path / "3"), name), said(again, name))


def test_a_folder_that_is_read_otherwise_becomes_a_recipe_and_says_so(tmp_path: Path) -> None:
    """This model fills a buffer, which is not saved, by hand."""

    def model() -> Any:
        bert = transformers.BertModel(transformers.BertConfig(**TEXT)).eval()
        bert.encoder.register_buffer("more", torch.ones(3), persistent=False)
        return bert

    torch.manual_seed(0)
    small = mhaprune.wrap(model(), square, score=[IDS]).prune(mask={0: [1]})
    with pytest.warns(UserWarning, match=r"cannot read this BertModel \(encoder.more is in one of them only\)"):
        mhaprune.save(small, tmp_path / "small")
    again: Any = mhaprune.load(tmp_path / "small", model=model())
    with torch.no_grad():
        assert torch.equal(again(**IDS)[0], small(**IDS)[0])
    assert not (tmp_path / "small" / "config.json").exists()


def test_no_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='^path="": must name a folder$'):
        mhaprune.save(nn.Linear(2, 2), "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 10**6), ("num_attention_heads", -1)])
def test_numbers_that_cannot_be_are_refused_by_their_key(key: str, value: int, tmp_path: Path) -> None:
    mhaprune.save(made("ClapTextModel"), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {key: value}))
    (tmp_path / "checksums.json").unlink()
    with pytest.raises(ValueError, match=f"{key}={value}: must be "):
        mhaprune.load(tmp_path)
