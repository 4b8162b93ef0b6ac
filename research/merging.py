"""Is it better to merge key-value groups than to remove them? `python research/merging.py FOLDER`.

In every layer of SmolLM2, or in every second one, two of the three groups are made one. The keys of the second are
turned onto those of the first by one angle for each rotary frequency, its values by an orthogonal matrix (Procrustes).
Both are exact where the groups are the same up to such turns: the turns go into the queries and into W_O. The merged
keys and values are the means, and a refit fits W_O and W_2. Of the three pairs, that of the least misfit is merged.
Beside it as many groups are removed, or see only a window, by `taylor`, before the same refit.

The texts are those of research/streaming.py. FOLDER then holds `merging.csv`. Needs what that script needs; it takes
half an hour on one core.

Made docs/findings/no-help.md.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from mhaprune_models.smollm2 import language_model
from torch import Tensor

from mhaprune.api.wrap import Heads
from mhaprune.recoveries.refitting import refit, show
from mhaprune.storage.store import write_bytes
from mhaprune.wrapping.wrapped_model import WrappedModel
from rivals import in_folder
from streaming import RECENT, SINK, TASKS, Texts, judged, with_rises, without, wrapped

LENGTH, COUNT = 1024, 4
"""Tokens and number of the texts that are judged, for each task."""


@torch.no_grad()
def inputs_of(heads: Heads) -> dict[int, Tensor]:
    """Return what the attention of each layer reads on the texts for refits, (tokens, D)."""
    model: Any = heads.subject.model
    found: dict[int, list[Tensor]] = {n: [] for n in range(len(model.model.layers))}

    def keep(n: int, module: Any, arguments: Any, named: Any) -> None:
        found[n].append(named["hidden_states"].flatten(0, 1))

    hooks = [
        layer.self_attn.register_forward_pre_hook(partial(keep, n), with_kwargs=True)
        for n, layer in enumerate(model.model.layers)
    ]
    for batch in heads.splits.train.batches(1):
        heads.subject.call(batch)
    for hook in hooks:
        hook.remove()
    return {n: torch.cat(parts) for n, parts in found.items()}


def turned(weight_KD: Tensor, angles_F: Tensor) -> Tensor:
    """Return rows of queries or keys turned by an angle for each rotary frequency, which is a pair of rows."""
    first, second = weight_KD.chunk(2)
    cos, sin = angles_F.cos()[:, None], angles_F.sin()[:, None]
    return torch.cat([cos * first - sin * second, sin * first + cos * second])


def angles_between(keys_a: Tensor, keys_b: Tensor) -> Tensor:
    """Return the angles by which the second keys (T, K) fit the first best."""
    a, b = (torch.complex(*keys.chunk(2, dim=1)) for keys in (keys_a, keys_b))
    return (b.conj() * a).sum(dim=0).angle()


@torch.no_grad()
def merge(attention: Any, inputs_TD: Tensor) -> None:
    """Make two groups of an attention module of Llama one."""
    K, share = attention.head_dim, attention.num_key_value_groups
    keys, values = (each.weight.unflatten(0, (-1, K)) for each in (attention.k_proj, attention.v_proj))
    best: tuple[float, Any] = (torch.inf, None)
    for a, b in combinations(range(len(keys)), 2):
        angles = angles_between(inputs_TD @ keys[a].T, inputs_TD @ keys[b].T)
        turned_b = turned(keys[b], angles)
        values_a, values_b = inputs_TD @ values[a].T, inputs_TD @ values[b].T
        left, _, right = torch.linalg.svd(values_b.T @ values_a)
        turn = left @ right  # values_b @ turn is nearest to values_a
        missed = [(inputs_TD @ (turned_b - keys[a]).T).norm() / (inputs_TD @ keys[a].T).norm()]
        missed.append((values_b @ turn - values_a).norm() / values_a.norm())
        if (misfit := float(sum(missed))) < best[0]:
            best = misfit, (a, b, angles, turned_b, turn)
    a, b, angles, turned_b, turn = best[1]
    mine = slice(b * share * K, (b + 1) * share * K)
    queries = attention.q_proj.weight[mine].unflatten(0, (share, K))
    attention.q_proj.weight[mine] = torch.cat([turned(each, angles) for each in queries])
    out = attention.o_proj.weight[:, mine].unflatten(1, (share, K))
    attention.o_proj.weight[:, mine] = torch.einsum("dsk,kj->dsj", out, turn).flatten(1)
    keys_ab, values_ab = (keys[a] + turned_b) / 2, (values[a] + turn.T @ values[b]) / 2
    for group in (a, b):
        rows = slice(group * K, (group + 1) * K)
        attention.k_proj.weight[rows], attention.v_proj.weight[rows] = keys_ab, values_ab


def merged(heads: Heads, every: int, fit: bool) -> WrappedModel:
    """Return the model with two groups made one in every layer, or in every second one."""
    subject, inputs = heads.subject, inputs_of(heads)
    model: Any = copy.deepcopy(subject.model)
    for n in range(0, len(model.model.layers), every):
        merge(model.model.layers[n].self_attn, inputs[n])
    small = subject.with_module(model, subject.blocks)
    return refit(small, show(subject, heads.splits.train)) if fit else small


def compare(folder: Path, few: bool) -> None:
    """Write the table into the folder, and print it."""
    model: Any
    model, tokenizer = language_model("outputs/cache")
    texts = Texts(tokenizer)
    heads = wrapped(model, texts, few)
    groups = heads.units("group")
    stream, ways = groups.streaming(SINK, RECENT), dict[str, Callable[[], WrappedModel]]()
    ways["whole model"] = lambda: heads.subject
    for every in (1, 2):
        gone = len(range(0, len(model.model.layers), every))
        for fit in (False, True):
            ways[f"{gone} merged{', refit' * fit}"] = partial(merged, heads, every, fit)
        for name, of in (("removed", groups), ("stream", stream)):
            ways[f"{gone} {name}, refit"] = partial(without, of, len(of.grid) - gone, lambda: "taylor", True)
    file = folder / "merging.csv"
    rows = pd.read_csv(file).to_dict("records") if file.exists() else []
    for name, make in ways.items():
        if name in {row["way"] for row in rows}:
            continue
        small = make()
        rows += [
            judged(small, task, texts, 96 if few else LENGTH, 2 if few else COUNT) | {"way": name} for task in TASKS
        ]
        write_bytes(file, pd.DataFrame(rows).to_csv(index=False).encode())
    table = with_rises(pd.DataFrame(rows)).drop(columns="losses")
    print(table[["way", "task", "loss", "rise", "low", "high"]].round(3).to_string(index=False))


if __name__ == "__main__":
    sys.exit(in_folder(__doc__, compare))
