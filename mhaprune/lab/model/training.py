"""The training of our own model.

Dimensions: B = batch, T = target positions, V = vocabulary.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mhaprune.attention.gates import GateConfig, HeadGate
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.tasks.sequences import PAD, Examples
from mhaprune.settings.ranges import Ge, Lt
from mhaprune.training.loop import Descent, parameter_groups


@dataclass(frozen=True)
class Training(Descent):
    """Muon (Jordan et al. 2024) or AdamW (Loshchilov & Hutter 2019), with linear warm-up and decay to zero, gradients
    clipped by norm."""

    fine_tuning_rate: ClassVar[float] = 1e-3
    quality_name: ClassVar[str] = "exact match"

    optimiser: Literal["adamw", "muon"] = "muon"
    """`muon` trains the matrices inside the layers with Muon and all else with AdamW; `adamw` trains all with AdamW."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the target probability that is spread evenly over all symbols."""

    def objective(self, model: Seq2Seq, batch: Examples) -> Tensor:
        return cross_entropy(model, batch, self.label_smoothing)

    def distil(self, model: Seq2Seq, batch: Examples, teacher: Seq2Seq, share: float) -> Tensor:
        with torch.no_grad():
            taught = teacher.call(batch).log_softmax(dim=-1)
        said = model.call(batch).log_softmax(dim=-1)
        valid = batch.target != PAD
        kl = F.kl_div(said[valid], taught[valid], reduction="sum", log_target=True) / valid.sum()
        own = F.nll_loss(said[valid], batch.target[valid])
        return (1 - share) * own + share * kl

    def penalties(self, model: Seq2Seq) -> list[Tensor]:
        return [penalty for gate in head_gates(model) if (penalty := gate.penalty()) is not None]

    @contextmanager
    def while_training(self, model: Seq2Seq) -> Iterator[None]:
        try:
            yield
        finally:
            unstack(model.parameters())

    def optimisers(self, model: Seq2Seq, gate: GateConfig | None) -> list[Optimizer]:
        """Return AdamW and, if it is chosen, Muon. AdamW trains the gates, with a learning rate of their own and no
        decay.

        Until `unstack`, the parameters of the model are slices of the optimisers' tensors.
        """
        gates = [parameter for gate in head_gates(model) for parameter in gate.parameters()]
        ends = {id(module.weight) for module in (model.source_embedding, model.target_embedding, model.output)}
        inner = [weight for weight in model.parameters() if weight.dim() == 2 and id(weight) not in ends]
        matrices = [] if self.optimiser == "adamw" else inner
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


def cross_entropy(model: Seq2Seq, batch: Examples, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy per target token, in nats."""
    logits_BTV = model.call(batch)
    return F.cross_entropy(
        logits_BTV.flatten(0, 1), batch.target.flatten(), ignore_index=PAD, label_smoothing=label_smoothing
    )


def head_gates(model: Seq2Seq) -> list[HeadGate]:
    """Return the trainable gates of a model, block by block; none for a model without gates."""
    gates = [sublayer.attention.gate for sublayer in model.attention_sublayers().values()]
    return [gate for gate in gates if gate is not None]


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The coefficients of Jordan et al. 2024. Five steps bring all singular values between about 0.7 and 1.2."""


def stacked(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Stack parameters of equal shape into one tensor (P, *shape); each parameter and its gradient become slices of it.

    So one optimiser step on the stack changes all its parameters. `unstack` undoes the stacking.
    """
    by_shape: dict[tuple[torch.Size, torch.dtype], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_shape.setdefault((parameter.shape, parameter.dtype), []).append(parameter)
    stacks = []
    for alike in by_shape.values():
        stack = nn.Parameter(torch.stack([parameter.detach() for parameter in alike]))
        stack.grad = torch.zeros_like(stack)
        for parameter, values, gradient in zip(alike, stack.detach(), stack.grad, strict=True):
            parameter.data, parameter.grad = values, gradient
        stacks.append(stack)
    return stacks


def unstack(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `stacked`: each parameter has memory of its own again, and no gradient."""
    for parameter in parameters:
        parameter.data, parameter.grad = parameter.data.clone(), None


class Muon(Optimizer):
    """Momentum whose update of a matrix is made orthogonal (Jordan et al. 2024), for stacks of matrices (P, R, C).

    All matrices of a stack go through the Newton-Schulz iteration together. The learning rate is scaled by 0.2·√max(R,
    C), so that an update is about as large as one of AdamW at the same rate (Liu et al. 2025). The weight decay is that
    of AdamW. For a single matrix it equals `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, except that torch
    iterates in bfloat16, and this class in the precision of the parameters.
    """

    def __init__(
        self,
        stacks: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(stacks, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for stack in group["params"]:
                if stack.grad is None or not stack.numel():
                    continue
                average = self.state[stack].setdefault("momentum_buffer", torch.zeros_like(stack))
                average.lerp_(stack.grad, 1 - group["momentum"])
                update = orthogonal(torch.lerp(stack.grad, average, group["momentum"]))  # Nesterov's
                stack.mul_(1 - group["lr"] * group["weight_decay"])
                stack.sub_(update, alpha=group["lr"] * 0.2 * max(stack.shape[-2:]) ** 0.5)


def orthogonal(matrices_PRC: Tensor, steps: int = 5) -> Tensor:
    """Return U Vᵀ of each matrix U Σ Vᵀ, approximately, by a Newton-Schulz iteration of fifth degree."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices_PRC.shape[-2] <= matrices_PRC.shape[-1]
    x = matrices_PRC if wide else matrices_PRC.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
