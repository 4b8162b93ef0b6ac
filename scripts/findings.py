"""Measure findings again, and on models of other seeds: the table of docs/findings/again.md.

`python scripts/findings.py` trains and measures models of seeds 0 to 9, then of 20 to 24. That takes hours; the same
command goes on with what is left. `python scripts/findings.py refit` does one of the findings. Settings hold for all
jobs: `launch=joblib`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from mhaprune.interrupts import interruptible_once
from mhaprune.settings.plugins import results_folder
from mhaprune.statistics.intervals import LEAST_RUNS, geometric_mean, prediction_interval, student_interval

SEEDS = {"claimed": "0,1,2,3,4,5,6,7,8,9", "found": "20,21,22,23,24"}
SCORERS = ("ablation", "taylor_example", "taylor", "gate_output", "refit_error", "gate", "integrated_gradients_all")
Tables = Mapping[str, pd.DataFrame]


class Claim(NamedTuple):
    """What is said of the mean over models, of `per_model` with a row per seed."""

    words: str
    per_model: pd.Series
    is_ratio: bool = False
    """Whether equal factors count equally: the mean is the geometric one."""

    def value(self) -> tuple[float, float, float]:
        """The mean over models and both ends of its 95 % interval."""
        if self.is_ratio:
            return geometric_mean(self.per_model)
        return float(self.per_model.mean()), *student_interval(self.per_model)

    def __str__(self) -> str:
        decimals = 2 if self.is_ratio else 1
        if self.per_model.nunique() == 1:
            return f"{self.per_model.iloc[0]:.{decimals}f} in each"
        new = () if self.is_ratio else prediction_interval(self.per_model)
        mean, low, high, *one = (f"{np.round(end, decimals) + 0.0:.{decimals}f}" for end in (*self.value(), *new))
        return f"{mean} ({low} to {high}{f'; one new model {one[0]} to {one[1]}' if one else ''})".replace("-", "−")


class Finding(NamedTuple):
    """A sweep over seeds, and what is claimed of its tables."""

    overrides: tuple[str, ...]
    claims: Callable[[Tables], Iterator[Claim]]


def refit(tables: Tables) -> Iterator[Claim]:
    for task, rows in tables["summary"].groupby("task", sort=False):
        for recovery, words in (("nothing", "as they are"), ("refit", "after a refit")):
            heads = rows[rows["recovery"] == recovery].set_index("seed")["heads_removed"]
            yield Claim(f"{task}: heads that can go {words}", heads)


def chosen_for_a_refit(tables: Tables) -> Iterator[Claim]:
    smallest = tables["smallest"][tables["smallest"]["recovery"] == "refit"]
    for task, rows in smallest.groupby("task", sort=False):
        heads = rows.pivot(index="seed", columns="schedule", values="heads_removed")
        more = heads["greedy_refit"] - heads["one_shot"]
        yield Claim(f"{task}: heads that can go after a refit, by greedy_refit more than by one_shot", more)


def regret(tables: Tables) -> Iterator[Claim]:
    for task, rows in tables["methods"].groupby("task", sort=False):
        one_shot = rows[rows["schedule"] == "one_shot"].pivot(index="seed", columns="scorer", values="regret_quality")
        searches = rows[rows["schedule"] == "greedy"].set_index("seed")["regret_quality"]
        for name, values in {
            "greedy": searches,
            **{name: one_shot[name] for name in SCORERS if name in one_shot},
        }.items():
            yield Claim(f"{task}: regret of {name}, points", 100 * values)


def interactions(tables: Tables) -> Iterator[Claim]:
    together = tables["together"]
    together = together[together["heads_removed"] == 2 * together["heads_total"] // 3]
    for task, rows in together.groupby("task", sort=False):
        rows, size = rows.set_index("seed"), int(rows["heads_removed"].iloc[0])
        for column, words in (
            ("expected_alone", "the costs of single heads"),
            ("expected_pairs", "the costs of all pairs"),
        ):
            share = rows[column] / rows["loss_rise"]
            yield Claim(f"{task}: share of what {size} heads cost that {words} make expect", share, is_ratio=True)


BOTH = "task=sort,reverse"
FINDINGS = {
    "refit": Finding(
        (
            *("experiment=ablate", BOTH, "scorer=[ablation]", "experiment.latency_rounds=1"),
            f"experiment.budgets={list(range(6, 23))}",
        ),
        refit,
    ),
    "chosen_for_a_refit": Finding(
        (
            *("experiment=prune", BOTH, "scorer=[ablation]", "schedule=[one_shot,greedy_refit]", "recovery=[refit]"),
            *(f"experiment.budgets={[12, *range(14, 23)]}", "experiment.latency_rounds=1"),
        ),
        chosen_for_a_refit,
    ),
    "regret": Finding(("experiment=compare", BOTH, f"scorer=[{','.join(SCORERS)}]"), regret),
    "interactions": Finding(("experiment=interact", BOTH), interactions),
}


def measured(folder: Path, name: str, seeds: str, settings: Sequence[str]) -> Tables:
    """The tables of the sweep in the folder, which is done or goes on. Raises ValueError if a job of it fails, and
    KeyboardInterrupt if it was interrupted."""
    script = Path(__file__).parent / "run.py"
    overrides = [*FINDINGS[name].overrides, f"seed={seeds}", *settings, f"hydra.sweep.dir={folder}"]
    # In a session of its own: a second signal, straight from the terminal, would stop it before its jobs have saved.
    sweep = subprocess.Popen([sys.executable, str(script), "-m", *overrides], start_new_session=True)
    with interruptible_once():
        try:
            code = sweep.wait()
        except KeyboardInterrupt:
            sweep.terminate()
            sweep.wait()  # its jobs save
            raise
    if code:
        raise ValueError(f"{name}: the sweep in {folder} ended with exit code {code}, the same command goes on with it")
    return {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}


def overlap(first: Claim, second: Claim) -> bool:
    """Whether the intervals have a value in common."""
    (_, low, high), (_, other_low, other_high) = first.value(), second.value()
    return max(low, other_low) <= min(high, other_high)


def lines(claimed: Sequence[Claim], found: Sequence[Claim]) -> Iterator[str]:
    """A Markdown table, and how many intervals overlap."""
    counts = [f"{len(claims[0].per_model)} models" for claims in (claimed, found)]
    yield f"| | claimed, {counts[0]} | found, {counts[1]} | intervals overlap |"
    yield "|---|---|---|---|"
    both = list(zip(claimed, found, strict=True))
    for first, second in both:
        yield f"| {first.words} | {first} | {second} | {'yes' if overlap(first, second) else 'no'} |"
    yield ""
    yield f"{sum(overlap(*each) for each in both)} of {len(both)} intervals overlap."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FINDINGS)}; KEY=VALUE; default: all")
    for which, seeds in SEEDS.items():
        parser.add_argument(f"--{which}", default=seeds, metavar="SEEDS", help=f"default: {seeds}")
    place = results_folder() / "findings"
    parser.add_argument("--folder", type=Path, default=place, help=f"where the sweeps are, default: {place}")
    chosen = parser.parse_intermixed_args(arguments)
    settings = [name for name in chosen.names if "=" in name]
    names = [name for name in chosen.names if "=" not in name] or list(FINDINGS)
    if unknown := [name for name in names if name not in FINDINGS]:
        print(f"error: NAME={unknown[0]}: no such finding, allowed are {', '.join(FINDINGS)}", file=sys.stderr)
        return 1
    if few := [which for which in SEEDS if len(getattr(chosen, which).split(",")) < LEAST_RUNS]:
        given = f"--{few[0]}={getattr(chosen, few[0])}"
        print(
            f"error: {given}: must be {LEAST_RUNS} seeds or more, such as 0,1,2, or there is no interval",
            file=sys.stderr,
        )
        return 1
    claims: dict[str, list[Claim]] = {which: [] for which in SEEDS}
    try:
        for which in SEEDS:
            for name in names:
                tables = measured(chosen.folder / f"{name}-{which}", name, getattr(chosen, which), settings)
                claims[which] += FINDINGS[name].claims(tables)
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(*claims.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
