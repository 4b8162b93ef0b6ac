"""Find the best subset of heads. The result is exact if all subsets are measured; otherwise it is the best that a
search finds.

Dimensions: M = masks, N = all heads, E = examples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mhaprune.data import Data
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import all_open, measure_masks
from mhaprune.progress import doing
from mhaprune.storage.cache import Remember, code_digests, data_digest
from mhaprune.subject import Subject
from mhaprune.tables import QUALITY

MOST_HEADS = 16
"""The largest number of heads for which all 2^N masks are measured."""
MASKS_AT_ONCE = 256
OBJECTIVES = ("loss", QUALITY)


Removed = tuple[int, ...]
"""The indices on N of the removed heads, ascending."""


@dataclass(frozen=True)
class Oracle:
    """Every subset that was measured, with its mean loss and its mean quality. `exact` is True if all subsets were
    measured."""

    subject: Subject
    outcomes: dict[Removed, tuple[float, float]]
    exact: bool

    def best(self, removed: int, objective: str) -> HeadMask:
        """Return the best mask with this number of removed heads, by mean loss or by mean quality, as `objective` says.
        If two masks are equal in it, the other measure decides."""
        others = [name for name in OBJECTIVES if name != objective]

        def badness(subset: Removed) -> tuple[float, ...]:
            loss, quality = self.outcomes[subset]
            signed = {"loss": loss, QUALITY: -quality}
            return tuple(signed[name] for name in (objective, *others))

        subset = min((subset for subset in self.outcomes if len(subset) == removed), key=badness)
        return HeadMask(self.subject.grid, frozenset(self.subject.grid.heads[n] for n in subset))


def find_best(
    subject: Subject,
    examples: Data,
    budgets: Sequence[int],
    method: Literal["auto", "exact", "beam"] = "auto",
    beam_width: int = 8,
    also: Iterable[HeadMask] = (),
    remember: Remember | None = None,
) -> Oracle:
    """Measure all subsets. With `method` beam, or more than `MOST_HEADS` heads, measure only those that a beam search
    with swaps visits. Return the results.

    The search removes one head after the other from the `beam_width` best subsets so far. Then, for each budget, it
    exchanges a removed head for a kept one as long as this lowers the loss. The masks `also` are measured, too.
    Outcomes are saved during the search. Raises ValueError if `method` is exact and there are more than `MOST_HEADS`
    heads.
    """
    num_heads = len(subject.grid)
    most_heads_for(method, num_heads)
    exact = method == "exact" or (method == "auto" and num_heads <= MOST_HEADS)

    def make(state: dict[str, Any] | None, save: Any) -> dict[str, Any]:
        run = _Runner(subject, examples, state, save)
        if exact:
            places = range(num_heads - 1, -1, -1)
            every = (tuple(n for n in range(num_heads) if number >> places[n] & 1) for number in range(2**num_heads))
            run(every, 2**num_heads)
        else:
            _search(run, num_heads, [budget for budget in budgets if 0 < budget < num_heads], beam_width)
        return run.state()

    what = {
        "oracle": ["exact"] if exact else ["beam", beam_width, sorted(budgets)],
        "chosen_on": data_digest(examples),
        "searched_with": code_digests(__name__, type(subject).__module__),
    }
    content = make(None, None) if remember is None else remember("oracle", what, make)
    run = _Runner(subject, examples, content, None)
    if not exact:
        known = {tuple(sorted(subject.grid.index(head) for head in mask.removed)) for mask in also}
        run(sorted(known), len(known))
    return Oracle(subject, run.outcomes, exact)


def most_heads_for(method: str, num_heads: int) -> None:
    """Raise ValueError if `method` is exact and the model has too many heads to measure all subsets."""
    if method == "exact" and num_heads > MOST_HEADS:
        raise ValueError(
            f"oracle=exact: {num_heads} heads have {2**num_heads} subsets, exact takes up to {MOST_HEADS}"
            " heads, auto and beam any number"
        )


class _Runner:
    """Measures each subset once and saves the outcomes."""

    def __init__(self, subject: Subject, examples: Data, state: dict[str, Any] | None, save: Any) -> None:
        self.subject, self.examples, self.save = subject, examples, save
        self.outcomes: dict[Removed, tuple[float, float]] = {}
        if state is not None:
            for row, values in zip(state["removed"].tolist(), state["outcomes"].tolist(), strict=True):
                self.outcomes[tuple(n for n, gone in enumerate(row) if gone)] = tuple(values)

    def __call__(self, subsets: Iterable[Removed], total: int) -> None:
        new = [subset for subset in subsets if subset not in self.outcomes]
        with doing("subsets", total, done=total - len(new)) as step:
            for start in range(0, len(new), MASKS_AT_ONCE):
                part = new[start : start + MASKS_AT_ONCE]
                gates_MN = all_open(self.subject, len(part))
                for row, subset in enumerate(part):
                    gates_MN[row, list(subset)] = 0.0
                outcome = measure_masks(self.subject, self.examples, gates_MN)
                both = outcome.loss, outcome.quality
                means = zip(*(values.double().mean(dim=1).tolist() for values in both), strict=True)
                self.outcomes |= dict(zip(part, means, strict=True))
                if self.save is not None:
                    self.save(self.state())
                step.done += len(part)

    def state(self) -> dict[str, Any]:
        removed = torch.zeros(len(self.outcomes), len(self.subject.grid), dtype=torch.bool)
        for row, subset in enumerate(self.outcomes):
            removed[row, list(subset)] = True
        return {"removed": removed, "outcomes": torch.tensor(list(self.outcomes.values()), dtype=torch.double)}


def _search(run: _Runner, num_heads: int, budgets: Sequence[int], beam_width: int) -> None:
    def loss(subset: Removed) -> float:
        return run.outcomes[subset][0]

    # Only from the beams: an interrupted search may have measured later subsets.
    beam: list[Removed] = [()]
    run(beam, 1)
    best_of: list[Removed] = [()]
    most = max(budgets, default=0)
    with doing("search", most + len(budgets)) as step:
        for _ in range(most):
            further = {tuple(sorted({*subset, n})) for subset in beam for n in range(num_heads) if n not in subset}
            run(sorted(further), len(further))
            beam = sorted(sorted(further), key=loss)[:beam_width]
            best_of.append(beam[0])
            step.done += 1
        for budget in budgets:
            best = best_of[budget]
            while True:
                kept = [n for n in range(num_heads) if n not in best]
                swaps = sorted(tuple(sorted({*best, n} - {gone})) for gone in best for n in kept)
                run(swaps, len(swaps))
                better = min(swaps, key=loss)
                if loss(better) >= loss(best):
                    break
                best = better
            step.done += 1
