"""Score: the squared gradient of the gate plus the squared size of what it scales."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE, gate_gradients, head_norms
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.settings.ranges import Ge
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Knowledge(Scorer):
    """½ · mean over examples of (∂ℓ/∂ξ_n)² + λ · mean over tokens of ‖g_n c_n O_n‖² / D: the *predictive* and the
    *representational* knowledge of a head in K-prune (Park, Choi & Kang 2024).

    g_n is the learned gate, c_n the output of the head, O_n its slice of W_O and D the width of the model. In the paper
    ℓ is the divergence from the dense model. Its derivative is exactly 0 at the dense model, so there the first term
    says nothing; here ℓ is the loss.
    """

    family: ClassVar[str] = "gradient"

    representation: Annotated[float, Ge(0)] = 2.5e-4
    """The factor λ. The default is that of the published script; the paper chooses 0, 0.00025 or 1 for each data
    set."""

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        predictive = Scores.mean_over_examples(gate_gradients(subject, examples) ** 2 / 2, 1, 1)
        widths = {weights.shape[-1] for weights in subject.output_weights().values()}
        gates_N = subject.learned_gates()
        with torch.no_grad():
            squared = (
                [(norms.square(), valid) for norms, valid in head_norms(subject, batch)]
                for batch in examples.batches(BATCH_SIZE)
            )
            sizes = Scores.mean_over_tokens(squared, forward_passes=1).values / max(widths)
        if gates_N is not None:
            sizes = sizes * gates_N.square()
        return Scores(predictive.values + self.representation * sizes, None, 2, 1)
