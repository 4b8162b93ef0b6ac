from __future__ import annotations

import json

from conftest import run_script


def test_a_bench_prints_ratios_with_their_spread_and_the_control() -> None:
    done = run_script("bench.py", "training", "--pairs", "20", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == ["training", "training, A/A"]
    for row in rows:
        assert list(row) == ["name", "ours_ms", "peer_ms", "ratio", "q1", "q3"]
        assert 0 < row["q1"] <= row["ratio"] <= row["q3"]


def test_bad_names_and_too_few_pairs_are_refused() -> None:
    refused = run_script("bench.py", "speed").stderr
    assert "NAME=speed: no such bench, allowed are training, removal, ablation, oracle, shapley" in refused
    assert "--pairs=3: must be 20 or more" in run_script("bench.py", "--pairs", "3").stderr
