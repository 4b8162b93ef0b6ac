"""Sentences of `experiment=anatomy`."""

from collections.abc import Iterator

import pandas as pd

from mhaprune.heads import HeadId
from mhaprune.reporting.plots import short
from mhaprune.tables import HEAD, Tables


def say(tables: Tables) -> Iterator[str]:
    """Say which call was followed, and what the division by √d_head does."""
    head = HeadId(*tables["values"].iloc[0][HEAD])
    steps = tables["tensors"]["step"].max()
    example = tables["examples"].iloc[0]
    yield (
        f"One call of the layer of {head} in {steps} steps, while the model answers {example['source']} with"
        f" {example['answer']}: every tensor with its formula, its shape and its numbers."
    )
    yield _scaling(tables["scaling"])


def _scaling(scaling: pd.DataFrame) -> str:
    largest = scaling["head_dim"].max()
    table = scaling.set_index(["head_dim", "scaled"])
    with_it, without = table.loc[(largest, True)], table.loc[(largest, False)]
    said = [
        f"{what} is {short(with_it[f'{name}_mean'])} on average with it (quartiles {short(with_it[f'{name}_q1'])} to"
        f" {short(with_it[f'{name}_q3'])}) and {short(without[f'{name}_mean'])} without"
        f" ({short(without[f'{name}_q1'])} to {short(without[f'{name}_q3'])})"
        for name, what in (("entropy", "the entropy of its weights (nats)"), ("gradient", "the norm of its derivative"))
    ]
    return (
        f"Dividing scores by √d_head keeps softmax soft. With random queries at d_head {largest} {said[0]}. There"
        f" {said[1]}."
    )
