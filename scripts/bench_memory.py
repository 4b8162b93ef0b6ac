"""Memory of scoring, pruning and saving a language model from a folder: `python scripts/bench_memory.py FOLDER`.

The folder is one that `save_pretrained` of transformers wrote. The model is loaded, half of its key-value groups are
scored by `taylor` on six texts of 96 random tokens and removed with `copy=False`, and the result is saved. The table
has the largest memory in each step, in GB: *own* is what the process must hold, and *mapped* are weights that lie in
files, which the system may drop and read again. Both are beyond what the same steps hold for a tiny model. Linux only;
needs pip install -e '.[hf]'.
"""

import argparse
import gc
import random
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

import mhaprune
from mhaprune import losses

EVERY = 0.005
"""Seconds between two looks at the memory."""


def memory() -> tuple[float, float]:
    """Return the memory that the process holds itself and that of files, in GB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    own, mapped = (int(lines[name].split()[0]) * 1024 / 1e9 for name in ("RssAnon", "RssFile"))
    return own, mapped


def most_during(step: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Return what the step returns, and the largest memory of both kinds meanwhile."""
    seen, over = [memory()], threading.Event()

    def look() -> None:
        while not over.wait(EVERY):
            seen.append(memory())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    found = step()
    over.set()
    thread.join()
    return found, tuple(map(max, zip(*seen, memory(), strict=True)))


def texts(tokens: int) -> list[dict[str, torch.Tensor]]:
    """Return six texts of random tokens that are said twice."""
    luck = random.Random(0)
    first = [[luck.randrange(tokens) for _ in range(48)] for _ in range(6)]
    ids = [torch.tensor([each + each]) for each in first]
    return [{"input_ids": each, "labels": each} for each in ids]


Step = Callable[[str, Callable[[], Any]], Any]


def pruned(load: Callable[[], Any], step: Step) -> Any:
    wrap: Any = mhaprune.wrap
    model = step("load", load)
    batches = texts(model.config.vocab_size)
    heads = step("wrap", lambda: wrap(model, losses.language_model, score=batches).units("group"))
    mask = step("score", lambda: heads.mask(keep=0.5, by="taylor"))
    return step("prune", lambda: heads.prune(mask=mask, copy=False))


def steps(load: Callable[[], Any]) -> pd.DataFrame:
    """Return the largest memory in each step."""
    rows = {}

    def step(name: str, do: Callable[[], Any]) -> Any:
        found, rows[name] = most_during(do)
        return found

    small = pruned(load, step)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        step("save", lambda: mhaprune.save(small, folder))
    return pd.DataFrame(rows, index=["own", "mapped"]).T


def tiny() -> Any:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    steps(tiny)  # which imports everything
    gc.collect()
    before = memory()
    table = steps(lambda: transformers.AutoModelForCausalLM.from_pretrained(folder)) - before
    weights = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 1e9
    print(table.round(2).to_string())
    print(f"weights in the folder: {weights:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
