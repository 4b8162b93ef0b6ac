from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mhaprune.experiments.explain import gate_starts
from mhaprune.experiments.explain.gate_starts import from_other_starts
from mhaprune.model.network import Transformer
from mhaprune.model.transformer import Seq2Seq
from mhaprune.tasks.base import Splits
from mhaprune.tasks.sort import Sort


def test_starts_differ_sums_stay_and_the_model_stays_as_it_is(model: Seq2Seq, splits: Splits) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    table = from_other_starts(model, splits.train, starts=2, steps=3, seed=0)
    assert len(table) == 2 * len(model.grid)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    own = model.learned_gates()
    assert own is not None
    np.testing.assert_allclose(table.loc[table["start"] == 1, "gate_own"], own.tolist())
    for _, block in table.groupby(["start", "site", "layer"]):
        for column in ("gate_start", "gate_end"):
            assert block[column].sum() == pytest.approx(block["gate_own"].sum())
    first, second = (table.loc[table["start"] == start, "gate_start"].to_numpy() for start in (0, 1))
    assert np.abs(first - second).max() > 0.1


def test_gates_go_where_the_loss_is_lower(model: Seq2Seq, splits: Splits) -> None:
    table = from_other_starts(model, splits.train, starts=1, steps=40, seed=0)
    own = model.learned_gates()
    assert own is not None

    def loss(column: str) -> float:
        gates = torch.tensor(table[column].to_numpy()) / own
        return model.evaluate(splits.train[:100], gates.detach()).loss.mean().item()

    assert loss("gate_end") < loss("gate_start") - 0.01


def test_the_models_own_gates_change_nothing_and_the_last_step_counts(
    model: Seq2Seq, splits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of the model's own gates make its gates once more, not twice over."""
    samples: list[Any] = []
    plain = gate_starts.train_gates

    def watched(*arguments: Any, **named: Any) -> Any:
        samples.append(arguments[3])
        return plain(*arguments, **named)

    monkeypatch.setattr(gate_starts, "train_gates", watched)
    ends = [from_other_starts(model, splits.train, 1, steps, 0)["gate_end"].to_numpy() for steps in (1, 5)]
    assert np.abs(ends[0] - ends[1]).max() > 0.05
    own = model.learned_gates()
    assert own is not None
    gates = samples[0](own.detach().log(), 3, 0.0, torch.Generator())
    torch.testing.assert_close(gates, torch.ones(3, len(model.grid), dtype=torch.double))


def test_a_gate_that_is_shut_ends_nothing(model: Seq2Seq, splits: Splits) -> None:
    with torch.no_grad():
        for sublayer in model.attention_sublayers().values():
            sublayer.attention.gate.logits[0] = -2000.0  # type: ignore[union-attr, index]
    table = from_other_starts(model, splits.train, starts=1, steps=3, seed=0)
    assert np.isfinite(table["gate_end"]).all()


def test_a_model_without_gates_has_none_to_start(task: Sort, splits: Splits) -> None:
    config = Transformer(d_model=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    bare = Seq2Seq(config, len(task.vocabulary))
    with pytest.raises(ValueError, match="gate=none: a model without gates has none to start elsewhere"):
        from_other_starts(bare, splits.train, starts=1, steps=1, seed=0)
