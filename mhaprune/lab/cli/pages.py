"""The pages that `Heads` of the core writes by the lab: a line for a notebook, and the report that experiments write.

They stand beside the command line, because both put experiments to work."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.api.choosing import sparing, usual_scores
from mhaprune.api.parsing import named_scorers, two_examples
from mhaprune.api.wrap import Heads
from mhaprune.heads import is_share
from mhaprune.inputs import Study
from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.experiments.examples import close_each, text_tables
from mhaprune.lab.reporting.head_map import SmallMap, thumbnail
from mhaprune.lab.reporting.sentences import Aside, as_fast, quality_of, right
from mhaprune.lab.runs.clock import timed
from mhaprune.lab.runs.results import Results, present
from mhaprune.lab.runs.run import MODEL, SHOW
from mhaprune.lab.sources.pretrained import tokens_of
from mhaprune.measure.accuracy import worst_columns
from mhaprune.measure.outcomes import measure
from mhaprune.measure.times import clock_for, in_turn, speed_columns
from mhaprune.progress import doing
from mhaprune.recoveries.refit import Refit
from mhaprune.saving.model_card import LOST
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.base import Scorer
from mhaprune.settings.refusals import one_line
from mhaprune.storage.store import write_bytes
from mhaprune.tables import DENSE, DENSE_AGAIN, ENDS, QUALITY

log = logging.getLogger(__name__)


def small_page(heads: Heads) -> str:
    """Return what `repr` says with a map of the heads. Hollow squares are heads without effect."""
    idle = heads.subject.without_effect
    rows = [["0" if head in idle else "1" for head in heads.grid if head.block == block] for block in heads.grid.blocks]
    small = thumbnail(SmallMap(repr(heads), ["".join(row) for row in rows]), 14)
    names = "".join(f"<div>{escape(str(block))}</div>" for block in heads.grid.blocks)
    side = '<div style="display:flex;gap:.7em;align-items:center;line-height:14px;font-size:11px;text-align:right">'
    return f"<p>{escape(repr(heads))}</p>{side}<div>{names}</div>{small}</div>"


TEXTS = 3
"""Largest number of texts whose attention a page shows."""
TOUCH = "attention to touch"
"""A step that only a page of one's own model has."""


def report(
    heads: Heads,
    path: str | Path | None,
    by: Sequence[str | Scorer] | None,
    budgets: Sequence[float | int],
    settings: Mapping[str, Any],
    refit: bool,
    tokenizer: Any,
) -> Results:
    """Run `experiment=ablate` with these settings on the heads, see `Heads.report`."""
    experiment = Ablate(**settings)
    heads.check_unchanged()
    heads.check_removable()
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise ValueError(f"path={path}: must be a file in a folder that exists")
    for name in ("score", "choose", "report"):
        two_examples(heads.splits, name)
    by = usual_scores(heads) if by is None else by
    if not by:
        raise ValueError("by=[]: must name one scorer or more")
    texts = heads.splits.report[:TEXTS]
    if tokenizer is not None:
        tokens_of(tokenizer, texts[:1].as_given())
    experiment = replace(experiment, budgets=_allowed(heads, budgets))
    study = replace(
        Study.of(heads),
        scorers=named_scorers(heads.subject, by),
        schedules={"one_shot": sparing(heads, OneShot())},
        recoveries={"refit": Refit()} if refit else {},
    )
    title = f"The {heads.subject.counted} of {type(heads.subject.model).__name__}"
    title += ", each counted as one head" if heads.subject.single is not None else ""
    steps = [step for step in experiment.steps if step != MODEL]
    with timed(title, [*steps[:-1], *([TOUCH] if tokenizer is not None else []), SHOW]):
        findings = experiment(study)
        if tokenizer is not None:
            study = replace(study, tokens=lambda batch: tokens_of(tokenizer, batch.as_given()))
            with doing(TOUCH):
                findings.tables.update(text_tables(study, range(len(texts)), close_each(study.subject, texts)))
        with doing(SHOW):
            yours = sentence_of_pruned(heads, experiment.latency_batch, experiment.latency_rounds)
            results = present(experiment, study, findings, title)
    then = "`heads.prune(mask=...)` removes heads for real, and `mhaprune.save` writes what is left."
    first, sentences = results.first._replace(then=then), list(results.sentences)
    if yours is not None:
        asides = (at for at, each in enumerate(sentences) if isinstance(each, Aside))
        sentences.insert(next(asides, len(sentences)), yours)
    if (window := heads.subject.window) is not None:
        seen = f"the first {window[0]} tokens and the last {window[1]}"
        units = heads.subject.counted
        sentences.insert(1, f"“Removed” {units} stream here: they still see {seen}, and their weights stay.")
        first = first._replace(
            question=f"Which {units} can stream, that is, see only {seen}, and what does that bring?"
        )
    if kinds := heads.splits.report.by_kind():
        sentences.insert(1, f"Numbers are of the kind of examples that loses most, of {', '.join(kinds)}.")
    if refit and heads.splits.alike:
        which = "All other" if "held_out" in findings.tables else "All"
        sentences.append(
            f"{which} numbers are of examples like those that the refitted models were fitted to. On other kinds of"
            " examples they may keep less: `wrap(..., report={name: batches})` measures each kind."
        )
    results = replace(results, first=first, sentences=sentences)
    if path is not None:
        write_bytes(Path(path), results.page({"heads": repr(heads)}).encode())
    return results


def sentence_of_pruned(heads: Heads, examples: int, rounds: int) -> str | None:
    """Return a sentence about the model that the user pruned last; None if nobody holds it any more, or if it cannot be
    measured as it is now."""
    found = heads.promised.pruned and heads.promised.pruned()
    lost = vars(found).get(LOST) if found is not None else None
    if not lost or heads.subject.runtime != "torch":
        return None
    dense, smaller, split = heads.subject, heads.subject.changed(model=found), heads.splits.report
    batch = split.first(examples).converted(dense.device, dense.dtype)
    try:
        calls = {name: partial(dense.predict, batch) for name in (DENSE, DENSE_AGAIN)}
        calls["smaller"] = partial(smaller.predict, batch)
        times = in_turn(calls, rounds, device=dense.device, clock=clock_for(dense.device))
        row = worst_columns(measure(smaller, split), measure(dense, split), split)
    except Exception as error:  # it is the user's, who may have changed or moved it
        log.warning("the model that was pruned last cannot be measured as it is now: %s", one_line(error))
        return None
    speed = {"scorer": DENSE_AGAIN, "timed_examples": len(batch), **speed_columns(times, DENSE, DENSE_AGAIN)}
    words = {"latency": pd.DataFrame([speed | heads.words])}
    low, high = (quality_of(row[f"{QUALITY}{end}"], words) for end in ENDS[1:])
    what, *then = lost[-1].split(", then ")
    return (
        f"Your model, pruned last, {'has lost' if dense.window is None else 'streams'} {what.partition(':')[0]}"
        f"{''.join(f', then {each}' for each in then)}: {right(row[QUALITY], words)} (95 % interval {low} to {high})."
        f" {as_fast(speed_columns(times, DENSE, 'smaller'), words)}"
    )


def _allowed(heads: Heads, budgets: Sequence[float | int]) -> tuple[float | int, ...]:
    """Return the budgets that can be met without the heads that cannot be removed. Raises ValueError for none."""
    total, most = len(heads.grid), len(heads.grid) - sum(heads.must_stay().values())
    allowed = tuple(size for size in budgets if (size * total if is_share(size) else size) <= most)
    if not allowed:
        raise ValueError(f"budgets={[*budgets]}: must be at most {most} heads, the others cannot be removed")
    return allowed
