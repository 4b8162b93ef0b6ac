"""Write a pruned model into a folder of the architecture DeciLM, which mlx-lm and vLLM read.

A layer of DeciLM has its own number of key-value heads, or no attention, and its own number of neurons, or no
feed-forward part. But all layers have equally many query heads, and the numbers of neurons are multiples of 256. So
query heads and neurons that were removed are filled up with zeros, which change no output. The key-value cache is as
small as that of the pruned model. It computes less only where a layer has no attention or fewer neurons.

Dimensions: H = query heads, G = key-value heads, K = head_dim, D = width of the model, F = neurons.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from mhaprune.progress import shown
from mhaprune.settings.ranges import checked
from mhaprune.storage.store import make_folder, write_bytes, write_json

WEIGHTS = "model.safetensors"
MULTIPLE = 256
"""Numbers of neurons are rounded up to a multiple of this by every reader."""
KEPT = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "hidden_size", "initializer_range"),
    *("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings"),
    *("vocab_size", "attention_bias", "mlp_bias"),
)
"""Keys of the config that a removal leaves as they were."""
ACTIVATIONS = ("silu", "relu", "gelu", "gelu_new", "gelu_fast")
"""The activations that mlx-lm has."""
CODE = '''"""The config of DeciLM, for readers that take it from transformers."""

from transformers import LlamaConfig


class Named(dict):
    """A dict whose entries are attributes too."""

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **named):
        super().__init__(**named)
        self.block_configs = [Named({part: Named(each) for part, each in block.items()}) for block in block_configs]
'''


@checked
@shown()
def write(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a pruned `LlamaForCausalLM`, and its tokenizer if it is given, into a folder.

    Raises ValueError, one line, for another model, for heads that stream, for a layer whose key-value heads cannot
    share the query heads equally, and for a folder with other weights; `prune(..., even={layer: groups})` chooses how
    many groups stay.
    """
    if type(model).__name__ != "LlamaForCausalLM":
        raise ValueError(f"model: is a {type(model).__name__}, only a LlamaForCausalLM can be written")
    whole: Any = model
    config = whole.config
    layers = whole.model.layers
    head_dim = layers[0].self_attn.head_dim
    heads = config.hidden_size // head_dim
    widest = max(layer.self_attn.q_proj.out_features for layer in layers)
    if config.hidden_size % head_dim or widest > config.hidden_size or config.attention_bias or config.mlp_bias:
        raise ValueError("model: its heads must fit into its width, which their own width divides, and have no biases")
    weights, blocks = dict[str, Tensor](), []
    for name, weight in (("model.embed_tokens", whole.model.embed_tokens), ("model.norm", whole.model.norm)):
        weights[f"{name}.weight"] = weight.weight
    if whole.lm_head.weight is not whole.model.embed_tokens.weight:
        weights["lm_head.weight"] = whole.lm_head.weight
    for number, layer in enumerate(layers):
        path = f"model.layers.{number}"
        attention, feed_forward = list(attention_of(layer, path, heads)), list(feed_forward_of(layer))
        kv_heads = len(attention[1][1]) // head_dim if attention else 0
        neurons = len(feed_forward[0][1]) if feed_forward else 0
        blocks.append(
            {
                "attention": {"no_op": not attention, "n_heads_in_group": heads // kv_heads if attention else None},
                "ffn": {"no_op": not feed_forward, "ffn_mult": multiplier(neurons, config.hidden_size)},
            }
        )
        weights |= {f"{path}.{name}.weight": weight for name, weight in (*attention, *feed_forward)}
    if all(block["attention"]["no_op"] for block in blocks):
        raise ValueError("model: has no attention left, and readers of DeciLM need some")
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"model: its activation is {config.hidden_act}, must be one of {', '.join(ACTIVATIONS)}")
    if others := sorted({path.name for path in Path(folder).glob("*.safetensors")} - {WEIGHTS}):
        raise ValueError(f"folder={folder}: holds {others[0]}, which readers would take for weights of this model")
    target = make_folder("folder", Path(folder))
    save_file(
        {name: weight.detach().cpu().contiguous() for name, weight in weights.items()},
        target / WEIGHTS,
        {"format": "pt"},
    )
    write_bytes(target / "configuration_decilm.py", CODE.encode())
    write_json(target / "config.json", config_of(whole, heads, blocks))
    if tokenizer is not None:
        tokenizer.save_pretrained(target)


def config_of(model: Any, heads: int, blocks: list[Any]) -> dict[str, Any]:
    """Return the config of the folder: `heads` query heads in every layer, and the sizes of each."""
    rope = dict(model.config.rope_parameters)
    theta = rope.pop("rope_theta")
    return {name: getattr(model.config, name) for name in KEPT} | {
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "model_type": "nemotron-nas",
        "num_attention_heads": heads,
        "rope_theta": theta,
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "block_configs": blocks,
    }


def attention_of(layer: Any, path: str, heads: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the attention of a layer with `heads` query heads; nothing if it has lost them all."""
    attention = layer.self_attn
    K = attention.head_dim
    if getattr(attention, "streams", None):
        raise ValueError(f"{path}: has heads that stream, which DeciLM cannot say")
    if not attention.o_proj.weight.any():  # the silent head that a layer without heads keeps
        return
    H, G = (map_.out_features // K for map_ in (attention.q_proj, attention.k_proj))
    of_kv = getattr(attention, "kept_of_kv", None) or [head * G // H for head in range(H)]
    if heads % G or max(map(of_kv.count, range(G))) > heads // G:
        numbers = ", ".join(str(n) for n in range(1, heads) if heads % n == 0)
        raise ValueError(
            f"{path}: has {G} key-value heads for {heads} query heads, must have one of {numbers} in DeciLM; choose"
            f" their number by prune(..., even={{layer: number}})"
        )
    queries_GqKD, outputs_DGqK = (
        [[own for own, kv in zip(each, of_kv, strict=True) if kv == g] for g in range(G)]
        for each in (attention.q_proj.weight.split(K), attention.o_proj.weight.split(K, dim=1))
    )
    size = K * heads // G
    yield "self_attn.q_proj", torch.cat([filled(torch.cat(own), size) for own in queries_GqKD])
    yield "self_attn.k_proj", attention.k_proj.weight
    yield "self_attn.v_proj", attention.v_proj.weight
    columns = [filled(torch.cat(own, dim=1).T, size) for own in outputs_DGqK]
    yield "self_attn.o_proj", torch.cat(columns).T
    yield "input_layernorm", layer.input_layernorm.weight


def feed_forward_of(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the feed-forward part of a layer; nothing if it has lost all its neurons."""
    maps = layer.mlp
    if not maps.down_proj.weight.any():
        return
    neurons = -(-maps.gate_proj.out_features // MULTIPLE) * MULTIPLE
    yield "mlp.gate_proj", filled(maps.gate_proj.weight, neurons)
    yield "mlp.up_proj", filled(maps.up_proj.weight, neurons)
    yield "mlp.down_proj", filled(maps.down_proj.weight.T, neurons).T
    yield "post_attention_layernorm", layer.post_attention_layernorm.weight


def filled(weight_RD: Tensor, rows: int) -> Tensor:
    """Return a weight with rows of zeros below, so that it has `rows`."""
    return F.pad(weight_RD, (0, 0, 0, rows - len(weight_RD)))


def multiplier(neurons: int, width: int) -> float | None:
    """Return the `ffn_mult` from which readers compute the neurons: 2/3 of it times the width, rounded up to a multiple
    of `MULTIPLE`. It aims at the middle between two multiples, so that its own rounding does not matter."""
    return 1.5 * (neurons - MULTIPLE / 2) / width if neurons else None
