"""Models as files: what is read back is what was saved, in another process too, and anything else is refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import mhaprune
from mhaprune.attention.gates import Softmax
from mhaprune.heads import HeadId, HeadMask
from mhaprune.inputs import Study
from mhaprune.lab.cli.command_line import main
from mhaprune.lab.model.checkpoint import load, restore, to_bytes
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.measure.outcomes import measure
from mhaprune.settings.options import ConfigError
from mhaprune.storage.seals import sealed
from support.commands import run_here, run_script
from support.composing import compose, tables_in
from support.sizes import LEARNT, chosen, slow, small

GONE = ("encoder_self.0.0", "decoder_self.0.1", "cross.0.0")


@pytest.fixture(scope="module")
def study(cache: Path) -> Study:
    torch.set_num_threads(1)
    return build(compose("experiment=train", *LEARNT, f"cache={cache}")).study()


@pytest.fixture(scope="module")
def pruned(study: Study) -> Seq2Seq:
    return study.subject.without(HeadMask(study.subject.grid, frozenset(map(HeadId.parse, GONE))))


@pytest.fixture(scope="module")
def file(study: Study, pruned: Seq2Seq, cache: Path) -> Path:
    path = cache.parent / "pruned.pt"
    path.write_bytes(study.saved("model", pruned)["model.pt"])
    return path


def run(folder: Path, *overrides: str) -> dict[str, pd.DataFrame]:
    with RunFolder(folder).recorded() as recorded:
        build(compose(*overrides))(recorded)
    return tables_in(folder)


def evaluate(file: Path, folder: Path) -> list[str]:
    """The arguments that evaluate a saved model."""
    output = [f"cache={folder / 'cache'}", f"hydra.run.dir={folder / 'run'}"]
    return ["experiment=evaluate", f"model_file={file}", *output]


def test_neurons_need_no_other_training_and_are_saved_by_name(study: Study, cache: Path, tmp_path: Path) -> None:
    trained = sorted(cache.glob("trained*"))
    settings = ["experiment=train", *LEARNT, f"cache={cache}"]
    both = build(compose(*settings, "model.units=[head,neuron]")).study()
    assert trained
    assert sorted(cache.glob("trained*")) == trained
    assert torch.equal(both.subject.outputs(study.splits.report), study.subject.outputs(study.splits.report))
    small = both.subject.without(HeadMask(both.subject.grid).without("cross.0.0", "encoder_neuron.0.3"))
    (tmp_path / "small.pt").write_bytes(both.saved("model", small)["model.pt"])
    read = build(compose("experiment=evaluate", f"model_file={tmp_path / 'small.pt'}", f"cache={cache}")).study()
    assert read.subject.grid == small.grid
    assert torch.equal(read.subject.outputs(study.splits.report), small.outputs(study.splits.report))
    assert both.words == read.words == {"units": "units"}


@pytest.mark.parametrize(
    "call", [partial(run_here, main), *slow(partial(run_script, "run.py"))], ids=["here", "process"]
)
def test_a_file_is_evaluated_as_the_model_it_is(
    call: Any, study: Study, pruned: Seq2Seq, file: Path, tmp_path: Path
) -> None:
    done = call(*evaluate(file, tmp_path))
    assert done.returncode == 0, done.stderr
    accuracy = pd.read_csv(tmp_path / "run" / "accuracy.csv").iloc[0]
    outcome = measure(pruned, study.splits.report)
    assert accuracy["loss"] == pytest.approx(float(outcome.loss.double().mean()), rel=1e-5)
    assert accuracy["quality"] == pytest.approx(float(outcome.quality.double().mean()))
    assert accuracy["heads"].split() == [str(head) for head in pruned.grid]
    assert accuracy["parameters"] == pruned.count_parameters()
    groups = pd.read_csv(tmp_path / "run" / "groups.csv")
    assert groups["examples"].sum() == len(study.splits.report)


def test_a_pruned_model_is_pruned_again_and_heads_keep_their_names(
    study: Study, pruned: Seq2Seq, file: Path, tmp_path: Path
) -> None:
    overrides = [f"model_file={file}", f"cache={tmp_path / 'cache'}", "scorer=[ablation]", "experiment.budgets=[1,2]"]
    table = run(tmp_path / "run", *chosen("experiment", "ablate"), *overrides)["pruning"]
    assert list(table["heads_total"]) == [3, 3, 3]
    removed = table.loc[table["heads_removed"] == 2, "removed"].item().split()
    assert not set(removed) & set(GONE)
    whole = study.subject.without(HeadMask(study.subject.grid, frozenset(map(HeadId.parse, (*GONE, *removed)))))
    again = pruned.without(HeadMask(pruned.grid, frozenset(map(HeadId.parse, removed))))
    batch = study.splits.report
    torch.testing.assert_close(again.call(batch), whole.call(batch), atol=1e-5, rtol=1e-5)
    exact = measure(whole, batch).quality.double().mean()
    assert table.loc[table["heads_removed"] == 2, "quality"].item() == pytest.approx(float(exact))


def test_a_model_without_any_head_is_a_model(study: Study, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.pt"
    grid = study.subject.grid
    path.write_bytes(study.saved("model", study.subject.without(HeadMask(grid, frozenset(grid))))["model.pt"])
    overrides = [f"model_file={path}", f"cache={cache}"]
    assert list(run(tmp_path / "run", "experiment=evaluate", *overrides)["accuracy"]["heads_total"]) == [0]
    greedy = ["schedule=greedy", "scorer=[]", "recovery=[]", *small("experiment", "prune"), "experiment.budgets=[0]"]
    assert list(run(tmp_path / "prune", "experiment=prune", *overrides, *greedy)["recovery"]["heads_total"]) == [0]
    with pytest.raises(ConfigError, match="model_file=.*none.pt: has no heads left to score, allowed is scorer="):
        build(compose("experiment=ablate", *overrides, "scorer=[ablation]"))


def test_what_is_read_is_what_was_saved(study: Study, pruned: Seq2Seq, file: Path) -> None:
    saved, batch = load(str(file)), study.splits.report
    assert saved.heads == pruned.grid.heads
    assert saved.settings["gate"] is None
    assert saved.facts["task"] == "sort"
    assert len(saved.history) == len(study.history)
    again = build(compose("experiment=evaluate", f"model_file={file}"))
    assert (again.task, again.training) == (study.task, study.training)
    assert again.study().trained_with == saved.facts["trained_with"] == study.trained_with
    built = pruned.config, len(study.task.vocabulary)
    restored = restore(saved, *built)
    assert not restored.training
    assert torch.equal(restored.call(batch), pruned.call(batch))
    for config, gate in ((replace(pruned.config, dim_feedforward=8), None), (pruned.config, Softmax())):
        with pytest.raises(ValueError, match=f"model_file={file}: damaged, its weights do not fit"):
            restore(saved, config, built[1], gate)
    with pytest.raises(ValueError, match=f"model_file={file}: damaged, its weights are not those that were saved"):
        restore(replace(saved, digest="0"), *built)


def test_two_files_of_one_name_are_two_runs(study: Study, file: Path, tmp_path: Path) -> None:
    """A run's fingerprint is that of the weights, wherever they lie."""
    copy, other = tmp_path / "copy.pt", tmp_path / "other.pt"
    copy.write_bytes(file.read_bytes())
    other.write_bytes(study.saved("model", study.subject.without(HeadMask(study.subject.grid)))["model.pt"])
    runs = [build(compose("experiment=evaluate", f"model_file={path}")).identity["run"] for path in (file, copy, other)]
    assert runs[0] == runs[1] != runs[2]


def broken(content: dict[str, Any], **changes: Any) -> bytes:
    return sealed(content | changes)


def test_anything_else_is_refused_in_one_line(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    whole = file.read_bytes()
    content = torch.load(file, weights_only=True)
    weights = content["weights"] | {"output.bias": torch.zeros(3)}
    shifted = content["weights"] | {"output.bias": content["weights"]["output.bias"] + 1}
    larger = content["settings"]["model"] | {"dim_feedforward": 2**31}
    for data, message in (
        (whole[: len(whole) // 2], "damaged or no saved model at all, no checksum at its end, so truncated"),
        (b"", "damaged or no saved model at all, no checksum at its end"),
        (broken({}), "holds something else, must be a model that mhaprune saved"),
        (broken({"content": 1, "key": {}}), "holds something else, must be a model that mhaprune saved"),
        (broken(content, version=1), "saved in version 1 of the format, this mhaprune reads 4"),
        (broken(content, weights=weights), "damaged, its weights do not fit"),
        (broken(content, weights=shifted), "damaged, its weights are not those that were saved"),
        (broken(content, heads=["elsewhere.0.0"]), "damaged, head='elsewhere.0.0': has an unknown site"),
        (broken(content, settings=None), "damaged, settings is a NoneType"),
        (broken(content, heads=[5]), "damaged, head='5': must read SITE.LAYER.HEAD"),
        (broken(content, settings=content["settings"] | {"task": 3}), "damaged, task=3: must be settings"),
        (broken(content, settings=content["settings"] | {"model": larger}), "damaged, its weights do not fit"),
        (broken(content, settings=content["settings"] | {"cache": "x"}), "its settings are task, .* cache, must"),
        (broken({name: content[name] for name in ("format", "version", "heads")}), "damaged, settings is missing"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message) as raised:
            mhaprune.load(path)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)
        with pytest.raises(ValueError, match=f"{message}|the memory of this machine"):
            build(compose("experiment=evaluate", f"model_file={path}")).study()
    with pytest.raises(ValueError, match="nowhere.pt: cannot be read .No such file"):
        build(compose("experiment=evaluate", "model_file=nowhere.pt"))
    with pytest.raises(ConfigError, match="model_file=3: must be a text or null"):
        build(compose("experiment=evaluate", "model_file=3"))


def test_weights_that_are_not_finite_are_named(pruned: Seq2Seq, file: Path, tmp_path: Path) -> None:
    broken, path, saved = pruned.copied(), tmp_path / "model.pt", load(str(file))
    with torch.no_grad():
        next(iter(broken.attention_sublayers().values())).attention.q_proj.weight[0, 0] = float("nan")
    path.write_bytes(to_bytes(broken, saved.settings, saved.history, saved.facts))
    with pytest.raises(ValueError, match=r"model.pt: damaged, its weight encoder.0.*q_proj.weight is nan in 1 of"):
        mhaprune.load(path)


def test_what_the_file_brings_cannot_be_overridden(file: Path, tmp_path: Path) -> None:
    output = f"hydra.run.dir={tmp_path / 'run'}"
    done = run_here(main, "experiment=evaluate", f"model_file={file}", "++training.steps=3", output)
    assert done.returncode == 1
    expected = "error: ++training.steps=3: model_file brings its own task, model, gate, training, leave this out"
    assert done.stderr.strip().splitlines()[-1] == expected
