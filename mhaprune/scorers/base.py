"""The base of scorers.

Dimensions: N = all heads of the subject, R = draws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import is_share
from mhaprune.settings.ranges import Checked
from mhaprune.statistics.intervals import moments
from mhaprune.subject import Subject

TokenValues = Sequence[tuple[Tensor, Tensor]]
"""For each block the values of its heads at every token, (B, H, T), and the tokens that count, (B, T)."""


@dataclass(frozen=True)
class Scores:
    """The importance of every head (higher = more important), and the cost of computing it."""

    values: Tensor
    """The scores, (R, N). R is above 1 only for a control that draws at random."""
    stderr: Tensor | None = None
    """The standard errors (R, N) of scores that are means. They measure the variation between examples, unless the
    docstring of the scorer names another unit."""
    forward_passes: float = 0.0
    """Number of forward passes over the whole split."""
    backward_passes: float = 0.0
    """Number of backward passes over the whole split."""
    skewness: Tensor | None = None
    """(R, N): the skewness of a score that is a mean over examples. The interval of the score needs it (see
    `intervals.skewed_ends`)."""
    examples: Tensor | None = None
    """(E, N): the values of which the score is the mean."""
    tokens: Tensor | None = None
    """(E, N): the number of tokens of each example, if the score is a mean over all tokens."""
    columns: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Further columns of the table of heads: a number for each head, (N,), or one for all."""

    @classmethod
    def mean_over_examples(cls, values_EN: Tensor, forward_passes: float, backward_passes: float = 0.0) -> Scores:
        """Return the mean over examples of these values (E, N), with its standard error and its skewness."""
        if len(values_EN) < 2:
            raise ValueError(f"score split of {len(values_EN)}: a standard error needs 2 or more examples")
        values_EN = values_EN.double()
        _, stderr_N, skewness_N = torch.from_numpy(moments(values_EN.cpu().numpy())).to(values_EN.device)
        mean_N = values_EN.mean(dim=0)
        return cls(mean_N[None], stderr_N[None], forward_passes, backward_passes, skewness_N[None], values_EN)

    @classmethod
    def mean_over_tokens(cls, batches: Iterable[TokenValues], forward_passes: float) -> Scores:
        """Return the mean of the heads' values over all tokens of a split.

        Every token counts the same, so a long example counts more than a short one. The mean is a ratio of two sums
        over examples, and the standard error is computed for such a ratio (Cochran 1977, section 2.11).
        """
        sums, counts = [], []
        for blocks in batches:
            sums.append(
                torch.cat([(values.double() * counted[:, None]).sum(dim=2) for values, counted in blocks], dim=1)
            )
            tokens = [counted.sum(dim=1, keepdim=True).expand(-1, values.shape[1]) for values, counted in blocks]
            counts.append(torch.cat(tokens, dim=1).double())
        return cls._of_sums(torch.cat(sums), torch.cat(counts), forward_passes)

    @classmethod
    def _of_sums(cls, sums_EN: Tensor, counts_EN: Tensor, forward_passes: float) -> Scores:
        mean_N = sums_EN.sum(dim=0) / counts_EN.sum(dim=0)
        residuals_EN = sums_EN - mean_N * counts_EN
        # no heads at all have no deviation, for which `torch.std` warns
        deviation_N = residuals_EN.std(dim=0) if len(mean_N) else mean_N
        stderr_N = deviation_N * len(sums_EN) ** 0.5 / counts_EN.sum(dim=0)
        linear_EN = mean_N + residuals_EN / counts_EN.mean(dim=0)  # their mean is the ratio, up to second order
        return cls(mean_N[None], stderr_N[None], forward_passes, examples=linear_EN, tokens=counts_EN)

    def on(self, rows: Tensor) -> Scores | None:
        """Return the scores on some of the examples; None for a score that is no mean over examples."""
        if self.examples is None:
            return None
        share, rows = len(rows) / len(self.examples), rows.to(self.examples.device)
        passes, back = share * self.forward_passes, share * self.backward_passes
        if self.tokens is None:
            return self.mean_over_examples(self.examples[rows], passes, back)
        sums_EN = (self.examples - self.values) * self.tokens.mean(dim=0) + self.values * self.tokens
        return self._of_sums(sums_EN[rows], self.tokens[rows], passes)


NEEDS_GATES = (
    "needs learned gates, one number per head for all inputs: gate=softmax and a schedule that scores no pruned model,"
    ' or a layer of yours that has them; else leave it out, for example with scorer=[ablation], in Python by="ablation"'
)


@dataclass(frozen=True)
class Scorer(Checked, ABC):
    """A method that scores heads. It sees the model only through the `Subject` protocol, and of the examples only the
    *score* split.

    Facts about a scorer are attributes of its class, so that no other module lists scorers by name. A `Budgeted` scorer
    must know how many heads are kept.

    >>> @dataclass(frozen=True)
    ... class Peak(Scorer):
    ...     '''The largest weight that reads the head.'''
    ...
    ...     reads_examples = False
    ...     power: float = 1.0
    ...     '''The exponent of the largest weight.'''
    ...
    ...     def __call__(self, subject, examples, seed):
    ...         peaks = [weights.abs().amax(dim=(1, 2)) for weights in subject.output_weights().values()]
    ...         return Scores(torch.cat(peaks).detach()[None] ** self.power)
    >>> sorted(heads.score(Peak(power=2.0))["rank"])
    [1, 2, 3, 4, 5, 6, 7, 8]
    """

    family: ClassVar[str] = "other"
    """The kind of the score. Figures put the scorers of one family together."""

    reads_examples: ClassVar[bool] = True
    """True if the score depends on the examples of the split."""
    reads_attention: ClassVar[bool] = False
    """True if the scorer reads attention weights. If False, the model need not compute attention weights."""
    needs_gates: ClassVar[bool] = False
    """True if the scorer works only for a model with learned gates."""
    draws_by_head: ClassVar[bool] = False
    """True if a random number is drawn for each head, in the order of the grid. Then the removal of a head changes the
    scores of the other heads."""
    stored: ClassVar[bool] = False
    """True if the cache keeps the scores, because they take long."""
    signed: ClassVar[bool] = False
    """True if a score below 0 says that the model does better without the head."""
    zero_if_silent: ClassVar[bool] = True
    """True if the score of a head with zero output is 0."""

    @abstractmethod
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores: ...

    @property
    def reads_pairs(self) -> bool:
        """True if the scorer reads a corrupt counterpart of every example."""
        return False

    def check(self, num_heads: int, gated: bool) -> None:
        """Raise ValueError, before anything is trained, if the scorer cannot score a model with this number of heads,
        with learned gates (`gated`) or without."""
        if self.needs_gates and not gated:
            raise ValueError(NEEDS_GATES)


@dataclass(frozen=True)
class Budgeted(Scorer):
    """A scorer that must know how many heads are kept. It runs again for every budget."""

    keep: int | float = 0.5
    """The size of the pruned model: a number of heads (6) or a share of all heads (0.5)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep <= 0 or (is_share(self.keep) and not self.keep <= 1):
            raise ValueError(
                f"keep={self.keep}: a share must be above 0.0 and at most 1.0, a number of heads 1 or more"
            )

    def heads_to_keep(self, num_heads: int) -> int:
        """Return the number of heads to keep. Raises ValueError if it is 0 or more than there are."""
        heads = round(self.keep * num_heads) if is_share(self.keep) else int(self.keep)
        if not 1 <= heads <= num_heads:
            raise ValueError(f"keep={self.keep}: of {num_heads} heads these are {heads}, allowed are 1 to {num_heads}")
        return heads

    def check(self, num_heads: int, gated: bool) -> None:
        super().check(num_heads, gated)
        self.heads_to_keep(num_heads)

    def keeping(self, heads: int) -> Self:
        """Return a copy of this scorer with another number of heads to keep."""
        return replace(self, keep=heads)
