"""Test the claims of results/claims.yaml on models and examples that nobody has looked at.

`python research/findings.py` trains and measures the models of all studies, which takes hours; the same command goes on
with what is left. `python research/findings.py sort reverse` does two of the studies. Settings hold for all jobs of
sweeps: `launch=joblib`. It prints a table: what is claimed, what was found, and whether the claim holds.

Made docs/findings/claims.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import atan, copysign, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import ArrayLike

from mhaprune.interrupts import handling, interruptible
from mhaprune.lab.reporting.plots import number
from mhaprune.settings.options import construct
from mhaprune.settings.plugins import results_folder
from mhaprune.settings.ranges import Checked
from mhaprune.statistics.intervals import LEAST_RUNS, holm, prediction_interval, student_interval, student_mass
from mhaprune.storage.store import read_table

LEVEL = 0.05
"""The level of the whole page, over all its claims together."""


@dataclass(frozen=True)
class Study(Checked):
    """A sweep over seeds, or draws that a script makes."""

    seeds: str
    """The seeds or draws, `100-109`. None of them may have been looked at."""
    settings: str = ""
    """The settings of all jobs, as on the command line."""
    script: str = ""
    """In place of settings: a script of this folder and its arguments, which takes FOLDER, --first and --draws."""
    looked_at: str = ""
    """The seeds that were looked at, if not those that the file names."""

    @property
    def numbers(self) -> range:
        return _numbers(self.seeds)

    def command(self, folder: Path, settings: Sequence[str]) -> list[str]:
        """Return the command that makes the tables in the folder."""
        if self.script:
            name, *arguments = self.script.split()
            draws = ["--first", str(self.numbers[0]), "--draws", str(len(self.numbers))]
            return [sys.executable, str(Path(__file__).parent / name), str(folder), *draws, *arguments]
        seeds = f"seed={','.join(map(str, self.numbers))}"
        overrides = [*self.settings.split(), seeds, *settings, f"hydra.sweep.dir={folder}"]
        return [sys.executable, "-m", "mhaprune", "-m", *overrides]


@dataclass(frozen=True)
class Claim(Checked):
    """A statement about the mean over models of one number per model, and its test."""

    claim: str
    study: str
    table: str
    value: str
    """A column, or a formula of columns; the number of a model is the mean over its rows."""
    rows: str = ""
    """A condition on the rows of the table; empty for all rows."""
    minus: str = ""
    """A condition on other rows of the table, whose mean is subtracted; empty to subtract nothing."""
    above: float = nan
    """The mean is claimed to be above this number."""
    below: float = nan
    """The mean is claimed to be below this number."""

    @property
    def test(self) -> str:
        if np.isnan(self.below):
            return f"above {self.above:g}"
        return f"below {self.below:g}" if np.isnan(self.above) else f"{self.above:g} to {self.below:g}"

    def per_model(self, table: pd.DataFrame) -> pd.Series:
        """Return the number of each model, by its seed, without models that have none: no row is meant by a condition.
        Raises ValueError for a table that cannot answer."""
        try:
            first, second = (
                (table.query(rows) if rows else table).assign(_value=lambda own: own.eval(self.value))
                for rows in (self.rows, self.minus or self.rows)
            )
        except Exception as error:  # pandas raises many kinds for a formula
            raise ValueError(f"claim “{self.claim}”: {' '.join(str(error).split())[:200]}") from None
        means = [own.groupby("seed")["_value"].mean() for own in (first, second)]
        found = (means[0] - means[1] if self.minus else means[0]).dropna()
        if found.empty:
            raise ValueError(
                f"claim “{self.claim}”: no row of the table {self.table} is meant by its conditions and has a number"
            )
        return found

    def p(self, values_S: pd.Series) -> float:
        """Return the p of the claim: of two one-sided tests the larger one (Schuirmann 1987)."""
        above = 0.0 if np.isnan(self.above) else student_p(values_S, self.above)
        below = 0.0 if np.isnan(self.below) else student_p(-values_S, -self.below)
        return max(above, below)

    def refuted(self, values_S: pd.Series) -> bool:
        """Return whether the interval of the mean lies outside of what is claimed."""
        low, high = student_interval(values_S)
        return bool(high < self.above or low > self.below)


def _numbers(seeds: str) -> range:
    """Return the numbers of `100-109`."""
    first, _, last = seeds.partition("-")
    return range(int(first), int(last or first) + 1)


def student_p(values_S: ArrayLike, bound: float) -> float:
    """Return the one-sided p of the mean over a few seeds against `bound`: small if the mean is above (Student 1908).
    NaN for fewer than `LEAST_RUNS` values. If all values are equal, p is 0 or 1."""
    values_S = np.asarray(values_S, dtype=float)
    n = len(values_S)
    if n < LEAST_RUNS:
        return nan
    above, stderr = float(values_S.mean()) - bound, float(values_S.std(ddof=1)) / sqrt(n)
    if stderr == 0:
        return 0.0 if above > 0 else 1.0
    mass = student_mass(atan(abs(above) / stderr / sqrt(n - 1)), n - 1)
    return (1 - copysign(mass, above)) / 2


def read_claims(path: Path) -> tuple[dict[str, Study], list[Claim]]:
    """Return the studies and claims of a file. Raises ValueError, one line, for a file that does not say everything."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name}: is no YAML ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(content, dict) or sorted(content) != ["claims", "looked_at", "studies"]:
        raise ValueError(f"{path.name}: must have looked_at, studies and claims")
    studies = {name: construct(Study, given, f"studies.{name}") for name, given in content["studies"].items()}
    claims = [construct(Claim, given, f"claims[{i}]") for i, given in enumerate(content["claims"])]
    for name, study in studies.items():
        if bool(study.settings) == bool(study.script):
            raise ValueError(f"studies.{name}: must have settings or a script, and not both")
        if seen := sorted({*study.numbers} & {*_numbers(study.looked_at or str(content["looked_at"]))}):
            raise ValueError(f"studies.{name}.seeds={study.seeds}: seed {seen[0]} was looked at, choose others")
        if len(study.numbers) < LEAST_RUNS:
            raise ValueError(f"studies.{name}.seeds={study.seeds}: must be {LEAST_RUNS} seeds or more")
    for claim in claims:
        if np.isnan(claim.above) and np.isnan(claim.below):
            raise ValueError(f"claim “{claim.claim}”: has no test, must say above, below or both")
        if claim.study not in studies:
            raise ValueError(f"claim “{claim.claim}”: study={claim.study}: must be one of {', '.join(studies)}")
    return studies, claims


def measured(folder: Path, study: Study, settings: Sequence[str]) -> Mapping[str, pd.DataFrame]:
    """Return the tables of the study in the folder, which is done or goes on. Raises ValueError if it fails,
    and KeyboardInterrupt if it was interrupted."""
    # In a session of its own: a second signal, straight from the terminal, would stop it before its jobs have saved.
    sweep = subprocess.Popen(study.command(folder, settings), start_new_session=True)
    with interruptible():
        try:
            code = sweep.wait()
        except KeyboardInterrupt:
            sweep.terminate()
            with handling(lambda number, frame: None):
                sweep.wait()  # its jobs save
            raise
    if code:
        raise ValueError(f"the study in {folder} ended with exit code {code}, the same command goes on with it")
    tables = {path.stem: read_table(path.read_bytes()) for path in folder.glob("*.csv")}
    return {name: table.rename(columns={"draw": "seed"}) if study.script else table for name, table in tables.items()}


def lines(claims: Sequence[Claim], tables: Mapping[str, Mapping[str, pd.DataFrame]]) -> Iterator[str]:
    """Yield a Markdown table of the claims, and how many hold. Raises ValueError for a claim without its table."""
    for claim in claims:
        if claim.table not in tables[claim.study]:
            known = ", ".join(sorted(tables[claim.study]))
            raise ValueError(f"claim “{claim.claim}”: table={claim.table}: must be one of {known}")
    found = [claim.per_model(tables[claim.study][claim.table]) for claim in claims]
    ps = [claim.p(values_S) for claim, values_S in zip(claims, found, strict=True)]
    yield "| claim | models | claimed mean | found mean (95 % interval) | one new model | p | p, Holm | |"
    yield "|---|---|---|---|---|---|---|---|"
    verdicts = []
    for claim, values_S, p, corrected in zip(claims, found, ps, holm(np.array(ps)), strict=True):
        ends, one = student_interval(values_S), prediction_interval(values_S)
        verdicts.append("holds" if corrected < LEVEL else "**fails**" if claim.refuted(values_S) else "undecided")
        models, all_models = len(values_S), tables[claim.study][claim.table]["seed"].nunique()
        counted = models if models == all_models else f"{models} of {all_models}"
        cells = [claim.claim, counted, claim.test, f"{_text(values_S.mean())} ({_text(*ends)})", _text(*one)]
        yield f"| {' | '.join(map(str, [*cells, _p(p), _p(corrected), verdicts[-1]]))} |"
    yield ""
    counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in VERDICTS.items()]
    yield f"Of {len(claims)} claims {', '.join(counts)}, at a level of {LEVEL:g} for all of them together."


VERDICTS = {"holds": "hold", "**fails**": "fail", "undecided": "are not decided"}


def _text(*numbers: float) -> str:
    """Return numbers with three digits or, from 100 on, without decimals; a dash for NaN."""
    return " to ".join(number(each, 2 - sum(abs(each) >= 10**digits for digits in (1, 2))) for each in numbers)


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else number(p, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="studies of the file, default: all; KEY=VALUE")
    claimed = Path(__file__).parents[1] / "results" / "claims.yaml"
    parser.add_argument("--claims", type=Path, default=claimed, help="the file of claims, default: results/claims.yaml")
    place = results_folder() / "findings"
    parser.add_argument("--folder", type=Path, default=place, help=f"where the sweeps are, default: {place}")
    chosen = parser.parse_intermixed_args(arguments)
    settings = [name for name in chosen.names if "=" in name]
    try:
        studies, claims = read_claims(chosen.claims)
        names = [name for name in chosen.names if "=" not in name] or list(studies)
        if unknown := [name for name in names if name not in studies]:
            raise ValueError(f"NAME={unknown[0]}: no such study, allowed are {', '.join(studies)}")
        tables: dict[str, Any] = {n: measured(chosen.folder / n, studies[n], settings) for n in names}
        print("\n".join(lines([claim for claim in claims if claim.study in names], tables)))
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
