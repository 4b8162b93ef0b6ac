"""The training loop of all models: our own network and pretrained ones."""

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mhaprune.attention.gates import GateConfig
from mhaprune.data import Data
from mhaprune.interrupts import HeldSignals
from mhaprune.measure.outcomes import Diverged, measure
from mhaprune.progress import doing
from mhaprune.settings.ranges import Checked, Ge, Gt
from mhaprune.subject import Batch, Outcome
from mhaprune.subjects.gated_model import GatedModel

Objective = Callable[[Any, Batch], Tensor]
"""A function that training minimises. It takes a model and a batch and returns a scalar, without the penalties of the
gates."""


@dataclass(frozen=True)
class Descent(Checked, ABC):
    """The settings of a training by gradient descent: the learning rate rises linearly, then decays to zero, and
    gradients are clipped. A call of the object trains a model."""

    fine_tuning_rate: ClassVar[float]
    """The highest learning rate of a fine-tuning, if none is given."""
    quality_name: ClassVar[str]
    """The name of the quality in the progress line."""

    steps: Annotated[int, Ge(1)] = 600
    """Number of optimiser steps."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Number of examples per step."""
    learning_rate: Annotated[float, Gt(0)] = 4e-3
    """The highest learning rate of the weights, after warm-up. Gates have their own."""
    warmup_steps: Annotated[int, Ge(0)] = 50
    """Number of first steps in which the learning rate rises."""
    weight_decay: Annotated[float, Ge(0)] = 1.0
    """The factor λ: a step multiplies the weights by 1 - λ·learning rate, with every optimiser. Gates do not decay."""
    clip_norm: Annotated[float, Gt(0)] = 1.0
    """The largest norm of all gradients together. A longer gradient is scaled down to it."""
    decay: Literal["cosine", "linear"] = "cosine"
    """The way in which the learning rate falls to zero after warm-up: half a cosine, or a line."""
    sorted_batches: Annotated[int, Ge(1)] = 8
    """Number of batches whose examples are drawn together and then sorted by length. So each batch holds examples of
    similar length and little padding. 1 sorts nothing."""
    evaluate_every: Annotated[int, Ge(1)] = 25
    """Number of steps between two rows of the history: loss, held-out accuracy, gates."""
    checkpoint_every: Annotated[int, Ge(1)] = 500
    """Number of steps between two saved states. An interrupted training saves one more state before it stops. A resumed
    training ends with the same bits as one without a stop."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate <= 1 < self.weight_decay * self.learning_rate:  # above 1 it is the rate that is wrong
            raise ValueError(
                f"weight_decay={self.weight_decay}: a step multiplies the weights by 1 - learning_rate·weight_decay,"
                f" which must not be negative; allowed are 0 to {1 / self.learning_rate:.6g}"
            )

    @abstractmethod
    def optimisers(self, model: Any, gate: GateConfig | None) -> list[Optimizer]:
        """Return new optimisers for the weights of the model. Each group of parameters has an `initial_lr`."""

    @abstractmethod
    def objective(self, model: Any, batch: Batch) -> Tensor:
        """Return the mean loss of the batch, which training minimises unless the caller gives an `objective`."""

    @abstractmethod
    def distil(self, model: Any, batch: Batch, teacher: Any, share: float) -> Tensor:
        """Return (1 - share) · own loss + share · KL(teacher ‖ model), both means over the batch. The labels are not
        smoothed, because the teacher's probabilities are smooth already."""

    def penalties(self, model: Any) -> Sequence[Tensor]:
        """Return the scalars that training adds to the objective. The loss in the history does not include them."""
        return ()

    def step(
        self, model: Any, batch: Batch, optimisers: Sequence[Optimizer], objective: Objective | None = None
    ) -> Tensor:
        """Take one optimiser step on objective + penalties. Return the objective before the step, detached."""
        loss = (objective or self.objective)(model, batch)
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=False)  # the gradients of the parameters may be slices of these
        sum(self.penalties(model), loss).backward()
        parameters = [each for group in parameter_groups(optimisers) for each in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        for optimiser in optimisers:
            optimiser.step()
        return loss.detach()

    def while_training(self, model: Any) -> AbstractContextManager[None]:
        """Return a context for the whole training. When the context ends, it undoes temporary changes that the training
        needed in the model. The trained weights stay."""
        return nullcontext()

    def __call__(
        self,
        model: GatedModel,
        train: Data,
        valid: Data,
        gate: GateConfig | None,
        seed: int,
        state: dict[str, Any] | None = None,
        save: Callable[[dict[str, Any]], None] | None = None,
        objective: Objective | None = None,
        lost: Callable[[Outcome], float] | None = None,
        dropout: bool = True,
    ) -> pd.DataFrame:
        """Train `model` in place; returns a row for step 0 and one for each evaluation: step, seconds spent on training
        steps so far, loss, held-out accuracy, gates.

        Training minimises `objective`, by default the method `objective`. `state` is a state that an earlier call gave
        to `save`; training goes on from there. With `lost`, a function of the outcome on `valid`, the rows have it, and
        the model ends with the weights of the evaluation of which it is the least. Without `dropout` the model trains
        as it is measured. Raises `Diverged` if the loss is not finite.
        """
        with ExitStack() as stack:
            stack.enter_context(self.while_training(model))
            stack.callback(model.module.eval)
            optimisers, running = self.optimisers(model, gate), torch.zeros((), device=train.device)
            if state is None:
                rows = [{"step": 0, "seconds": 0.0, "loss": math.nan, **self._held_out(model, valid, lost)}]
                first, seconds, best = 0, 0.0, copy.deepcopy(model.module.state_dict()) if lost else None
            else:
                _restore(state, model, optimisers, running)
                first, seconds, rows = int(state["step"]), state["seconds"], list(state["rows"])
                best = state.get("best")
            order = torch.Generator().manual_seed(seed)
            batches = train.shuffled_batches(self.batch_size, order, self.sorted_batches, skip=first)
            held = stack.enter_context(HeldSignals())
            progress = stack.enter_context(doing("training", self.steps, done=first))
            for step in range(first, self.steps):
                begin = time.perf_counter()
                for group in parameter_groups(optimisers):
                    group["lr"] = group["initial_lr"] * self.learning_rate_factor(step)
                model.module.train(dropout)
                running += self.step(model, next(batches), optimisers, objective)
                done = progress.done = step + 1
                evaluated = done % self.evaluate_every == 0 or done == self.steps
                mean_loss = running.item() / ((done - 1) % self.evaluate_every + 1) if evaluated else math.nan
                seconds += time.perf_counter() - begin  # after the loss was read, for which a GPU has to finish
                if evaluated:
                    running.zero_()
                    row = {"step": done, "seconds": seconds, "loss": mean_loss}
                    rows.append(row | self._finite(mean_loss, model, valid, done, rows, lost))
                    if lost and rows[-1]["lost"] <= min(each["lost"] for each in rows):
                        best = copy.deepcopy(model.module.state_dict())
                    progress.note = f"loss {mean_loss:.3f}, {self.quality_name} {rows[-1]['valid_quality']:.3f}"
                asked, due = held.asked, done % self.checkpoint_every == 0 and done < self.steps
                if save is not None and (due or asked):
                    now = {"running": running, "rows": rows, "step": done, "seconds": seconds, "best": best}
                    save(now | _state(model, optimisers, running.device))
                if asked:
                    held.stop()
            if best is not None:
                model.module.load_state_dict(best)
        return pd.DataFrame(rows)

    def _finite(
        self,
        loss: float,
        model: GatedModel,
        valid: Data,
        step: int,
        rows: Sequence[Mapping[str, Any]],
        lost: Callable[[Outcome], float] | None,
    ) -> dict[str, float]:
        """Evaluate the model on `valid` and return the columns of the training table: loss, quality and gates.

        Raises `Diverged` if the training loss or a value on `valid` is not finite.
        """
        try:
            if not math.isfinite(loss):
                raise Diverged(f"the loss is {loss}")
            return self._held_out(model, valid, lost)
        except Diverged as error:
            raise Diverged(
                f"training.learning_rate={self.learning_rate}: {error} by step {step}, {self.quality_name}"
                f" had reached {max(row['valid_quality'] for row in rows):.3f}; a lower rate, a longer warm-up or"
                " a smaller clip_norm keeps it finite"
            ) from None

    def learning_rate_factor(self, step: int) -> float:
        """Return the learning rate at a step as a share of the highest: a linear rise, then a fall to zero."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))

    def _held_out(self, model: GatedModel, valid: Data, lost: Callable[[Outcome], float] | None) -> dict[str, float]:
        model.module.eval()
        outcome = measure(model, valid)
        row = {f"valid_{name}": float(values.mean()) for name, values in outcome._asdict().items()}
        row |= {"lost": lost(outcome)} if lost else {}
        if (gates := model.learned_gates()) is not None:
            row |= zip(map("gate_{}".format, model.grid), gates.tolist(), strict=True)
        return row


def parameter_groups(optimisers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Return the groups of parameters of all optimisers, as one list."""
    return [group for optimiser in optimisers for group in optimiser.param_groups]


def _state(model: GatedModel, optimisers: Sequence[Optimizer], device: torch.device) -> dict[str, Any]:
    """Return the states of the weights, the optimisers, and the random generators that dropout uses."""
    rng = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return {"model": model.module.state_dict(), "optimisers": [each.state_dict() for each in optimisers], "rng": rng}


def _restore(state: Mapping[str, Any], model: GatedModel, optimisers: Sequence[Optimizer], running: Tensor) -> None:
    """Restore model, optimisers, random generators and `running`, the sum of losses since the last evaluation."""
    model.module.load_state_dict(state["model"])
    for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    running.copy_(state["running"])
    torch.set_rng_state(state["rng"][0])
    if running.device.type == "cuda":
        torch.cuda.set_rng_state(state["rng"][1], running.device)
