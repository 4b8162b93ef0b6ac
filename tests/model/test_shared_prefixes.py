import pytest
import torch
from torch import Tensor

from mhaprune.data import Splits
from mhaprune.heads import Block, HeadMask, Site
from mhaprune.measure.outcomes import mean_outputs, measure, measure_masks
from mhaprune.model import transformer
from mhaprune.model.shared_prefixes import Branches
from mhaprune.model.transformer import Seq2Seq
from mhaprune.scorers.ablation import resample


def some_gates(model: Seq2Seq) -> Tensor:
    """All open, each head closed, random sets, half-open gates, the same mask twice, all closed."""
    draw, n = torch.Generator().manual_seed(0), len(model.grid)
    sets = (torch.rand(10, n, generator=draw) < 0.5).double()
    halves = torch.rand(3, n, generator=draw, dtype=torch.double)
    return torch.cat([torch.ones(1, n), 1 - torch.eye(n), sets, halves, sets[3:5], torch.zeros(1, n)]).double()


@pytest.mark.parametrize(("tokens", "waiting"), [(1, 2**30), (100, 2**30), (2**30, 2**30), (100, 100_000)])
def test_many_masks_at_once_are_each_alone(
    model: Seq2Seq, splits: Splits, tokens: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "TOKENS_AT_ONCE", tokens)
    monkeypatch.setattr(transformer, "WAITING_BYTES", waiting)
    gates = some_gates(model)
    together = measure_masks(model, splits.score, gates)
    for row, gates_N in enumerate(gates):
        for ours, plain in zip(together, measure(model, splits.score, gates_N), strict=True):
            torch.testing.assert_close(ours[row], plain)


@pytest.mark.parametrize("kind", ["mean", "resample", "pruned"])
def test_what_closed_heads_give_instead_is_the_same_also_beside_an_empty_block(
    model: Seq2Seq, splits: Splits, kind: str
) -> None:
    if kind == "pruned":
        empty = [head for head in model.grid if head.block == Block(Site.CROSS, 0)]
        model = model.without(HeadMask(model.grid, frozenset([*empty, model.grid.heads[0]])))
    means = mean_outputs(model, splits.score)
    replacement = resample(splits.score, seed=0) if kind == "resample" else lambda *_: means
    gates = some_gates(model)
    together = measure_masks(model, splits.score, gates, replacement)
    for row, gates_N in enumerate(gates):
        torch.testing.assert_close(together.loss[row], measure(model, splits.score, gates_N, replacement).loss)


@pytest.mark.parametrize(("tokens", "calls"), [(2**30, 1), (1, 19)])
def test_states_are_shared(
    model: Seq2Seq, splits: Splits, tokens: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ablating every head once takes one state before the first block and one more per head behind it; however few of
    them are taken at once, none is computed twice."""
    states: dict[str, list[int]] = {}
    plain = Branches.apply

    def counting(self: Branches, function: torch.nn.Module) -> Branches:
        (name,) = [name for name, module in model.named_modules() if module is function]
        states.setdefault(name, []).append(len(self.states))
        return plain(self, function)

    monkeypatch.setattr(transformer, "TOKENS_AT_ONCE", tokens)
    monkeypatch.setattr(Branches, "apply", counting)
    n = len(model.grid)
    model.evaluate_masks(splits.score[:4], torch.cat([torch.ones(1, n), 1 - torch.eye(n)]).double())
    assert {name: sum(counts) for name, counts in states.items()} == {
        "encoder.0.feed_forward": 1 + 3,
        "encoder.1.feed_forward": 1 + 6,
        "encoder_norm": 1 + 6,
        "decoder.0.feed_forward": 1 + 12,
        "decoder.1.feed_forward": 1 + 18,
        "decoder_norm": 1 + 18,
        "output": 1 + 18,
    }
    assert len(states["output"]) == calls
