"""How our own model is trained.

Dimensions: B = batch, T = target positions, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mhaprune.data import PAD, Examples
from mhaprune.model.gates import GateConfig, HeadGate
from mhaprune.model.network import EncoderDecoder
from mhaprune.settings.ranges import Ge, Lt
from mhaprune.training.descent import Descent, Objective, descend, parameter_groups
from mhaprune.training.optimisers import Muon, stacked, unstack


@dataclass(frozen=True)
class Training(Descent):
    """Muon (Jordan et al. 2024) or AdamW (Loshchilov & Hutter 2019), with linear warm-up and decay to zero, gradients
    clipped by norm."""

    fine_tuning_rate: ClassVar[float] = 1e-3
    quality_name: ClassVar[str] = "exact match"

    optimiser: Literal["adamw", "muon"] = "muon"
    """`muon` updates the matrices inside the layers by Muon; everything else is left to AdamW."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the target probability that is spread evenly over all symbols."""

    def objective(self, model: EncoderDecoder, batch: Examples) -> Tensor:
        return cross_entropy(model, batch, self.label_smoothing)

    def step(self, model: Any, batch: Any, optimisers: Sequence[Optimizer], objective: Objective) -> Tensor:
        return training_step(model, batch, optimisers, objective, self.clip_norm)

    @contextmanager
    def while_training(self, model: EncoderDecoder) -> Iterator[None]:
        try:
            yield
        finally:
            unstack(model.parameters())

    def optimisers(self, model: EncoderDecoder, gate: GateConfig | None) -> list[Optimizer]:
        """AdamW and, where it is chosen, Muon. Gates are AdamW's, at a learning rate of their own, and do not decay.

        The parameters of the model become slices of what the optimisers hold, until `unstack`.
        """
        gates = [parameter for gate in head_gates(model) for parameter in gate.parameters()]
        matrices = [] if self.optimiser == "adamw" else inner_matrices(model)
        apart = {id(parameter) for parameter in (*gates, *matrices)}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in apart]
        groups: list[dict[str, Any]] = [{"params": stacked(rest), "weight_decay": self.weight_decay}]
        if gate is not None and gates:
            groups.append({"params": stacked(gates), "weight_decay": 0.0, "lr": gate.learning_rate})
        optimisers: list[Optimizer] = [AdamW(groups, lr=self.learning_rate, fused=True)]
        if matrices:
            optimisers.append(Muon(stacked(matrices), self.learning_rate, self.weight_decay))
        for group in parameter_groups(optimisers):
            group["initial_lr"] = group["lr"]
        return optimisers


def cross_entropy(model: EncoderDecoder, batch: Examples, label_smoothing: float = 0.0) -> Tensor:
    """Mean per target token, in nats."""
    logits_BTV = model.logits(batch)
    return F.cross_entropy(
        logits_BTV.flatten(0, 1), batch.target.flatten(), ignore_index=PAD, label_smoothing=label_smoothing
    )


def training_step(
    model: EncoderDecoder,
    batch: Examples,
    optimisers: Sequence[Optimizer],
    objective: Objective = cross_entropy,
    clip_norm: float = 1.0,
) -> Tensor:
    """One step down the objective and the penalties of the gates; returns the objective before the step, detached."""
    penalties = [penalty for gate in head_gates(model) if (penalty := gate.penalty()) is not None]
    return descend(objective(model, batch), optimisers, clip_norm, penalties)


def inner_matrices(model: EncoderDecoder) -> list[nn.Parameter]:
    """The matrices between hidden states: not the embeddings, not the output."""
    ends = {id(module.weight) for module in (model.source_embedding, model.target_embedding, model.output)}
    return [weight for weight in model.parameters() if weight.dim() == 2 and id(weight) not in ends]


def head_gates(model: EncoderDecoder) -> list[HeadGate]:
    """The trainable gates of a model, block by block; empty for a model without."""
    gates = [sublayer.attention.gate for sublayer in model.attention_sublayers().values()]
    return [gate for gate in gates if gate is not None]
