"""What `experiment=anatomy` shows, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from mhaprune.tables import HEAD, HeadName, Tables


def say(tables: Tables) -> Iterator[str]:
    """How far the tensors of a call were followed, and what the division by √d_head is for."""
    head = HeadName(*tables["values"].iloc[0][HEAD])
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
    return (
        f"Dividing scores by √d_head keeps softmax soft: with random queries at d_head {largest} its weights have"
        f" {with_it['entropy']:.2f} nats of entropy with it and {without['entropy']:.2g} without, its derivative a norm"
        f" of {with_it['gradient']:.2f} and {without['gradient']:.2g} (medians)."
    )
