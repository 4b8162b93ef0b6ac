"""Write a pruned model into a file that llama.cpp reads, and the servers that are built on it.

Layers of a pruned model differ in their numbers of heads, key-value heads and neurons. The architecture `deci` of
llama.cpp has these numbers layer by layer, and no attention or feed-forward part where a number is 0. All else that it
computes is what `llama` computes.

Dimensions: H = heads, K = head_dim, D = width of the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from mhaprune.progress import shown, track
from mhaprune.settings.ranges import checked
from mhaprune.settings.refusals import foreign

MAPS = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
NAME = "deci"
"""The architecture whose layers may differ."""
OF_HEADS = [f"{NAME}.{name}" for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")]
"""The facts that are the width of a head."""


@checked
@shown()
def write(model: nn.Module, path: str | Path, base: str | Path) -> None:
    """Write a model into the file `path`, in float16 if it is, else in float32; llama.cpp's `llama-quantize` makes it
    smaller.

    `base` is a file of the whole model, as llama.cpp's own `convert_hf_to_gguf.py` writes it. The tokenizer and all
    facts that a removal leaves as they were are copied from it. Raises ValueError, one line, for a model that is no
    Llama, for heads that stream or share keys unevenly, which the format cannot say, and for another model's file.
    """
    target = Path(path)
    if type(model).__name__ != "LlamaForCausalLM":
        raise ValueError(f"model: is a {type(model).__name__}, only a LlamaForCausalLM can be written")
    if target.suffix != ".gguf" or not target.parent.is_dir():
        raise ValueError(f"path={target}: must be a file that ends in .gguf, in a folder that exists")
    with foreign(f"base={base}: is no file of GGUF that can be read"):
        read = gguf.GGUFReader(base)
    facts = read.fields
    body: Any = model.model  # type: ignore[union-attr]
    check(body, facts, base)
    check_factors(body, read.tensors, base)
    unfinished = target.with_suffix(".gguf.part")
    writer = gguf.GGUFWriter(unfinished, NAME)
    try:
        numbers = counts(body)
        copy_facts(writer, facts, set(numbers))
        for name, values in numbers.items():
            writer.add_array(name, values)
        for name in OF_HEADS:
            writer.add_uint32(name, body.layers[0].self_attn.head_dim)
        for each in read.tensors:
            if each.name.startswith("rope_"):  # the factors of rotary positions, which are no weight of the model
                writer.add_tensor(each.name, each.data)
        for name, weight in track([*tensors(model, body)], "tensors"):
            kept = weight.detach().cpu()
            kept = kept.float() if kept.dtype == torch.bfloat16 or kept.dim() == 1 else kept
            writer.add_tensor(name, kept.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def check(body: Any, facts: Any, base: str | Path) -> None:
    """Raise ValueError for heads that the format cannot describe, and for a file of another model."""
    for number, layer in enumerate(body.layers):
        attention = layer.self_attn
        for name, what in (("streams", "heads that stream"), ("kept_of_kv", "groups of unequal size")):
            if getattr(attention, name, None):
                raise ValueError(f"model.layers.{number}: has {what}, which a file of GGUF cannot say")
        parts = [*attention.children(), *layer.mlp.children()]
        if any(getattr(part, "bias", None) is not None for part in parts):
            raise ValueError(f"model.layers.{number}: has biases, which {NAME} of llama.cpp has not")
    kind = facts["general.architecture"].contents() if "general.architecture" in facts else "unknown"
    tokens, width = body.embed_tokens.weight.shape
    sizes = {"block_count": len(body.layers), "embedding_length": width, "tokens": tokens}
    found = {name: facts[f"{kind}.{name}"].contents() for name in sizes if f"{kind}.{name}" in facts}
    if (words := facts.get("tokenizer.ggml.tokens")) is not None:
        found["tokens"] = len(words.contents())
    if kind != "llama" or found != sizes:
        raise ValueError(f"base={base}: is of a model of {kind} with {found}, not of this one with {sizes}")
    if (activation := body.config.hidden_act) not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation}: {NAME} of llama.cpp computes silu, must be silu")
    for name, (ours, default) in computed(body.config).items():
        theirs = facts[f"{kind}.{name}"].contents() if f"{kind}.{name}" in facts else default
        same = abs(theirs - ours) <= 1e-5 * abs(ours) if isinstance(ours, float) else theirs == ours
        if not same:
            raise ValueError(f"base={base}: has {name} {theirs}, this model has {ours}; must be a file of this model")


def computed(config: Any) -> dict[str, tuple[Any, Any]]:
    """Return what the model computes beside its weights, by the names of facts, each with what llama.cpp takes if there
    is no such fact. Raises ValueError for positions that cannot be compared."""
    rope = config.rope_parameters
    kinds = {"default": "none", "llama3": "none", "linear": "linear"}  # of llama3 the factors are a tensor
    if (kind := rope.get("rope_type", "default")) not in kinds:
        raise ValueError(f"rope_type={kind}: cannot be compared with a file, must be {', '.join(kinds)}")
    return {
        "attention.layer_norm_rms_epsilon": (float(config.rms_norm_eps), 0.0),
        "rope.freq_base": (float(rope["rope_theta"]), 10_000.0),
        "rope.scaling.type": (kinds[kind], "none"),
        "rope.scaling.factor": (float(rope["factor"]) if kind == "linear" else 1.0, 1.0),
    }


def check_factors(body: Any, tensors: Any, base: str | Path) -> None:
    """Raise ValueError for another model's factors of rotary positions, which Llama 3 has."""
    rope, given = body.config.rope_parameters, [each.data for each in tensors if each.name.startswith("rope_")]
    steps = torch.arange(0, body.layers[0].self_attn.head_dim, 2).double() / body.layers[0].self_attn.head_dim
    ours = (rope["rope_theta"] ** -steps) / body.rotary_emb.inv_freq.double().cpu()
    wanted = [ours] if rope.get("rope_type") == "llama3" else []
    theirs = [torch.tensor(data).double().flatten() for data in given]
    if len(theirs) != len(wanted) or not all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3) for a, b in zip(theirs, wanted, strict=True)
    ):
        raise ValueError(f"base={base}: has other factors of rotary positions, must be a file of this model")


def counts(body: Any) -> dict[str, list[int]]:
    """Return the numbers of heads, key-value heads and neurons of each layer."""
    rows: dict[str, list[int]] = {}
    for layer in body.layers:
        attention, attends = layer.self_attn, reads(layer.self_attn.o_proj)
        of_layer = {
            "attention.head_count": attention.q_proj.out_features // attention.head_dim * attends,
            "attention.head_count_kv": attention.k_proj.out_features // attention.head_dim * attends,
            "feed_forward_length": layer.mlp.gate_proj.out_features * reads(layer.mlp.down_proj),
        }
        for name, value in of_layer.items():
            rows.setdefault(f"{NAME}.{name}", []).append(value)
    return rows


def reads(last: Any) -> bool:
    """Return whether a part has units: one that lost all of them has a silent one, which its last map reads as zero."""
    return bool(last.weight.any())


def copy_facts(writer: Any, facts: Any, own: set[str]) -> None:
    """Copy the facts of another file, but for those that describe the file, and `own`."""
    for name, field in facts.items():
        name = name.replace("llama.", f"{NAME}.", 1) if name.startswith("llama.") else name
        described = name.startswith("GGUF.") or name in ("general.architecture", "general.file_type")
        if not described and name not in own and name not in OF_HEADS:
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[-1] if len(kinds) > 1 else None)


def tensors(model: Any, body: Any) -> Any:
    """Yield the weights by their names in llama.cpp. Queries and keys have their rotary halves in turn there."""
    yield "token_embd.weight", body.embed_tokens.weight
    yield "output_norm.weight", body.norm.weight
    if model.lm_head.weight is not body.embed_tokens.weight:
        yield "output.weight", model.lm_head.weight
    for number, layer in enumerate(body.layers):
        attention, block = layer.self_attn, f"blk.{number}"
        if reads(attention.o_proj):
            yield f"{block}.attn_norm.weight", layer.input_layernorm.weight
            for letter in "qk":
                weight = getattr(attention, f"{letter}_proj").weight
                yield f"{block}.attn_{letter}.weight", in_turn(weight, attention.head_dim)
            yield f"{block}.attn_v.weight", attention.v_proj.weight
            yield f"{block}.attn_output.weight", attention.o_proj.weight
        if reads(layer.mlp.down_proj):
            yield f"{block}.ffn_norm.weight", layer.post_attention_layernorm.weight
            for name, theirs in MAPS.items():
                yield f"{block}.{theirs}.weight", getattr(layer.mlp, name).weight


def in_turn(weight: Tensor, head_dim: int) -> Tensor:
    """Return the rows (H·K, D) of heads with those of the first and the second half of each head in turn."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
