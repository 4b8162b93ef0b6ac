"""Measure a scoring that is shared out to worker processes, and one that is killed and goes on.

The model has layers of the widths of Qwen2-0.5B, random weights and a small vocabulary. Ablation of all its heads is
timed in one process and with workers, in turn. A second scoring is killed (SIGKILL) when half of its batches are kept,
and started again. All scores must be equal in every bit. Needs pip install -e '.[hf,ray]'.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import torch

import mhaprune
from bench_scale import QWEN, WIDTHS, loss
from mhaprune.api.wrap import Heads
from mhaprune.settings.refusals import one_line

BATCHES = 4


def wrapped(chosen: argparse.Namespace, workers: int = 0, cache: Path | None = None) -> Heads:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(num_hidden_layers=chosen.layers, **QWEN, **WIDTHS[chosen.small])
    parts = torch.randint(0, 2000, (chosen.texts, 64)).split(chosen.texts // BATCHES)
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]
    return mhaprune.wrap(Qwen2ForCausalLM(config).eval(), loss, score=batches, workers=workers, cache=cache)


def scored(heads: Heads) -> tuple[float, pd.DataFrame]:
    begin = time.perf_counter()
    table = heads.score("ablation")
    return time.perf_counter() - begin, table[["layer", "head", "score", "stderr"]]


def share_out(chosen: argparse.Namespace) -> None:
    """Time one process and workers in turn, each time with a model that was not scored before."""
    times: dict[int, list[float]] = {0: [], chosen.workers: []}
    tables = []
    scored(wrapped(chosen, chosen.workers))  # the workers start
    for _ in range(chosen.rounds):
        for workers, seconds in times.items():
            taken, table = scored(wrapped(chosen, workers))
            seconds.append(taken)
            tables.append(table)
    for workers, seconds in times.items():
        name = f"{workers} workers" if workers else "one process"
        print(f"{name}: {', '.join(f'{each:.1f}' for each in seconds)} s")
    ratios = [alone / shared for alone, shared in zip(*times.values(), strict=True)]
    print(f"{statistics.median(ratios):.2f} times as fast; equal in every bit: {all(map(tables[0].equals, tables))}")


def kill(chosen: argparse.Namespace) -> None:
    """Kill a scoring in the middle and start it again."""
    whole, table = scored(wrapped(chosen))
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--score", folder, "--layers", str(chosen.layers)]
        command += ["--texts", str(chosen.texts), *(["--small"] if chosen.small else [])]
        with subprocess.Popen(command) as process:
            while len(list(Path(folder).rglob("*.pt"))) < BATCHES // 2:
                if process.poll() is not None:
                    raise RuntimeError("too quick to be killed: give more --layers or --texts")
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        on, again = scored(wrapped(chosen, cache=Path(folder)))
        more, last = scored(wrapped(chosen, cache=Path(folder)))
    print(f"whole {whole:.1f} s, after the kill {on:.1f} s, once more {more:.1f} s;", end=" ")
    print(f"equal in every bit: {table.equals(again) and table.equals(last)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of workers, default 2; 0 measures the kill only")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in turn, default 3")
    parser.add_argument("--layers", type=int, default=4, help="depth, default 4")
    parser.add_argument("--texts", type=int, default=16, help="number of texts of 64 tokens, default 16")
    parser.add_argument("--small", action="store_true", help="narrow layers, to try the script")
    parser.add_argument("--score", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    for name, least in {"workers": 0, "rounds": 1, "layers": 1, "texts": BATCHES}.items():
        if getattr(chosen, name) < least:
            parser.error(f"--{name}={getattr(chosen, name)}: must be {least} or more")
    torch.set_num_threads(1)
    if chosen.score:
        scored(wrapped(chosen, cache=chosen.score))
        return 0
    try:
        if chosen.workers:
            share_out(chosen)
        kill(chosen)
    except (ValueError, RuntimeError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
