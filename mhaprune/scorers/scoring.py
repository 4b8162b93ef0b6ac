"""Run scorers on a subject and put the scores into tables."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from math import nan
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.heads import HeadId
from mhaprune.progress import doing
from mhaprune.scorers.base import Budgeted, Scorer, Scores
from mhaprune.scorers.stability import stability, unknown
from mhaprune.settings.options import describe
from mhaprune.settings.ranges import Checked
from mhaprune.storage.cache import Remember, code_digests, data_digest
from mhaprune.subject import Subject
from mhaprune.tables import HEAD, KIND


class ScorerResult(NamedTuple):
    """The scores of one scorer, and the seconds that they took."""

    scores: Scores
    seconds: float


class Scoring:
    """The scores of one subject on one split. Each scorer runs once. The cache, if there is one, keeps those that
    are `stored`."""

    def __init__(self, subject: Subject, examples: Data, seed: int, remember: Remember | None = None) -> None:
        self.subject, self.examples, self.seed, self.remember = subject, examples, seed, remember
        self._done: dict[Scorer, ScorerResult] = {}
        self._of_kinds: dict[str, Scoring] = {}

    def __call__(self, name: str, scorer: Scorer) -> ScorerResult:
        """Return the scores of a scorer. Raises ValueError, with the name of the scorer, if the scorer refuses the
        model or if a score is not finite."""
        with naming(name):
            scorer = self._definite(scorer)
            if scorer not in self._done:
                with doing(name):
                    self._done[scorer] = self._scored(scorer)
        return self._done[scorer]

    def of_kind(self, name: str, scorer: Scorer, kind: str, rows: Tensor) -> ScorerResult:
        """Return the scores of a scorer on the examples of one kind, at the positions `rows`."""
        if (own := self(name, scorer).scores.on(rows)) is not None:
            return ScorerResult(own, nan)
        if kind not in self._of_kinds:
            self._of_kinds[kind] = Scoring(self.subject, self.examples[rows], self.seed, self.remember)
        with doing(kind):
            return self._of_kinds[kind](name, scorer)

    def cost(self, scorers: Iterable[Scorer]) -> dict[str, float]:
        """Return the sum of passes and seconds of these scorers. Scorers that were not run count as nothing."""
        done = [self._done[scorer] for scorer in dict.fromkeys(map(self._definite, scorers)) if scorer in self._done]
        return {
            "forward_passes": sum(scored.scores.forward_passes for scored in done),
            "backward_passes": sum(scored.scores.backward_passes for scored in done),
            "seconds": sum(scored.seconds for scored in done),
        }

    def _definite(self, scorer: Scorer) -> Scorer:
        """Turn a share of heads to keep into a number, so that keep=12 and keep=0.5 of 24 heads share one result.
        (keep=1 is one head, keep=1.0 all of them.)"""
        if isinstance(scorer, Budgeted):
            return scorer.keeping(scorer.heads_to_keep(len(self.subject.grid)))
        return scorer

    def _scored(self, scorer: Scorer) -> ScorerResult:
        def make(state: Any, save: Any) -> dict[str, Any]:
            start = time.perf_counter()
            scores = scorer(self.subject, self.examples, self.seed)
            seconds = time.perf_counter() - start
            for draw, n in (~torch.isfinite(scores.values)).nonzero().tolist():
                head, value = self.subject.grid.heads[n], float(scores.values[draw, n])
                raise ValueError(f"gives head {head} the score {value}, which is not finite")
            return {**vars(scores), "seconds": seconds}

        if scorer.stored and self.remember is not None:
            what = {
                "scorer": describe(scorer),
                "seed": self.seed,
                "heads": [str(head) for head in self.subject.grid],
                "scored_on": data_digest(self.examples),
                "scored_with": code_digests(type(scorer).__module__, type(self.subject).__module__),
            }
            content = dict(self.remember("gates", what, make))
        else:
            content = make(None, None)
        seconds = content.pop("seconds")
        return ScorerResult(Scores(**content), seconds)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix a scorer's ValueError with its config key, for example `scorer.taylor.batch_size=0: ...`."""
    try:
        yield
    except ValueError as error:
        about_a_setting = re.match(r"\w+=", str(error))
        raise ValueError(f"scorer.{name}.{error}" if about_a_setting else f"scorer={name}: {error}") from error


def settings_text(plug_in: Checked) -> str:
    """Return the settings of a scorer or schedule as `name=value` pairs, so that tables tell variants apart."""
    return " ".join(f"{field.name}={getattr(plug_in, field.name)}" for field in fields(plug_in))


def head_columns(head: HeadId) -> dict[str, Any]:
    """Return the columns that name a head."""
    return dict(zip(HEAD, (str(head.site), head.layer, head.head), strict=True))


def heads_table(scoring: Scoring, scorers: Mapping[str, Scorer]) -> pd.DataFrame:
    """Return one row per scorer, draw and head. Rank 1 is the most important head. `top_shared` and `examples_needed`
    say how far the most important heads depend on the examples, see `stability`."""
    return _rows(scoring.subject, {name: (scorer, scoring(name, scorer)) for name, scorer in scorers.items()})


def kinds_table(
    scoring: Scoring, scorers: Mapping[str, Scorer], kinds: Mapping[str, Tensor] | None = None
) -> pd.DataFrame:
    """Return rows as `heads_table` for each kind of examples, in the column `kind`, of the scorers that read any.
    `kinds` are positions of examples, by default of those that the user told apart."""
    reading = {name: scorer for name, scorer in scorers.items() if scorer.reads_examples}
    kinds = scoring.examples.by_kind() if kinds is None else kinds
    made = {
        kind: {name: (s, scoring.of_kind(name, s, kind, rows)) for name, s in reading.items()}
        for kind, rows in kinds.items()
    }
    tables = [_rows(scoring.subject, of_kind).assign(**{KIND: kind}) for kind, of_kind in made.items() if of_kind]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _rows(subject: Subject, made: Mapping[str, tuple[Scorer, ScorerResult]]) -> pd.DataFrame:
    parts = []
    for name, (scorer, (scores, seconds)) in made.items():
        stable = unknown() if scores.examples is None else stability(scores.examples)
        for draw, values_N in enumerate(scores.values):
            frame = pd.DataFrame(
                {
                    "scorer": name,
                    "family": scorer.family,
                    "settings": settings_text(scorer),
                    "draw": draw,
                    **pd.DataFrame(map(head_columns, subject.grid)),
                    "score": values_N.tolist(),
                    "stderr": float("nan") if scores.stderr is None else scores.stderr[draw].tolist(),
                    "skewness": float("nan") if scores.skewness is None else scores.skewness[draw].tolist(),
                }
            )
            frame["rank"] = frame["score"].rank(ascending=False, method="first").astype(int)
            cost = {"forward_passes": scores.forward_passes, "backward_passes": scores.backward_passes}
            more = {column: x.tolist() if isinstance(x, Tensor) else x for column, x in scores.columns.items()}
            parts.append(frame.assign(**stable, **more, **cost, seconds=seconds))
    return pd.concat(parts, ignore_index=True)
