"""Score: the part of the head's output that the other heads of its block cannot predict."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE, of_equal_norm
from mhaprune.scorers.base import Scorer, Scores, TokenValues
from mhaprune.scorers.prediction import PASSES, Prediction
from mhaprune.settings.ranges import Gt
from mhaprune.subject import Batch, Subject


@dataclass(frozen=True)
class RefitError(Scorer):
    """Mean over tokens of ‖g_n r_n O_n‖²: the squared error that remains in the output of the block if head n is
    removed and W_O is refitted for the other heads. r_n is the part of the head's output that a linear regression on
    the other heads does not predict, g_n is its learned gate, O_n its slice of W_O.

    This is the error of the optimal brain surgeon (Hassibi & Stork 1992) for a whole head. The standard error does not
    include the error of the regression itself.
    """

    family: ClassVar[str] = "reconstruction"

    ridge: Annotated[float, Gt(0)] = 1e-3
    """The penalty on squared coefficients of the regression, as a multiple of the mean variance of an output."""

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        prediction = Prediction.fit(subject, examples, self.ridge)
        weights, gates_N = subject.output_weights(), subject.learned_gates()
        if gates_N is not None:
            gates = subject.grid.split(gates_N)
            weights = {block: gates[block][:, None, None] * weights_HKD for block, weights_HKD in weights.items()}
        weights = {block: of_equal_norm(weights_HKD) for block, weights_HKD in weights.items()}

        def errors(batch: Batch) -> TokenValues:
            missed, valid = prediction.missed(subject.head_outputs(batch)), subject.queries(batch)
            return [((missed[block] @ weights[block]).square().sum(dim=-1), valid[block]) for block in missed]

        return Scores.mean_over_tokens(map(errors, examples.batches(BATCH_SIZE)), forward_passes=PASSES + 1)
