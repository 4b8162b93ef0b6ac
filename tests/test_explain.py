"""`experiment=explain`: what it shows of a model that has learnt something is true of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from conftest import LEARNT, TINY, TINY_EXPLAIN, compose, run_script
from legible import check_legible
from mhaprune.attention import MultiHeadAttention
from mhaprune.config import ConfigError, build
from mhaprune.data import shift_right
from mhaprune.experiments.explain import Explain
from mhaprune.figures import draw
from mhaprune.heads import Block, HeadMask, Site
from mhaprune.plots import Plot, Tables
from mhaprune.report import answers
from mhaprune.run import Run
from mhaprune.store import RunFolder

SETTINGS = ("experiment=explain", *LEARNT, *TINY_EXPLAIN)


@pytest.fixture(scope="module")
def run(cache: Path) -> Run:
    return build(compose(*SETTINGS, f"cache={cache}", "example=3 1 2", "experiment.shown=2"))


@pytest.fixture(scope="module")
def tables(run: Run) -> dict[str, pd.DataFrame]:
    torch.set_num_threads(1)
    return run.experiment(run.study()).tables


@pytest.fixture(scope="module")
def plots(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw(tables)}


def test_everything_is_there_and_can_be_read(tables: Tables, plots: dict[str, Plot]) -> None:
    assert list(plots) == [
        *("matter", "patterns", "attention-0-encoder_self", "attention-0-decoder_self", "attention-0-cross"),
        *("agreement", "gates", "training", "tensors", "scaling"),
    ]
    for plot in plots.values():
        check_legible(plot)
    assert len(tables["looks"]) == 6
    lines = answers(tables)
    assert " matters most of 6 heads: without it exact match falls from" in lines[0]
    assert any(line.startswith("Asked 3 1 2 the model says ") for line in lines)


def test_attention_is_that_of_the_model_on_its_own_answer(run: Run, tables: Tables) -> None:
    study = run.study()
    model, vocabulary = study.subject, study.task.vocabulary
    source = torch.tensor([vocabulary.encode("312")])
    answer = model.decode_greedily(source, 20, stop=True)
    answer = answer[:, answer[0] != 0]
    weights: dict[Block, Any] = {}
    call = model.call()
    call.weights = weights
    model.run(source, shift_right(answer), call)
    attention = tables["attention"].set_index(["site", "layer", "head"])
    for head in model.grid:
        mine = attention.loc[(head.site, head.layer, head.head)]
        table = mine.pivot(index="query", columns="key", values="weight").to_numpy()
        np.testing.assert_allclose(table, weights[head.block][0, head.head].detach(), atol=1e-6)
        np.testing.assert_allclose(table.sum(axis=1), 1, atol=1e-6)
        keys = list(mine[mine["query"] == 0]["looks_at"])
        said = ["<bos>", *tables["examples"]["answer"].item().split()]
        assert keys == (said if head.site == Site.DECODER_SELF else ["3", "1", "2", "<eos>"])
    writes = attention.loc[("cross", 0, 0)].drop_duplicates("query")["writes"]
    assert " ".join(writes).removesuffix(" <eos>") == tables["examples"]["answer"].item()


def test_the_head_that_is_closed_is_the_head_that_is_named(run: Run, tables: Tables) -> None:
    study = run.study()
    for row in tables["looks"].itertuples():
        head = next(h for h in study.subject.grid if (h.site, h.layer, h.head) == (row.site, row.layer, row.head))
        left = study.subject.without(HeadMask(study.subject.grid).without(head))
        outcome = left.evaluate(study.splits.report)
        assert outcome.sequence_accuracy.mean().item() == pytest.approx(row.sequence_accuracy)


def test_attention_weights_are_made_for_nothing_but_where_they_are_looked_at(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    plain = MultiHeadAttention.attend

    def counted(self: MultiHeadAttention, *arguments: Any, **named: Any) -> Any:
        made.append(named.get("need_weights", False))
        return plain(self, *arguments, **named)

    monkeypatch.setattr(MultiHeadAttention, "attend", counted)
    monkeypatch.setattr("mhaprune.run.draw", lambda tables: [])
    scorers = sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "scorer").glob("*.yaml"))
    few = [f"scorer.{name}.steps=2" for name in ("subset", "hard_concrete")]
    study = build(
        compose(
            *TINY,
            "task.train=200",
            "task.max_length=6",
            f"scorer=[{','.join(scorers)}]",
            *few,
            f"cache={cache / 'other'}",
        )
    ).study()
    assert made, "a model was trained"
    assert not any(made), "in training"
    for name, scorer in study.scorers.items():
        made.clear()
        scorer(study.subject, study.splits.score, 0)
        assert any(made) == (name in ("confidence", "entropy")), name
    made.clear()
    study.subject.predict(study.splits.report)
    study.subject.evaluate_masks(study.splits.report, torch.ones(2, len(study.subject.grid)))
    assert made
    assert not any(made)


def explained(tmp_path: Path, *overrides: str) -> Tables:
    """The tables of a run as they are read back from its files."""
    with RunFolder(tmp_path / "run").recorded() as folder:
        build(compose("experiment=explain", *TINY_EXPLAIN, *overrides))(folder)
    return {path.stem: pd.read_csv(path) for path in (tmp_path / "run").glob("*.csv")}


def test_removed_heads_are_grey_and_say_so(run: Run, cache: Path, tmp_path: Path) -> None:
    study = run.study()
    gone = [
        head for head in study.subject.grid if str(head) in ("encoder_self.0.1", "decoder_self.0.0", "decoder_self.0.1")
    ]
    path = tmp_path / "model.pt"
    path.write_bytes(study.save(study.subject.without(HeadMask(study.subject.grid, frozenset(gone)))))
    tables = explained(tmp_path, f"model_file={path}", f"cache={cache}", "scorer=[ablation]", "example=2 1")
    looks = tables["looks"].set_index(["site", "head"])
    assert looks["removed"].sum() == 3
    assert pd.isna(looks.loc[("decoder_self", 0), "score"])
    plots = {plot.name: plot for plot in draw(tables)}
    assert "attention-0-decoder_self" not in plots, "nobody is left to look"
    first, second = plots["attention-0-encoder_self"].figure.axes[:2]
    assert len(first.images) == 1
    assert not second.images
    assert [text.get_text() for text in second.texts] == ["removed"]
    words = [text.get_text() for text in plots["matter"].figure.axes[0].texts]
    assert words.count("removed") == 3
    assert "of 3 heads matter" in plots["matter"].caption
    for plot in plots.values():
        check_legible(plot)


def test_one_layer_or_head_can_be_asked_for(run: Run) -> None:
    named = Explain(heads=("encoder_self.0", "cross.0.1"), start_steps=1, starts=0)
    tables = replace(run, experiment=named).experiment(run.study()).tables
    asked = {"encoder_self.0.0", "encoder_self.0.1", "cross.0.1"}
    for name in ("attention", "wrong"):
        rows = tables[name][["site", "layer", "head"]].astype(str).agg(".".join, axis=1)
        assert set(rows) <= asked
    assert len(tables["looks"]) == 6
    assert "starts" not in tables
    plots = {plot.name: plot for plot in draw(tables)}
    left = plots["attention-0-cross"].figure.axes[0]
    assert [text.get_text() for text in left.texts] == ["not asked for"]
    assert "attention-0-decoder_self" not in plots


def test_what_long_examples_look_like(cache: Path, tmp_path: Path) -> None:
    """Forty symbols, longer than any that was trained: every so many tokens have a name, and all names can be read."""
    settings = [f"cache={cache}", f"example={'012345' * 6}0123", "experiment.heads=[encoder_self.0]"]
    tables = explained(tmp_path, *LEARNT, *settings)
    plot = next(plot for plot in draw(tables) if plot.name == "attention-0-encoder_self")
    check_legible(plot)
    axes = plot.figure.axes[0]
    assert 8 < len([label for label in axes.get_xticklabels() if label.get_text()]) < 41
    assert axes.images[0].get_array().shape == (41, 41)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["example=3 9 x 9"], "example='3 9 x 9': 9, x are not in the vocabulary, allowed are 0 1 2 3 4 5"),
        (["example=9"], "example='9': 9 is not in the vocabulary, allowed are 0 1 2 3 4 5"),
        (["example=''"], "example='': is empty, allowed are 0 1 2 3 4 5"),
        (
            [f"example={'1' * 70}a".removesuffix("a").replace("1", "1 ")],
            "has 70 symbols, model.max_length=64 allows 63 and the end of sequence",
        ),
        (
            ["task=inflection", "example=walk"],
            "example='walk': must be a lemma and one of noun0, verb0, verb1, verb2, verb3, adj0, adj1, for example",
        ),
        (["task=inflection", "example=Walk verb3"], "example='Walk verb3': W is not in the vocabulary"),
        (
            ["experiment.heads=[cross.7]"],
            "experiment.heads=cross.7: no such layer, the model has encoder_self.0, decoder_self.0, cross.0",
        ),
        (
            ["experiment.heads=[cross.0.5]"],
            "experiment.heads=cross.0.5: no such head, layer cross.0 has heads 0, 1",
        ),
        (["scorer=[]"], "scorer=[]: must name at least one scorer, for example scorer=[ablation]"),
        (["experiment.examples=[]"], "experiment.examples=[]: must be one or more numbers of examples, from 0 on"),
        (["experiment.start_steps=0"], "experiment.start_steps=0: must be 1 or more"),
        (["experiment.head_dims=[0]"], "experiment.head_dims=[0]: must be one or more sizes, each 1 or more"),
        (
            ["experiment=ablate", "example=3 1"],
            "example='3 1': experiment=ablate looks at no example, experiment=explain does",
        ),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_allowed(overrides: list[str], message: str) -> None:
    settings = LEARNT if "task=inflection" not in overrides else TINY
    with pytest.raises(ConfigError) as error:
        build(compose("experiment=explain", *settings, *overrides))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_example_that_the_split_does_not_have(cache: Path) -> None:
    run = build(compose("experiment=explain", *LEARNT, f"cache={cache}", "experiment.examples=[60]"))
    with pytest.raises(ValueError, match=r"experiment.examples=\[60\]: the report split has examples 0 to 59"):
        run.experiment(run.study())


def test_examples_of_the_split_are_shown_with_what_is_right(run: Run) -> None:
    chosen = replace(run, example=None, experiment=Explain(examples=(4, 0), starts=0, heads=("cross.0.1",)))
    study = chosen.study()
    examples = chosen.experiment(study).tables["examples"]
    for row, number in zip(examples.itertuples(), (4, 0), strict=True):
        source, target = (getattr(study.splits.report, part)[number].tolist() for part in ("source", "target"))
        assert study.task.show(source, target) == f"{row.source} -> {row.right_answer}"
        assert row.correct == (row.answer == row.right_answer)


def test_a_word_that_the_table_does_not_know_has_no_right_answer(tmp_path: Path, cache: Path) -> None:
    settings = [f"cache={cache}", "example=mhaprune verb3", "experiment.starts=0"]
    tables = explained(tmp_path, *TINY, "task=inflection", *settings)
    assert pd.isna(tables["examples"]["right_answer"].item())
    assert "which the task has no answer for" in " ".join(answers(tables))


def test_with_retrain_the_model_is_trained_from_other_gates(run: Run) -> None:
    again = replace(run, experiment=Explain(starts=1, start_steps=2, retrain=True, heads=("cross.0.1",)))
    tables = again.experiment(again.study()).tables
    names = list(tables["gates"]["gates"])
    assert names == ["trained", "weights held still, start 0", "retrained, init=rand"]
    start = tables["retraining"].filter(like="gate_cross").iloc[0]
    assert start.nunique() == 2, "random numbers, not all the same"
    assert any("With the whole model retrained, init=rand" in line for line in answers(tables))


def test_the_command_of_the_readme(tmp_path: Path) -> None:
    settings = [*SETTINGS[1:], f"cache={tmp_path / 'cache'}", f"hydra.run.dir={tmp_path / 'run'}"]
    done = run_script("run.py", "experiment=explain", "task=reverse", "example=3 1 4 1 5", *settings)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "run" / "report.html").read_text()
    assert "One wide projection is an independent one for every head" in page
    assert "Asked 3 1 4 1 5 the model says" in page
    assert 'alt="' in page
