import copy
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any, Literal

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune.attention.gates import Softmax
from mhaprune.data import Splits
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.training import Muon, Training, cross_entropy, head_gates, orthogonal, stacked
from mhaprune.lab.tasks.sequences import PAD, Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.measure.outcomes import Diverged

GATE = Softmax(learning_rate=0.05, entropy_weight=0.01)
EACH = {"warmup_steps": 2, "evaluate_every": 3, "checkpoint_every": 2}
RECIPE = Training(optimiser="adamw", sorted_batches=1, steps=7, batch_size=8, **EACH)  # type: ignore[arg-type]


def fresh(task: Sort, dropout: float = 0.2) -> Seq2Seq:
    torch.manual_seed(1)
    config = Transformer(d_model=12, num_heads=3, num_encoder_layers=1, num_decoder_layers=1, dropout=dropout)
    return Seq2Seq(config, len(task.vocabulary), GATE)


def train(task: Sort, splits: Splits, recipe: Training = RECIPE, **more: Any) -> tuple[Seq2Seq, pd.DataFrame]:
    model = fresh(task)
    return model, recipe(model, splits.train, splits.valid, GATE, 5, **more)


def assert_same(first: Seq2Seq, second: Seq2Seq) -> None:
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("recipe", [RECIPE, replace(RECIPE, optimiser="muon", sorted_batches=4)])
def test_an_interrupted_training_goes_on_to_the_same_bits(task: Sort, splits: Splits, recipe: Training) -> None:
    whole, rows = train(task, splits, recipe)
    states: list[dict[str, Any]] = []

    def save_and_stop(state: dict[str, Any]) -> None:
        states.append({key: _clone(value) for key, value in state.items()})
        if state["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(task, splits, recipe, save=save_and_stop)
    torch.rand(100)  # whatever happened in between
    resumed, again = train(task, splits, recipe, state=states[-1])
    assert_same(whole, resumed)
    pd.testing.assert_frame_equal(*(table.drop(columns="seconds") for table in (rows, again)))


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    return [_clone(item) for item in value] if isinstance(value, list) else value


def test_a_step_is_clipped_adamw_on_the_mean_loss_per_token(task: Sort, splits: Splits) -> None:
    """Against the same step written with nothing but autograd and torch's plain AdamW."""
    ours, twin = fresh(task, dropout=0.0), fresh(task, dropout=0.0)
    for gate in (*head_gates(ours), *head_gates(twin)):
        gate.get_parameter("logits").data[0] = 2.0  # away from zero, where weight decay would not show
    batch = splits.train[:9]
    recipe = Training(optimiser="adamw", learning_rate=0.01, weight_decay=0.3, label_smoothing=0.1, clip_norm=0.5)
    loss = recipe.step(ours, batch, recipe.optimisers(ours, GATE))
    log_p = twin.call(batch).log_softmax(-1)
    valid = batch.target != PAD
    nll = -log_p.gather(-1, batch.target[..., None])[..., 0]
    expected = ((0.9 * nll - 0.1 * log_p.mean(-1)) * valid).sum() / valid.sum()
    penalty = sum(-0.01 * (g().div(3) * g().div(3).log()).sum() for g in head_gates(twin))
    (expected + penalty).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    gates = [p for g in head_gates(twin) for p in g.parameters()]
    weights = [p for p in twin.parameters() if not any(p is gate for gate in gates)]
    torch.optim.AdamW(weights, lr=0.01, weight_decay=0.3).step()
    torch.optim.AdamW(gates, lr=0.05, weight_decay=0.0).step()
    torch.testing.assert_close(loss, expected.detach())
    # The first step of Adam goes by the signs of the gradients only.
    for (name, a), b in zip(ours.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    for (name, a), b in zip(ours.state_dict().items(), twin.state_dict().values(), strict=True):
        if not name.endswith("k_proj.bias"):  # shifts all scores alike: its gradient is rounding, which Adam blows up
            torch.testing.assert_close(a, b, msg=name)


def test_the_rate_rises_in_a_line_and_falls_in_half_a_cosine_or_in_a_line() -> None:
    cosine, linear = (Training(steps=110, warmup_steps=10, **how) for how in ({}, {"decay": "linear"}))
    at = [cosine.learning_rate_factor(step) for step in (0, 4, 9, 60, 110)]
    assert at == pytest.approx([0.1, 0.5, 1.0, 0.5, 0.0])
    assert [linear.learning_rate_factor(step) for step in (9, 35, 110)] == pytest.approx([1.0, 0.75, 0.0])


def test_muon_moves_the_matrices_inside_and_adamw_the_rest(task: Sort) -> None:
    model = fresh(task)
    adamw, muon = Training(optimiser="muon", learning_rate=0.02, weight_decay=0.3).optimisers(model, GATE)
    inside = {id(stack): stack.numel() for group in muon.param_groups for stack in group["params"]}
    matrices = {name: weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2}
    ends = ("source_embedding", "target_embedding", "output")
    assert sum(inside.values()) == sum(size for name, size in matrices.items() if not name.startswith(ends))
    weights, gates = adamw.param_groups
    assert inside.keys().isdisjoint(id(stack) for group in adamw.param_groups for stack in group["params"])
    assert sum(stack.numel() for stack in gates["params"]) == len(model.grid)
    assert (gates["lr"], gates["weight_decay"]) == (0.05, 0.0)
    assert weights["weight_decay"] == muon.param_groups[0]["weight_decay"] == 0.3
    assert weights["lr"] == muon.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("rate", [0.003, 1e30])
def test_a_trained_model_has_left_the_stacks(task: Sort, splits: Splits, rate: float) -> None:
    """Also if the training ended in an error."""
    model = fresh(task)
    with pytest.raises(Diverged) if rate > 1 else nullcontext():
        replace(RECIPE, learning_rate=rate, warmup_steps=0)(model, splits.train, splits.valid, GATE, 5)
    assert not model.training
    for parameter in model.parameters():
        assert parameter.grad is None
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


def test_batches_of_an_epoch_hold_all_examples_once_and_sorted_ones_less_padding(splits: Splits) -> None:
    train = splits.train

    def epoch(sorted_batches: int, skip: int = 0) -> list[Examples]:
        batches = train.shuffled_batches(30, torch.Generator().manual_seed(0), sorted_batches, skip=skip)
        return [next(batches) for _ in range(7 - skip)]

    plain, ordered = epoch(1), epoch(5)
    for batches, sorted_batches in ((plain, 1), (ordered, 5)):
        assert sorted(map(len, batches)) == [20] + [30] * 6
        seen = torch.cat([F.pad(batch.source, (0, 7 - batch.source.shape[1])) for batch in batches])
        assert len(seen.unique(dim=0)) == 200
        assert torch.equal(epoch(sorted_batches, skip=4)[0].source, batches[4].source)
    assert sum(batch.source.numel() for batch in ordered) < 0.9 * sum(batch.source.numel() for batch in plain)
    # They come in no order of length, and five batches hold examples drawn at random.
    widths = [batch.source.shape[1] for batch in ordered[:5]]
    assert len(set(widths)) > 2
    assert widths != sorted(widths)


def test_the_history_has_the_loss_the_accuracy_and_every_gate(
    task: Sort, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is the mean since the evaluation before, also of the last one, before which there are fewer steps."""
    monkeypatch.setattr("time.perf_counter", count().__next__)  # a second passes between two looks at the clock
    losses: list[float] = []

    def objective(model: Any, batch: Examples) -> torch.Tensor:
        loss = cross_entropy(model, batch)
        losses.append(loss.item())
        return loss

    model, rows = train(task, splits, objective=objective)
    assert list(rows["step"]) == [0, 3, 6, 7]
    assert list(rows["seconds"]) == list(rows["step"])
    assert {"valid_loss", "valid_token_accuracy", "valid_quality"} <= set(rows)
    assert (rows.filter(like="gate_").iloc[0] == 1.0).all()
    gates = model.learned_gates()
    assert gates is not None
    for n, head in enumerate(model.grid):
        assert rows[f"gate_{head}"].iloc[-1] == pytest.approx(gates[n].item())
    assert not model.training
    expected = [sum(part) / len(part) for part in (losses[:3], losses[3:6], losses[6:])]
    assert rows["loss"].tolist()[1:] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_the_gradients_of_all_optimisers_are_clipped_together(
    task: Sort, splits: Splits, optimiser: Literal["adamw", "muon"]
) -> None:
    model = fresh(task)
    recipe = Training(optimiser=optimiser, clip_norm=0.01)
    optimisers = recipe.optimisers(model, GATE)
    for each in optimisers:
        each.step = lambda: None  # type: ignore[method-assign, assignment, misc]
    recipe.step(model, splits.train[:9], optimisers)
    stacks = [stack for each in optimisers for group in each.param_groups for stack in group["params"]]
    assert torch.stack([stack.grad.norm() for stack in stacks]).norm() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("steps", "said"),
    [(6, "nan by step 3, exact match had"), (1, "nan for 16 of 16 examples by step 1")],
    ids=["underway", "after the last step"],
)
def test_a_loss_that_is_not_finite_ends_the_training(task: Sort, splits: Splits, steps: int, said: str) -> None:
    with pytest.raises(Diverged, match=rf"training.learning_rate=1e\+30: the loss is {said}"):
        train(task, splits, Training(steps=steps, learning_rate=1e30, warmup_steps=0, evaluate_every=3))


SHAPES = ((6, 6), (9, 4), (6, 6), (5,), (4, 9), (9, 4), (0, 4), (2, 2), (2, 2), (2, 2))


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def loss_of(weights: list[nn.Parameter], wanted: list[Tensor]) -> Tensor:
    return sum(((a - b) ** 2).sum() for a, b in zip(weights, wanted, strict=True))  # type: ignore[return-value]


def test_a_stack_holds_the_parameters_of_one_shape() -> None:
    plain = parameters()
    before = [weight.detach().clone() for weight in plain]
    stacks = stacked(plain)
    assert [tuple(stack.shape) for stack in stacks] == [(2, 6, 6), (2, 9, 4), (1, 5), (1, 4, 9), (1, 0, 4), (3, 2, 2)]
    for weight, value in zip(plain, before, strict=True):
        assert torch.equal(weight, value)
    loss_of(plain, [torch.zeros_like(value) for value in before]).backward()
    for stack in stacks:
        assert stack.grad is not None
        torch.testing.assert_close(stack.grad, 2 * stack.detach())
        stack.data.add_(1.0)
    for weight, value in zip(plain, before, strict=True):
        torch.testing.assert_close(weight.detach(), value + 1)


def test_parameters_of_different_precision_are_not_stacked() -> None:
    assert len(stacked([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, dtype=torch.float64))])) == 2


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_a_step_on_stacks_is_muon_on_each_matrix(weight_decay: float) -> None:
    """Against the published update written out for one matrix."""
    ours = [weight for weight in parameters() if weight.dim() == 2]
    twins = copy.deepcopy(ours)
    averages = [torch.zeros_like(weight) for weight in twins]
    wanted = [torch.randn_like(weight) for weight in ours]
    optimiser = Muon(stacked(ours), lr=0.05, weight_decay=weight_decay)
    for _ in range(3):
        optimiser.zero_grad(set_to_none=False)
        loss_of(ours, wanted).backward()
        optimiser.step()
        for twin, average, target in zip(twins, averages, wanted, strict=True):
            if not twin.numel():
                continue
            gradient = 2 * (twin.detach() - target)
            average.mul_(0.95).add_(0.05 * gradient)
            update = iterated(0.05 * gradient + 0.95 * average)
            twin.data = twin.data * (1 - 0.05 * weight_decay) - 0.05 * 0.2 * max(twin.shape) ** 0.5 * update
    for weight, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(weight.detach(), twin.detach())


def iterated(matrix: Tensor) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan et al. 2024
    x = matrix / matrix.norm()
    for _ in range(5):
        x = a * x + b * x @ x.mT @ x + c * x @ x.mT @ x @ x.mT @ x
    return x


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_that_of_torch_up_to_its_bfloat16() -> None:
    # Of the smallest matrices bfloat16 may lose the lesser direction altogether.
    ours = [weight for weight in parameters(torch.float32) if weight.dim() == 2 and weight.numel() > 4]
    twins = copy.deepcopy(ours)
    start = copy.deepcopy(ours)
    wanted = [torch.randn_like(weight) for weight in ours]
    mine = Muon(stacked(ours), lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(twins, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for weights, optimiser in ((ours, mine), (twins, theirs)):
            optimiser.zero_grad(set_to_none=False)
            loss_of(weights, wanted).backward()
            optimiser.step()
    for weight, twin, first in ((x.detach() for x in three) for three in zip(ours, twins, start, strict=True)):
        moved = (twin - first).norm()
        assert float((weight - twin).norm() / moved) < 0.02
        assert float(moved) > 0.1


def test_no_gradient_is_no_update() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 3, 3)), torch.zeros(2, 3, 3))
