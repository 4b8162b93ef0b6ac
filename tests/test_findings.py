from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import findings
from findings import Claim, lines, overlap
from support.commands import run_here
from support.sizes import TINY, TINY_SEQUENCES


def frame(task: str, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({**columns, "task": task})


def said(claims: Any) -> dict[str, list[float]]:
    return {claim.words: claim.per_model.sort_index().round(9).tolist() for claim in claims}


def test_what_can_go_is_read_for_each_task_before_and_after_a_refit() -> None:
    recovery = ["nothing", "refit"] * 2
    rows = frame("sort", seed=[1, 1, 0, 0], recovery=recovery, heads_removed=[9, 15, 12, 18])
    other = frame("reverse", seed=[0, 0], recovery=recovery[:2], heads_removed=[3, 6])
    assert said(findings.refit({"summary": pd.concat([rows, other])})) == {
        "sort: heads that can go as they are": [12, 9],
        "sort: heads that can go after a refit": [18, 15],
        "reverse: heads that can go as they are": [3],
        "reverse: heads that can go after a refit": [6],
    }


def test_a_mean_of_ratios_is_geometric_and_equal_models_need_no_interval() -> None:
    assert str(Claim("", pd.Series([1.0, 2, 3]))) == "2.0 (−0.5 to 4.5; one new model −3.0 to 7.0)"
    assert str(Claim("", pd.Series([1.0, 2, 4]), is_ratio=True)) == "2.00 (0.36 to 11.19)"
    assert Claim("", pd.Series([0.1, 10]), is_ratio=True).value()[0] == pytest.approx(1)
    assert str(Claim("", pd.Series([1.0, 1]))) == "1.0 in each"


def test_intervals_that_share_a_value_overlap() -> None:
    low, high = Claim("a", pd.Series([1.0, 1.2, 1.1])), Claim("a", pd.Series([3.0, 3.2, 3.1]))
    wide = Claim("a", pd.Series([0.0, 2, 4]))
    assert not overlap(low, high)
    assert not overlap(high, low)
    assert overlap(low, wide)
    assert overlap(wide, low)
    table = list(lines([low, wide], [high, low]))
    assert table[0] == "| | claimed, 3 models | found, 3 models | intervals overlap |"
    assert [line.split(" | ")[-1] for line in table[2:4]] == ["no |", "yes |"]
    assert table[-1] == "1 of 2 intervals overlap."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["refitt"], "NAME=refitt: no such finding, allowed are refit, chosen_for_a_refit, regret, interactions"),
        (["refit", "--found", "7,8"], "--found=7,8: must be 3 seeds or more, such as 0,1,2, or there is no interval"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    assert run_here(findings.main, *arguments)[::2] == (1, f"error: {message}\n")


@pytest.mark.slow
def test_a_finding_is_repeated_on_both_lots_of_models(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = [*TINY, *TINY_SEQUENCES, "experiment.budgets=[1,2]", "task=sort", f"cache={tmp_path / 'cache'}"]
    seeds = ["--claimed", "0,1,2", "--found", "3,4,5", "--folder", str(tmp_path / "sweeps")]
    assert findings.main(["refit", *seeds, *small]) == 0
    out = capfd.readouterr().out
    assert "| | claimed, 3 models | found, 3 models | intervals overlap |" in out
    assert "sort: heads that can go after a refit | " in out
    assert {path.name for path in (tmp_path / "sweeps").iterdir()} == {"refit-claimed", "refit-found"}
    assert findings.main(["refit", *seeds, *small]) == 0
    again = capfd.readouterr()
    assert again.out.endswith(out[out.index("| |") :])
    assert "3 of 3 jobs are done and skipped" in again.err + again.out
