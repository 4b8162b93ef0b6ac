"""Measure wrapping, scoring, pruning and a refit of models by depth: processor time and memory on one thread.

The layers have the widths of Qwen2-0.5B (14 query heads, 2 key-value heads, 896 and 4864 features), random weights and
a small vocabulary. The data are 8 texts of 64 tokens, in batches of 4. Every depth is measured in a process of its own,
so that the peak of memory is its own. Needs pip install -e '.[hf]'.
"""

import argparse
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mhaprune

QWEN: dict[str, Any] = {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 2000}
WIDTHS = {False: {"hidden_size": 896, "intermediate_size": 4864}, True: {"hidden_size": 56, "intermediate_size": 64}}


def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, ids = output.logits[:, :-1].transpose(1, 2).float(), batch["input_ids"][:, 1:]
    return F.cross_entropy(logits, ids, reduction="none").mean(dim=1)


def peak() -> float:
    """The most gigabytes that this process has held so far, by the counter of the system."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(layers: int, dtype: str, small: bool, refit: bool, neurons: bool) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=layers, **QWEN, **WIDTHS[small])).to(getattr(torch, dtype))
    ids = torch.randint(0, 2000, (8, 64))
    parts = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(4)]
    weights = sum(weight.nbytes for weight in model.parameters()) / 1e9
    print(f"{layers} layers, {dtype}, {weights:.2f} GB of weights, {peak():.2f} GB held", flush=True)
    wrap = mhaprune.wrap  # the import is not measured
    units: Any = ("head", "neuron") if neurons else ("head",)
    heads = timed("wrap", lambda: wrap(model.eval(), loss, score=parts, units=units))
    print(f"  {heads}; masked and removed differ by {heads.proven.difference:.1e}")
    timed("gate_output", partial(heads.score, "gate_output"))
    timed("half of the heads removed, without a copy", partial(heads.prune, keep=0.5, by="gate_output", copy=False))
    timed("half of the heads removed", partial(heads.prune, keep=0.5, by="gate_output"))
    if neurons:
        timed("surgeon", partial(heads.score, "surgeon"))
    if refit:
        timed("the same with a refit", partial(heads.prune, keep=0.5, by="gate_output", refit=True))


def timed(name: str, call: Callable[[], Any]) -> Any:
    before, begin = peak(), time.process_time()
    result = call()
    print(f"  {name}: {time.process_time() - begin:.2f} s, {peak() - before:.2f} GB more at the peak", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 24], help="depths, default 4 8 24")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--refit", action="store_true", help="also with a refit")
    parser.add_argument("--neurons", action="store_true", help="hidden neurons too, and their order by surgeon")
    parser.add_argument("--small", action="store_true", help="narrow layers, to try the script")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if len(chosen.layers) == 1:
        measure(chosen.layers[0], chosen.dtype, chosen.small, chosen.refit, chosen.neurons)
        return 0
    further = [option for option in ("--refit", "--small", "--neurons") if getattr(chosen, option[2:])]
    for layers in chosen.layers:
        command = [sys.executable, __file__, "--layers", str(layers), "--dtype", chosen.dtype, *further]
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
