"""The training of a pretrained model: plain AdamW on the user's own loss."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer

from mhaprune.attention.gates import GateConfig
from mhaprune.hooks.eval_mode import switched_off
from mhaprune.hooks.pytree import of_equal_sizes, precise
from mhaprune.losses import Drift
from mhaprune.subjects.batches import Batches
from mhaprune.training.loop import Descent
from mhaprune.wrapping.wrapped_model import WrappedModel


@dataclass(frozen=True)
class PlainTraining(Descent):
    """AdamW (Loshchilov & Hutter 2019) on the mean loss of the examples, over all weights that require a gradient."""

    fine_tuning_rate: ClassVar[float] = 5e-5
    quality_name: ClassVar[str] = "quality"

    def objective(self, model: WrappedModel, batch: Batches) -> Tensor:
        batch = batch.converted(model.device, model.dtype)
        return model.judge(model.run(model.model, batch.arguments()), batch).loss.mean()

    def distil(self, model: WrappedModel, batch: Batches, teacher: WrappedModel, share: float) -> Tensor:
        """See `Descent.distil`. An output without logits of several classes is compared by the mean squared difference
        of all its numbers, as a share of their mean square. If the loss is a `Drift`, it is that from the teacher. Else
        with a `share` of 1 no labels are read."""
        batch = batch.converted(model.device, model.dtype)
        said, taught = model.run(model.model, batch.arguments()), teacher.predict(batch)
        own: Any = 0.0
        if isinstance(model.loss, Drift):
            given = batch.as_given()
            ours, theirs = (precise(model.loss.represent(each, given)) for each in (said, taught))
            own = 1 - F.cosine_similarity(ours, theirs, dim=-1).mean()
        elif share < 1:
            own = model.judge(said, batch).loss.mean()
        logits = getattr(said, "logits", None)
        if logits is None or logits.dim() not in (2, 3) or logits.shape[-1] == 1:
            ours, theirs = (model.real_outputs(each, batch) for each in of_equal_sizes(said, taught))
            return (1 - share) * own + share * (ours - theirs).square().mean() / theirs.square().mean()
        real: Any = ...
        if said.logits.dim() == 3:
            real = model.real(batch, "", said.logits.shape[1])
        ours, theirs = (each.logits[real].flatten(0, -2).log_softmax(dim=-1) for each in (said, taught))
        return (1 - share) * own + share * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)

    def optimisers(self, model: WrappedModel, gate: GateConfig | None) -> list[Optimizer]:
        weights = [weight for weight in model.model.parameters() if weight.requires_grad]
        optimiser = AdamW(weights, lr=self.learning_rate, weight_decay=self.weight_decay)
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
        return [optimiser]

    @contextmanager
    def while_training(self, model: WrappedModel) -> Iterator[None]:
        """Train within this context. Raises ValueError if all weights of the model are frozen."""
        if not any(weight.requires_grad for weight in model.model.parameters()):
            raise ValueError("recovery=fine_tune: none of the model's weights asks for a gradient, all are frozen")
        with ExitStack() as undo:
            undo.enter_context(switched_off([("use_cache", getattr(model.model, "config", None))]))
            yield


FINE_TUNING = PlainTraining(batch_size=16, weight_decay=0.01, decay="linear")
"""The usual settings for fine-tuning pretrained models (Devlin et al. 2019, appendix A.3)."""
