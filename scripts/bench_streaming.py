"""How much faster SmolLM2 writes a token with half of its groups streaming: `python scripts/bench_streaming.py`.

The cache holds 4096 and 8192 tokens. In every round the whole model with its usual cache, the same once more, and two
models whose groups were chosen at random take turns, in processor time, on one core: the groups of one see the last 16
tokens, those of the other the last 252. Needs what `streaming.py` needs, and takes five minutes.
"""

import copy
import sys
import time
from typing import Any

import numpy as np
import torch
from mhaprune_models.smollm2 import language_model
from transformers import DynamicCache

import mhaprune
from mhaprune import losses
from mhaprune.hooks.windows import streaming_cache

ROUNDS, WARMUP = 24, 3


@torch.no_grad()
def times(models: dict[str, Any], length: int) -> dict[str, np.ndarray]:
    """Return the seconds of a token, in each round, by the name of the model."""
    ids, caches = torch.randint(1000, 40000, (1, length), generator=torch.Generator().manual_seed(0)), dict[str, Any]()
    for name, model in models.items():
        caches[name] = streaming_cache(model) if "window" in name else DynamicCache(config=model.config)
        if name == "whole again":
            caches[name] = copy.deepcopy(caches["whole"])
            continue
        for part in ids.split(1024, dim=1):
            model(part, cache=caches[name], use_cache=True, logits_to_keep=1)
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            begin = time.process_time()
            model(ids[:, :1], cache=caches[name], use_cache=True)
            taken[name].append(time.process_time() - begin)
    return {name: np.array(seconds[WARMUP:]) for name, seconds in taken.items()}


def main() -> int:
    torch.set_num_threads(1)
    model, _ = language_model("outputs/cache")
    wrap: Any = mhaprune.wrap
    heads = wrap(
        model.eval(), losses.language_model, score=[{"input_ids": torch.arange(600).view(2, 300)}], prove="none"
    )
    models = {"whole": model, "whole again": model}
    for recent in (16, 252):
        stream = heads.units("group").streaming(recent=recent)
        models[f"window 4 + {recent}"] = stream.prune(keep=0.5, by="random")
    for length in (4096, 8192):
        taken = times(models, length)
        for name in list(models)[1:]:
            low, middle, high = np.quantile(taken["whole"] / taken[name], (0.25, 0.5, 0.75))
            print(f"{length} tokens, {name}: {middle:.3f} times as fast ({low:.3f} to {high:.3f})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
