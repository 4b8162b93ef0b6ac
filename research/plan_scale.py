"""Say what scoring the heads of a large model would take: operations and memory, counted without its weights.

A model of the shape of Llama-2 7B is built on torch's meta device, where tensors have shapes and no numbers. The same
passes are run there as for a real model: an open pass, and for each layer a pass with one head closed that replays what
came before it. torch's counter counts their operations, and the bytes that a replay keeps are added up. Times follow
from the operations and an assumed speed.

With --check, models of three small depths are really scored, and their counted operations stand beside the plan.
Needs pip install -e '.[hf]'.

Made a part of docs/findings/large-models.md until version 0.2.0.
"""

import argparse
import warnings
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mhaprune
from mhaprune.hooks.eval_mode import at_rest
from mhaprune.hooks.pytree import tensors_in
from mhaprune.hooks.replay import Replay, recorders
from mhaprune.recoveries.refitting import refit, show

LARGE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 88,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


def operations(run: Any) -> int:
    """Return the floating-point operations of a call, by torch's counter."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return int(counter.get_total_flops())


def plan(model: Any, batch_size: int, length: int) -> dict[str, float]:
    """Return the operations of each way of scoring for one batch, and the bytes that replays hold beside the weights:
    those of the batch, and in a refit also the dense model's streams after every sublayer."""
    device = model.lm_head.weight.device
    ids = torch.zeros(batch_size, length, dtype=torch.long, device=device)
    # A mask of four dimensions is taken as it is; to make one, transformers would look at numbers.
    mask = torch.zeros(batch_size, 1, length, length, dtype=model.dtype, device=device)
    outs = [f"model.layers.{layer}.self_attn.o_proj" for layer in range(model.config.num_hidden_layers)]
    replay = Replay(model, outs)

    def run() -> None:
        model(input_ids=ids, attention_mask=mask)

    with torch.no_grad(), at_rest(model):
        forward = operations(run)
        with recorders(model) as record:
            record(replay)
            run()
        kept = {id(x): x.nbytes for call in replay.calls for x in tensors_in(call.output)}
        closed = 0
        for out in outs:
            with replay.until([out]):
                closed += operations(run)
    tokens, width = batch_size * length, model.config.hidden_size
    # A refit sums the products of the inputs of each map with themselves and with its outputs.
    sums = sum(2 * tokens * inputs * (inputs + width) for inputs in (width // 2, model.config.intermediate_size))
    sums *= len(outs)
    return {
        "gate_output": forward,
        # One pass tells the positions of each layer, one the loss; a gradient in the gates passes every product once.
        "taylor": 3 * forward,
        "ablation": forward + model.config.num_attention_heads * closed,
        "refit of half the heads": 2 * forward + sums,
        "held": sum(kept.values()),
        "held by a refit": sum(kept.values()) + 2 * len(outs) * tokens * width * model.dtype.itemsize,
    }


def checked(layers: int, texts: int = 32) -> list[dict[str, Any]]:
    """Return the counted operations of really scoring a small model, beside the plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SMALL)).eval()
    batch = {"input_ids": torch.randint(0, 100, (texts, 96))}
    planned, rows = plan(model, texts, 96), []
    for name in [name for name in planned if not name.startswith("held")]:
        heads = mhaprune.wrap(model, loss, score=[batch], quality=mean_logit)
        subject, data = heads.subject, heads.splits["score"]
        smaller = subject.without(heads.mask(0.5, by="magnitude"))
        run = partial(refitted, subject, smaller, data) if "refit" in name else partial(heads.score, name)
        counted = operations(run)
        rows.append({"layers": layers, "work": name, "counted": counted, "counted / planned": counted / planned[name]})
    return rows


def refitted(dense: Any, smaller: Any, data: Any) -> Any:
    return refit(smaller, show(dense, data))


def loss(output: Any, batch: Any) -> Tensor:
    squares: Tensor = output.logits.square().mean(dim=(1, 2))
    return squares


def mean_logit(output: Any, batch: Any) -> Tensor:
    mean: Tensor = output.logits.mean(dim=(1, 2))
    return mean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000, help="number of texts, default 1000")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text, default 512")
    parser.add_argument("--batch-size", type=int, default=8, help="texts of a batch, default 8")
    parser.add_argument("--speed", type=float, default=400e12, help="operations a second of one device, default 4e14")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8], help="numbers of devices, default 1 8")
    parser.add_argument("--layers", type=int, default=32, help="depth of the model, default 32")
    parser.add_argument("--check", action="store_true", help="count real scorings of three small models instead")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    if chosen.check:
        print(pd.DataFrame([row for layers in (2, 4, 8) for row in checked(layers)]).to_string(index=False))
        return 0
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: nn.Module = (
            LlamaForCausalLM(LlamaConfig(**LARGE | {"num_hidden_layers": chosen.layers})).bfloat16().eval()
        )
    weights = sum(weight.nbytes for weight in model.parameters())
    found = plan(model, chosen.batch_size, chosen.length)
    kept, of_refit = found.pop("held") / 1e9, found.pop("held by a refit") / 1e9
    tokens = chosen.batch_size * chosen.length
    print(
        f"{chosen.layers} layers, {sum(w.numel() for w in model.parameters()) / 1e9:.2f} billion weights in bfloat16,"
        f" {weights / 1e9:.1f} GB; a batch of {chosen.batch_size} texts of {chosen.length} tokens:"
        f" a replay holds {kept:.1f} GB; a refit holds {of_refit / tokens * 1e3:.1f} MB for each of its tokens"
    )
    batches = chosen.texts / chosen.batch_size
    rows = [
        {"work": name, "operations": f"{count * batches:.2e}"}
        | {f"hours on {n}": f"{count * batches / chosen.speed / n / 3600:.3f}" for n in chosen.devices}
        for name, count in found.items()
    ]
    print(f"{chosen.texts} texts, {chosen.speed:.0e} operations a second:")
    print(pd.DataFrame(rows).to_string(index=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
