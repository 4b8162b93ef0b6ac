"""`experiment=explain`: what it shows of a model that has learnt something is true of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mhaprune.heads import HeadId, HeadMask
from mhaprune.lab.experiments.base import figures_of
from mhaprune.lab.experiments.examples import (
    answers_without,
    attention_table,
    close_each,
    examples_table,
    show,
    turned_wrong,
)
from mhaprune.lab.experiments.explain.explain import Explain, closed_table
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.reporting.plots import Plot
from mhaprune.lab.reporting.sentences import share
from mhaprune.lab.runs.run import Run, build
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.lab.tasks.sequences import PAD, AnswerOutcome, Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import measure
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.statistics.intervals import prunable as claimed
from mhaprune.tables import HEAD, Tables
from mhaprune_literature.attention import Entropy
from support.composing import compose, run_of, tables_in
from support.figures import check_legible
from support.sizes import LEARNT, chosen

EXPLAIN = chosen("experiment", "explain")
SETTINGS = (*EXPLAIN, *LEARNT)


@pytest.fixture(scope="module")
def run(cache: Path) -> Run:
    return run_of("explain", cache)


@pytest.fixture(scope="module")
def tables(ran: Callable[[str], Path]) -> dict[str, pd.DataFrame]:
    return tables_in(ran("explain"))


@pytest.fixture(scope="module")
def plots(tables: Tables) -> dict[str, Plot]:
    return {plot.name: plot for plot in figures_of(Explain, tables)}


def test_everything_is_there_and_can_be_read(tables: Tables, plots: dict[str, Plot]) -> None:
    for plot in plots.values():
        check_legible(plot)
    assert len(tables["looks"]) == 6
    lines = list(Explain.say(tables))
    best = tables["looks"].sort_values("score").iloc[-1]
    name = f"{best['site']}.{best['layer']}.{best['head']}"
    for words in (name, f"{best['score']:.3f} nats", share(best["quality"]), share(best["open_quality"])):
        assert words in " ".join(lines[:2]), "of the score split, as on the map"
    assert best["quality"] < best["open_quality"]
    first, count = Explain.headline(tables)[0].beside, tables["looks"]["scored_examples"].iloc[0]
    assert "less than 0.01 nats" in first
    assert f", {count} examples" in first
    assert f", {count} examples)" in lines[0]


def test_the_heads_said_to_be_prunable_are_removed_for_its_proof(
    run: Run, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing all heads, which is proved too, proves little: masked and removed then compute the very same."""
    proved: list[HeadMask] = []
    monkeypatch.setattr(EquivalenceCheck, "prove", lambda self, mask: proved.append(mask))
    study = run.study()
    tolerant = Explain(tolerance_nats=float(tables["looks"]["score"].median()))
    looks = tolerant(study).tables["looks"]
    names = {tuple(name) for name in looks.loc[looks["prunable"], HEAD].to_numpy().tolist()}
    assert 0 < len(names) < len(looks)
    assert names in [{(str(head.site), head.layer, head.head) for head in mask.removed} for mask in proved]


def test_heads_are_scored_and_watched_on_the_score_split_and_broken_on_the_report_split(
    run: Run, tables: Tables
) -> None:
    study = run.study()
    model, splits, task = study.subject, study.splits, study.task
    scores = tables["heads"].set_index("scorer")["score"]
    for name, scorer in study.scorers.items():
        np.testing.assert_allclose(scores[name], scorer(model, splits.score, study.seed).values[0].detach(), atol=1e-5)
    entropy = -Entropy()(model, splits.score, 0).values[0]
    np.testing.assert_allclose(tables["looks"]["entropy"], entropy, atol=1e-5)
    report = set(map(task.show, splits.report.source.tolist(), splits.report.target.tolist()))
    assert len(tables["wrong"])
    assert set(tables["wrong"]["example"]) <= report | {"3 1 2 -> 1 2 3"}, "and what was asked"
    prunable = tables["looks"]["prunable"]
    ablation = study.scorers["ablation"](model, splits.score, 0)
    assert ablation.stderr is not None
    assert ablation.skewness is not None
    known = torch.cat([ablation.values, ablation.stderr, ablation.skewness]).numpy()
    assert list(prunable) == claimed(known, 0.01).tolist()
    left = HeadMask(model.grid, frozenset(head for head, gone in zip(model.grid, prunable, strict=True) if gone))
    together = model.without(left).evaluate(splits.report).quality.mean().item()
    assert tables["looks"]["without_prunable"].unique() == pytest.approx(together)


def test_an_answer_that_begins_with_padding_or_never_ends(run: Run) -> None:
    study = run.study()
    for token, count in ((0, 64), (3, 64), (2, 1)):
        with torch.no_grad():
            study.subject.output.bias.zero_()[token] = 1e4
        shown = show(study.subject, study.task, ["3", "1"], None)
        assert shown.batch.target.shape == (1, count)
        assert len(attention_table(study.subject, study.task, [shown]))
        table = examples_table([shown], study.splits.train)
        assert table["ended"].item() == (token == 2)


def test_attention_is_that_of_the_model_on_its_own_answer(run: Run, tables: Tables) -> None:
    study = run.study()
    model, vocabulary = study.subject, study.task.vocabulary
    source = torch.tensor([vocabulary.encode("312")])
    answer = model.decode_greedily(source, 20, stop=True)
    answer = answer[:, answer[0] != 0]
    weights = {block: each.weights for block, each in model.attention_maps(Examples(source, answer)).items()}
    attention = tables["attention"].set_index(["site", "layer", "head"]).sort_index(kind="stable")
    for head in model.grid:
        mine = attention.loc[(head.site, head.layer, head.head)]
        table = mine.pivot(index="query", columns="key", values="weight").to_numpy()
        np.testing.assert_allclose(table, weights[head.block][0, head.head].detach(), atol=1e-5)
        np.testing.assert_allclose(table.sum(axis=1), 1, atol=1e-5)
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
        assert outcome.quality.mean().item() == pytest.approx(row.quality)


def explained(tmp_path: Path, *overrides: str) -> Tables:
    """The tables of a run as they are read back from its files."""
    with RunFolder(tmp_path / "run").recorded() as folder:
        build(compose(*EXPLAIN, *overrides))(folder)
    return tables_in(tmp_path / "run")


@pytest.mark.slow
def test_removed_heads_are_grey_and_say_so(run: Run, cache: Path, tmp_path: Path) -> None:
    study = run.study()
    gone = map(HeadId.parse, ("encoder_self.0.1", "decoder_self.0.0", "decoder_self.0.1"))
    path = tmp_path / "model.pt"
    path.write_bytes(
        study.saved("model", study.subject.without(HeadMask(study.subject.grid, frozenset(gone))))["model.pt"]
    )
    tables = explained(tmp_path, f"model_file={path}", f"cache={cache}", "scorer=[ablation]", "example=2 1")
    looks = tables["looks"].set_index(["site", "head"])
    assert looks["removed"].sum() == 3
    assert pd.isna(looks.loc[("decoder_self", 0), "score"])
    plots = {plot.name: plot for plot in figures_of(Explain, tables)}
    assert "attention-0-decoder_self" not in plots, "nobody is left to look"
    first, second = plots["attention-0-encoder_self"].figure.axes[:2]
    assert (len(first.images), len(second.images)) == (1, 0)
    assert [text.get_text() for text in second.texts] == ["removed"]
    assert (
        "Removed already: encoder self-attention 0.1, decoder self-attention 0.0, decoder self-attention 0.1."
        in plots["matter"].alt
    )
    for plot in plots.values():
        check_legible(plot)


@pytest.mark.slow
def test_what_long_examples_look_like(cache: Path, tmp_path: Path) -> None:
    """Forty symbols, longer than any that was trained: every so many tokens have a name, and all names can be read."""
    settings = [f"cache={cache}", f"example={'012345' * 6}0123"]
    tables = explained(tmp_path, *LEARNT, *settings)
    plot = next(plot for plot in figures_of(Explain, tables) if plot.name == "attention-0-encoder_self")
    check_legible(plot)
    axes = plot.figure.axes[0]
    assert 8 < len([label for label in axes.get_xticklabels() if label.get_text()]) < 41
    assert axes.images[0].get_array().shape == (41, 41)  # type: ignore[union-attr]


def test_an_example_that_the_split_does_not_have(run: Run, cache: Path) -> None:
    with pytest.raises(ValueError, match="experiment.examples=60: the report split has examples 0 to 59"):
        build(compose("experiment=explain", *LEARNT, f"cache={cache}", "experiment.examples=[60]"))
    with pytest.raises(ValueError, match=r"experiment.examples=\[1\]: an example of your own is shown already"):
        replace(run, example="3 1 2", experiment=Explain(examples=(1,)))


def test_examples_of_the_split_are_shown_with_what_is_right(run: Run) -> None:
    chosen = replace(run, example=None, experiment=Explain(examples=(4, 0)))
    study = chosen.study()
    examples = chosen.experiment(study).tables["examples"]
    for row, number in zip(examples.itertuples(), (4, 0), strict=True):
        source, target = (getattr(study.splits.report, part)[number].tolist() for part in ("source", "target"))
        assert study.task.show(source, target) == f"{row.source} -> {row.right_answer}"
        assert row.correct == (row.answer == row.right_answer)


@pytest.mark.slow
def test_an_example_that_the_task_does_not_know_has_no_right_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    study = run.study()
    monkeypatch.setattr(Sort, "answer", lambda self, source: None)
    tables = Explain()(study).tables
    assert pd.isna(tables["examples"]["right_answer"].item())
    assert "wrong" not in next(plot for plot in figures_of(Explain, tables) if plot.name == "attention-0-cross").caption


def own_answers(model: Seq2Seq, batch: Examples) -> Examples:
    """The examples with the model's answers for targets, so that an untrained model is right."""
    with torch.no_grad():
        model.output.bias[PAD] = -1e4
    return Examples(batch.source, model.decode_greedily(batch.source, batch.target.shape[1]))


def test_every_row_is_the_model_without_that_head(model: Seq2Seq, batch: Examples) -> None:
    closed = close_each(model, batch)
    for n, head in enumerate([None, *model.grid]):
        mask = HeadMask(model.grid) if head is None else HeadMask(model.grid).without(head)
        torch.testing.assert_close(closed.loss[n], measure(model.without(mask), batch).loss)


def test_the_table_counts_what_turns() -> None:
    exact = torch.tensor([[1.0, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]])
    loss = torch.tensor([[0.0, 0, 0, 1], [2, 2, 0, 2], [0, 0, 0, 0]])
    heads = [HeadId(Site.CROSS, 0, n) for n in (0, 3)]
    table = closed_table(heads, AnswerOutcome(loss, exact, exact)).set_index("head")
    assert table["turned_wrong"].to_dict() == {0: 2, 3: 0}
    assert table["turned_right"].to_dict() == {0: 0, 3: 1}
    assert table["quality"].to_dict() == {0: 0.25, 3: 1.0}
    assert table["loss_rise"].to_dict() == {0: 1.25, 3: -0.25}
    assert (table["open_quality"] == 0.75).all()


def test_examples_that_turn_wrong_are_shown_with_what_is_said_then(model: Seq2Seq, task: Sort, batch: Examples) -> None:
    right = own_answers(model, batch)
    closed = close_each(model, right)
    assert (closed.quality[0] == 1).all()
    table = turned_wrong(model, task, [], answers_without(model, task, []), right, closed, shown=2)
    assert len(table), "closing a head of this model changes an answer"
    for (site, layer, number), rows in table.groupby(["site", "layer", "head"]):
        head = next(h for h in model.grid if (h.site, h.layer, h.head) == (site, layer, number))
        assert len(rows) <= 2
        smaller = model.without(HeadMask(model.grid).without(head))
        said = smaller.decode_greedily(right.source, right.target.shape[1])
        pairs = zip(right.source.tolist(), right.target.tolist(), said.tolist(), strict=True)
        shown = {
            task.show(source, target): task.show(source, answer).split(" -> ")[1] for source, target, answer in pairs
        }
        for row in rows.itertuples():
            assert shown[row.example] == row.said_without_it != row.example.split(" -> ")[1]


def test_what_was_asked_comes_first_where_the_model_knew_it(model: Seq2Seq, task: Sort, batch: Examples) -> None:
    right = own_answers(model, batch)
    closed, symbols = close_each(model, right), [task.vocabulary.decode(ids) for ids in right.source[:2].tolist()]
    asked = show(model, task, symbols[0], task.vocabulary.decode(right.target[0].tolist()))
    unknown, missed = show(model, task, symbols[1], None), asked._replace(right="9 9 9")
    some = [missed, unknown, asked]
    table = turned_wrong(model, task, some, answers_without(model, task, some), right, closed, shown=0)
    without = {head: model.without(HeadMask(model.grid).without(head)) for head in model.grid}
    answers = {head: show(smaller, task, symbols[0], None).answer for head, smaller in without.items()}
    turned = {head: answer for head, answer in answers.items() if answer != asked.answer}
    assert turned, "closing a head of this model changes this answer"
    found = zip(table["site"], table["layer"], table["head"], table["said_without_it"], strict=True)
    assert {HeadId(Site(site), layer, head): said for site, layer, head, said in found} == turned
    assert set(table["example"]) == {f"{asked.source} -> {asked.right}"}
