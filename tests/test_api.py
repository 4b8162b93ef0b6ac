"""mhaprune from Python: what its page shows, the examples in docstrings, and calls that cannot be."""

import doctest
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mhaprune
import mhaprune.lab.cli.python
from mhaprune import losses
from mhaprune.api.wrap import Heads
from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.heads import HeadMask
from mhaprune.schedules.greedy import Greedy
from mhaprune_literature.swap import Swap
from support import ROOT
from support.classifier import Classifier, batches, classifier
from support.figures import drawing
from support.sizes import TINY, TINY_SEQUENCES, slow, small

SMALL = [*TINY, *TINY_SEQUENCES, *small("experiment", "ablate"), "experiment.budgets=[0.5]"]


@pytest.mark.slow
def test_a_run_returns_its_tables_figures_and_sentences(cache: Path) -> None:
    with drawing():
        results = mhaprune.run("experiment=ablate", "task=sort", *SMALL, f"cache={cache}")
    assert results.sentences[0].startswith("Beware: the model itself is poor"), "it was trained for a moment"
    assert "heads can be removed" in results.sentences[1]
    assert repr(results) == "\n".join([results.title, *results.brief])
    assert {line[:13] for line in set(results.sentences) - set(results.brief)} == {
        "The heads rem",
        "“At 95 % conf",
        "The choose sp",
    }
    assert results.tables["pruning"]["run"].nunique() == 1
    assert results.figures["matter"].png.startswith(b"\x89PNG")
    assert results.checks["max_difference_masked_removed"] <= 1e-9
    page = results.page()
    assert results.sentences[0] in re.sub("</?(abbr|b)[^>]*>", "", page)
    assert results.first.question in page


def test_a_saved_model_is_a_module_that_answers(cache: Path, tmp_path: Path) -> None:
    study = mhaprune.study("experiment=train", *TINY, *TINY_SEQUENCES, f"cache={cache}")
    pruned = study.subject.without(HeadMask(study.subject.grid).without(*study.subject.grid.heads[:2]))
    path = tmp_path / "pruned.pt"
    path.write_bytes(study.saved("model", pruned)["model.pt"])
    model = mhaprune.load(path)
    assert isinstance(model, torch.nn.Module)
    assert model.grid == pruned.grid
    batch = study.splits.report[:5]
    from mhaprune.lab.tasks.sequences import shift_right

    torch.testing.assert_close(model(batch.source, shift_right(batch.target)), pruned.call(batch))
    one, two = model.decode("3 1 2", "0 1"), model.decode("3 1 2")
    assert isinstance(one, list)
    assert one[0] == two
    with pytest.raises(ValueError, match="x is not in the vocabulary"):
        model.decode("3 x")
    with pytest.raises(ValueError, match="cannot be read"):
        mhaprune.load(tmp_path / "nothing.pt")


def made_small(monkeypatch: pytest.MonkeyPatch, *small: str) -> None:
    """Give every run and every study these settings too."""
    for name in ("run", "study"):
        plain = getattr(mhaprune.lab.cli.python, name)
        monkeypatch.setattr(mhaprune.lab.cli.python, name, lambda *given, plain=plain: plain(*given, *small))


@pytest.mark.figures
def test_the_lines_of_the_page_run(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, on a tiny model."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), flags=re.S)
    made_small(monkeypatch, *SMALL, f"cache={cache}")
    study = mhaprune.study("experiment=ablate")
    (tmp_path / "pruned.pt").write_bytes(study.saved("model", study.subject)["model.pt"])
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "python.md", "exec"), names)
    assert isinstance(names["layer"], torch.nn.Module)


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'rum', it has AttentionBlock, Budget, HeadMask, Heads"):
        mhaprune.rum  # noqa: B018
    assert {*mhaprune.__all__, "__version__"} <= set(dir(mhaprune))
    assert mhaprune.__version__ == version("mhaprune")


CORE = """
import sys

BLOCKED = ("hydra", "omegaconf", "matplotlib", "jinja2", "antlr4", "annotated_types", "scipy", "transformers")
sys.modules |= dict.fromkeys(BLOCKED)
import mhaprune
assert "torch" not in sys.modules
from support.classifier import Classifier, batches, classifier
model = classifier()
heads = mhaprune.wrap(model, mhaprune.losses.classification, score=batches(3), choose=batches(2), report=batches(2))
heads.score("ablation", "taylor", "gate_output", "magnitude", "random")
heads.prune(keep=6, by="greedy_refit", refit=True)
small = heads.prune(keep=0.5, by="ablation", fine_tune=2)
heads.evaluate({0: [0]})
mhaprune.save(small, sys.argv[1])
again = mhaprune.load(sys.argv[1], model=Classifier())
import torch

assert all(map(torch.equal, small.state_dict().values(), again.state_dict().values()))
assert heads._repr_html_() is None
assert not hasattr(mhaprune, "run")
try:
    heads.report()
except ModuleNotFoundError as error:
    print(error)
assert not [name for name in sys.modules if name.startswith("mhaprune.lab.experiments.a")]
"""


def test_the_core_needs_no_package_of_the_lab(tmp_path: Path) -> None:
    """Wrap, score, prune, save and load in a process that has torch, pandas, tqdm and PyYAML alone."""
    command = [sys.executable, "-c", CORE, str(tmp_path / "small")]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(jinja2|matplotlib|hydra|omegaconf): is not installed, [^\n]*\n", done.stdout)


METHODS = [name for name, value in vars(Heads).items() if inspect.isfunction(value) and not name.startswith("_")]
DOORS = [name for name in mhaprune.__all__ if name != "Heads"] + [f"Heads.{name}" for name in METHODS]


def door(name: str) -> Any:
    return getattr(Heads, name.removeprefix("Heads.")) if name.startswith("Heads.") else getattr(mhaprune, name)


def heads_of(kind: str, loss: Any) -> Heads:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    config = getattr(transformers, f"{kind}Config")(vocab_size=11, num_key_value_heads=2, **sizes)
    model = getattr(transformers, {"Bert": "BertModel", "Llama": "LlamaForCausalLM"}[kind])(config)
    return mhaprune.wrap(model, loss, score=[{"input_ids": torch.arange(24).reshape(2, 12) % 11}])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder of all examples, which share their cache."""
    return tmp_path_factory.mktemp("examples")


LONG = ("load", "export", "Heads.report", "Heads.speed")
"""Those whose example takes a second or more."""


@pytest.mark.parametrize("name", [*(name for name in DOORS if name not in LONG), *slow(*LONG)])
def test_the_example_runs(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    if name in ("save", "Heads.streaming") and importlib.util.find_spec("transformers") is None:
        pytest.skip("pip install -e '.[hf]'")
    model, made = classifier(), batches(4)
    given = {"mhaprune": mhaprune, "torch": torch, "losses": losses, "model": model, "batches": made}
    if name.startswith("Heads.") or name in ("Budget", "export", "save", "verify"):
        given["heads"] = mhaprune.wrap(model, losses.classification, score=made, choose=made, report=made)
    if name == "Heads.profile":
        kinds: Any = {"short": made[:2], "long": made[2:]}
        given["heads_by_kind"] = mhaprune.wrap(model, losses.classification, score=kinds)
    if name == "save":
        given["heads_of_bert"] = heads_of("Bert", losses.drift)
    if name == "Heads.streaming":
        given["heads_of_llama"] = heads_of("Llama", losses.language_model)
    where = door(name)
    found = [each for each in doctest.DocTestFinder(recurse=inspect.isclass(where)).find(where, name) if each.examples]
    assert found, "has no example"
    made_small(monkeypatch, *TINY_SEQUENCES, *(f"task.{split}=32" for split in ("valid", "score", "choose", "report")))
    for example in found:
        example.globs |= given
        told: list[str] = []
        assert doctest.DocTestRunner(verbose=False).run(example, out=told.append).failed == 0, "".join(told)


@pytest.fixture(scope="module")
def heads() -> Heads:
    return mhaprune.wrap(classifier(), losses.classification, score=batches(2), choose=batches(2), report=batches(2))


def wrap(**given: Any) -> Callable[[Heads], object]:
    usual: dict[str, Any] = {"model": Classifier(), "loss": losses.classification, "score": batches(1)}
    return lambda heads: mhaprune.wrap(**usual | given)


NAN = float("nan")
CALLS: dict[str, list[Callable[[Heads], object]]] = {
    "overrides": [lambda h: mhaprune.run(["experiment=ablate"]), lambda h: mhaprune.study(3)],  # type: ignore[arg-type]
    "folder": [lambda h: mhaprune.run("experiment=train", folder=3)],  # type: ignore[arg-type]
    "path": [
        lambda h: mhaprune.load(3),  # type: ignore[arg-type]
        lambda h: mhaprune.save(Classifier(), None),  # type: ignore[arg-type]
        lambda h: h.report("/no/such/folder/x.html"),
        lambda h: h.report(3),  # type: ignore[arg-type]
    ],
    "model": [
        wrap(model="bert"),
        wrap(model=None),
        wrap(model=nn.Identity(), score=[torch.ones(2, 3)]),
        lambda h: mhaprune.save("bert", "folder"),  # type: ignore[arg-type]
    ],
    "loss": [
        wrap(loss=None),
        wrap(loss=lambda output, batch: output["logits"]),
        wrap(loss=lambda output, batch: output["logits"].argmax(-1)),
        wrap(loss=lambda output, batch: torch.full((len(batch["labels"]),), NAN)),
    ],
    "quality": [
        wrap(quality=lambda output, batch: torch.full((len(batch["labels"]),), NAN)),
        wrap(quality=lambda output, batch: None),
    ],
    "score": [
        wrap(score=[]),
        wrap(score=[3]),
        wrap(score=[{"input_ids": [1, 2]}]),
        wrap(score=[{"input_ids": torch.zeros(0, 3, dtype=torch.long)}]),
        wrap(score=torch.utils.data.TensorDataset(torch.ones(3))),
        wrap(score=[{"words": torch.ones(2, 3)}]),
        wrap(score=[torch.full((2, 3), 10_000)]),
    ],
    "choose": [wrap(choose=[]), wrap(choose=7)],
    "blocks": [wrap(blocks=[]), wrap(blocks=["attention"]), wrap(blocks=3)],
    "call": [wrap(call="plainly")],
    "seed": [wrap(seed=-1), wrap(seed=0.5), wrap(seed="0")],
    "scorers": [lambda h: h.score(["ablation"]), lambda h: h.score(3)],  # type: ignore[arg-type]
    "scorer=subset: is not installed: pip install -e examples/literature": [lambda h: h.score("subset")],
    "scorer": [lambda h, name=name: h.score(name) for name in ("ablatoin", "gate", "")],  # type: ignore[misc]
    "scorer/schedule=greedi: no such scorer or schedule, did you mean greedy": [lambda h: h.mask(by="greedi")],
    "keep": [
        lambda h: h.mask(True),
        lambda h: h.mask(-1),
        lambda h: h.speed(keep=[1.5]),
        lambda h: h.mask(NAN),
        lambda h: h.mask("half"),  # type: ignore[arg-type]
        lambda h: h.mask(1.5),
        lambda h: h.mask(9),
        lambda h: h.masks(0.5),  # type: ignore[arg-type]
        lambda h: h.mask(3, even=True),
        lambda h: h.mask(0.5, unit="block", even=True),
        lambda h: h.mask(0.75, even=True, divisible_by=2),
        lambda h: h.mask(4, even={0: 2}),
    ],
    "by": [
        lambda h: h.prune(by=np.zeros(7)),
        lambda h: h.prune(by=[0.0] * 7 + [NAN]),
        lambda h: h.prune(by={"attention.0.0": 1}),
        lambda h: h.prune(by=h.score("ablation", "random")),
        lambda h: h.prune(by=h.score("ablation").drop(columns="head")),
        lambda h: h.mask(by=Swap(Greedy()), even=True),
        lambda h: h.mask(by="one_shot"),
        lambda h: h.mask(by="greedy", rescore_every=2),
        lambda h: h.report(by=[3]),  # type: ignore[list-item]
    ],
    "schedule": [
        lambda h: h.mask(by="greedy", schedule="iterative"),
        lambda h: h.mask(schedule="itertaive"),
        lambda h: h.mask(schedule="iterative", rescore_every=2),
    ],
    "share": [lambda h: h.mask(share=0.5)],
    "rescore_every": [lambda h: h.mask(rescore_every=0), lambda h: h.mask(rescore_every=1.5)],  # type: ignore[arg-type]
    "refit": [lambda h: h.prune(refit="yes")],  # type: ignore[arg-type]
    "fine_tune": [
        lambda h: h.prune(fine_tune={"lr": 1}),
        lambda h: h.prune(fine_tune=-1),
        lambda h: h.prune(fine_tune=True),
    ],
    "mask": [
        lambda h: h.without(None),
        lambda h: h.without(h.grid),
        lambda h: h.prune(mask={7: [0]}),
        lambda h: h.prune(mask={0: 1}),
        lambda h: h.prune(mask={0: [1.7]}),
        lambda h: h.prune(mask='{"0": 1}'),
        lambda h: h.prune(mask="nowhere.json"),
        lambda h: h.prune(mask=""),
        lambda h: h.prune(mask=h.units("block").mask(keep=1)),
        lambda h: h.prune(mask={0: [1, 1]}),
        lambda h: h.prune(mask="[no json"),
        lambda h: h.prune(mask=np.ones(7)),
        lambda h: h.prune(mask=[[0.5] * 4] * 2),
    ],
    "unit": [
        lambda h: h.mask(unit="neuron"),
        lambda h: h.units("layer"),  # type: ignore[arg-type]
        lambda h: h.units("block").mask(unit="head"),
        lambda h: h.prune(mask={0: [1]}, unit="block"),
    ],
    "divisible_by": [lambda h: h.mask(divisible_by=2), lambda h: h.mask(even=True, divisible_by=0)],
    "even": [
        lambda h: h.mask(even=1),
        lambda h: h.mask(even={7: 1}),
        lambda h: h.mask(even={0: 5}),
        lambda h: h.mask(even={0: -1}),
        lambda h: h.mask(even={0: 2.0}),
        lambda h: h.mask(even={0: True}),
        lambda h: h.mask(even={0: 3, "0": 2}),
        lambda h: h.mask(even={0: 3}, divisible_by=2),
        lambda h: h.mask(even={0: 2}, unit="block"),
        lambda h: h.prune(even={0: 2}, by=Swap(Greedy())),
    ],
    "cache_bytes": [
        lambda h: h.prune(cache_bytes=0.5),
        lambda h: h.prune(cache_bytes="half"),
        lambda h: h.prune(cache_bytes=100, mask={0: [1]}),
        lambda h: h.mask(cache_bytes=NAN),
    ],
    "batch_size": [lambda h: h.cache_bytes(batch_size=0)],
    "head": [
        lambda h: HeadMask(h.grid).without("attention"),
        lambda h: HeadMask(h.grid).without("attention.0.9"),
        lambda h: HeadMask(h.grid).without("other.0.0"),
        lambda h: h.prune(mask={0: [4]}),
        lambda h: h.evaluate(["attention.0.9"]),
    ],
    "budgets": [
        lambda h: h.report(budgets=[]),
        lambda h: h.report(budgets=[2.0]),
        lambda h: h.report(budgets="12"),  # type: ignore[arg-type]
    ],
    "tolerance": [lambda h: h.report(tolerance=-1), lambda h: h.report(tolerance=NAN)],
    "rounds": [lambda h: h.report(rounds=0), lambda h: h.speed(rounds=0)],
    "batch_sizes": [lambda h: h.speed(batch_sizes=0), lambda h: h.speed(batch_sizes=[])],
    "new_tokens": [lambda h: h.speed(new_tokens=0), lambda h: h.speed(new_tokens=2)],
    "num_heads": [lambda h: MultiHeadAttention(8, "4"), lambda h: MultiHeadAttention(8, 3)],  # type: ignore[arg-type]
    "embed_dim": [lambda h: MultiHeadAttention(0, 1), lambda h: MultiHeadAttention(8.0, 2)],  # type: ignore[arg-type]
}
EACH = [(name, call) for name, calls in CALLS.items() for call in calls]


@pytest.mark.parametrize(("name", "call"), EACH, ids=[f"{name}-{i}" for i, (name, _) in enumerate(EACH)])
def test_a_call_that_cannot_be_is_refused_in_one_line(
    name: str, call: Callable[[Heads], object], heads: Heads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    """A name that stands for a whole message must be found as it is."""
    with pytest.raises(ValueError, match=f"{name}\\b") as refused:
        call(heads)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())
