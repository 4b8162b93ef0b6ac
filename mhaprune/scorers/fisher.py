"""Score: the squared gradient of the gate."""

from dataclasses import dataclass
from typing import ClassVar

from mhaprune.data import Data
from mhaprune.measure.outcomes import gate_gradients
from mhaprune.scorers.base import Scorer, Scores
from mhaprune.subject import Subject


@dataclass(frozen=True)
class Fisher(Scorer):
    """Mean over examples of (∂ℓ/∂ξ_n)², the diagonal of the empirical Fisher information of the gates (Kwon et al.
    2022, section 4.1)."""

    family: ClassVar[str] = "gradient"

    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        return Scores.mean_over_examples(gate_gradients(subject, examples) ** 2, 1, 1)
