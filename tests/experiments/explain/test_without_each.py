"""What breaks without a head is what the model without it gets wrong."""

from __future__ import annotations

import torch

from mhaprune.data import PAD, Examples
from mhaprune.experiments.examples import show, turned_wrong
from mhaprune.experiments.explain.study import close_each, closed_table
from mhaprune.heads import HeadId, HeadMask, Site
from mhaprune.measure.outcomes import measure
from mhaprune.model.transformer import Seq2Seq
from mhaprune.subject import AnswerOutcome
from mhaprune.tasks.sort import Sort


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
    table = turned_wrong(model, task, [], right, closed, shown=2)
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
    table = turned_wrong(model, task, [missed, unknown, asked], right, closed, shown=0)
    without = {head: model.without(HeadMask(model.grid).without(head)) for head in model.grid}
    answers = {head: show(smaller, task, symbols[0], None).answer for head, smaller in without.items()}
    turned = {head: answer for head, answer in answers.items() if answer != asked.answer}
    assert turned, "closing a head of this model changes this answer"
    found = zip(table["site"], table["layer"], table["head"], table["said_without_it"], strict=True)
    assert {HeadId(Site(site), layer, head): said for site, layer, head, said in found} == turned
    assert set(table["example"]) == {f"{asked.source} -> {asked.right}"}
