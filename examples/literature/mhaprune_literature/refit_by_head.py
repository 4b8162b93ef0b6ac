"""Fit one factor for each head of a pruned model, in closed form, to what the dense model computes.

Dimensions: T = tokens, W = inputs of a map, D = outputs, H = heads, K = head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from mhaprune.inputs import Study
from mhaprune.progress import track
from mhaprune.recoveries.base import HISTORY, Pruned, Recovery, State, pruned_digest
from mhaprune.recoveries.refitting import correct, show
from mhaprune.settings.ranges import Ge
from mhaprune.subject import LastMap

LARGEST = 10.0
"""The largest absolute factor of a head. If a block needs a larger one, it stays as it was (Kwon et al. 2022)."""


@dataclass(frozen=True)
class RefitByHead(Recovery):
    """The mask tuning of Kwon et al. 2022, section 4.3, here with a ridge and with no limit on the layers: like
    `refit`, but only one factor for each head is fitted in place of the whole of W_O."""

    kept: ClassVar[bool] = False

    examples: Annotated[int, Ge(1)] = 1024
    """Number of sources of the *train* split to read. A smaller split is read whole."""
    ridge: Annotated[float, Ge(0)] = 1e-3
    """The penalty on factors other than 1, as a share of the mean square of what the heads write."""

    def starts_from(self, study: Study, pruned: Pruned) -> Any:
        return pruned_digest(pruned)

    @torch.no_grad()
    def __call__(
        self, study: Study, pruned: Pruned, draw: int, state: State | None, save: Callable[[State], None]
    ) -> tuple[Pruned, pd.DataFrame]:
        targets = study.once(("refit", self.examples), lambda: show(study.subject, study.splits.train[: self.examples]))
        model = pruned.copied()
        walk = zip(model.last_maps(targets.batches), targets.streams, strict=True)
        for each, wanted in track(walk, "sublayers", len(targets.streams)):
            if each.heads is not None and len(each.heads):
                pairs = zip(each.parts, wanted, strict=True)
                scale_heads(
                    each, [(read_TW, wanted_TD - stream_TD) for (read_TW, stream_TD), wanted_TD in pairs], self.ridge
                )
        return model, pd.DataFrame(columns=HISTORY)


def scale_heads(last: LastMap, parts: Sequence[tuple[Tensor, Tensor]], ridge: float) -> None:
    """Multiply each head by a factor, in place in W_O: the factors that, with one constant, best make up what the
    output lacks, by least squares over all tokens and outputs.

    Each part holds the inputs of the map (T, W), and what its output lacks (T, D).
    """
    assert last.heads is not None
    by_head_HDK = last.weight[:, last.heads].transpose(0, 1)
    factors, constant = torch.ones_like(last.weight[:1, : len(last.heads)]), torch.zeros_like(last.weight[0, :1])
    lacking = []
    for inputs_TW, missing_TD in parts:
        outputs_TDH = torch.einsum("thk,hdk->tdh", inputs_TW[:, last.heads], by_head_HDK)
        lacking.append((outputs_TDH.flatten(0, 1), missing_TD.reshape(-1, 1)))
    correct(factors, constant, lacking, ridge)
    if float(factors.abs().amax()) <= LARGEST:
        for columns_K, factor in zip(last.heads, factors[0], strict=True):
            last.weight[:, columns_K] *= factor
