"""Tables as `experiment=compare` writes them, made up, in all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

BY_FAMILY = {
    "gate": "gate gate_output",
    "ablation": "ablation ablation_mean ablation_resample all_but_one",
    "gradient": "taylor taylor_example taylor_batch fisher integrated_gradients",
    "game": "shapley",
    "weights": "magnitude",
    "attention": "confidence entropy lrp",
    "trained": "hard_concrete subset raced",
    "control": "random",
}
FAMILIES = {name: family for family, names in BY_FAMILY.items() for name in names.split()}
EVERY = tuple(FAMILIES)
CASES = {
    "all": (EVERY, 24),
    "three": (("gate", "ablation", "random"), 24),
    "small": ((*EVERY[:9], "random"), 6),
    "three small": (("gate", "taylor", "ablation"), 6),
    "one": (("ablation",), 6),
}


def method_tables(scorers: tuple[str, ...] = EVERY, heads: int = 24, seed: int = 0) -> dict[str, pd.DataFrame]:
    """What experiment=compare writes: `scorers` × budgets on `heads` heads in blocks of `heads // 6`."""
    chance = np.random.default_rng(seed)
    budgets = sorted({round(heads * share / 8) for share in range(9)})
    best = {n: 1 / (1 + np.exp(14 * (n / heads - 0.72))) for n in budgets}
    pruning = _pruning(scorers, heads, best, chance)
    training = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.0], "valid_loss": [2.1, 1.2]})
    return {
        "methods": _methods(pruning, scorers, heads),
        "pruning": pruning,
        "heads": _scores(scorers, heads, chance),
        "training": training.assign(valid_quality=[0.1, 0.9]),
    }


def _pruning(scorers: tuple[str, ...], heads: int, best: dict[int, Any], chance: np.random.Generator) -> pd.DataFrame:
    skill = {name: 1.0 if name == "random" else chance.uniform(0.02, 0.5) ** 1.5 for name in scorers}
    rows = []
    for name in scorers:
        for number in range(10 if name == "random" else 1):
            worse = skill[name] * chance.uniform(0.7, 1.3)
            for n in best:
                own = 1 / (1 + np.exp(14 * (n / heads - 0.72 + 0.55 * worse)))
                own = own if 0 < n < heads else best[n]
                rows.append(
                    {"scorer": name, "family": FAMILIES[name], "settings": "", "draw": number, "schedule": "one_shot"}
                    | {"heads_total": heads, "heads_kept": heads - n, "heads_removed": n, "fraction_removed": n / heads}
                    | {f"quality{end}": own + by for end, by in (("", 0), ("_low", -0.02), ("_high", 0.02))}
                    | {"regret_quality": best[n] - own + (chance.normal(0, 0.004) if 0 < n < heads else 0)}
                )
    table = pd.DataFrame(rows)
    table["regret_quality_low"] = table["regret_quality"] - 0.02
    table["regret_quality_high"] = table["regret_quality"] + 0.02
    return table


def _methods(pruning: pd.DataFrame, scorers: tuple[str, ...], heads: int) -> pd.DataFrame:
    rows = []
    for name in scorers:
        regret = pruning.loc[pruning["scorer"] == name, "regret_quality"].mean()
        rows.append(
            {"scorer": name, "family": FAMILIES[name], "settings": "", "area": 0.7}
            | {"choose_quality": 0.7 - regret, "choose_loss": regret}
            | {"regret_quality": regret}
            | {"regret_quality_low": regret - 0.012, "regret_quality_high": regret + 0.012}
            | {"forward_passes": heads, "backward_passes": int(FAMILIES[name] == "gradient"), "seconds": 1.0}
        )
    return pd.DataFrame(rows)


def _scores(scorers: tuple[str, ...], heads: int, chance: np.random.Generator) -> pd.DataFrame:
    rows = [
        {"scorer": name, "draw": number, "site": site, "layer": layer, "head": head}
        | {"score": scale * chance.normal(1, 1), "stderr": 0.1 * scale, "skewness": 0.3}
        for name, scale in zip(scorers, 10.0 ** chance.integers(-6, 4, len(scorers)), strict=True)
        for number in range(10 if name == "random" else 1)
        for site in ("encoder_self", "decoder_self", "cross")
        for layer in range(2)
        for head in range(heads // 6)
    ]
    return pd.DataFrame(rows)
