"""`mhaprune.wrap` as a user meets it."""

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhaprune import losses, progress
from mhaprune.api.timing import generating
from mhaprune.api.wrap import Heads, wrap
from mhaprune.heads import HeadMask
from mhaprune.lab.reporting.sentences import Aside
from mhaprune.measure.outcomes import measure
from mhaprune.pruning.plans import Search
from mhaprune.recoveries.refitting import refit, show
from mhaprune.schedules.greedy_refit import GreedyRefit
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.settings.options import option
from mhaprune.subjects import gated_model
from mhaprune.subjects.batches import Batches
from mhaprune_literature.attention import Confidence
from support.classifier import Classifier, batches, classifier


@pytest.fixture(scope="module")
def heads() -> Heads:
    return wrap(classifier(), losses.classification, score=batches(3), choose=batches(3, 1), report=batches(3, 2))


def test_scores_are_a_tidy_table_with_intervals_and_costs(heads: Heads) -> None:
    names = ("ablation", "gate_output", "refit_error", "random")
    table = heads.score(*names)
    assert table[table["draw"] == 0].groupby("scorer").size().to_dict() == dict.fromkeys(names, 8)
    ablation = table[table["scorer"] == "ablation"]
    assert ((ablation["score_low"] <= ablation["score"]) & (ablation["score"] <= ablation["score_high"])).all()
    assert sorted(ablation["rank"]) == list(range(1, 9))
    assert (ablation["forward_passes"] == 9).all()
    assert (ablation["site"] == "attention").all()


@pytest.mark.parametrize("what", ["score", "mask"])
def test_what_takes_long_says_how_far_it_is(
    what: str, heads: Heads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.001)
    heads.__dict__.pop("scoring", None)
    getattr(heads, what)()
    assert "ablation" in capsys.readouterr().err


def test_a_refit_follows_the_whole_model_without_labels(heads: Heads) -> None:
    """And without what stands in the padding."""
    mask = heads.mask(keep=2, by="gate_output")
    plain, fitted = heads.without(mask), heads.without(mask, refit=True)
    split = [batch.arguments() for batch in heads.splits["score"].batches(6)]
    distances = [
        torch.cat([(one.model(**batch)["logits"] - heads.subject.model(**batch)["logits"]) for batch in split])
        for one in (plain, fitted)
    ]
    assert distances[1].square().mean() < 0.5 * distances[0].square().mean()
    others = []
    for batch in split:
        ids, real = batch["input_ids"], batch["attention_mask"] != 0
        others.append({**batch, "labels": batch["labels"].flip(0), "input_ids": ids.where(real, (ids + 3) % 11)})
    for name in ("labels", "input_ids"):
        assert not all(torch.equal(other[name], batch[name]) for other, batch in zip(others, split, strict=True))
    shown = show(heads.subject, Batches.of(others, "score"))
    for one, same in zip(refit(plain, shown).model.parameters(), fitted.model.parameters(), strict=True):
        torch.testing.assert_close(one, same)


def test_a_block_without_heads_gets_a_bias_is_scored_further_and_found_again(heads: Heads) -> None:
    mask = HeadMask(heads.grid, frozenset(head for head in heads.grid if head.block == heads.grid.blocks[0]))
    split, left, fitted = heads.splits["score"].first(6), heads.without(mask), heads.without(mask, refit=True)
    path = next(iter(heads.subject.blocks)).out
    assert fitted.model.get_submodule(path).weight.shape[1] == 0
    assert not torch.equal(*(one.model.get_submodule(path).bias for one in (heads.subject, fitted)))
    drifts = [(heads.subject.outputs(split) - one.outputs(split)).square().mean() for one in (left, fitted)]
    assert drifts[1] < 0.9 * drifts[0]
    for name in ("ablation_mean", "gate_output", "refit_error", "magnitude"):
        (scores_N,) = option(name, {"scorer": Scorer})(left, split, 0).values
        assert scores_N.shape == (len(left.grid),)
        assert scores_N.isfinite().all()
    again = wrap(left.model, losses.classification, score=batches(1))
    assert repr(again) == "4 heads in 2 blocks, all with an effect, all removable"


def test_measuring_gives_the_users_own_loss(heads: Heads) -> None:
    outcome = measure(heads.subject, heads.splits["report"])
    with torch.no_grad():
        logits = torch.cat([heads.subject.model.eval()(**batch)["logits"] for batch in batches(3, 2)])
    labels = torch.cat([batch["labels"] for batch in batches(3, 2)])
    expected = nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(outcome.loss, expected, atol=1e-5, rtol=1e-5)
    assert outcome.quality.tolist() == (logits.argmax(-1) == labels).float().tolist()


@pytest.mark.figures
def test_a_report_speaks_of_the_users_quality(heads: Heads, tmp_path: Path) -> None:
    found = heads.report(tmp_path / "report.html", by=["ablation", "random"], budgets=[0.25, 0.5], rounds=1)
    page = (tmp_path / "report.html").read_text()
    assert {"accuracy", "matter", "latency"} <= found.figures.keys()
    text = f"{found} {page}"
    assert ": accuracy is " in repr(found)
    assert "a forward pass is " in text or "None of 8 heads can be removed within 0.01 of the whole" in text
    assert "exact match" not in text.lower()
    assert "greedy decoding" not in text.lower()
    recovered = found.tables["recovered"]
    assert recovered["recovery"].unique().tolist() == ["refit"]
    assert (recovered["quality"].between(0, 1)).all()
    assert found.checks["max_difference_masked_removed"] < 1e-9


@pytest.mark.slow
def test_a_report_tells_of_the_model_that_was_pruned_last_as_long_as_it_is_held() -> None:
    splits: Any = {name: batches(2, seed) for seed, name in enumerate(("score", "choose", "report"))}
    heads = wrap(classifier(), losses.classification, **splits)
    once: Any = {"by": ["random"], "budgets": [0.25], "rounds": 1, "refit": False}
    assert "Your model" not in " ".join(heads.report(**once).sentences)
    mask = heads.mask(keep=5, by="random")
    quality = heads.evaluate(mask)["quality"].iloc[1]
    small: Any = heads.prune(mask=mask)
    sentences = heads.report(**once).sentences
    [at] = [at for at, each in enumerate(sentences) if each.startswith("Your model")]
    assert not any(isinstance(each, Aside) for each in sentences[:at])
    assert all(isinstance(each, Aside) for each in sentences[at + 1 : at + 2])
    share = f"{round(100 * quality, 1):g} %"
    assert sentences[at].startswith(f"Your model, pruned last, has lost 3 of 8 heads: accuracy is {share} (95 % interv")
    assert "A forward pass of 6 examples is then" in sentences[at]
    small.output = nn.Linear(1, 1)  # what the user does with it is no fault of the report
    assert "Your model" not in " ".join(heads.report(**once).sentences)
    pickle.dumps(heads.promised)
    small = heads.prune(within=1.0, by="random", refit=True)
    [said] = [each for each in heads.report(**once).sentences if each.startswith("Your model")]
    assert ", then refitted: accuracy is" in said, "of all that were tried, the one that was handed out"
    del small
    gc.collect()
    assert "Your model" not in " ".join(heads.report(**once).sentences)


@pytest.mark.slow
def test_a_report_measures_batches_of_another_kind_too() -> None:
    splits = {name: batches(2, seed) for seed, name in enumerate(("score", "choose", "report"))}
    odd = wrap(classifier(), losses.classification, **splits, shift={"odd": batches(4, 9)})
    table = odd.report(by=["ablation"], budgets=[0.25], rounds=2, tolerance=1.0).tables["shift"]
    assert table.groupby("examples_of", sort=False)["examples"].first().tolist() == [
        sum(len(batch["labels"]) for batch in some) for some in (splits["report"], batches(4, 9))
    ]
    assert table["recovery"].tolist() == ["nothing"] * 4 + ["refit"] * 2
    assert table["heads_removed"].tolist() == [0, 0, 2, 2, 2, 2]
    for taken in ("score", "report split"):
        with pytest.raises(ValueError, match=f"shift={taken}: is the name of a split, train, valid, score, choose, re"):
            wrap(classifier(), losses.classification, score=batches(1), shift={taken: batches(1)})
    for wrong in (batches(1), {1: batches(1)}):
        with pytest.raises(ValueError, match="^shift=<.*>: must be names with, each, anything or null$"):
            wrap(classifier(), losses.classification, score=batches(1), shift=wrong)  # type: ignore[arg-type]


def test_a_split_that_was_not_given_is_named(tmp_path: Path) -> None:
    few = wrap(Classifier(), losses.classification, score=batches(1))
    with pytest.raises(ValueError, match="choose: no batches were given"):
        few.report(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_heads_are_chosen_by_a_search_too(heads: Heads) -> None:
    masks = heads.masks(keep=[6, 5], by="greedy_refit")
    assert [len(mask.kept) for mask in masks] == [6, 5]
    costs = heads.score("ablation").set_index(["site", "layer", "head"])["score"]
    (first,) = heads.masks(keep=[7], by="greedy")[0].removed
    assert costs.idxmin() == (first.site, first.layer, first.head)
    search = Search(heads.scoring)
    assert search(GreedyRefit(), [2, 3]) == masks == heads.masks([6, 5], GreedyRefit())


def bad_loss(output: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output["logits"], batch["labels"])


def logits(output: Any, batch: Any) -> Tensor:
    return output["logits"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": bad_loss}, r"loss: returns \(\) for a batch of 6, must be one number per example, \(6,\)"),
        ({"loss": losses.Drift(logits), "quality": losses.Drift(lambda *given: logits(*given))}, "quality: looks at"),
        ({"model": nn.Linear(2, 2).to("meta")}, "model: its weight weight is on the meta device"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    given = {"model": Classifier(), "loss": losses.classification, "score": batches(1)} | change
    with pytest.raises(ValueError, match=message) as refused:
        wrap(given.pop("model"), given.pop("loss"), **given)
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_are_refused() -> None:
    small = torch.ao.quantization.quantize_dynamic(Classifier(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match=r"model: output is a Linear of torch\..*quantized.*, must have plain weights"):
        wrap(small, losses.classification, score=batches(1))


def test_gates_that_do_not_fit_are_refused(heads: Heads) -> None:
    with pytest.raises(ValueError, match=r"gates of shape \(3,\): must be \(8,\), or \(2, 8\) for a batch of 2"):
        heads.subject.evaluate(heads.splits["score"][:2], torch.ones(3))


@pytest.mark.parametrize(("name", "value"), [("attention.0.q_proj.weight", "nan"), ("output.bias", "inf")])
def test_a_weight_that_is_not_finite_is_named(name: str, value: str) -> None:
    model = Classifier()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = float(value)
    with pytest.raises(ValueError, match=f"model: its weight {name} is {value} in 1 of "):
        wrap(model, losses.classification, score=batches(1))


@pytest.mark.parametrize(("what", "value"), [("loss", float("nan")), ("quality", float("-inf"))])
def test_a_loss_and_a_quality_that_are_not_finite_are_named(what: str, value: float) -> None:
    """At once for the first examples, and when the heads are scored for any other."""

    def broken(output: Any, batch: Any) -> Tensor:
        return torch.where(batch["input_ids"][:, 0] == first, value, losses.classification(output, batch))

    judges: dict[str, Any] = {"loss": losses.classification, "quality": losses.accuracy} | {what: broken}
    ids = batches(2)[1]["input_ids"][:, 0].tolist()
    for first in ids[:2]:  # noqa: B007 (`broken` reads it)
        with pytest.raises(ValueError, match=f"^the {what} is {value} for . of 6 examples"):
            wrap(Classifier(), score=batches(2)[1:], **judges)
    first = -1
    heads = wrap(Classifier(), score=batches(2)[1:], **judges)
    first = ids[0]
    with pytest.raises(ValueError, match=f"the {what} is {value} for"):
        heads.score("ablation")


class TwoInputs(Classifier):
    """A classifier with the usual signature: a mask may be the second argument."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> dict[str, Tensor]:
        return super().forward(input_ids, torch.ones_like(input_ids) if attention_mask is None else attention_mask)


def test_the_target_of_a_tuple_is_never_an_input() -> None:
    """Targets that look like a mask, as those of a classifier of tokens, are none."""
    torch.manual_seed(0)
    model, given = TwoInputs(), batches(1)[0]
    targets = (given["labels"] == 0).long()
    pairs = wrap(model, losses.classification, score=[(given["input_ids"], targets)])
    named = wrap(model, losses.classification, score=[{"input_ids": given["input_ids"], "labels": targets}])
    triples = [(given["input_ids"], torch.ones_like(given["input_ids"]), targets)]
    both = wrap(model, losses.classification, score=triples)
    wanted = named.score("ablation", "taylor")["score"].tolist()
    assert pairs.score("ablation", "taylor")["score"].tolist() == wanted
    assert both.score("ablation", "taylor")["score"].tolist() == wanted


def test_the_target_of_a_tuple_is_read_beside_what_the_whole_model_said() -> None:
    given = batches(1)[0]
    judges = {"loss": losses.classification, "quality": losses.Similarity(logits)}
    heads = wrap(TwoInputs(), score=[(given["input_ids"], given["labels"])], **judges)
    outcome = measure(heads.subject, heads.splits["score"])
    torch.testing.assert_close(outcome.quality, torch.ones(6))
    expected = nn.functional.cross_entropy(heads.subject.model(given["input_ids"])["logits"], given["labels"])
    torch.testing.assert_close(outcome.loss.mean(), expected.detach())


def test_a_tuple_of_which_nothing_reads_the_target_is_refused() -> None:
    """It may be an attention mask, which would be left out without a word."""
    given, drift = batches(1)[0], losses.Drift(logits)
    pair = [(given["input_ids"], given["attention_mask"])]
    with pytest.raises(ValueError, match=r"score: a batch is a tuple of 2, the last of them a target .* call="):
        wrap(TwoInputs(), drift, score=pair)
    heads = wrap(TwoInputs(), drift, score=pair, call=lambda model, batch: model(*batch))
    assert heads.score("ablation")["score"].max() > 0


def test_no_pass_holds_more_examples_than_a_batch_of_the_user() -> None:
    seen: list[int] = []

    class Counting(Classifier):
        def judged(self, logits: Tensor, ids: Tensor) -> Tensor:
            seen.append(len(ids))
            return logits

    small = [{name: value[i : i + 2] for name, value in batch.items()} for batch in batches(3) for i in (0, 2, 4)]
    heads = wrap(Counting(), losses.classification, score=small, choose=small[:3], report=small[:3])
    heads.score("ablation", "gate_output", "taylor", "fisher", Confidence(), "refit_error")
    heads.without(heads.mask(keep=4, by="gate_output"), refit=True)
    assert set(seen) <= {1, 2}


class Writes(Classifier):
    """Says what it was asked to generate from."""

    def can_generate(self) -> bool:
        return True

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **how: Any) -> tuple[Tensor, dict[str, Any]]:
        return input_ids, how


def test_masks_are_expected_to_take_the_part_of_a_pass_that_is_not_replayed(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(gated_model, "perf_counter", iter((1.0, 3.0)).__next__)
    plain = gated_model.track
    monkeypatch.setattr(gated_model, "track", lambda *given, **more: said.append(more["expected"]) or plain(*given))
    closed = [HeadMask(heads.grid).without(*some).gates() for some in ((), heads.grid.heads[:1], heads.grid.heads[-1:])]
    heads.subject.evaluate_masks(heads.splits.score[:1], torch.stack(closed))
    assert said == [2 * (0 + 1 + 1 / len(heads.grid.blocks))]


def wrapped(model: nn.Module) -> Heads:
    given = {name: batches(1, seed) for seed, name in enumerate(("score", "report"))}
    return wrap(model, losses.classification, **given)


def test_every_size_is_timed_in_turn_with_the_whole_model_twice() -> None:
    table = wrapped(Classifier()).speed(keep=[0.5, 2], by="random", batch_sizes=(1, 99), rounds=3)
    assert table.groupby("batch_size")["heads_kept"].apply(list).to_dict() == {1: [4, 2, 8, 8], 6: [4, 2, 8, 8]}, ()
    assert table["model"].tolist() == 2 * ["removed", "removed", "dense", "dense again"]
    assert (table["latency_ms"] > 0).all()
    assert (table["speedup_q1"] <= table["speedup_q3"]).all()
    assert set(table["timed"]) == {"a forward pass"}


def test_generation_is_of_so_many_tokens_and_from_no_answer() -> None:
    heads = wrapped(Writes())
    split = heads.splits["report"]
    ids, how = generating(heads.subject, 5).predict(split)
    assert torch.equal(ids, split.fields["input_ids"])
    assert how == {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1, "use_cache": True}
    table = heads.speed(keep=[0.5], by="random", batch_sizes=(2,), new_tokens=5, rounds=3)
    assert set(table["timed"]) == {"5 new tokens"}


def test_heads_of_equal_scores_are_not_chosen_by_their_order_in_silence(
    heads: Heads, caplog: pytest.LogCaptureFixture
) -> None:
    heads.mask(keep=4, by=[0, 0, 0, 1, 1, 1, 1, 2])
    assert "1 of the 4 removed have the same score as others that stay" in caplog.text
    caplog.clear()
    heads.mask(keep=5, by=[0, 0, 0, 1, 1, 1, 1, 2])
    assert not caplog.text

    class Flat(Scorer):
        def __call__(self, subject: Any, examples: Any, seed: int) -> Scores:
            return Scores(torch.full((1, 8), 0.25))

    with pytest.raises(ValueError, match=r"^by=Flat: is 0.25 for all 8 heads, so it cannot choose$"):
        heads.mask(keep=4, by=Flat())
    assert len(heads.mask(keep=1.0, by=Flat()).kept) == 8


def test_training_leaves_the_random_state(heads: Heads) -> None:
    before = torch.get_rng_state()
    heads.prune(mask={0: [1]}, fine_tune=2)
    assert torch.equal(before, torch.get_rng_state())
