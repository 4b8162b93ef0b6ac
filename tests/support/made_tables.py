"""Tables as `experiment=ablate` writes them, made by hand, and how to read a figure."""

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd

from mhaprune.lab.experiments.base import Experiment
from mhaprune.lab.reporting.plots import Plot
from mhaprune.tables import LABEL, Tables


def said_over_runs(kind: type[Experiment], tables: Tables) -> Iterator[str]:
    """What several runs found together, then the first sentence of each, as `collect` says it."""
    yield from kind.say_in_common(tables)
    for label in dict.fromkeys(label for frame in tables.values() if LABEL in frame for label in frame[LABEL]):
        own = {name: frame[frame[LABEL] == label] for name, frame in tables.items() if LABEL in frame}
        yield f"{label}: {next(iter(kind.say(own)))}"


def pruning_table(seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    draws = {"gate": 1, "ablation": 1, "random": 3}
    rows = [(scorer, n, removed) for scorer, number in draws.items() for n in range(number) for removed in (0, 2, 4)]
    table = pd.DataFrame(rows, columns=["scorer", "draw", "heads_removed"]).assign(heads_total=4)
    gone = table["fraction_removed"] = table["heads_removed"] / 4
    table["quality"] = (1 - gone) * draw.uniform(0.8, 1, len(table))
    table["quality_low"], table["quality_high"] = table["quality"] - 0.05, table["quality"] + 0.05
    for end, first in (("", 1.0), ("_q1", 0.9), ("_q3", 1.1)):
        table[f"speedup{end}"] = (first + gone).where(table["draw"] == 0)
    return table


SCALES = {"gate": 1.0, "ablation": 0.3}


def all_tables() -> dict[str, pd.DataFrame]:
    heads = pd.DataFrame(
        [("encoder_self", 0), ("encoder_self", 1), ("cross", 0), ("cross", 2)], columns=["site", "head"]
    )
    heads = heads.assign(draw=0, layer=0, skewness=0.3)
    scores = [heads.assign(scorer=name, score=k * heads.index, stderr=0.1 * k) for name, k in SCALES.items()]
    training = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "valid_loss": [2.1, 1.2], "valid_quality": [0.1, 0.9]})
    for head in ("encoder_self.0.0", "encoder_self.0.1", "cross.0.0", "cross.0.2"):
        training[f"gate_{head}"] = [1.0, 1.2]
    return {
        "heads": pd.concat(scores, ignore_index=True),
        "agreement": pd.DataFrame([{"scorer": "gate", "other": "ablation", "spearman": 0.876}]),
        "pruning": pruning_table(),
        "latency": pd.DataFrame([{"scorer": "dense again", "speedup_q1": 0.98, "speedup_q3": 1.02}]),
        "training": training,
        "summary": summary().assign(heads_removed=[0, 2]),
    }


def summary() -> pd.DataFrame:
    rows = [
        ("gate", 3, 1.0, "cross.0.0 cross.0.1 cross.1.2"),
        ("ablation", 9, 0.993, " ".join(f"cross.1.{n}" for n in range(9))),
    ]
    columns = ["scorer", "heads_removed", "quality", "removed"]
    table = pd.DataFrame(rows, columns=columns).assign(recovery="nothing", heads_total=24, choose_quality=0.99)
    table = table.assign(dense_quality=1.0, quality_low=0.97, quality_high=1.0, tolerance=0.01)
    return table.assign(speedup=1.21, speedup_q1=1.2, speedup_q3=1.22)


def refitted(table: pd.DataFrame, **changes: object) -> pd.DataFrame:
    """The rows of ablation once more, after a refit."""
    return table[(table["scorer"] == "ablation")].assign(recovery="refit", note="", **changes)


def text_of(plot: Plot) -> str:
    """The words in a figure: its SVG keeps text as text."""
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", plot.svg.decode()))
