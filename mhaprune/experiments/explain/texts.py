"""Where each head of a model that others made looks in a text: the tables `examples` and `attention`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pandas as pd
import torch
from torch import Tensor

from mhaprune.heads import HeadId
from mhaprune.scorers.scoring import head_columns
from mhaprune.studies.study import Study


def text_tables(study: Study, numbers: Sequence[int], heads: Collection[HeadId]) -> dict[str, pd.DataFrame]:
    """`examples` has one row per text; `attention` one row per text, head, query and key: the `weight`, the token that
    `reads` stands for and the token that it `looks_at`. A token without a name is called by its place."""
    texts, parts = [], []
    for example, number in enumerate(numbers):
        batch = study.splits.report[number : number + 1]
        (words,) = study.tokens(batch) if study.tokens is not None else [[]]
        texts.append({"example": example, "source": " ".join(words)})
        with torch.no_grad():
            maps = study.subject.attention_maps(batch)
        for block, seen in maps.items():
            queries, keys = (_named(real[0], words) for real in (seen.queries, seen.keys))
            weights_HTU = seen.weights[0][:, seen.queries[0]][:, :, seen.keys[0]].double().cpu().numpy()
            places = pd.MultiIndex.from_product([range(len(queries)), range(len(keys))], names=["query", "key"])
            frame = places.to_frame(index=False)
            frame["reads"] = [queries[i] for i in frame["query"]]
            frame["looks_at"] = [keys[i] for i in frame["key"]]
            of_block = [head for head in study.subject.grid if head.block == block]
            for head, weights_TU in zip(of_block, weights_HTU, strict=True):
                if head in heads:
                    parts.append(frame.assign(weight=weights_TU.flatten(), example=example, **head_columns(head)))
    table = pd.concat(parts, ignore_index=True)
    first = ["example", *head_columns(next(iter(heads)))]
    return {
        "examples": pd.DataFrame(texts),
        "attention": table[[*first, *(name for name in table if name not in first)]],
    }


def _named(real_T: Tensor, words: Sequence[str]) -> list[str]:
    """The words at the real positions, if these are the positions of the text; else numbers."""
    count = int(real_T.sum())
    return list(words) if count == len(words) else [str(i) for i in range(count)]
