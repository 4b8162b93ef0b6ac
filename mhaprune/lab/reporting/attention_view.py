"""Attention that can be touched: the data of the interactive part of a report, made from the tables of a run."""

import base64
from collections.abc import Iterator
from math import isnan, sqrt
from typing import Any

import numpy as np
import pandas as pd

from mhaprune.heads import HeadId
from mhaprune.lab.model.sites import block_label
from mhaprune.lab.reporting.head_map import REMOVED, Verdict
from mhaprune.lab.reporting.names import loss_suffix, quality_name
from mhaprune.lab.reporting.plots import SIGNS, amount, number
from mhaprune.lab.reporting.sentences import quality_of, right
from mhaprune.tables import HEAD, LOSS_RISE, QUALITY, Tables, blocks_in, named

MOST_WEIGHTS = 400_000
"""Largest number of attention weights in a page. Each is two bytes, so they add at most 1.1 MB."""
FINEST = 2**16 - 1
"""The code of a weight of 1: weights have five digits."""
LEAST_TOKENS = 16
"""Number of tokens that are shown at least; if there are too many heads for that, the least important ones are left
out."""


def view_of(tables: Tables, verdict: Verdict | None) -> dict[str, Any] | None:
    """Return what the page's script draws, as plain values; None without attention or without a map of heads.

    `heads` are the tiles of the map, `rows` the names of its rows. Each of the `examples` has its tokens by block and,
    by head, its attention weights: two bytes each, `FINEST` for a weight of 1 and 0 only for exactly 0, row by row in
    base64; and `largest`, the place of the largest weight in each row and in each column.
    `cut` says in words what was left out, `together` whether the heads that can go were removed together.
    """
    if verdict is None or not all(len(tables.get(name, ())) for name in ("attention", "examples", "closed")):
        return None
    remaining = verdict.heads[verdict.heads["name"] != REMOVED]
    examples = tables["examples"]
    heads = remaining.assign(order=remaining["score"].fillna(0).rank(ascending=False, method="first")).query(
        f"order <= {max(MOST_WEIGHTS // (len(examples) * LEAST_TOKENS**2), 1)}"
    )
    most = int(sqrt(MOST_WEIGHTS / (len(examples) * len(heads))))
    shown = [_example(row, tables, named(heads), most) for row in examples.to_dict("records")]
    longest = int(max(tables["attention"][["query", "key"]].max()) + 1)
    symbols = max(longest, int(examples.get("symbols", pd.Series([0])).max()))
    cut = [f"the {len(heads)} most important of {len(remaining)} heads"] if len(heads) < len(remaining) else []
    cut += [f"the first {min(most, longest)} of {symbols} tokens"] if min(most, longest) < symbols else []
    rows = blocks_in(heads)
    return {
        "rows": [block_label(*row) for row in rows],
        "heads": list(_tiles(heads, rows, verdict)),
        "examples": shown,
        "finest": FINEST,
        "cut": " and ".join(cut),
        "together": verdict.together,
    }


def _tiles(heads: pd.DataFrame, rows: list[tuple[str, int]], verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Yield the tiles of the map: the name of a head, its place, its share of the highest score, and words."""
    highest = heads["score"].max()
    for id_, head in zip(named(heads), heads.to_dict("records"), strict=True):
        score = head["score"]
        words = [head["name"]] if head["name"] else []
        words += [] if isnan(score) else [f"{verdict.scorer} {amount(score)}"]
        yield {
            "name": str(id_),
            "row": rows.index((id_.site, id_.layer)),
            "column": id_.head,
            "share": 0.0 if isnan(score) or not highest > 0 else sqrt(max(score, 0.0) / highest),
            "stays": bool(head["stays"]),
            "undecided": bool(head.get("undecided", False)),
            "words": ", ".join(words),
        }


def _example(example: dict[str, Any], tables: Tables, heads: list[HeadId], most: int) -> dict[str, Any]:
    """Return the tokens, weights and answers of one example."""
    of_example = {name: tables[name][tables[name]["example"] == example["example"]] for name in ("attention", "closed")}
    tokens, weights, largest = {}, {}, {}
    for key, cells in of_example["attention"].groupby(HEAD, sort=False):
        head = HeadId(*key)
        if head in heads:
            by_query, by_key = cells.drop_duplicates("query"), cells.drop_duplicates("key")
            matrix = cells["weight"].to_numpy(float).reshape(len(by_query), len(by_key))[:most, :most]
            coded = np.where(matrix > 0, np.clip(np.round(FINEST * matrix), 1, FINEST), 0).astype("<u2")
            weights[str(head)] = base64.b64encode(coded.tobytes()).decode()
            largest[str(head)] = [matrix.argmax(axis=1).tolist(), matrix.argmax(axis=0).tolist()]
            writes = by_query["writes"] if "writes" in cells else pd.Series(dtype=object)
            tokens[str(head.block)] = {
                "queries": _texts(by_query["reads"], most),
                "writes": _texts(writes.dropna(), most),
                "keys": _texts(by_key["looks_at"], most),
            }
    closed = of_example["closed"]
    if "answer" in closed:
        closed = closed.merge(tables["looks"][[*HEAD, QUALITY, "open_quality"]], on=HEAD)
    return {
        "source": example["source"],
        "answer": example.get("answer"),
        "right": right if isinstance(right := example.get("right_answer"), str) else None,
        "tokens": tokens,
        "weights": weights,
        "largest": largest,
        "without": {
            str(HeadId(*(row[name] for name in HEAD))): _without(row, tables) for row in closed.to_dict("records")
        },
    }


def _texts(tokens: pd.Series, most: int) -> list[str]:
    return [SIGNS.get(token, token) for token in tokens[:most].astype(str)]


def _without(row: dict[str, Any], tables: Tables) -> dict[str, str]:
    """Return the stored answer with the head closed, and the quality of all answers then, in words; without an answer,
    the quality and loss of this text."""
    if isinstance(row.get("answer"), str):
        words = f"{right(row[QUALITY], tables)} ({quality_of(row['open_quality'], tables)} with all heads)"
        return {"answer": row["answer"], "words": words}
    change = f"the loss changes by {number(row[LOSS_RISE], 4)}{loss_suffix(tables)}"
    now, before = (quality_of(row[name], tables) for name in (QUALITY, "open_quality"))
    return {"words": f"{quality_name(tables)} {now} instead of {before}, {change}"}
