"""Score: the gradient of the loss in the gate."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import gate_gradients, token_gradients
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.settings.ranges import Ge
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Taylor(Scorer):
    """|∂ℓ/∂ξ_n| at open gates, the first-order estimate of an ablation (Michel et al. 2019, equation 2; Molchanov et
    al. 2017).

    If derivatives are summed before the absolute value is taken, positive and negative ones cancel. So the score of a
    head can only fall from level `token` to `example` to `batch`.
    """

    family: ClassVar[str] = "gradient"

    level: Literal["token", "example", "batch"] = "token"
    """The derivatives whose absolute value is taken. `token`: one for each token that the head writes to (the code of
    Michel et al.). `example`: one for each example (their paper). `batch`: the mean over a batch (most
    re-implementations)."""
    batch_size: Annotated[int, Ge(1)] = 32
    """Number of examples of a batch, for level `batch`."""

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        if self.level == "token":
            return Scores.mean_over_examples(token_gradients(subject, examples)[1], 1, 1)
        gradients_EN = gate_gradients(subject, examples)
        if self.level == "example":
            return Scores.mean_over_examples(gradients_EN.abs(), 1, 1)
        batches = gradients_EN.split(self.batch_size)
        means_SN = torch.stack([batch.mean(dim=0).abs() for batch in batches])
        share_S = torch.tensor([len(batch) / len(gradients_EN) for batch in batches], device=means_SN.device).double()
        values_N = share_S @ means_SN
        # Standard error of a weighted mean over batches; of one batch there is none.
        spread_N = (share_S**2 @ (means_SN - values_N) ** 2).sqrt() * (len(batches) / max(1, len(batches) - 1)) ** 0.5
        return Scores(values_N[None], spread_N[None] if len(batches) > 1 else None, 1, 1)
