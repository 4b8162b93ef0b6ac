"""The heads of any model: score, choose, remove, time, report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pandas as pd
from torch import nn

from mhaprune.data import SPLITS
from mhaprune.front.given import least_of, mask_of, scores_of
from mhaprune.front.timing import generating, speed_table
from mhaprune.heads import Block, HeadMask
from mhaprune.inputs import Study
from mhaprune.measure.columns import accuracy_columns
from mhaprune.measure.outcomes import ProofFailed, measure
from mhaprune.progress import doing, shown, track
from mhaprune.pruning.plans import choices, plans_of, removed_names
from mhaprune.pruning.removal import EquivalenceCheck
from mhaprune.recoveries.base import Recovery
from mhaprune.recoveries.fine_tune import FineTune
from mhaprune.recoveries.refit import Refit
from mhaprune.schedules.base import Schedule, Stepwise
from mhaprune.schedules.iterative import Iterative
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.scoring import Scoring, heads_table, naming, settings_text
from mhaprune.settings.options import option
from mhaprune.settings.ranges import Ge, Within, checked
from mhaprune.statistics.intervals import skewed_ends
from mhaprune.storage.store import write_bytes
from mhaprune.studies.pretrained import study_of, tokens_of
from mhaprune.tables import MOMENTS, USUAL
from mhaprune.wrapping.block_proof import BlockProof
from mhaprune.wrapping.blocks import AttentionBlock, Unsupported
from mhaprune.wrapping.losses import Judge
from mhaprune.wrapping.replay import eager
from mhaprune.wrapping.saving import make_plain
from mhaprune.wrapping.units import UnitModel, in_units
from mhaprune.wrapping.wrap import ModelWithData, understand, with_removal
from mhaprune.wrapping.wrapped import WrappedModel

if TYPE_CHECKING:
    from mhaprune.experiments.results import Results

By = Any
"""A scorer or a schedule that uses no scores, by name or as an object; or scores. It chooses the heads."""
Number = float | int | None
"""A share or a number; None if it is not given."""
Unit = Literal["head", "group", "block", "call"]
TUNED = ("steps", "learning_rate", "batch_size", "distillation")
Steps = Annotated[int, Ge(0)] | dict[str, Any]
"""A number of training steps, or settings of `FineTune`, those of `TUNED`, by name."""
Every = Annotated[int | None, Ge(1)]
"""The number of removed heads after which the smaller model is scored again. None scores only the dense model."""


@checked
def wrap(
    model: nn.Module,
    loss: Judge,
    *,
    score: Any,
    choose: Any = None,
    report: Any = None,
    train: Any = None,
    shift: dict[str, Any] | None = None,
    quality: Judge | None = None,
    blocks: Sequence[AttentionBlock] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
    seed: Annotated[int, Within(0, 2**32 - 1)] = 0,
    prove: Literal["blocks", "whole", "none"] = "blocks",
    workers: Annotated[int, Ge(0)] = 0,
    cache: str | Path | None = None,
) -> Heads:
    """Find the heads of a model, and prove that they can be gated and removed. The model itself does not change.

    `loss` takes the model's output and a batch, and returns one number per example (see `mhaprune.losses`); `quality`
    does too, and higher is better. Each split is a list of batches, or a DataLoader: heads are scored on `score`,
    choices are made on `choose`, numbers are reported on `report`. A refit and fine-tuning use `train`, or `score`.
    `shift` has batches of other kinds, by name; `heads.report` measures the smaller models on them too.

    Batches are dicts, tuples or tensors with a row per example. A tuple is (inputs ..., target), as torch loaders make
    it. The model is called as `model(**batch)`, `model(*inputs)` or `model(batch)`, and never with the target.
    `call(model, batch)` replaces this. No pass has more examples than your largest batch.

    `prove="blocks"` compares removing and masking for one attention layer after the other, in float64; "whole" does so
    for a copy of the model; "none" proves nothing now. A removal is always proved.

    `workers` is a number of Ray processes, each with a copy of the model, which share the masks. They run here, or on
    the cluster that `RAY_ADDRESS` names. The scores are the same in every bit.

    `cache` is a folder. It keeps the results of every batch that took a second or more. If a scoring is killed, the
    next process that asks the same goes on from there.

    `blocks` names the attention layers by hand, for a model in which they are not found. Raises `Unsupported`, one
    line, for a model that cannot be understood.

    >>> heads = mhaprune.wrap(model, losses.classification, score=batches, choose=batches, report=batches)
    >>> heads
    8 heads in 2 blocks, all with an effect, all removable
    """
    splits = {"score": score, "choose": choose, "report": report, "train": train}
    if taken := [name for name in shift or () if name in (*SPLITS, USUAL)]:
        raise ValueError(f"shift={taken[0]}: is the name of a split, {', '.join((*SPLITS, USUAL))} are taken")
    splits |= shift or {}
    return Heads(**vars(understand(model, loss, splits, quality, blocks, call, seed, prove, workers, cache)))


@dataclass(frozen=True, repr=False, eq=False)
class Heads(ModelWithData):
    """The attention heads of a model, with methods that score, choose, remove and time them. Made by `wrap`."""

    def _repr_html_(self) -> str:
        """Return what `repr` says with a map of the heads, for a notebook. Hollow squares are heads without effect."""
        from mhaprune.reporting.head_map import SmallMap, thumbnail

        idle = self.subject.without_effect
        rows = [
            ["0" if head in idle else "1" for head in self.grid if head.block == block] for block in self.grid.blocks
        ]
        small = thumbnail(SmallMap(repr(self), ["".join(row) for row in rows]), 14)
        names = "".join(f"<div>{escape(str(block))}</div>" for block in self.grid.blocks)
        side = '<div style="display:flex;gap:.7em;align-items:center;line-height:14px;font-size:11px;text-align:right">'
        return f"<p>{escape(repr(self))}</p>{side}<div>{names}</div>{small}</div>"

    @checked
    @shown()
    def score(self, *scorers: str | Scorer) -> pd.DataFrame:
        """Return the importance of every head by each scorer, on the *score* split, as a tidy table.

        One row per scorer and head: `score` with its 95 % interval, which is empty if there are too few examples;
        `rank` (1 is the most important), and the cost. A scorer is a name as in `scorer=[...]` of the command line, or
        an object. Raises ValueError, one line, for a scorer that does not fit the model.

        >>> heads.score("ablation", "gate_output").groupby("scorer")["head"].count().to_dict()
        {'ablation': 8, 'gate_output': 8}
        """
        self.check_unchanged()
        chosen = self._scorers(scorers or ("ablation",))
        table = heads_table(self.scoring, chosen)
        table["score_low"], table["score_high"] = skewed_ends(table[MOMENTS].to_numpy(dtype=float).T)
        return table

    @checked
    def units(self, unit: Unit) -> Heads:
        """Return these heads as sets that are closed and removed together, with the same methods.

        A "group" is the heads that share keys and values: only whole groups make a key-value cache smaller. A "block"
        is an attention layer. A set has the name of its first head. If a pass calls a layer several times, a "call" is
        a head in one of these calls, `layer.0.3@2`: it can be scored and closed, a removal takes a head out of all
        calls. Raises ValueError for groups of unequal size.

        >>> heads.units("block").mask(keep=1).kept
        (HeadId(site='attention', layer=1, head=0),)
        """
        subject = in_units(self.subject, unit)
        # Kept, so that scores are computed only once.
        return self if subject is self.subject else vars(self).setdefault(f"_{unit}", replace(self, subject=subject))

    @checked
    def mask(
        self, keep: Number = None, by: By = "ablation", cache_bytes: Number = None, unit: Unit | None = None, **how: Any
    ) -> HeadMask:
        """Return a mask that keeps `keep` heads, a share (0.5, by default) or a number (72). The model is not changed.

        The heads with the lowest scores are removed. `by` names a score; a search, a schedule that uses no scores, for
        example "greedy", or "greedy_refit" for a model that will be refitted; or it holds your own scores (see
        `front.given.scores_of`). For `unit` and `how` see `masks`.

        `cache_bytes` in place of `keep` keeps as many heads as fit into a key-value cache of this size: a share of the
        dense model's, or bytes for one position of one example, as the method `cache_bytes` returns them.

        >>> len(heads.mask(keep=0.25, by="gate_output").removed)
        6
        """
        if cache_bytes is None:
            return self.masks(None if keep is None else [keep], by, unit=unit, **how)[0]
        if keep is not None or isinstance(how.get("even"), dict):
            raise ValueError(f"cache_bytes={cache_bytes}: says how many heads stay, as keep= or even= does; give one")
        self.check_removable()
        self.masks([], by, unit=unit, **how)  # checks the arguments
        units = self if unit is None else self.units(unit)
        budget, largest, kept = units._cache_budget(cache_bytes), units.subject.largest_in_cache, len(units.grid)
        while True:
            while how.get("even") and units._uneven(kept, how.get("divisible_by", 1)):
                kept -= 1
            mask = self.masks([kept], by, unit=unit, **how)[0]
            if (over := self.cache_bytes(mask) - budget) <= 0:
                return mask
            kept -= max(1, math.ceil(over / largest))

    @checked
    @shown()
    def masks(
        self,
        keep: Sequence[float | int] | None = None,
        by: By = "ablation",
        rescore_every: Every = None,
        unit: Unit | None = None,
        even: bool | dict[Any, Any] = False,
        divisible_by: Annotated[int, Ge(1)] = 1,
    ) -> list[HeadMask]:
        """Return a mask for each of several sizes, all chosen in one call of the schedule.

        With `rescore_every=6` the smaller model is scored again after every six heads. `unit` chooses whole sets of
        heads, see `units`; `keep` then counts these. With `even`, every block keeps the same share of its heads, and a
        number of them that is `divisible_by` the given one. The pruned model is then a plain one of its library, if its
        config holds the width of a head; where heads share keys, this needs `unit="group"` too. In place of `keep`,
        `even` may say how many heads a block keeps, by its number or name; blocks that are not named keep all.

        >>> [len(mask.kept) for mask in heads.masks([0.75, 2], even=True)]
        [6, 2]
        >>> [layer.num_heads for layer in heads.prune(even={1: 3}).attention]
        [4, 3]
        """
        if unit is not None and isinstance(self.subject, UnitModel):
            raise ValueError(f"unit={unit}: these heads are sets of heads already, leave it out")
        self.check_unchanged()
        grouped = self if unit is None else self.units(unit)
        if grouped is not self:
            found = grouped.masks(keep, by, rescore_every, even=even, divisible_by=divisible_by)
            assert isinstance(grouped.subject, UnitModel)
            return [grouped.subject.mask_of_heads(mask) for mask in found]
        by_block = isinstance(even, dict)
        if by_block and keep is not None:
            raise ValueError(f"keep={[*keep]}: even={even} says how many heads stay; leave one of them out")
        least = least_of(even, self.grid, divisible_by) if isinstance(even, dict) else {}
        kept = [sum(least.values())] if by_block else [0.5] if keep is None else keep
        counts = [len(self.grid) - self._kept(each, even is True, 1 if by_block else divisible_by) for each in kept]
        chosen: Any = option(by, {"scorer": Scorer, "schedule": Schedule}) if isinstance(by, str) else by
        if not isinstance(chosen, Scorer | Schedule):
            chosen = scores_of(by, self.grid)
        scorers: dict[str, Scorer] = {}
        schedule: Schedule = OneShot() if rescore_every is None else Iterative(every=rescore_every)
        if isinstance(chosen, Scorer):
            scorers = self._scorers([by if isinstance(by, str) else chosen])
        elif chosen.scoring == "none" and rescore_every is None:
            schedule = chosen
        else:
            raise ValueError(f"by={by}: must be a scorer, or a schedule that uses no scores and then no rescore_every")
        if even is not False:
            if not isinstance(schedule, Stepwise):
                raise ValueError(f"by={by}: with even= it must be a score, or a search that removes head by head")
            schedule = replace(schedule, keep_at_least=least) if by_block else replace(schedule, scope="per_block")
        if schedule.removes:
            self.check_removable()
        schedule = self._sparing(schedule, least)
        made = choices(self.scoring, scorers, schedule, counts, draws=1)
        return [plan.mask for plan in plans_of(made)]

    def _sparing(self, schedule: Schedule, least: Mapping[Block, int]) -> Schedule:
        """Return the schedule so that it keeps the heads that cannot be removed. `least` are numbers to keep by block.
        Raises `Unsupported` for a schedule that cannot."""
        stuck = self.proven.stuck
        if not stuck or self.proven.why_not:
            return schedule
        sizes = dict(zip(self.grid.blocks, self.grid.sizes, strict=True))
        uneven = [block for block in stuck if least.get(block, sizes[block]) < sizes[block]]
        if not isinstance(schedule, Stepwise) or schedule.scope == "per_block" or uneven:
            block, reason = next(iter(stuck.items()))
            raise Unsupported(
                f"heads of {block} can be gated, not removed: {reason}; a score, or a search head by head, spares them"
            )
        return replace(
            schedule, keep_at_least={block: sizes[block] if block in stuck else least.get(block, 0) for block in sizes}
        )

    def _allowed(self, budgets: Sequence[float | int]) -> tuple[float | int, ...]:
        """Return the budgets that can be met without the heads that cannot be removed. Raises ValueError for none."""
        total, most = len(self.grid), sum(head.block not in self.proven.stuck for head in self.grid)
        allowed = tuple(size for size in budgets if (size * total if isinstance(size, float) else size) <= most)
        if not allowed:
            raise ValueError(f"budgets={[*budgets]}: must be at most {most} heads, the others cannot be removed")
        return allowed

    def _kept(self, keep: float | int, even: bool, divisible_by: int) -> int:
        sizes, total = self.grid.sizes, len(self.grid)
        parts = sizes if even else (total,)
        kept = sum(round(keep * part) for part in parts) if isinstance(keep, float) else keep
        if not 0 <= kept <= total or (isinstance(keep, float) and not 0 <= keep <= 1):
            raise ValueError(f"keep={keep}: must be a share of the heads, 0.0 to 1.0, or a number from 0 to {total}")
        if divisible_by > 1 and not even:
            raise ValueError(f"divisible_by={divisible_by}: needs even=True")
        if even and keep and not kept:
            raise ValueError(f"keep={keep}: leaves no whole number in any block of {max(sizes)}")
        if even and (wrong := self._uneven(kept, divisible_by)):
            left = f"{kept * wrong[0] / total:.3g} of {wrong[0]}"
            which = f" that {divisible_by} divides" if divisible_by > 1 else ""
            raise ValueError(f"keep={keep}: leaves {left} in a block, must be a whole number{which}")
        return kept

    def _uneven(self, kept: int, divisible_by: int) -> list[int]:
        """Return the sizes of the blocks of which no number divided by `divisible_by` stays, if all keep one share."""
        return [size for size in self.grid.sizes if (kept * size / len(self.grid)) % divisible_by]

    def _cache_budget(self, given: float | int) -> float:
        """Return a size of the cache in bytes. Raises ValueError, one line, for one that no removal brings about."""
        if not (whole := self.cache_bytes()):
            raise ValueError(f"cache_bytes={given}: the model cannot generate, so it keeps no keys and values")
        if any(len(set(block.of_kv)) < block.heads for block in self.subject.blocks):
            if self.units("group") is self:
                raise ValueError(f"cache_bytes={given}: all heads of a layer share keys and values, which must stay")
            raise ValueError(f'cache_bytes={given}: heads share keys and values, write unit="group" too')
        least = self.cache_bytes(HeadMask(self.grid, frozenset(self.grid)))
        budget = given * whole if isinstance(given, float) else given
        if not least <= budget <= whole:
            shares = f"{math.ceil(1000 * least / whole) / 1000} to 1.0"
            raise ValueError(f"cache_bytes={given}: must be a share, {shares}, or a number from {least} to {whole}")
        return budget

    @checked
    def prune(
        self,
        keep: Number = None,
        by: By = "ablation",
        refit: bool = False,
        fine_tune: Steps = 0,
        mask: Any = None,
        **how: Any,
    ) -> nn.Module:
        """Return a smaller and faster copy of the model that has only the heads that `mask` keeps, see there for
        `how`; or those of a `mask` of your own (see `front.given.mask_of`).

        The copy is an ordinary module of the model's own class, so users can train it. Before any refit or training it
        is proved equal to the model with the other heads masked.

        With `refit`, W_O of each attention and W_2 of each feed-forward are fitted so that the copy computes what the
        dense model does. `fine_tune` is a number of training steps: AdamW lowers the loss. Or it holds settings, such
        as `{"steps": 300, "learning_rate": 1e-4, "distillation": 0.5}`; with this one, half of the objective is the
        distance from the dense model's answers. All use the *train* split, or *score* if there is none. Raises
        ValueError if heads cannot be removed.

        >>> small = heads.prune(keep=0.5, by="gate_output", refit=True)
        >>> type(small) is type(model), [layer.num_heads for layer in small.attention] != [4, 4]
        (True, True)
        >>> [layer.num_heads for layer in heads.prune(mask={1: [0, 3]}).attention]
        [4, 2]
        """
        if mask is not None and how:
            raise ValueError(f"{next(iter(how))}: chooses heads, which mask= names already; leave one of them out")
        model = self.without(self.mask(keep, by, **how) if mask is None else mask, refit, fine_tune).model
        make_plain(model)
        return model

    @contextmanager
    def closed(self, mask: Any) -> Iterator[nn.Module]:
        """While the context lasts, the heads that a mask removes are closed in every call of the model that this
        yields. It is your own model, unless that has attention of torch.nn.

        >>> with heads.closed(["attention.0.1"]) as gated:
        ...     output = gated(**batches[0])
        """
        subject, passes = self.subject, Counter[str]()
        gates = mask_of(mask, self.grid).gates(subject.device)
        begun = subject.model.register_forward_pre_hook(lambda *_: passes.update(["pass"]))
        try:
            with eager(), subject.gated(1, gates) as calls:
                yield subject.model
        finally:
            begun.remove()
        if passes:
            subject.check_calls(calls, subject.grid.split(gates))

    @checked
    @shown()
    def evaluate(self, *masks: Any) -> pd.DataFrame:
        """Return loss and quality on the *report* split, with 95 % intervals: a row for the whole model, then a row for
        each mask, with its heads closed. Heads need not be removable.

        >>> heads.evaluate({0: [0]}, heads.mask(keep=2))["heads_kept"].tolist()
        [8, 7, 2]
        """
        self.check_unchanged()
        self._two_examples("report")
        rows = []
        for mask in track([HeadMask(self.grid), *(mask_of(mask, self.grid) for mask in masks)], "masks"):
            if mask not in self._measured:
                outcome = measure(self.subject, self.splits.report, mask.gates(self.subject.device))
                self._measured[mask] = accuracy_columns(outcome)
            rows.append({"heads_kept": len(mask.kept), **self._measured[mask], "removed": removed_names(mask)})
        return pd.DataFrame(rows)

    @checked
    def cache_bytes(
        self, mask: Any = None, batch_size: Annotated[int, Ge(1)] = 1, length: Annotated[int, Ge(1)] = 1
    ) -> int:
        """Return the bytes of keys and values that generation keeps for a batch, at this length, without the heads of
        a mask. 0 for a model that cannot generate.

        >>> heads.cache_bytes()
        0
        """
        subject = self.subject if mask is None else self.subject.without(mask_of(mask, self.grid), shared=True)
        return subject.cache_bytes(batch_size, length)

    @checked
    @shown()
    def without(self, mask: Any, refit: bool = False, fine_tune: Steps = 0) -> WrappedModel:
        """Return the model without the heads that `mask` removes, as a subject. Before that, removing is proved equal
        to masking.

        >>> len(heads.without(heads.mask(keep=3)).grid)
        3
        """
        self.check_unchanged()
        mask = mask_of(mask, self.grid)
        if (settled := self._settled) is not self:
            return settled.without(HeadMask(settled.grid, mask.removed), refit, fine_tune)
        self.check_removable(mask)
        recoveries: list[Recovery] = [Refit()] if refit else []
        if fine_tune != 0:
            settings = fine_tune if isinstance(fine_tune, dict) else {"steps": fine_tune}
            if wrong := set(settings) - set(TUNED):
                raise ValueError(f"fine_tune={wrong.pop()}: must be {', '.join(TUNED)}")
            recoveries.append(FineTune(**settings))
        try:
            self._equivalence.prove(mask)
        except ProofFailed:
            raise
        except Exception as error:  # of a model that may be anybody's
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise Unsupported(f"heads of this model can be gated, not removed: {reason}") from error
        smaller = self.subject.without(mask)
        for recovery in recoveries:
            smaller, _ = recovery(self._study, smaller, 0, None, lambda state: None)
        return smaller

    @checked
    @shown()
    def report(
        self,
        path: str | Path | None = None,
        by: Sequence[str | Scorer] = ("ablation", "gate_output", "random"),
        budgets: Sequence[float | int] = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875),
        tolerance: Annotated[float, Within(0, 1)] = 0.01,
        refit: bool = True,
        rounds: Annotated[int, Ge(1)] = 20,
        tokenizer: Any = None,
    ) -> Results:
        """Measure how many heads can be removed, and the cost and the speed-up: `experiment=ablate`, as one page.

        Heads are removed in one shot by each scorer. `budgets` are shares or numbers of heads. `tolerance` is the
        largest loss of quality on the *choose* split. With `refit`, the models of the best scorer are refitted, too.
        With a `tokenizer`, the page also shows the attention of every head in the first text of *report*, to touch.

        >>> found = heads.report("heads.html", budgets=[0.5], rounds=2)
        >>> found.tables["pruning"]["heads_removed"].unique().tolist()
        [0, 4]
        """
        self.check_unchanged()
        self.check_removable()
        if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
            raise ValueError(f"path={path}: must be a file in a folder that exists")
        for name in ("score", "choose", "report"):
            self._two_examples(name)
        if not by:
            raise ValueError("by=[]: must name one scorer or more")
        if tokenizer is not None:
            tokens_of(tokenizer, self.splits.report[:1].as_given())
        from mhaprune.experiments.ablate.study import Ablate
        from mhaprune.experiments.examples import close_each, text_tables
        from mhaprune.experiments.results import present

        experiment = Ablate(budgets=self._allowed(budgets), tolerance=tolerance, latency_rounds=rounds)
        study = replace(
            study_of(self),
            scorers=self._scorers(by),
            schedules={"one_shot": self._sparing(OneShot(), {})},
            recoveries={"refit": Refit()} if refit else {},
        )
        title = f"The {self.subject.counted} of {type(self.subject.model).__name__}"
        title += ", each counted as one head" if isinstance(self.subject, UnitModel) else ""
        with doing(title):
            findings = experiment(study)
            if tokenizer is not None:
                study = replace(study, tokens=lambda batch: tokens_of(tokenizer, batch.as_given()))
                first = self.splits.report[:1]
                findings.tables.update(text_tables(study, [0], close_each(study.subject, first)))
            results = present(experiment, study, findings, title)
        then = "`heads.prune(mask=...)` removes heads for real, and `mhaprune.save` writes what is left."
        results = replace(results, first=results.first._replace(then=then))
        if path is not None:
            write_bytes(Path(path), results.page({"heads": repr(self)}).encode())
        return results

    @checked
    @shown()
    def speed(
        self,
        keep: float | int | Sequence[float | int] = (0.75, 0.5, 0.25),
        by: By = "ablation",
        batch_sizes: int | Sequence[int] = (1, 8),
        new_tokens: Annotated[int | None, Ge(1)] = None,
        rounds: Annotated[int, Ge(1)] = 20,
    ) -> pd.DataFrame:
        """Measure how much faster the model is with fewer heads (see `mask`), on the first examples of *report*.

        A forward pass is timed; with `new_tokens`, the generation of this number of tokens with a cache, of which
        `cache_bytes` is the size at the end. Returns one row per batch size and model: milliseconds, and the speed-up
        over the dense model (median and quartiles). In every round, all models take turns. The row `dense again` shows
        the noise. A batch is never larger than the split.

        >>> heads.speed(keep=0.5, batch_sizes=1, rounds=2)["model"].tolist()
        ['removed', 'dense', 'dense again']
        """
        self.check_removable()
        keep = [keep] if isinstance(keep, int | float) else keep
        sizes = [batch_sizes] if isinstance(batch_sizes, int) else list(batch_sizes)
        if min(sizes, default=0) < 1:
            raise ValueError(f"batch_sizes={min(sizes) if sizes else sizes}: must be 1 or more")
        timed = self.subject if new_tokens is None else generating(self.subject, new_tokens)
        return speed_table(timed, self.masks(keep, by), self.splits.report, sizes, rounds, new_tokens)

    @cached_property
    def scoring(self) -> Scoring:
        """The scores on the *score* split. Each score is computed only once."""
        return Scoring(self.subject, self.splits.score, self.seed)

    @cached_property
    def _equivalence(self) -> EquivalenceCheck:
        known = None if self.proof is None else self.proof.of(self.subject)
        return EquivalenceCheck(self.subject, self.splits.proof, known)

    @cached_property
    def _measured(self) -> dict[HeadMask, dict[str, Any]]:
        """Rows that `evaluate` has measured."""
        return {}

    @cached_property
    def _settled(self) -> Heads:
        """These heads after the proofs of a removal that `prove="none"` has put off."""
        if self.subject.prove != "none" or isinstance(self.subject, UnitModel):
            return self
        subject = self.subject.changed(prove="blocks")
        proof = BlockProof(subject, self.splits.proof).recorded()
        subject, proven = with_removal(subject, proof, self.proven)
        return replace(self, subject=subject, proven=proven)

    def _two_examples(self, name: str) -> None:
        if (count := len(self.splits[name])) < 2:
            raise ValueError(f"{name}: holds {count} example, an interval needs two or more")

    @cached_property
    def _study(self) -> Study:
        return study_of(self)

    def _scorers(self, scorers: Iterable[str | Scorer]) -> dict[str, Scorer]:
        chosen: dict[str, Scorer] = {}
        for scorer in scorers:
            made = option(scorer, {"scorer": Scorer}) if isinstance(scorer, str) else scorer
            name = scorer if isinstance(scorer, str) else type(scorer).__name__
            with naming(name):
                made.check(len(self.grid), gated=self.subject.learned_gates() is not None)
            if chosen.get(name, made) != made:
                name = f"{name} {settings_text(made)}"
            chosen[name] = made
        return chosen
