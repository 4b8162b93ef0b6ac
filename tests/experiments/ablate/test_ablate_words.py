from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from mhaprune.experiments.ablate.study import Ablate
from mhaprune.tables import Tables
from support.made_tables import refitted, said_over_runs, summary

PLAIN = summary().assign(recovery="nothing", heads_removed_sure=[3, 6])
FIFTEEN = {"removed": " ".join(f"cross.1.{n}" for n in range(15)), "quality": 0.985, "speedup": 1.4}
AFTER = refitted(summary(), heads_removed=15, heads_removed_sure=11, speedup_q1=1.38, speedup_q3=1.42, **FIFTEEN)
BOTH = pd.concat([PLAIN, AFTER], ignore_index=True)


def said(tables: Tables) -> list[str]:
    return list(Ablate.say(tables))


def test_what_is_said(snapshot: Any) -> None:
    failed = refitted(summary()).assign(note="diverged, so it is as it was: why")
    small = pd.DataFrame({"heads_removed": [0, 0, 3], "choose_drop_high": [0.0148, float("nan"), 0.5]})
    runs = [PLAIN.assign(label="one"), BOTH.assign(label="other")]
    cases = {
        "without a recovery": {"summary": PLAIN},
        "after a refit": {"summary": BOTH},
        "none is sure, with a choose split that is too small": {
            "summary": BOTH.assign(heads_removed_sure=0),
            "pruning": small,
        },
        "none can be removed": {"summary": BOTH.assign(heads_removed=0, heads_removed_sure=0)},
        "a recovery that failed": {"summary": PLAIN, "recovered": failed},
    }
    over = said_over_runs(Ablate, {"summary": pd.concat(runs, ignore_index=True)})
    snapshot("ablate", {name: said(tables) for name, tables in cases.items()} | {"two runs": over})


@pytest.mark.parametrize(
    ("low", "high", "best", "refit"),
    [(0.98, 1.199, False, False), (0.97, 1.2, True, False), (1.22, 1.38, True, True), (1.221, 1.38, False, True)],
)
def test_a_speed_up_within_the_noise_is_said_to_be_that(low: float, high: float, best: bool, refit: bool) -> None:
    rows = [("ablation", 1.3, 0.1, 9.0), ("dense", 1.0, 1.0, 1.0), ("dense again", 1.0, low, high)]
    latency = pd.DataFrame(rows, columns=["scorer", "speedup", "speedup_q1", "speedup_q3"]).assign(timed_examples=32)
    plain, after = (line for line in said({"summary": BOTH, "latency": latency}) if "1.21×" in line or "1.40×" in line)
    noise = f"the dense model against itself is at {low:.2f}–{high:.2f}."
    assert "32 examples" in plain
    assert (noise in plain, noise in after) == (best, refit)


@pytest.mark.parametrize(("widest", "small"), [(0.0148, True), (0.0074, False)])
def test_a_choose_split_that_is_too_small_is_named(widest: float, small: bool) -> None:
    """The upper ends of 256 equal answers, and of 512."""
    pruning = pd.DataFrame({"heads_removed": [0, 0, 3], "choose_drop_high": [widest, float("nan"), 0.5]})
    assert any("0.015" in line for line in said({"summary": BOTH, "pruning": pruning})) == small
