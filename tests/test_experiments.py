"""The figures that the project stands for, on models trained for real. Minutes each: `pytest -m slow`."""

from pathlib import Path

import pandas as pd
import pytest

from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder
from support.composing import compose


def pruning(tmp_path: Path, *overrides: str) -> pd.DataFrame:
    with RunFolder(tmp_path / "run").recorded() as folder:
        build(compose(f"cache={tmp_path / 'cache'}", "experiment.latency_rounds=1", *overrides))(folder)
    return pd.read_csv(tmp_path / "run" / "pruning.csv")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sort", "reverse", "copy", "running_sum"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_quarter_of_the_heads_goes_by_ablation_but_not_by_chance(tmp_path: Path, task: str, seed: int) -> None:
    table = pruning(tmp_path, f"task={task}", f"seed={seed}", "scorer=[ablation,random]")
    assert (table.loc[table["heads_removed"] == 0, "quality"] >= 0.99).all()
    means = table[table["fraction_removed"] == 0.25].groupby("scorer")["quality"].mean()
    assert means["ablation"] >= 0.98
    assert means["ablation"] >= means["random"] + (0.2 if task == "copy" else 0.3)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "heads"), [("reverse", 5), ("sort", 8)])
def test_few_heads_are_enough_once_they_are_fine_tuned(tmp_path: Path, task: str, heads: int) -> None:
    settings = [f"task={task}", "schedule=greedy", "recovery=fine_tune", f"experiment.budgets=[{24 - heads}]"]
    overrides = [*settings, "experiment.latency_rounds=1", f"cache={tmp_path / 'cache'}"]
    with RunFolder(tmp_path / "run").recorded() as folder:
        build(compose("experiment=prune", *overrides))(folder)
    table = pd.read_csv(tmp_path / "run" / "recovery.csv").set_index(["recovery", "heads_kept"])["quality"]
    assert table["fine_tune", heads] >= table["nothing", 24] - 0.01
    assert table["nothing", heads] <= table["nothing", 24] - 0.1, "it takes the training"
