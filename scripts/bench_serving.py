"""Time models with half of their heads where models are served: torch, onnxruntime and OpenVINO, on one thread.

A model of the shape of BERT-base with random weights has lost half of its heads: the same number in each layer (even),
or wherever the lowest scores are (ragged). Dense, even, ragged and dense again are run in turn; `ratio` is the time of
a model divided by that of the dense one, median and quartiles. A Llama-like model that lost half of its key-value
groups generates beside one that was built so. Needs pip install -e '.[hf,onnx]' openvino; a runtime that is not
installed is left out.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import mhaprune
from mhaprune import losses
from mhaprune.measure.times import in_turn, ratios

SMALL = {"hidden_size": 48, "intermediate_size": 48}


def runners(model: nn.Module, file: Path, batch: dict[str, Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """A runtime's name, and one pass in it."""
    yield "torch", torch.no_grad()(partial(model, **batch))
    mhaprune.export(model, file, batch)
    given = {name: tensor.numpy() for name, tensor in batch.items()}
    with suppress(ImportError):
        onnxruntime: Any = import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(file), options)
        yield "onnxruntime", partial(session.run, None, given)
    with suppress(ImportError):
        openvino: Any = import_module("openvino")
        compiled = openvino.Core().compile_model(str(file), "CPU", {"INFERENCE_NUM_THREADS": 1})
        yield "openvino", partial(compiled, given)


def encoders(small: bool, rounds: int, clock: Callable[[], float]) -> pd.DataFrame:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SMALL if small else {}), add_pooling_layer=False).eval()
    ids = torch.randint(0, 1000, (8, 16 if small else 128))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    heads = mhaprune.wrap(model, losses.drift, score=[batch])
    models: dict[str, nn.Module] = {"dense": model, "dense again": model}
    for name, even in (("even", True), ("ragged", False)):
        models[name] = heads.prune(keep=0.5, by="gate_output", even=even)
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, each in models.items():
            for runtime, call in runners(each, Path(folder, f"{name}.onnx"), batch):
                calls.setdefault(runtime, {})[name] = call
        rows = []
        for runtime, of_models in calls.items():
            times = in_turn(of_models, rounds, warmup=3, clock=clock)
            for name in ("even", "ragged", "dense again"):
                rows.append({"runtime": runtime, "model": name, **ratios(times, name, "dense")})
    return pd.DataFrame(rows)


def generation(small: bool, rounds: int, clock: Callable[[], float]) -> pd.DataFrame:
    """Batches of eight, with a cache: pruned beside built so. The weights differ, the shapes are the same."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 1000, "head_dim": 16}
    sizes |= {"hidden_size": 64 if small else 512, "pad_token_id": 0, "eos_token_id": None}
    torch.manual_seed(0)
    models = {}
    for name, groups in (("dense", 8), ("built so", 4)):
        config = LlamaConfig(**sizes, num_attention_heads=2 * groups, num_key_value_heads=groups)
        models[name] = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 1000, (8, 16))
    heads = mhaprune.wrap(models["dense"], losses.language_model, score=[{"input_ids": ids, "labels": ids}])
    mask = heads.mask(keep=0.5, by="gate_output", unit="group", even=True)
    models["pruned"] = heads.prune(mask=mask)
    print("cache in bytes, dense and pruned:", heads.cache_bytes(None, 8, 48), heads.cache_bytes(mask, 8, 48))
    how = {"max_new_tokens": 8 if small else 32, "do_sample": False}
    calls = {name: partial(each.generate, ids, **how) for name, each in models.items()}
    calls["built so again"] = calls["built so"]
    times = in_turn(calls, rounds, warmup=2, clock=clock)
    return pd.DataFrame([{"model": name, **ratios(times, name, "built so")} for name in calls if name != "built so"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="how often each is run, in turn, default 20")
    parser.add_argument("--processor-time", action="store_true", help="for a machine with other work on it")
    parser.add_argument("--small", action="store_true", help="narrow models, to try the script")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if chosen.processor_time else time.perf_counter
    for table in (generation(chosen.small, chosen.rounds, clock), encoders(chosen.small, chosen.rounds, clock)):
        print(table.to_string(index=False, float_format=lambda x: f"{x:.3f}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
