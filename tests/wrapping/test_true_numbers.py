"""Numbers around the proofs: what counts, in which precision, alone or beside others, and of which weights."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mhaprune
from mhaprune import losses
from mhaprune.attention.gates import Softmax
from mhaprune.scorers.ablation import Ablation
from mhaprune.subjects.stacks import DENSE
from mhaprune_literature.attention import Entropy
from mhaprune_literature.subset import Subset
from support.attention import Attention, pruned
from support.sizes import slow
from support.texts import Change, Narrow, Net, TimeFirst, ids, texts, wrapped

EVERY = {0: [0, 1, 2, 3]}
"""A mask that closes the first layer."""

HIDDEN: dict[str, Change] = {
    "detach": Tensor.detach,
    "sign": torch.sign,
    "round": lambda x: (4 * x).round() / 4,
    "saturated": lambda x: 3 * (1e4 * x).softmax(dim=-1),
    "argmax": lambda x: F.one_hot(x.argmax(dim=-1), 16).float(),
}


@pytest.mark.parametrize("after", ["detach", "argmax", *slow("sign", "round", "saturated")])
def test_a_head_without_a_derivative_is_closed_before_it_is_called_idle(after: str) -> None:
    heads = wrapped(Net(after=HIDDEN[after]))
    first = set(heads.grid.heads[:4])
    assert heads.subject.without_effect == set()
    assert heads.subject.without_gradient == first
    assert "without a derivative" in repr(heads)
    assert heads.score("ablation")["score"].abs().min() > 0
    for scorer in ("taylor", "fisher", Subset()):
        with pytest.raises(ValueError, match=r"scorer=\w+: needs derivatives, .*0.0.* leave it out"):
            heads.score(scorer)
    heads.report(by=["ablation"], budgets=[0.5], rounds=1)  # whose proof needs no derivative


def test_a_derivative_that_moves_nothing_is_no_effect() -> None:
    heads = wrapped(Net(after=lambda x: 1e-40 * x))
    assert heads.subject.without_effect == set(heads.grid.heads[:4])
    assert heads.proven.smallest_effect > 1e-6


class Long(Narrow):
    """What it computes depends on its number of heads, for long inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.o.in_features / 16 if x.shape[1] > 8 else 1)


class Many(Narrow):
    """What it computes depends on its number of heads, for large batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.o.in_features / 16 if len(x) > 3 else 1)


@pytest.mark.parametrize("kind", [Long, Many])
def test_a_removal_is_proved_on_the_lengths_and_the_batches_of_all_splits(kind: type[Attention]) -> None:
    short, long = texts(1, examples=2 if kind is Long else 6), texts(1, examples=2 if kind is Long else 6, length=12)
    heads = wrapped(Net(kind), split=short, report=long)
    assert heads.proven.why_not.startswith("masked and removed differ by")
    with pytest.raises(ValueError, match="can be gated, not removed"):
        heads.prune(mask={0: [1]})


def test_what_an_example_says_may_not_depend_on_its_neighbours() -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(dim=0, keepdim=True)

    model = Net()
    model.output = nn.Sequential(nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 3))  # type: ignore
    for net, message in ((Net(after=centred), "depends on the other examples"), (model, "not on one example alone")):
        with pytest.raises(ValueError, match=f"model: .*{message}"):
            wrapped(net)
    assert len(wrapped(Net(after=centred), split=texts(examples=1) * 2).grid) == 8

    def contrastive(output: Tensor, batch: Any) -> Tensor:
        return (F.normalize(output) @ F.normalize(output).T).log_softmax(dim=1).diagonal().neg()

    assert "the loss of an example depends on the others of its batch" in repr(wrapped(Net(), loss=contrastive))
    assert "depends" not in repr(wrapped(Net()))


def test_batches_of_different_widths_need_no_mask_and_are_judged_as_given() -> None:
    model, split = Net(), texts(3)
    heads = wrapped(model, split=split)
    with torch.no_grad():
        by_hand = torch.cat([losses.classification(model(batch[0]), batch) for batch in split]).double().mean()
    assert heads.evaluate()["loss"][0] == pytest.approx(float(by_hand), rel=1e-5)
    resampled, fitted = heads.score("ablation_resample"), heads.prune(keep=0.5, refit=True, fine_tune=2)
    assert resampled["score"].notna().all()
    assert isinstance(fitted, Net)


def test_positions_before_examples_are_the_same_model() -> None:
    """Scores, a mask and a refit are those of the model that puts examples first."""
    one, other = Net().double(), Net(TimeFirst).double()
    other.load_state_dict(one.state_dict())
    a, b, unproved = wrapped(one), wrapped(other), wrapped(other, prove="none")
    assert unproved.score("fisher")["score"].tolist() == pytest.approx(b.score("fisher")["score"].tolist())
    names = ("ablation", "ablation_mean", "ablation_resample", "taylor", "taylor_example", "fisher", "refit_error")
    torch.testing.assert_close(*(torch.tensor(heads.score(*names)["score"].to_numpy()) for heads in (a, b)))
    small = [heads.prune(mask={0: [1], 1: [0, 2]}, refit=True) for heads in (a, b)]
    torch.testing.assert_close(*(model(texts()[0][0]) for model in small))


def test_padding_counts_on_no_side() -> None:
    def words(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return losses.language_model(output, batch)

    class Language(Net):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            x = self.embedding(input_ids)
            return x + self.layers[0].o(x)  # each position alone

    model, text = Language(), ids(3, 1, 5)
    found = []
    for left in (0, 2):
        padded = F.pad(text, (left, 2 - left))
        mask = F.pad(torch.ones_like(text), (left, 2 - left))
        found.append(words(model(padded, mask), {"input_ids": padded, "attention_mask": mask}))
    alone = words(model(text, text), {"input_ids": text})
    for each in found:
        torch.testing.assert_close(each, alone)


def test_a_label_that_is_missing_is_no_loss_of_zero() -> None:
    (words, labels), *_ = split = texts()
    labels[:2] = -100
    with pytest.raises(ValueError, match="score: 2 of 6 examples of a batch have nothing to judge"):
        wrapped(Net(), split=split)
    for wrong, message in ((labels.float(), "are torch.float32"), (labels + 9, "must be from 0 to 2")):
        with pytest.raises(ValueError, match=message):
            losses.classification(Net()(words), (words, wrong.where(labels >= 0, wrong)))
    with pytest.raises(ValueError, match="two or more"):
        losses.classification(torch.zeros(6, 1), (words, labels))


def test_drift_reads_no_state_of_padding_and_refuses_a_mask_that_is_none_of_its_own() -> None:
    states, mask = torch.randn(2, 3, 5), torch.tensor([[1, 1, 0], [1, 1, 1]])
    source = {"attention_mask": mask}
    decoder = {"last_hidden_state": states, "encoder_last_hidden_state": states}
    torch.testing.assert_close(losses.mean_of_tokens(decoder, source), states.mean(dim=1))
    own = losses.mean_of_tokens(decoder, source | {"decoder_attention_mask": mask.flip(0)})
    torch.testing.assert_close(own[1], states[1, :2].mean(dim=0))
    with pytest.raises(ValueError, match="padding cannot be told"):
        losses.mean_of_tokens({"last_hidden_state": states[:, :2]}, source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_computed_in_single_precision(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(4, 6, 9).to(dtype), ids(1, 4, 6, below=9)
    for loss in (losses.language_model, losses.seq2seq, losses.token_accuracy):
        found = loss(logits, {"labels": labels})
        assert found.dtype == torch.float32
        assert torch.equal(found, loss(logits.float(), {"labels": labels}))
    model = Net().to(dtype)
    heads = wrapped(model, loss=losses.drift, split=[batch[0] for batch in texts()])
    assert heads.evaluate()["loss"][0] == pytest.approx(0, abs=1e-6), "the whole model does not drift from itself"
    assert heads.splits.score.stacks[0].fields[DENSE].dtype == torch.float32  # type: ignore[union-attr]


def test_every_score_is_computed_in_half_precision() -> None:
    names = {each.stem for each in (Path(__file__).parents[2] / "conf" / "scorer").glob("*.yaml")}
    names -= {"gate", "random", "shortlist", "patching", "attribution_patching", "attribution_patching_path"}
    plain, *halves = (
        wrapped(Net().to(dtype)).score(*sorted(names)) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    )
    for half, (name, of_score) in product(halves, plain.groupby("scorer")):
        assert {*half["scorer"]} == names
        expected, found = of_score["score"].to_numpy(), half.loc[of_score.index, "score"].to_numpy()
        np.testing.assert_allclose(found, expected, rtol=0.1, atol=0.03 * np.abs(expected).max(), err_msg=str(name))


def test_weights_in_half_precision_are_weights() -> None:
    """Although they miss a sum of 1 by rounding."""
    eager = type("Eager", (Narrow,), {"mix": lambda self, q, k, v: (q @ k.mT).softmax(dim=-1) @ v})
    assert len(wrapped(Net(eager).bfloat16(), split=texts(1, length=40)).grid) == 8


def test_a_layer_that_is_called_twice_is_heard_twice() -> None:
    model = Net(calls=2)
    heads, hand = wrapped(model), []
    hook = model.layers[0].o.register_forward_pre_hook(lambda module, x: hand.append(x[0]))
    with torch.no_grad():
        for words, _ in texts():
            model(words)
    hook.remove()
    weight = model.layers[0].o.weight
    norms = [torch.stack([(x[..., 4 * n : 4 * n + 4] @ weight[:, 4 * n : 4 * n + 4].T).norm(dim=-1) for n in range(4)])
             for x in hand]  # fmt: skip
    expected = torch.cat([each.flatten(1) for each in norms], dim=1).mean(dim=1)
    found = heads.score("gate_output")["score"][:4].to_numpy()
    torch.testing.assert_close(torch.tensor(found), expected.double(), atol=1e-6, rtol=1e-5)
    assert heads.units("call").score(Entropy(), "ablation_resample", "taylor").shape[0] == 3 * 16
    subject, batch = heads.subject, heads.splits.score.first(6)
    closed, own = torch.zeros(8), subject.head_outputs(batch)
    torch.testing.assert_close(subject.run_gated(batch, closed, own), subject.run_gated(batch))  # each call its own


def test_one_call_of_a_head_is_scored_and_closed_and_not_removed() -> None:
    model = Net(calls=2)
    heads = wrapped(model)
    calls = heads.units("call")
    name = "layers.0.2@1"
    assert [str(head) for head in calls.grid][4:8] == [f"layers.0.{n}@1" for n in range(4)]
    assert name in map(str, calls.grid)
    seen = 0

    def second(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor] | None:
        nonlocal seen
        seen += 1
        return (given[0] * torch.tensor([1.0] * 8 + [0.0] * 4 + [1.0] * 4),) if seen % 2 == 0 else None

    with torch.no_grad(), model.layers[0].o.register_forward_pre_hook(second):
        by_hand = torch.cat([losses.classification(model(batch[0]), batch) for batch in texts()]).double().mean()
    assert calls.evaluate([name])["loss"][1] == pytest.approx(float(by_hand), rel=1e-5)
    with pytest.raises(ValueError, match="out of all calls of its layer, and layers.0.2@0 stays"):
        calls.prune(mask=[name])
    both = calls.prune(mask=["layers.0.2@0", name])
    torch.testing.assert_close(both(texts()[0][0]), heads.prune(mask={0: [2]})(texts()[0][0]))
    assert wrapped(Net()).units("call").grid == wrapped(Net()).grid


@pytest.mark.parametrize("when", ["before", "after"])
def test_gates_reach_a_model_that_is_compiled(when: str) -> None:
    model, plain = Net(), wrapped(Net()).evaluate(EVERY)
    if when == "before":
        model.layers[0].compile(backend="eager")
        with torch.no_grad():
            model(texts()[0][0])
    heads = wrapped(model)
    if when == "after":
        model.compile(backend="eager")
        with torch.no_grad():
            model(texts()[0][0])
    assert heads.evaluate(EVERY)["loss"].tolist() == pytest.approx(plain["loss"].tolist(), rel=1e-5)
    pruned(heads, EVERY, texts()[0][0])


def test_a_gate_that_is_not_applied_is_an_error_that_names_the_layer() -> None:
    model = Net()
    heads, layer = wrapped(model), model.layers[0]
    layer.forward = lambda x: F.linear(x, layer.o.weight)  # type: ignore[method-assign,assignment]
    for call in (partial(heads.evaluate, EVERY), partial(heads.score, "gate_output"), partial(heads.score, "taylor")):
        with pytest.raises(ValueError, match=r"layers.0: its heads were not gated, .*called layers.0.o 0 times"):
            call()
    with pytest.raises(ValueError, match="layers.0: its heads were not gated"), heads.closed(EVERY) as gated:
        gated(texts()[0][0])
    assert heads.evaluate({1: [0]})["heads_kept"].tolist() == [8, 7], "an open gate need not be applied"


def test_a_gate_that_was_learned_is_folded_in_the_precision_of_the_proof() -> None:
    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.output = nn.Embedding(11, 16), nn.Linear(16, 3)
            self.attention = mhaprune.MultiHeadAttention(16, 4, gate=Softmax())

        def forward(self, x: Tensor) -> Tensor:
            x = self.embedding(x)
            return self.output(self.attention(x, x, x)[0].mean(dim=1))

    model = Ours()
    model.attention.gate.logits.data = torch.tensor([1.0, 0.0, -1.0, 2.0])  # type: ignore[union-attr]
    heads = wrapped(model)
    assert repr(heads) == "4 heads in 1 block, all with an effect, all removable"
    assert heads.score("gate")["score"].tolist() == pytest.approx(model.attention.gate().tolist())  # type: ignore


def test_what_was_measured_belongs_to_the_weights_that_were_measured() -> None:
    """Also if a change leaves the sum of every row as it is, and if only whole numbers change."""
    model = Net()
    model.register_buffer("levels", torch.arange(4))
    heads = wrapped(model)
    heads.score("ablation")
    changes: list[Any] = [
        lambda weight: weight.data.mul_(1.001),
        lambda weight: weight.data.copy_(weight.data.flip(0)),
        lambda weight: weight.data.copy_(weight.data.roll(4, 1)),
        lambda weight: weight.data[:, 0].mul_(1 + 2**-23),
        lambda weight: model.levels.add_(1),
    ]
    for change in changes:
        kept = model.layers[0].o.weight.data.clone()
        change(model.layers[0].o.weight)
        prunings = [partial(heads.prune, keep=0.5), partial(heads.prune, mask={0: [0]}), partial(heads.prune, within=1)]
        for call in (heads.score, *prunings, heads.evaluate, heads.mask):
            with pytest.raises(ValueError, match="model: its weights have changed since wrap"):
                call()
        model.layers[0].o.weight.data.copy_(kept)
        model.levels.copy_(torch.arange(4))  # type: ignore[operator]
        heads.score("ablation")


def test_two_settings_of_one_score_are_two_scores_and_a_head_is_named_once() -> None:
    heads = wrapped(Net())
    table = heads.score(Ablation(), Ablation(replace="mean"))
    assert table["scorer"].value_counts().tolist() == [8, 8]
    assert not table["score"][:8].equals(table["score"][8:].reset_index(drop=True))
    for mask in (["layers.0.1", "layers.0.1"], {0: [1], "layers.0": [1]}):
        with pytest.raises(ValueError, match="mask: names a head twice"):
            heads.prune(mask=mask)
    block = mhaprune.AttentionBlock("layers.0", out="o", heads=4)
    with pytest.raises(ValueError, match="blocks: names layers.0 twice"):
        wrapped(Net(), blocks=[block, block])


def test_a_model_is_measured_once_for_many_masks() -> None:
    passes, model = [0], Net()
    heads = wrapped(model, call=lambda model, batch: (passes.__setitem__(0, passes[0] + 1), model(batch[0]))[1])
    first = heads.evaluate({0: [1]})
    before = passes[0]
    again = heads.evaluate({0: [1]}, {1: [1]})
    assert again[:2].equals(first)
    assert passes[0] - before == 2, "one new mask on two batches"


def test_a_nan_in_a_buffer_is_refused_if_the_model_reads_it() -> None:
    model = Net()
    model.register_buffer("factor", torch.tensor([1.0, float("nan")]))
    assert len(wrapped(model).grid) == 8
    layer: Any = model.layers[0]
    model.after = lambda x: x * model.factor[1].nan_to_num(float("nan"))  # type: ignore[index]
    with pytest.raises(ValueError, match="model: "):
        wrapped(model)
    query = layer.q.forward
    model.after, layer.q.forward = (lambda x: x), lambda x: query(x) * model.factor[1]  # type: ignore[index]
    with pytest.raises(ValueError, match="its buffer factor is nan in 1 of 2 places"):
        wrapped(model)


def test_one_layer_that_cannot_be_cut_leaves_the_others() -> None:
    class Pooled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.pool = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embedding(x)
            for layer in self.layers:
                x = x + layer(x)
            made = (F.layer_norm(self.query(x.mean(1, keepdim=True)), (16,)), self.key(x), self.value(x))
            said = F.scaled_dot_product_attention(*(each.unflatten(-1, (4, 4)).transpose(1, 2) for each in made))
            return self.output(self.pool(said.transpose(1, 2).flatten(1)))

    heads = wrapped(Pooled())
    assert "8 removable (attention.0 is not: its query is mixed from the heads of query (a norm?)" in repr(heads)
    pruned(heads, {"layers.0": [1]}, texts()[0][0])
    assert {head.site for head in heads.mask(keep=5, by="gate_output").removed} == {"layers"}
    with pytest.raises(ValueError, match="can be gated, not removed: its query is mixed from the heads of query"):
        heads.prune(mask={"attention.0": [0]})
    with pytest.raises(ValueError, match=r"budgets=8|must stay"):
        heads.prune(keep=2, by="gate_output")
    found = heads.report(by=["gate_output"], budgets=[0.5, 0.9], rounds=1, refit=False)
    assert found.tables["pruning"]["heads_removed"].max() == 6


@pytest.mark.slow
def test_what_comes_too_late_is_refused_at_the_door() -> None:
    one = [(batch[0][:1], batch[1][:1]) for batch in texts(1)]
    heads = wrapped(Net(), report=one)
    for call in (partial(heads.report, rounds=1), heads.evaluate):
        with pytest.raises(ValueError, match="report: holds 1 example, an interval needs two or more"):
            call()
    with pytest.raises(ValueError, match="by=\\[\\]: must name one scorer"):
        wrapped(Net()).report(by=[])
    with pytest.raises(ValueError, match="tokenizer: names the tokens of batches that are dicts"):
        wrapped(Net()).report(tokenizer=object())
    with pytest.raises(ValueError, match="cache='': must name a folder"):
        wrapped(Net(), cache="")
    with torch.no_grad():
        assert len(wrapped(Net()).score("taylor", Subset())) == 16
