"""Budgets in time: as many units go as a call needs to be so fast, and the promise is measured again."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mhaprune.api.parsing import two_examples
from mhaprune.api.scored_heads import ScoredHeads
from mhaprune.heads import BlockId, HeadId, HeadMask
from mhaprune.measure.accuracy import choose_columns
from mhaprune.measure.outcomes import measure
from mhaprune.measure.times import device_name
from mhaprune.progress import track
from mhaprune.pruning.plans import Plan
from mhaprune.pruning.pruned import time_removed
from mhaprune.tables import CHOOSE_DROP, CHOOSE_EXAMPLES, CHOOSE_KIND, CHOOSE_MOST, DENSE_AGAIN
from mhaprune.wrapping.wrapped_model import WrappedModel

log = logging.getLogger(__name__)

ROUNDS = 20
"""Number of rounds in which models take turns."""
FEW = 1 / 16
"""The share of the time that all units cost with which a search begins if that time is noise."""
CLOSE = 0.02
"""The share of the time by which a model may miss a promise, before it is measured again."""
TRIES = 8
"""Number of models that are timed to find one that is close."""
SHARES = [n / 10 for n in range(9, 0, -1)]
"""The shares of the time that all units cost which the models of `fastest_within` keep."""
LEAST = 1e-3
"""The smallest share of the dense model's time that all units of one site take together: a time may not be below 0."""


def mask_in_time(
    heads: ScoredHeads,
    asked: Callable[[float], float],
    named: str,
    batch_size: int,
    masks: Callable[[Sequence[float], Tensor], list[HeadMask]],
) -> HeadMask:
    """Return the mask of the model that takes `asked(d)` milliseconds, where d is the dense model's time for a batch.

    `masks(kept, cost)` chooses units until those that stay cost so many milliseconds. The costs are estimates, so the
    model is timed beside the dense one, and more or fewer units go until it is close. Then both are timed once more:
    this is what `heads.promises` says, at the speed that the machine then has. Raises ValueError for a time that no
    removal brings about; `named` is the setting.
    """
    dense, cost = unit_costs(heads, batch_size)
    total, everything = float(cost.sum()), HeadMask(heads.grid)
    stay = heads.must_stay()
    free = torch.tensor(
        [n >= stay[name] for name, size in zip(heads.grid.blocks, heads.grid.sizes, strict=False) for n in range(size)]
    )
    most = float(cost[free].sum())
    wanted = asked(dense)
    if wanted >= dense:
        log.warning("%s: the whole model takes %.3g ms, so nothing is removed", named, dense)
        return everything
    removed, best, mask, share = min(dense - wanted, most), float("inf"), everything, 0.0
    if in_noise(heads, batch_size):  # then nothing says how many units are enough, so begin with few
        removed = min(removed, FEW * most)
    for _ in range(TRIES):
        (tried,) = masks([total - removed], cost)
        dense, taken, *_ = _timed(heads, tried, batch_size)
        share = share or asked(dense) / dense  # the machine may be slower or faster in a minute
        miss = abs(taken / (share * dense) - 1)
        if miss < best:
            best, mask = miss, tried
        if miss <= CLOSE:
            break
        if removed == most and taken > share * dense:
            units = f"{int(free.sum())} {heads.subject.counted}"
            raise ValueError(
                f"{named}: cannot be met, without the {units} that can go the model is {dense / taken:.2f} times as"
                f" fast ({taken:.3g} of {dense:.3g} ms)"
            )
        gained = max(dense - taken, LEAST * dense)
        removed = min(most, removed * min(2.0, max(0.5, (1 - share) * dense / gained)))
    dense, taken, _ = _noted(heads, mask, named, batch_size, share)
    if abs(taken / (share * dense) - 1) > 0.05:
        log.warning("%s: measured again, the model takes %.3g ms, not %.3g", named, taken, share * dense)
    return mask


def _noted(
    heads: ScoredHeads, mask: HeadMask, named: str, batch_size: int, share: float = math.nan
) -> tuple[float, float, float]:
    """Time a model beside the dense one, note it as a promise of this `share` of the dense model's time, and return
    both times and the speed-up."""
    dense, taken, *quartiles = _timed(heads, mask, batch_size)
    row = {
        "promised": named,
        "runtime": heads.subject.runtime,
        "batch_size": len(_batch(heads, batch_size)),
        "promised_ms": share * dense,
        "measured_ms": taken,
    }
    speed = dict(zip(("speedup", "speedup_q1", "speedup_q3"), quartiles, strict=True))
    heads.promised.rows.append(row | {"dense_ms": dense, **speed, "units_kept": len(mask.kept)})
    return dense, taken, quartiles[0]


def fastest_within(
    heads: ScoredHeads,
    within: float,
    masks: Callable[..., list[HeadMask]],
    made: Callable[[HeadMask], WrappedModel],
) -> WrappedModel:
    """Return the fastest model that loses at most `within` of quality on the *choose* split at 95 % confidence, on each
    kind of examples if kinds are told apart.

    `masks` chooses the units that stay for each of several shares; `made` returns the model without the others,
    recovered. Models lose a tenth more of the time that units cost, one after the other, and the first whose one-sided
    interval goes beyond `within` ends the test, so that the confidence is that of all together. Raises ValueError if
    the first already does.
    """
    if heads.subject.window is not None:
        raise ValueError(
            f"within={within:g}: seeks a fast model, and heads that stream read a text no faster; use cache_bytes="
        )
    two_examples(heads.splits, "choose")
    dense, chosen = measure(heads.subject, heads.splits.choose), None
    for mask in track(masks(SHARES, of="time"), "sizes"):
        model = made(mask)
        drop = choose_columns(measure(model.in_runtime(), heads.splits.choose), dense, heads.splits.choose)
        if not drop[CHOOSE_MOST] <= within:
            break
        chosen, kept = model, mask
    on, of = (f" {word} {drop[CHOOSE_KIND]}" if CHOOSE_KIND in drop else "" for word in ("on", "of"))
    if chosen is None and math.isnan(drop[CHOOSE_MOST]):
        raise ValueError(
            f"choose: {drop[CHOOSE_EXAMPLES]} examples{of} are too few to say at 95 % confidence how much of"
            f" {heads.quality_name} is lost, within= needs more"
        )
    if chosen is None:
        raise ValueError(
            f"within={within:g}: not met, with {len(mask.kept)} of {len(heads.grid)} {heads.subject.counted}, the most"
            f" that was tried, {drop[CHOOSE_DROP]:.3g} of {heads.quality_name} is lost{on}, and {drop[CHOOSE_MOST]:.3g}"
            " is not excluded at 95 % confidence"
        )
    dense_ms, taken, speed = _noted(heads, kept, f"within={within:g}", 1)
    if speed <= 1:
        log.warning(
            "within=%g: the model with %d of %d %s takes %.3g ms for one example, the whole model %.3g",
            *(within, len(kept.kept), len(heads.grid), heads.subject.counted, taken, dense_ms),
        )
    return chosen


def unit_costs(heads: ScoredHeads, batch_size: int) -> tuple[float, Tensor]:
    """Return the dense model's time, and the milliseconds that each unit costs, (N,): for each site, the time that the
    model takes less without half of the units of each of its blocks, in equal parts."""
    gone = _half_of_sites(heads)
    ms: dict[str, float] = _unit_times(heads, batch_size)["ms"]
    if noisy := in_noise(heads, batch_size):
        log.warning("half of the units of %s save less time than timing varies", ", ".join(noisy))
    # Of a site whose units must all stay, nothing was timed.
    counts = Counter(head.site for head in heads.grid)
    taken = {site: max(ms["dense"] - ms[site] if gone[site] else 0.0, LEAST * ms["dense"]) for site in gone}
    saved = {site: taken[site] / (len(gone[site]) or counts[site] or 1) for site in gone}
    return ms["dense"], torch.tensor([saved[head.site] for head in heads.grid], dtype=torch.double)


def in_noise(heads: ScoredHeads, batch_size: int) -> list[str]:
    """Return the sites whose units cost less time than timing varies."""
    return sorted(_unit_times(heads, batch_size).get("noisy", ()))


def _half_of_sites(heads: ScoredHeads) -> dict[str, list[HeadId]]:
    names = heads.subject.names
    sites = dict.fromkeys(block.site for block in names)
    return {site: [h for name in names if name.site == site for h in _half(heads, name)] for site in sites}


def _unit_times(heads: ScoredHeads, batch_size: int) -> dict[str, Any]:
    """Return the times of the dense model, and without half of the units of each site; and the sites whose units save
    less than timing varies. Kept in the cache, if there is one, by machine and shapes."""
    subject = heads.subject
    batch, gone = _batch(heads, batch_size), _half_of_sites(heads)

    def make(state: Any, save: Any) -> dict[str, Any]:
        plans = [Plan(site, 0, "", HeadMask(heads.grid).without(*units)) for site, units in gone.items()]
        times = time_removed(subject, plans, batch, ROUNDS).drop_duplicates("scorer").set_index("scorer")
        noisy = [site for site in gone if times["speedup_q1"].get(site, 2.0) <= times["speedup_q3"][DENSE_AGAIN]]
        ms = {str(name): float(value) for name, value in times["latency_ms"].items()}
        return {"ms": ms, "noisy": noisy}

    what = {
        "blocks": [[block.out, block.heads, block.head_dim, block.kind] for block in subject.blocks],
        "batch": [list(x.shape) for x in batch.tensors().values()],
        "machine": [device_name(subject.device), torch.get_num_threads(), str(torch.__version__), str(subject.dtype)],
        "runtime": subject.runtime,
    }
    known = heads.promised.times
    key = repr(what)
    if key not in known:
        known[key] = make(None, None) if subject.cache is None else subject.cache.get("unit_times", what, make)
    return known[key]


def _half(heads: ScoredHeads, name: BlockId) -> list[HeadId]:
    units: list[HeadId] = heads.subject.heads_of(name)
    return units[max(len(units) // 2, heads.must_stay()[name]) :]


def _timed(heads: ScoredHeads, mask: HeadMask, batch_size: int) -> list[float]:
    """Return the milliseconds of the dense model and of the pruned one, and the speed-up with its quartiles."""
    plan = Plan("pruned", 0, "", mask)
    times = time_removed(heads.subject, [plan], _batch(heads, batch_size), ROUNDS).set_index("scorer")
    pruned, dense = times.loc["pruned"], float(times.loc["dense", "latency_ms"])
    return [dense, *(float(pruned[name]) for name in ("latency_ms", "speedup", "speedup_q1", "speedup_q3"))]


def _batch(heads: ScoredHeads, batch_size: int) -> Any:
    """Return as many examples of *score* as are asked for; no more than it has, and than the largest batch."""
    return heads.splits.score.first(heads.splits.score.rows(batch_size)).converted(
        heads.subject.device, heads.subject.dtype
    )
