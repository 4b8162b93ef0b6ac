"""One call of the attention layer, tensor by tensor, and what dividing by √d_head is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import pandas as pd

from mhaprune.experiments.anatomy import words
from mhaprune.experiments.anatomy.calls import call_in, call_of_other_sizes, place_in_block, scaling_here
from mhaprune.experiments.anatomy.figures import life_of_the_tensors, scaling
from mhaprune.experiments.anatomy.scaling import scaling_table
from mhaprune.experiments.anatomy.schematic import schematic
from mhaprune.experiments.anatomy.walkthrough import (
    LayerCall,
    heads_here_table,
    largest_difference,
    steps_table,
    values_table,
    walk,
)
from mhaprune.experiments.base import Experiment, Findings, Setup
from mhaprune.experiments.examples import check_examples, examples_table, heads_named, show, sources
from mhaprune.heads import HeadGrid, HeadId, HeadMask
from mhaprune.measure import MAX_DIFFERENCE, ProofFailed
from mhaprune.pruning.removal import EquivalenceCheck, proofs
from mhaprune.reporting.plots import Figures
from mhaprune.scorers.scoring import head_columns
from mhaprune.settings.ranges import Ge, Sizes
from mhaprune.studies.study import Study


@dataclass(frozen=True)
class Anatomy(Experiment):
    """How one call of multi-head attention works, in its real numbers: tables `tensors`, `values`,
    `heads_here`, `scaling`, `scaling_here`, `examples` and `training`.

    The call is followed step by step while the model answers an example. It needs no scorer. The run ends with
    `ProofFailed` if the layer, its steps and its separate heads disagree.
    """

    head: str | None = None
    """The head to follow, for example `cross.1.2`; by default the first one that is left in cross-attention."""
    example: Annotated[int, Ge(0)] = 0
    """The example of the report split to answer, counted from 0; an `example` of the run goes first."""
    head_dims: Sizes = (2, 4, 8, 16, 32, 64, 128, 256, 512)
    """The sizes of a head at which scores are compared with and without the division by √d_head."""

    needs_training: ClassVar[bool] = True
    reads_example: ClassVar[bool] = True
    tables: ClassVar[tuple[str, ...]] = (
        "tensors",
        "values",
        "heads_here",
        "scaling",
        "scaling_here",
        "examples",
        "training",
    )
    figures: ClassVar[Figures] = (schematic, life_of_the_tensors, scaling)
    say = staticmethod(words.say)

    def check(self, setup: Setup) -> None:
        self._followed(setup.grid)
        if setup.example is None:
            check_examples("example", (self.example,), setup.trained.task)

    def __call__(self, study: Study) -> Findings:
        subject, report = study.trained.network, study.trained.splits.report
        followed = self._followed(subject.grid)
        [shown] = [show(subject, study.trained.task, *pair) for pair in sources(study.trained, (self.example,))]
        call, other = call_in(subject, followed, shown.batch, report), call_of_other_sizes(subject)
        steps, place = walk(call), place_in_block(subject, followed)
        equivalence = EquivalenceCheck(subject, report)
        equivalence.prove(HeadMask(subject.grid).without(followed))
        tensors = [steps_table(str(followed.block), steps), steps_table("a layer with sizes of its own", walk(other))]
        tables = {
            "tensors": pd.concat(tensors),
            "values": values_table(steps, place).assign(**head_columns(followed), place=place),
            "heads_here": heads_here_table(steps, [head.head for head in subject.grid if head.block == followed.block]),
            "scaling": scaling_table(self.head_dims),
            "scaling_here": scaling_here(subject, study.trained.task, call, followed, shown.batch),
            "examples": examples_table([shown], study.trained.splits.train),
            **study.training_table,
        }
        proved = {"max_difference_masked_removed": equivalence.worst}
        proved |= {"max_difference_wide_independent": proved_equal(call, other)}
        return Findings(tables, proved | proofs(subject, report))

    def _followed(self, grid: HeadGrid) -> HeadId:
        """Raises ValueError for a head that is not there and for a layer of several heads."""
        if self.head is None:
            if not len(grid):
                raise ValueError("model_file: has no heads left to follow, anatomy needs one")
            return min(grid, key=lambda head: (head.site != "cross", grid.index(head)))
        try:
            found = heads_named(self.head, grid)
        except ValueError as error:
            raise ValueError(f"experiment.{str(error).replace('heads=', 'head=', 1)}") from None
        if len(found) > 1:
            raise ValueError(f"experiment.head={self.head}: names a layer, must name one head such as {found[0]}")
        return found[0]


def proved_equal(*calls: LayerCall) -> float:
    """The largest difference between a layer's output and that of its heads one by one; raises `ProofFailed`."""
    difference = float(np.max([largest_difference(call) for call in calls]))
    if not difference <= MAX_DIFFERENCE:
        raise ProofFailed(
            f"a layer and its heads one by one differ by {difference:.3g}, allowed is {MAX_DIFFERENCE:g} in float64"
        )
    return difference
