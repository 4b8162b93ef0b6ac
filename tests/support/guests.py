"""Folders of tiny random models of transformers, with a tokenizer and texts for them."""

import random
from pathlib import Path
from typing import Any

import torch

WORDS = (
    *("the", "a", "head", "gate", "mask", "of", "model", "is", "was", "red", "blue", "green", "small", "large", "cat"),
    *("dog", "sees", "eats", "runs", "and", "not"),
)
MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SIZES = {"vocab_size": len(MARKS) + len(WORDS) + 1}
BERT = SIZES | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
BERT |= {"max_position_embeddings": 32, "initializer_range": 0.5}
GPT2 = SIZES | {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.5}
GPT2 |= {"bos_token_id": 2, "eos_token_id": 3}
BART = SIZES | {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32}
BART |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2, "init_std": 0.5}
BART |= {"forced_eos_token_id": None}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForSequenceClassification", BERT),
    "masked": ("BertConfig", "BertForMaskedLM", BERT),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
}


def write_models(folder: Path, *names: str) -> None:
    """Each in a folder of its name."""
    import transformers

    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate((*MARKS, *WORDS, "."))})
    for name in names:
        config, model, settings = KINDS[name]
        torch.manual_seed(0)
        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        made.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_texts(folder: Path, count: int = 60) -> None:
    """`texts.txt`, and `texts.csv` with a label and a target for each."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) + " ." for _ in range(count)]
    (folder / "texts.txt").write_text("\n".join(texts))
    rows = [f"{text},{draw.randint(0, 1)},{' '.join(reversed(text.split()))}" for text in texts]
    (folder / "texts.csv").write_text("\n".join(["text,label,target", *rows]))
