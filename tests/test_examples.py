"""The examples in the docstrings of the front door: there is one for each name, and it runs."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.front.heads import Heads
from support.classifier import batches, classifier

METHODS = [name for name, value in vars(Heads).items() if inspect.isfunction(value) and not name.startswith("_")]
DOORS = [*mhaprune.__all__, *(f"Heads.{name}" for name in METHODS)]


def door(name: str) -> Any:
    return getattr(Heads, name.removeprefix("Heads.")) if name.startswith("Heads.") else getattr(mhaprune, name)


def bert_heads() -> Heads:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=11, **sizes))
    texts = [{"input_ids": torch.arange(12).reshape(2, 6) % 11}]
    return mhaprune.wrap(model, losses.drift, score=texts)


@pytest.mark.parametrize("name", DOORS)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "save" and importlib.util.find_spec("transformers") is None:
        pytest.skip("pip install -e '.[hf]'")
    model, made = classifier(), batches(4)
    given = {"mhaprune": mhaprune, "torch": torch, "losses": losses, "model": model, "batches": made}
    if name.startswith("Heads."):
        given["heads"] = mhaprune.wrap(model, losses.classification, score=made, choose=made, report=made)
    if name == "save":
        given["heads_of_bert"] = bert_heads()
    where = door(name)
    found = [each for each in doctest.DocTestFinder(recurse=inspect.isclass(where)).find(where, name) if each.examples]
    assert found, "has no example"
    for example in found:
        example.globs |= given
        told: list[str] = []
        assert doctest.DocTestRunner(verbose=False).run(example, out=told.append).failed == 0, "".join(told)
