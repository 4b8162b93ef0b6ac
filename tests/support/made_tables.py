"""Tables as `experiment=ablate` writes them, made by hand, and how to read a figure."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd

from mhaprune.experiments.base import Experiment
from mhaprune.reporting.plots import Plot
from mhaprune.tables import LABEL, Tables


def said_over_runs(kind: type[Experiment], tables: Tables) -> Iterator[str]:
    """What several runs found together, then the first sentence of each, as `collect` says it."""
    yield from kind.say_in_common(tables)
    for label in dict.fromkeys(label for frame in tables.values() if LABEL in frame for label in frame[LABEL]):
        own = {name: frame[frame[LABEL] == label] for name, frame in tables.items() if LABEL in frame}
        yield f"{label}: {next(iter(kind.say(own)))}"


def pruning_table(seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    rows = []
    for scorer, draws in (("gate", 1), ("ablation", 1), ("random", 3)):
        for number in range(draws):
            for removed in (0, 2, 4):
                share = (4 - removed) / 4 * draw.uniform(0.8, 1)
                speed = {"speedup": 1 + removed / 4, "speedup_q1": 0.9 + removed / 4, "speedup_q3": 1.1 + removed / 4}
                rows.append(
                    {
                        "scorer": scorer,
                        "draw": number,
                        "heads_total": 4,
                        "heads_removed": removed,
                        "fraction_removed": removed / 4,
                        "quality": share,
                        "quality_low": share - 0.05,
                        "quality_high": share + 0.05,
                        **(speed if number == 0 else {}),
                    }
                )
    return pd.DataFrame(rows)


def all_tables() -> dict[str, pd.DataFrame]:
    heads = [("encoder_self", 0, 0), ("encoder_self", 0, 1), ("cross", 0, 0), ("cross", 0, 2)]
    scores = [
        {"scorer": scorer, "draw": 0, "site": s, "layer": layer, "head": h, "score": i * k, "stderr": 0.1 * k}
        | {"skewness": 0.3}
        for scorer, k in (("gate", 1.0), ("ablation", 0.3))
        for i, (s, layer, h) in enumerate(heads)
    ]
    training = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "valid_loss": [2.1, 1.2]})
    training = training.assign(valid_quality=[0.1, 0.9])
    for head in ("encoder_self.0.0", "encoder_self.0.1", "cross.0.0", "cross.0.2"):
        training[f"gate_{head}"] = [1.0, 1.2]
    return {
        "heads": pd.DataFrame(scores),
        "agreement": pd.DataFrame([{"scorer": "gate", "other": "ablation", "spearman": 0.876}]),
        "pruning": pruning_table(),
        "latency": pd.DataFrame([{"scorer": "dense again", "speedup_q1": 0.98, "speedup_q3": 1.02}]),
        "training": training,
    }


def summary() -> pd.DataFrame:
    row = {
        "recovery": "nothing",
        "heads_total": 24,
        "choose_quality": 0.99,
        "dense_quality": 1.0,
        "quality_low": 0.97,
        "quality_high": 1.0,
        "speedup": 1.21,
        "tolerance": 0.01,
        "speedup_q1": 1.2,
        "speedup_q3": 1.22,
    }
    return pd.DataFrame(
        [
            row | {"scorer": "gate", "heads_removed": 3, "quality": 1.0} | {"removed": "cross.0.0 cross.0.1 cross.1.2"},
            row
            | {"scorer": "ablation", "heads_removed": 9, "quality": 0.993}
            | {"removed": " ".join(f"cross.1.{n}" for n in range(9))},
        ]
    )


def refitted(table: pd.DataFrame, **changes: object) -> pd.DataFrame:
    """The rows of ablation once more, after a refit."""
    return table[(table["scorer"] == "ablation")].assign(recovery="refit", note="", **changes)


def text_of(plot: Plot) -> str:
    """The words in a figure: its SVG keeps text as text."""
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", plot.svg.decode()))
