"""The heads of any model: score, choose, remove, time, report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from torch import nn

from mhaprune.api.budget import Budget, Number, Unit
from mhaprune.api.choosing import By, choose
from mhaprune.api.parsing import (
    mask_of,
    named_scorers,
    prove_removal,
    two_examples,
)
from mhaprune.api.promise import fastest_within
from mhaprune.api.recovering import Fit, Recoveries, Steps, recovered
from mhaprune.api.scored_heads import Promised, ScoredHeads
from mhaprune.api.timing import speed_table
from mhaprune.api.to_lab import lab
from mhaprune.data import SPLITS
from mhaprune.heads import HeadMask
from mhaprune.hooks.blocks import AttentionBlock, Block
from mhaprune.hooks.eval_mode import eager
from mhaprune.losses import Judge, name_of
from mhaprune.measure.accuracy import accuracy_columns, by_kind, worst_columns
from mhaprune.measure.outcomes import measure
from mhaprune.progress import shown, track
from mhaprune.proofs.block_by_block import gross_difference
from mhaprune.pruning.plans import removed_names
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.saving.folders import tell
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.profiles import profile
from mhaprune.scorers.scoring import heads_table, kinds_table
from mhaprune.settings.ranges import Ge, Gt, Within, checked
from mhaprune.statistics.intervals import skewed_ends
from mhaprune.subject import Outcome
from mhaprune.subjects.pairs import paired
from mhaprune.tables import ALL_KINDS, KIND, MOMENTS, USUAL, told
from mhaprune.wrapping.build import proved_again, understand, with_window
from mhaprune.wrapping.served import Runtime
from mhaprune.wrapping.wrapped_model import WrappedModel, check_runtime

log = logging.getLogger(__name__)


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
    corrupt: Any = None,
    quality: Judge | None = None,
    blocks: Sequence[AttentionBlock | Block] | None = None,
    units: Sequence[Literal["head", "neuron"]] = ("head",),
    call: Callable[[nn.Module, Any], Any] | None = None,
    seed: Annotated[int, Within(0, 2**32 - 1)] = 0,
    prove: Literal["blocks", "whole", "none"] = "blocks",
    workers: Annotated[int, Ge(0)] = 0,
    cache: str | Path | None = None,
) -> Heads:
    """Find the heads of a model, and prove that they can be gated and removed. The model itself does not change.

    `loss` takes the model's output and a batch, and returns one number per example (see `mhaprune.losses`); `quality`
    does too, and higher is better. Each split is a list of batches, or a DataLoader: heads are scored on `score`,
    choices are made on `choose`, numbers are reported on `report`. Or a split is a dict of kinds, `{"news": batches,
    "code": batches}`: then numbers are those of the kind that loses most, `within=` holds for every kind, and a refit
    is one that serves kinds which it has not read. A refit and fine-tuning use `train`, or `score`.
    `shift` has batches of other kinds, by name; `heads.report` measures the smaller models on them too. `corrupt` has a
    counterpart of the same shape for every example of `score`, in which the thing asked about is missing, for the
    scores `patching` and `attribution_patching`.

    Batches are dicts, tuples or tensors with a row per example. A tuple is (inputs ..., target), as torch loaders make
    it. The model is called as `model(**batch)`, `model(*inputs)` or `model(batch)`, and never with the target.
    `call(model, batch)` replaces this. No pass has more examples than your largest batch.

    `prove="blocks"` compares removing and masking for one attention layer after the other, in float64; "whole" does so
    for a copy of the model; "none" proves nothing now. A removal is always proved.

    `workers` is a number of Ray processes, here or on the cluster of `RAY_ADDRESS`, each with a copy of the model; they
    share the masks, and the scores are the same in every bit. `cache` is a folder that keeps the results of every batch
    that took a second or more: if a scoring is killed, the same call goes on from there.

    `units` are scored and removed: heads, or `("head", "neuron")` for the hidden neurons of feed-forward layers too.
    `blocks` names the attention layers by hand. Raises `Unsupported` for a model that cannot be understood.

    >>> heads = mhaprune.wrap(model, losses.classification, score=batches, choose=batches, report=batches)
    >>> heads
    8 heads in 2 blocks, all with an effect, all removable
    """
    splits = {"score": score, "choose": choose, "report": report, "train": train}
    if taken := [name for name in shift or () if name in (*SPLITS, USUAL)]:
        raise ValueError(f"shift={taken[0]}: is the name of a split, {', '.join((*SPLITS, USUAL))} are taken")
    splits |= shift or {}
    if corrupt is not None:
        splits["score"] = paired(score, corrupt)
    found = understand(
        model,
        loss,
        splits,
        quality=quality,
        blocks=blocks,
        call=call,
        seed=seed,
        prove=prove,
        workers=workers,
        cache=cache,
        units=units,
    )
    return Heads(**vars(found))


@dataclass(frozen=True, repr=False, eq=False)
class Heads(ScoredHeads):
    """The attention heads of a model, with methods that score, choose, remove and time them. Made by `wrap`."""

    def _repr_html_(self) -> str | None:
        """Return what `repr` says with a map of the heads, for a notebook. Hollow squares are heads without effect."""
        try:
            page: str = lab("cli.pages").small_page(self)
        except ModuleNotFoundError:
            return None  # then the notebook shows `repr`
        return page

    @checked
    @shown()
    def score(self, *scorers: str | Scorer) -> pd.DataFrame:
        """Return the importance of every head by each scorer, on the *score* split, as a tidy table.

        One row per scorer and head: `score` with its 95 % interval, empty if there are too few examples; `rank` (1 is
        the most important), and the cost. If `wrap` was given kinds of examples, rows for each `kind` follow. A scorer
        is a name as in `scorer=[...]` of the command line, or an object. Raises ValueError for a scorer that does not
        fit the model.

        >>> heads.score("ablation", "gate_output").groupby("scorer")["head"].count().to_dict()
        {'ablation': 8, 'gate_output': 8}
        """
        self.check_unchanged()
        if (window := self.subject.window) is not None and int(self.splits.score.lengths().max()) <= sum(window):
            log.warning(
                "score: no text is longer than the window, %d tokens, so closing a head changes nothing", sum(window)
            )
        chosen = named_scorers(self.subject, scorers or ("ablation",))
        table = heads_table(self.scoring, chosen)
        if len(of_kinds := kinds_table(self.scoring, chosen)):
            table = pd.concat([table.assign(**{KIND: ALL_KINDS}), of_kinds], ignore_index=True)
        table["score_low"], table["score_high"] = skewed_ends(table[MOMENTS].to_numpy(dtype=float).T)
        return table

    @checked
    @shown()
    def profile(self, scorer: str | Scorer = "attribution") -> pd.DataFrame:
        """Return what every head does for each kind of examples that `wrap` was given: see `scorers.profiles`.

        >>> sorted(heads_by_kind.profile()["kind"].unique())
        ['long', 'short']
        """
        return profile(self.scoring, named_scorers(self.subject, (scorer,)))

    @checked
    def units(self, unit: Unit) -> Heads:
        """Return these heads as sets that are closed and removed together, with the same methods.

        A "group" is the heads that share keys and values, a "block" an attention layer. A set has the name of its first
        head. If a pass calls a layer several times, a "call" is a head in one of these calls, `layer.0.3@2`, which can
        be scored and closed; a removal is from all calls. Raises ValueError for groups of unequal size.

        >>> heads.units("block").mask(keep=1).kept
        (HeadId(site='attention', layer=1, head=0),)
        """
        subject = self.subject.grouped(unit)
        if subject is self.subject:
            return self
        if (found := vars(self).get(f"_{unit}")) is None:  # kept, so that scores are computed only once
            found = vars(self)[f"_{unit}"] = replace(self, subject=subject)
            vars(found)["promised"] = Promised(self.promised.rows, self.promised.curves)
        return found

    @checked
    @shown()
    def streaming(self, sink: Annotated[int, Ge(0)] = 4, recent: Annotated[int, Ge(1)] = 16) -> Heads:
        """Return these heads with another way to be closed, for language models: a closed head still sees the first
        `sink` tokens and the last `recent`, itself among them.

        So `ablation`, `taylor` and `fisher` say what is lost without the other tokens, and the cache of a pruned model
        has them for other heads only. Heads with the same keys stream together. Raises `Unsupported` for no decoder.

        >>> len(heads_of_llama.units("group").streaming(sink=1, recent=3).mask(cache_bytes=0.5, context=100).kept)
        1
        """
        return with_window(self, sink, recent)

    @checked
    @shown()
    def mask(
        self, keep: Number | Budget = None, by: By = None, schedule: str | Schedule | None = None, **budget: Any
    ) -> HeadMask:
        """Return a mask that keeps `keep` heads, a share (0.5, by default) or a number (72). The model is not changed.

        The heads with the lowest scores are removed. `by` names a score, by default `ablation` and with neurons
        `surgeon`, or holds your own (see `api.parsing.scores_of`). `schedule` says how heads are chosen by it, for
        example `"iterative"`; by default all at once. A schedule that uses no scores may stand in place of a score:
        "greedy", or "greedy_refit" for a model that will be refitted. `budget` are other fields of `mhaprune.Budget`.

        >>> len(heads.mask(keep=0.25, by="gate_output").removed)
        6
        """
        self.check_unchanged()
        given = Budget.given(keep, budget)
        return choose(self._in(given.runtime), [given], by, schedule)[0]

    @checked
    @shown()
    def masks(
        self,
        keep: Sequence[float | int] | None = None,
        by: By = None,
        schedule: str | Schedule | None = None,
        **budget: Any,
    ) -> list[HeadMask]:
        """Return a mask for each of several sizes, chosen in one call of the schedule, see `mask`.

        >>> [len(mask.kept) for mask in heads.masks([0.75, 2], even=True)]
        [6, 2]
        """
        self.check_unchanged()
        given = [Budget.given(size, budget) for size in ([None] if keep is None else keep)]
        return choose(self._in(given[0].runtime if given else None), given, by, schedule)

    @checked
    def prune(
        self,
        keep: Number | Budget = None,
        by: By = None,
        refit: Fit = False,
        fine_tune: Steps = 0,
        mask: Any = None,
        within: Annotated[float, Ge(0)] | None = None,
        copy: bool = True,
        runtime: Runtime | None = None,
        distil: Any = None,
        minutes: Annotated[float, Gt(0)] | None = None,
        **how: Any,
    ) -> nn.Module:
        """Return a smaller and faster copy of the model that has only the heads that the method `mask` keeps, see there
        for `how`; or those of a `mask` of your own (see `api.parsing.mask_of`).

        The copy is an ordinary module of the model's own class, so users can train it. Before any refit or training it
        is proved equal to the model with the other heads masked.

        With `refit`, W_O of each attention and W_2 of each feed-forward are fitted so that the copy computes what the
        dense model does; `{"examples": 5600}` reads more than 1024 examples. `fine_tune` is a number of training steps:
        AdamW lowers the loss. Or it holds settings, such as `{"steps": 300, "learning_rate": 1e-4, "distillation":
        0.5}`; with this one, half of the objective is the distance from the dense model's answers. Both use the *train*
        split, or *score* if there is none. `distil` has batches without labels, other than those of *choose* and
        *report*, and the copy learns for some `minutes` (10) to say on them what the dense model says. Of about ten
        measurements on *choose* the best is kept, but with `within=`, which tests there, the last; `heads.trainings`
        has all. With `wrap(..., cache=folder)` a training that was killed goes on.

        `faster=1.5` asks for a speed (see `Budget`), `within=0.01` for the fastest model that loses at most so much of
        the quality on *choose*, at 95 % confidence, after a refit or training. Both are measured in a `runtime`:
        "torch", "onnxruntime" or "onnxruntime-int8" (see `mhaprune.export`). With `copy=False` the smaller model
        takes over weights of yours, so memory holds one; a refit copies it once, a training more often. Raises
        ValueError for heads that cannot be removed, and for what cannot be met.

        >>> small = heads.prune(keep=0.5, by="gate_output", refit=True)
        >>> type(small) is type(model), [layer.num_heads for layer in small.attention] != [4, 4]
        (True, True)
        >>> [layer.num_heads for layer in heads.prune(mask={1: [0, 3]}).attention]
        [4, 2]
        >>> [layer.num_heads for layer in heads.prune(even={1: 3}).attention]
        [4, 3]
        """
        if runtime is not None and within is None:
            how |= {"runtime": runtime}
        chosen = {name: value for name, value in {"keep": keep, "by": by, **how}.items() if value is not None}
        if mask is not None and chosen:
            raise ValueError(
                f"{next(iter(chosen))}: is for a choice of heads, which mask= makes; leave one of them out"
            )
        after = Recoveries(refit, fine_tune, distil, minutes, tested=within is not None)
        if within is not None:
            if keep is not None or mask is not None or {*how} - {"over"}:
                raise ValueError(f"within={within:g}: says how many heads stay, leave keep=, mask= and budgets out")
            timed = self._in(runtime)
            model = fastest_within(
                timed, within, partial(timed.masks, by=by, **how), lambda mask: timed._without(mask, after, copy)
            ).model
        elif mask is None:
            model = self._without(self.mask(keep, by, **how), after, copy).model
        else:
            model = self.without(mask, refit, fine_tune, copy, distil, minutes).model
        return self.handed_out(model)

    @contextmanager
    def closed(self, mask: Any) -> Iterator[nn.Module]:
        """Yield your model with the heads of a mask closed in every call; a copy if its attention is of torch.nn, or
        the weights of its layers are parameters or handed to functions.

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
    def evaluate(self, *masks: Any, runtime: Runtime = "torch") -> pd.DataFrame:
        """Return loss and quality on *report*, with 95 % intervals: a row for the whole model, then one for each mask.
        If `wrap` was given kinds of examples, each has a row for every `kind`, and `worst` is True where the quality
        drops most. In another `runtime` than torch the heads are removed, and that runtime computes the model.

        >>> heads.evaluate({0: [0]}, heads.mask(keep=2))["heads_kept"].tolist()
        [8, 7, 2]
        """
        self.check_unchanged()
        two_examples(self.splits, "report")
        rows = []
        for mask in track([HeadMask(self.grid), *(mask_of(mask, self.grid) for mask in masks)], "masks"):
            if (mask, runtime) not in self._measured:
                if runtime == "torch":
                    outcome = measure(self.subject, self.splits.report, mask.gates(self.subject.device))
                else:
                    smaller = self._in(runtime).subject.without(mask, shared=True)
                    outcome = measure(smaller.in_runtime(), self.splits.report)
                self._measured[mask, runtime] = outcome
            outcome, report = self._measured[mask, runtime], self.splits.report
            dense = self._measured[HeadMask(self.grid), runtime]
            worst = worst_columns(outcome, dense, report).get(KIND)
            for kind, part in by_kind(outcome, report).items():
                about = {"heads_kept": len(mask.kept), **({KIND: kind, "worst": kind == worst} if kind else {})}
                rows.append({**about, **accuracy_columns(part), "removed": removed_names(mask)})
        return told(pd.DataFrame(rows), quality=self.quality_name, loss=name_of(self.subject.loss))

    @checked
    def cache_bytes(
        self, mask: Any = None, batch_size: Annotated[int, Ge(1)] = 1, length: Annotated[int, Ge(1)] = 1
    ) -> int:
        """Return the bytes of keys and values of a batch, without the heads of a mask; 0 if the model cannot generate.

        >>> heads.cache_bytes()
        0
        """
        subject = self.subject if mask is None else self.subject.without(mask_of(mask, self.grid), shared=True)
        return subject.cache_bytes(batch_size, length)

    @checked
    @shown()
    def without(
        self,
        mask: Any,
        refit: Fit = False,
        fine_tune: Steps = 0,
        copy: bool = True,
        distil: Any = None,
        minutes: Annotated[float, Gt(0)] | None = None,
    ) -> WrappedModel:
        """Return the model without the heads that `mask` removes, as a subject, see `prune`.

        >>> len(heads.without(heads.mask(keep=3)).grid)
        3
        """
        self.check_unchanged()
        return self._without(mask_of(mask, self.grid), Recoveries(refit, fine_tune, distil, minutes), copy)

    def _without(self, mask: HeadMask, after: Recoveries, copy: bool = True) -> WrappedModel:
        """See `without`; the weights were compared with those that were proved."""
        if (settled := self._settled) is not self:
            return settled._without(HeadMask(settled.grid, mask.removed), after, copy)
        self.check_removable(mask)
        steps = after.on(self)
        prove_removal(self._equivalence, mask)
        smaller = self.subject.without(mask, shared=not copy)
        if copy and self.subject.prove != "none":  # the proof was made with shared weights
            one = self.subject.placed(self.splits.proof[:1])
            apart = partial(gross_difference, self.subject, smaller, one)
            prove_removal(EquivalenceCheck(self.subject, one, apart), mask)
        smaller = recovered(self, smaller, steps)
        tell(self.subject, smaller, mask, [step.done for step in steps])
        return smaller

    @checked
    @shown()
    def report(
        self,
        path: str | Path | None = None,
        by: Sequence[str | Scorer] | None = None,
        budgets: Sequence[float | int] = (1, 2, 4, 0.125, 0.25, 0.375, 0.5, 0.75),
        tolerance: Annotated[float, Within(0, 1)] = 0.01,
        refit: bool = True,
        rounds: Annotated[int, Ge(1)] = 20,
        tokenizer: Any = None,
        runtime: Runtime = "torch",
    ) -> Any:
        """Measure how many heads can be removed, and the cost and the speed-up: `experiment=ablate`, as one page.

        Heads are removed in one shot by each scorer. `budgets` are shares or numbers of heads. `tolerance` is the
        largest loss of quality on the *choose* split. With `refit`, the models of the best scorer are refitted, too.
        With a `tokenizer`, the page also shows the attention of every head in three texts of *report*, to touch. Times
        are those of a `runtime`, see `prune`; quality is that of torch.

        >>> found = heads.report("heads.html", budgets=[0.5], rounds=2)
        >>> found.tables["pruning"]["heads_removed"].unique().tolist()
        [0, 4]
        """

        settings = {"tolerance": tolerance, "latency_rounds": rounds}
        return lab("cli.pages").report(self._in(runtime), path, by, budgets, settings, refit, tokenizer)

    @checked
    @shown()
    def speed(
        self,
        keep: float | int | Sequence[float | int] = (0.75, 0.5, 0.25),
        by: By = None,
        batch_sizes: int | Sequence[int] = (1, 8),
        new_tokens: Annotated[int | None, Ge(1)] = None,
        rounds: Annotated[int, Ge(1)] = 20,
        runtime: Runtime = "torch",
    ) -> pd.DataFrame:
        """Measure how much faster the model is with fewer heads (see `mask`), on the first examples of *report*.

        A forward pass is timed; with `new_tokens`, the generation of this number of tokens with a cache, of which
        `cache_bytes` is the size at the end. Returns one row per batch size and model: milliseconds, and the speed-up
        over the dense model (median and quartiles). In every round, all models take turns. The row `dense again` shows
        the noise. A batch is never larger than the split. `runtime` computes all of them, see `prune`.

        >>> heads.speed(keep=0.5, batch_sizes=1, rounds=2)["model"].tolist()
        ['removed', 'dense', 'dense again']
        """
        self.check_removable()
        keep = keep if isinstance(keep, Iterable) else [keep]
        if runtime != "torch" and new_tokens is not None:
            raise ValueError(f"new_tokens={new_tokens}: is generated by torch alone, leave runtime={runtime} out")
        return speed_table(self._in(runtime), lambda: self.masks(keep, by), batch_sizes, rounds, new_tokens)

    @property
    def promises(self) -> pd.DataFrame:
        """The budgets `faster=`, `ms=` and `within=`: the promise, and what was measured at the end."""
        return pd.DataFrame(self.promised.rows)

    @property
    def trainings(self) -> pd.DataFrame:
        """The trainings of `distil=` and `fine_tune=`, a row for each measurement on *choose*: step, seconds, loss and
        quality; with `distil=` also how much is `lost` of the dense model's quality, on the kind that loses most."""
        return pd.concat(self.promised.curves, ignore_index=True) if self.promised.curves else pd.DataFrame()

    def _in(self, runtime: Runtime | None) -> Heads:
        """Return the heads whose model this runtime computes where it is timed."""
        if runtime in (None, self.subject.runtime):
            return self
        if (found := vars(self).get(f"_{runtime}")) is None:
            check_runtime(self.subject, self.splits.proof)
            found = vars(self)[f"_{runtime}"] = replace(self, subject=self.subject.changed(runtime=runtime))
            vars(found).update(scoring=self.scoring, promised=self.promised)
        return found

    @cached_property
    def _equivalence(self) -> EquivalenceCheck:
        known = None if self.proof is None else self.proof.of(self.subject)
        return EquivalenceCheck(self.subject, self.splits.proof, known)

    @cached_property
    def _measured(self) -> dict[tuple[HeadMask, str], Outcome]:
        """Outcomes that `evaluate` has measured."""
        return {}

    @cached_property
    def _settled(self) -> Heads:
        """These heads after the proofs that `prove="none"` has put off."""
        put_off = self.subject.prove == "none" and self.subject.single is None
        if not put_off:
            return self
        settled = proved_again(self, self.subject.changed(prove="blocks"))
        vars(settled)["promised"] = self.promised
        return settled
