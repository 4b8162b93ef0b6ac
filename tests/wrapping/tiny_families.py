"""Tiny models of the families of transformers, with random weights, and a batch for each."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCABULARY = 41
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "intermediate_size": 32}
IMAGES = {**TEXT, "image_size": 8, "patch_size": 4}
CAUSAL = {**TEXT, "max_position_embeddings": 64, "pad_token_id": 0}
CAUSAL |= {"bos_token_id": 1, "eos_token_id": None}
GROUPED = {**CAUSAL, "num_key_value_heads": 2}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}
BART |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None}
BART |= {"decoder_start_token_id": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


class Family(NamedTuple):
    """How a model is made, and what it reads."""

    model: str
    settings: dict[str, Any]
    batch: str = "text"
    generates: bool = False
    why_not: str = ""
    """What is said of a family whose heads cannot be removed, or are not found."""


FAMILIES = {
    "bert": Family("BertForSequenceClassification", TEXT),
    "roberta": Family("RobertaModel", TEXT),
    "distilbert": Family(
        "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},
    ),
    "electra": Family("ElectraModel", {**TEXT, "embedding_size": 16}),
    "albert": Family("AlbertModel", {**TEXT, "embedding_size": 16}),
    "vit": Family("ViTForImageClassification", IMAGES, "image"),
    "clip_vision": Family("CLIPVisionModel", IMAGES, "image"),
    "wav2vec2": Family(
        "Wav2Vec2Model",
        {**TEXT, "conv_dim": (16,), "conv_stride": (4,), "conv_kernel": (8,)}
        | {"num_feat_extract_layers": 1, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        "sound",
    ),
    "modernbert": Family("ModernBertModel", {**CAUSAL, "cls_token_id": 1, "sep_token_id": 2}),
    "gpt_neox": Family("GPTNeoXForCausalLM", CAUSAL, generates=True),
    "opt": Family(
        "OPTForCausalLM",
        {**CAUSAL, "ffn_dim": 32, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
        generates=True,
    ),
    "gpt2": Family("GPT2LMHeadModel", GPT2, generates=True),
    "llama": Family("LlamaForCausalLM", GROUPED, generates=True),
    "mistral": Family("MistralForCausalLM", GROUPED, generates=True),
    "qwen2": Family("Qwen2ForCausalLM", GROUPED, generates=True),
    "qwen3": Family("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, generates=True),
    "gemma3": Family("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8}, generates=True),
    "bart": Family("BartForConditionalGeneration", BART, "pair", generates=True),
    "marian": Family("MarianMTModel", BART, "pair", generates=True),
    "t5": Family("T5ForConditionalGeneration", T5, "pair", generates=True),
    "umt5": Family("UMT5ForConditionalGeneration", T5, "pair", generates=True),
    "swin": Family(
        "SwinModel",
        {"image_size": 8, "patch_size": 2, "window_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [4]},
        "image",
    ),
    "beit": Family("BeitModel", {**IMAGES, "use_relative_position_bias": True}, "image"),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
        | {"begin_suppress_tokens": None, "suppress_tokens": None},
        "mel",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {**CAUSAL, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
        | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        generates=True,
    ),
}
"""Those whose heads can be gated and removed."""

GATES_ONLY = {
    "olmo2": Family(
        "Olmo2ForCausalLM",
        GROUPED,
        why_not="mixed from the heads of model.layers.0.self_attn.q_proj",
    ),
}
"""Those whose heads can be gated and not removed."""

RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
SINGLE = {
    "phi3": Family("Phi3ForCausalLM", GROUPED),
    "stablelm": Family("StableLmForCausalLM", GROUPED),
    "gemma2": Family("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", GPT2),
    "mpt": Family("MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "bloom": Family("BloomForCausalLM", {**SMALL, "n_layer": 2, "n_head": 4}),
    "xglm": Family(
        "XGLMForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32},
    ),
    "deberta": Family("DebertaForSequenceClassification", TEXT | RELATIVE),
    "deberta_v2": Family("DebertaV2ForSequenceClassification", TEXT | RELATIVE),
    "mixtral": Family("MixtralForCausalLM", GROUPED | EXPERTS),
    "llama4": Family("Llama4ForCausalLM", GROUPED | EXPERTS | {"intermediate_size_mlp": 32}),
    "gpt_oss": Family("GptOssForCausalLM", GROUPED | EXPERTS),
    "afmoe": Family("AfmoeForCausalLM", GROUPED | EXPERTS | {"num_experts": 4, "num_dense_layers": 1}),
}
"""Those without fused attention, or that do not compute in float64, or that need a second look at their sizes."""


UNKNOWN = {
    "longformer": Family(
        "LongformerModel",
        {**TEXT, "attention_window": [4, 4]},
        why_not='AttentionBlock(path, out="output.dense", heads=4, query="self.query", key="self.key",'
        ' value="self.value") for path in ["encoder.layer.0.attention", "encoder.layer.1.attention"]',
    ),
}
"""Those whose heads are not found."""


def make(family: Family, attention: str | None = None, seed: int = 0) -> nn.Module:
    """The model in evaluation, with weights and biases all different from zero."""
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, family.model)
    config = kind.config_class(**family.settings)
    if attention is not None:
        config._attn_implementation = attention
    model: nn.Module = kind(config).eval()
    with torch.no_grad():
        for weight in (each for each in model.parameters() if each.requires_grad):  # others may not be saved
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.3) + (weight.dim() == 1))
    return model


@functools.cache
def heads_of(name: str, attention: str | None = None) -> Any:
    """The wrapped model of a family, the same for all tests. Most have two layers of four heads."""
    import mhaprune

    family = (FAMILIES | GATES_ONLY)[name]
    split = [batch_of(family)]
    return mhaprune.wrap(make(family, attention), size_of_output, score=split, choose=split, report=split)


def batch_of(family: Family) -> dict[str, Tensor]:
    """Three examples, texts of different lengths."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    text = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    answer = {"decoder_input_ids": torch.randint(3, VOCABULARY, (3, 5), generator=draw)}
    return {
        "text": text,
        "image": {"pixel_values": torch.randn(3, 3, 8, 8, generator=draw)},
        "sound": {"input_values": torch.randn(3, 64, generator=draw)},
        "pair": text | answer,
        "mel": {"input_features": torch.randn(3, 8, 20, generator=draw)} | answer,
    }[family.batch]


def said(model: nn.Module, family: Family) -> Tensor:
    """The first thing that a model returns."""
    with torch.no_grad():
        output = model.eval()(**batch_of(family), **({"use_cache": False} if family.generates else {}))
    return next(value for value in output.values() if isinstance(value, Tensor))


def size_of_output(output: Any, batch: Any) -> Tensor:
    """A loss that every head changes, whatever a model returns: from every real number that belongs to an example."""
    from mhaprune.hooks.pytree import tensors_in  # families are read where mhaprune is not

    examples = len(next(iter(batch.values())))
    numbers = [value for value in tensors_in(output) if value.is_floating_point() and value.dim()]
    of_each = [value.reshape(examples, -1) for value in numbers if len(value) == examples]
    return torch.cat(of_each, dim=1).double().square().mean(dim=1)
