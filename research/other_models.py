"""Small models of packages that are not ours, for other_code.py: built by their own classes, heads counted by hand.

Made docs/findings/other-code.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

D, H, V = 32, 4, 50


@dataclass(frozen=True)
class Other:
    """A model of a package."""

    package: str
    """The name of the package on PyPI."""
    heads: int
    """The number of its heads, counted by hand; of layers without a softmax over positions too."""
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    width: int | None = None
    """The columns of the input of W_O that belong to a head; None for an equal share of all."""
    weighs: bool = True
    """True if a softmax over positions weighs values; False for linear attention and the like."""


def of(path: str) -> Any:
    """Return what a path `package.module:name` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def built(path: str, *arguments: Any, **settings: Any) -> nn.Module:
    """Return a model of the class that a path names."""
    model: nn.Module = of(path)(*arguments, **settings)
    return model


def hooked(**settings: Any) -> nn.Module:
    """Return a model of TransformerLens 2."""
    sizes = {"n_layers": 2, "d_model": D, "n_ctx": 16, "d_head": 8, "n_heads": H, "d_vocab": V, "d_mlp": 2 * D}
    more: Any = sizes | {"act_fn": "gelu", "dtype": torch.float64} | settings
    config = of("transformer_lens:HookedTransformerConfig")(**more)
    return built("transformer_lens:HookedTransformer", config)


def ids(length: int = 8) -> Tensor:
    return torch.randint(1, V, (3, length), generator=torch.Generator().manual_seed(1))


def vectors(length: int = 8, width: int = D) -> Tensor:
    return torch.randn(3, length, width, generator=torch.Generator().manual_seed(1))


def pictures(size: int = 32) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


class Two(nn.Module):
    """Two layers that add to a stream of vectors."""

    def __init__(self, layer: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList([layer(), layer()]), nn.Linear(D, 3)
        self.call = call or (lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            said = self.call(layer, x)
            x = x + (said[0] if isinstance(said, tuple) else said)
        return self.out(x)


class Pixels(nn.Module):
    """A layer that adds to a picture of D channels."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer, self.out = layer(), nn.Conv2d(D, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        said: Tensor = self.out(x + self.layer(x))
        return said


class Called(nn.Module):
    """A model that is called in another way, and returns one tensor."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.model, x)


def x_transformers(**settings: Any) -> nn.Module:
    layers = of("x_transformers:Decoder")(dim=D, depth=2, heads=H, attn_dim_head=8, **settings)
    return built("x_transformers:TransformerWrapper", num_tokens=V, max_seq_len=16, attn_layers=layers)


def x_encoder(**settings: Any) -> nn.Module:
    layers = of("x_transformers:Encoder")(dim=D, depth=2, heads=H, attn_dim_head=8, **settings)
    return built("x_transformers:TransformerWrapper", num_tokens=V, max_seq_len=16, attn_layers=layers)


VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": D, "depth": 2, "heads": H, "mlp_dim": 64}


def vit(path: str, heads_: int = 2 * H, /, size: int = 32, **settings: Any) -> Other:
    return Other("vit-pytorch", heads_, lambda: of(f"vit_pytorch.{path}")(**settings), lambda: pictures(size))


def timm(name: str, heads_: int, /, size: int = 32, **settings: Any) -> Other:
    def build() -> nn.Module:
        return of("timm:create_model")(
            name, num_classes=5, **{k: v for k, v in ({"img_size": size} | settings).items() if v}
        )

    return Other("timm", heads_, build, lambda: pictures(size))


def torchvision(name: str, heads: int, **settings: Any) -> Other:
    return Other("torchvision", heads, lambda: of(f"torchvision.models.{name}")(**settings), lambda: pictures(32))


def esm1b() -> nn.Module:
    Alphabet, ProteinBertModel = of("esm:Alphabet"), of("esm.model.esm1:ProteinBertModel")
    args = {"arch": "roberta_large", "layers": 2, "embed_dim": D, "ffn_embed_dim": 64, "attention_heads": H}
    more = {"max_positions": 32, "emb_layer_norm_before": True, "token_dropout": False, "final_bias": True}
    model = ProteinBertModel(SimpleNamespace(**args, **more), Alphabet.from_architecture("ESM-1b"))
    return Called(model, lambda model, x: model(x % 20 + 4)["logits"])


def esm2() -> nn.Module:
    model = of("esm.model.esm2:ESM2")(num_layers=2, embed_dim=D, attention_heads=H, token_dropout=False)
    return Called(model, lambda model, x: model(x % 20 + 4)["logits"])


def msa() -> nn.Module:
    Alphabet, MSATransformer = of("esm:Alphabet"), of("esm.model.msa_transformer:MSATransformer")
    args: dict[str, Any] = {
        "layers": 2,
        "embed_dim": D,
        "ffn_embed_dim": 64,
        "attention_heads": H,
        "dropout": 0.0,
        "max_positions": 32,
    }
    more = {"attention_dropout": 0.0, "activation_dropout": 0.0, "max_tokens_per_msa": 2**14, "max_tokens": 2**14}
    args |= {"embed_positions_msa": True, "embed_positions_msa_dim": D, "logit_bias": False, "arch": "msa_transformer"}
    model = MSATransformer(SimpleNamespace(**args, **more), Alphabet.from_architecture("msa_transformer"))
    return Called(model, lambda model, x: model((x % 20 + 4).view(-1, 2, 4))["logits"])


def whisper(fused: bool) -> nn.Module:
    own = import_module("whisper.model")
    sizes = {"n_vocab": V, "n_audio_ctx": 6, "n_text_ctx": 8, "n_mels": 8}
    layers = {
        f"n_{part}_{name}": n for part in ("audio", "text") for name, n in (("state", D), ("head", H), ("layer", 1))
    }
    model = own.Whisper(own.ModelDimensions(**sizes, **layers))
    nn.init.normal_(model.decoder.positional_embedding)  # which the class leaves empty
    for norm in [part for part in model.modules() if isinstance(part, own.LayerNorm)]:
        norm.forward = nn.LayerNorm.forward.__get__(norm)  # theirs computes in float32
    own.MultiHeadAttention.use_sdpa = fused

    def call(model: Any, x: Tensor) -> Tensor:
        sound = x.to(model.decoder.token_embedding.weight.dtype)[:, None, :12].expand(-1, 8, -1)
        said: Tensor = model(sound, x[:, :6])
        return said

    return Called(model, call)


def curated(kind: str) -> nn.Module:
    sizes = {"hidden_width": D, "intermediate_width": 64, "n_hidden_layers": 2, "n_pieces": V}
    AttentionMask, models = of("curated_transformers.layers.attention:AttentionMask"), "curated_transformers.models"
    if kind == "bert":
        config = of(f"{models}.bert:BERTConfig")(embedding_width=D, n_attention_heads=H, **sizes)
        model = built(f"{models}.bert:BERTEncoder", config)
    else:
        config = of(f"{models}.llama:LlamaConfig")(n_query_heads=H, n_key_value_heads=2, **sizes)
        model = built(f"{models}.llama:LlamaDecoder", config)
    return Called(model, lambda model, x: model(x, AttentionMask(torch.ones_like(x) > 0)).last_hidden_layer_state)


def monai_unetr() -> nn.Module:
    return of("monai.networks.nets:UNETR")(3, 2, (32, 32), 8, hidden_size=48, mlp_dim=64, num_heads=4, spatial_dims=2)


def monai_vit() -> nn.Module:
    model = of("monai.networks.nets:ViT")(
        3, (32, 32), (8, 8), hidden_size=D, mlp_dim=64, num_layers=2, num_heads=H, spatial_dims=2
    )
    return Called(model, lambda model, x: model(x)[0])


def sam_encoder() -> nn.Module:
    return of("segment_anything.modeling.image_encoder:ImageEncoderViT")(
        img_size=32,
        patch_size=4,
        embed_dim=D,
        depth=2,
        num_heads=H,
        out_chans=8,
        use_rel_pos=True,
        window_size=4,
        global_attn_indexes=(1,),
    )


def sam_two_way() -> nn.Module:
    model = of("segment_anything.modeling.transformer:TwoWayTransformer")(
        depth=2, embedding_dim=D, num_heads=H, mlp_dim=64
    )

    def call(model: nn.Module, x: Tensor) -> Tensor:
        picture = x.mT.reshape(len(x), D, 2, 4)
        return torch.cat(model(picture, picture.flip(-1), x[:, :3] * 2), dim=1)

    return Called(model, call)


def diffusers(name: str, call: Callable[[Any, Tensor], Any], **settings: Any) -> nn.Module:
    return Called(of(f"diffusers:{name}")(**settings), call)


def flux() -> nn.Module:
    sizes = {"patch_size": 1, "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8}
    more = {"num_attention_heads": H, "joint_attention_dim": D, "pooled_projection_dim": D, "axes_dims_rope": (2, 2, 4)}

    def call(model: Any, x: Tensor) -> Any:
        places = torch.zeros(5, 3), torch.zeros(8, 3)
        time = torch.full((len(x),), 0.5, dtype=x.dtype)
        return model(
            hidden_states=x[..., :8],
            encoder_hidden_states=x[:, :5],
            pooled_projections=x[:, 0],
            timestep=time,
            txt_ids=places[0],
            img_ids=places[1],
        ).sample

    return diffusers("FluxTransformer2DModel", call, **sizes, **more)


def sd3() -> nn.Module:
    sizes = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": 2,
        "attention_head_dim": 8,
    }
    more = {
        "num_attention_heads": H,
        "joint_attention_dim": D,
        "caption_projection_dim": D,
        "pooled_projection_dim": D,
        "pos_embed_max_size": 8,
    }

    def call(model: Any, x: Tensor) -> Any:
        words, time = x.flatten(1)[:, : 4 * D].view(len(x), 4, D), torch.full((len(x),), 0.5, dtype=x.dtype)
        return model(hidden_states=x, encoder_hidden_states=words, pooled_projections=words[:, 0], timestep=time).sample

    return diffusers("SD3Transformer2DModel", call, **sizes, **more)


def dit() -> nn.Module:
    sizes = {
        "num_attention_heads": H,
        "attention_head_dim": 8,
        "in_channels": 3,
        "num_layers": 2,
        "sample_size": 8,
        "norm_num_groups": 8,
    }
    time = torch.ones(3, dtype=torch.long)
    return diffusers("DiTTransformer2DModel", lambda model, x: model(x, time[: len(x)], time[: len(x)]).sample, **sizes)


def unet() -> nn.Module:
    sizes = {
        "sample_size": 8,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "norm_num_groups": 8,
    }
    more = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16, "attention_head_dim": 4,
    }  # fmt: skip

    def call(model: Any, x: Tensor) -> Any:
        return model(x, torch.ones(len(x), dtype=torch.long), x.flatten(1)[:, :48].view(len(x), 3, 16)).sample

    return diffusers("UNet2DConditionModel", call, **sizes, **more)


def open_clip(name: str = "CLIP") -> nn.Module:
    vision = {"layers": 2, "width": D, "head_width": 8, "patch_size": 8, "image_size": 32}
    text = {"layers": 2, "width": D, "heads": H, "context_length": 8, "vocab_size": V}
    model = of("open_clip.model:CLIP")(16, vision, text)

    def call(model: Any, x: Tensor) -> Tensor:
        words = (x[:, 0, 0, :8] * 7).long() % (V - 1) + 1
        return torch.cat([model.encode_image(x), model.encode_text(words)], dim=1)

    return Called(model, call)


def clip_resnet() -> nn.Module:
    return of("open_clip.modified_resnet:ModifiedResNet")(
        layers=[1, 1, 1, 1], output_dim=16, heads=8, image_size=64, width=8
    )


def perceiver() -> nn.Module:
    sizes = {
        "num_freq_bands": 2,
        "depth": 2,
        "max_freq": 4.0,
        "input_channels": 3,
        "num_latents": 4,
        "latent_dim": D,
        "num_classes": 5,
    }
    model = of("perceiver_pytorch:Perceiver")(
        **sizes, cross_heads=2, latent_heads=H, cross_dim_head=8, latent_dim_head=8
    )
    return Called(model, lambda model, x: model(x.permute(0, 2, 3, 1)))


def perceiver_io() -> nn.Module:
    sizes = {
        "dim": D,
        "queries_dim": D,
        "logits_dim": 5,
        "num_latents": 4,
        "latent_dim": D,
        "cross_heads": 2,
        "latent_heads": H,
    }
    model = of("perceiver_pytorch:PerceiverIO")(**sizes, depth=2, cross_dim_head=8, latent_dim_head=8)
    return Called(model, lambda model, x: model(x, queries=x[:, :3]))


def timesformer() -> nn.Module:
    sizes = {"dim": D, "image_size": 16, "patch_size": 8, "num_frames": 3, "num_classes": 5, "depth": 2, "heads": H}
    model = of("timesformer_pytorch:TimeSformer")(**sizes, dim_head=8)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        film = torch.stack([x[..., n : n + 16, n : n + 16] for n in range(3)], dim=1)  # (B, frames, 3, 16, 16)
        said: Tensor = model(film)
        return said

    return Called(model, call)


def axial() -> nn.Module:
    return of("axial_attention:AxialAttention")(dim=3 * 8, dim_index=1, heads=H, num_dimensions=2)


def ft_transformer() -> nn.Module:
    own = of("rtdl_revisiting_models:FTTransformer")
    model = own(
        n_cont_features=6,
        cat_cardinalities=[],
        d_out=3,
        **own.get_default_kwargs(1) | {"n_blocks": 2, "d_block": D, "attention_n_heads": H, "_is_default": False},
    )
    return Called(model, lambda model, x: model(x[:, 0, :6], None))


def gps(name: str) -> nn.Module:
    pyg = import_module("torch_geometric.nn")
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]])
    layer = pyg.GPSConv(D, pyg.GCNConv(D, D), heads=H) if name == "GPSConv" else pyg.TransformerConv(D, D // H, heads=H)
    if name != "GPSConv":
        return Called(layer, lambda layer, x: torch.stack([layer(each, edges) for each in x]))

    def in_one_graph(layer: nn.Module, x: Tensor) -> Tensor:
        """Call the layer as a loader of the package does: the graphs of a batch one after the other."""
        graph = torch.arange(len(x))
        moved = (edges[:, None] + graph[None, :, None] * x.shape[1]).flatten(1)
        said: Tensor = layer(x.flatten(0, 1), moved, batch=graph.repeat_interleave(x.shape[1]))
        return said.view_as(x)

    return Called(layer, in_one_graph)


def layers(path: str, *arguments: Any, call: Callable[[nn.Module, Tensor], Any] | None = None, **how: Any) -> Other:
    """Return two layers of a package, which is named as on PyPI."""
    package = path.partition(".")[0].partition(":")[0].replace("_", "-")
    return Other(package, 2 * H, lambda: Two(lambda: built(path, *arguments, **how), call), vectors)


def of_pixels(path: str, **settings: Any) -> Other:
    package = path.partition(".")[0].partition(":")[0].replace("_", "-")
    return Other(
        package, H, lambda: Pixels(lambda: built(path, **settings)), lambda: vectors(64).mT.unflatten(2, (8, 8))
    )


def of_ids(path: str, width: dict[str, Any], **settings: Any) -> Other:
    """Return a language model of two layers, which may return more than the logits."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        said = model(x)
        logits: Tensor = said[0] if isinstance(said, tuple) else said
        return logits

    package = path.partition(":")[0].replace("_", "-")
    more = {"num_tokens": V, "dim": D, "depth": 2, "heads": H} | width | settings
    return Other(package, 2 * H, lambda: Called(built(path, **more), call), lambda: ids(16))


def graphs() -> nn.Module:
    model = built("graph_transformer_pytorch:GraphTransformer", dim=D, depth=2, heads=H, **WIDTH, edge_dim=16)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        said: Tensor = model(x, x[:, :, None, :16] + x[:, None, :, 16:], mask=torch.ones(x.shape[:2]).bool())[0]
        return said

    return Called(model, call)


def resampler() -> nn.Module:
    return built("flamingo_pytorch:PerceiverResampler", dim=D, depth=2, heads=H, **WIDTH, num_latents=4)


WIDTH: dict[str, Any] = {"dim_head": 8}
OTHERS: dict[str, Other] = {
    "x-transformers decoder": Other("x-transformers", 8, x_transformers, ids),
    "x-transformers encoder": Other("x-transformers", 8, x_encoder, ids),
    "x-transformers flash": Other("x-transformers", 8, lambda: x_transformers(attn_flash=True), ids),
    "x-transformers kv_heads": Other("x-transformers", 8, lambda: x_transformers(attn_kv_heads=2), ids),
    "x-transformers one_kv_head": Other("x-transformers", 8, lambda: x_transformers(attn_one_kv_head=True), ids),
    "x-transformers rotary": Other("x-transformers", 8, lambda: x_transformers(rotary_pos_emb=True), ids),
    "x-transformers relative": Other("x-transformers", 8, lambda: x_transformers(rel_pos_bias=True), ids),
    "x-transformers alibi": Other("x-transformers", 8, lambda: x_transformers(alibi_pos_bias=True), ids),
    "x-transformers qk_norm": Other("x-transformers", 8, lambda: x_transformers(attn_qk_norm=True), ids),
    "x-transformers talking heads": Other(
        "x-transformers", 8, lambda: x_transformers(attn_pre_talking_heads=True), ids
    ),
    "x-transformers gated values": Other("x-transformers", 8, lambda: x_transformers(attn_gate_values=True), ids),
    "x-transformers head scale": Other("x-transformers", 8, lambda: x_transformers(attn_head_scale=True), ids),
    "vit-pytorch vit": vit("vit:ViT", dim_head=8, **VIT),
    "vit-pytorch simple_vit": vit("simple_vit:SimpleViT", dim_head=8, **VIT),
    "vit-pytorch deepvit": vit("deepvit:DeepViT", dim_head=8, **VIT),
    "vit-pytorch cait": vit("cait:CaiT", 12, dim_head=8, cls_depth=1, **VIT),
    "vit-pytorch parallel_vit": vit("parallel_vit:ViT", 16, dim_head=8, num_parallel_branches=2, **VIT),
    "vit-pytorch small dataset": vit("vit_for_small_dataset:ViT", dim_head=8, **VIT),
    "vit-pytorch cct": vit(
        "cct:CCT",
        img_size=(32, 32),
        embedding_dim=D,
        n_conv_layers=1,
        num_layers=2,
        num_heads=H,
        mlp_ratio=2,
        num_classes=5,
    ),
    "vit-pytorch nest": vit(
        "nest:NesT",
        4 + 4 + 4,
        image_size=32,
        patch_size=4,
        dim=D,
        heads=4,
        num_hierarchies=2,
        block_repeats=(1, 1),
        num_classes=5,
    ),
    "vit-pytorch twins_svt": vit(
        "twins_svt:TwinsSVT",
        0,
        size=64,
        num_classes=5,
        s1_emb_dim=16,
        s1_depth=1,
        s2_emb_dim=16,
        s2_depth=1,
        s3_emb_dim=16,
        s3_depth=1,
        s4_emb_dim=16,
        s4_depth=1,
        s1_local_patch_size=4,
        s2_local_patch_size=4,
        s3_local_patch_size=2,
        s4_local_patch_size=1,
        s1_global_k=4,
        s2_global_k=4,
        s3_global_k=2,
        s4_global_k=1,
    ),
    "vit-pytorch cvt": vit(
        "cvt:CvT",
        1 + 2 + 2,
        num_classes=5,
        s1_emb_dim=16,
        s1_heads=1,
        s1_depth=1,
        s2_emb_dim=16,
        s2_heads=2,
        s2_depth=1,
        s3_emb_dim=16,
        s3_heads=2,
        s3_depth=1,
    ),
    "vit-pytorch levit": vit(
        "levit:LeViT",
        0,
        size=64,
        image_size=64,
        num_classes=5,
        stages=2,
        dim=(16, 32),
        depth=1,
        heads=(2, 4),
        mlp_mult=2,
        dim_key=8,
        dim_value=8,
    ),
    "vit-pytorch max_vit": vit(
        "max_vit:MaxViT", 0, num_classes=5, dim=16, dim_conv_stem=8, dim_head=8, depth=(1, 1), window_size=4
    ),
    "vit-pytorch regionvit": vit(
        "regionvit:RegionViT", 0, num_classes=5, dim=(16, 16, 16, 16), depth=(1, 1, 1, 1), window_size=2
    ),
    "vit-pytorch pit": vit(
        "pit:PiT",
        0,
        size=32,
        image_size=32,
        patch_size=8,
        dim=D,
        num_classes=5,
        depth=(1, 1),
        heads=H,
        mlp_dim=64,
        dim_head=8,
    ),
    "vit-pytorch t2t": vit(
        "t2t:T2TViT", 0, image_size=32, num_classes=5, dim=D, depth=2, heads=H, mlp_dim=64, dim_head=8
    ),
    "vit-pytorch cross_vit": vit(
        "cross_vit:CrossViT",
        0,
        image_size=32,
        num_classes=5,
        sm_dim=16,
        lg_dim=16,
        sm_patch_size=8,
        lg_patch_size=16,
        sm_enc_depth=1,
        sm_enc_heads=2,
        sm_enc_mlp_dim=32,
        sm_enc_dim_head=8,
        lg_enc_depth=1,
        lg_enc_heads=2,
        lg_enc_mlp_dim=32,
        lg_enc_dim_head=8,
        cross_attn_depth=1,
        cross_attn_heads=2,
        cross_attn_dim_head=8,
        depth=1,
    ),
    "vit-pytorch scalable": vit(
        "scalable_vit:ScalableViT",
        0,
        num_classes=5,
        dim=16,
        heads=(2, 2),
        depth=(1, 1),
        ssa_dim_key=(8, 8),
        reduction_factor=(2, 1),
        window_size=(4, None),
    ),
    "timm vit_tiny": timm("vit_tiny_patch16_224", 6, depth=2),
    "timm swin": timm("swin_tiny_patch4_window7_224", 0, depths=(1, 1), num_heads=(2, 4), embed_dim=16, window_size=4),
    "timm swinv2": timm("swinv2_tiny_window8_256", 0, depths=(1, 1), num_heads=(2, 4), embed_dim=16, window_size=4),
    "timm samvit": timm("samvit_base_patch16", 8, embed_dim=D, depth=2, num_heads=H, window_size=2, patch_size=4),
    "timm convit": timm("convit_tiny", 8, embed_dim=D, depth=2, num_heads=H, local_up_to_layer=1, patch_size=8),
    "timm davit": timm(
        "davit_tiny", 6, img_size=None, depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 4), window_size=4
    ),
    "timm crossvit": timm("crossvit_tiny_240", 0, size=240),
    "timm beit": timm("beit_base_patch16_224", 8, embed_dim=D, depth=2, num_heads=H, patch_size=8),
    "timm mvitv2": timm("mvitv2_tiny", 0, size=64),
    "timm xcit": timm("xcit_nano_12_p16_224", 8, embed_dim=D, depth=2, num_heads=H),
    "timm maxvit": timm("maxvit_rmlp_pico_rw_256", 0, size=64),
    "timm eva": timm("eva02_tiny_patch14_224", 0, depth=2, embed_dim=D, num_heads=H, patch_size=8),
    "torchvision vit": torchvision(
        "vision_transformer:VisionTransformer",
        8,
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=H,
        hidden_dim=D,
        mlp_dim=64,
        num_classes=5,
    ),
    "torchvision swin": torchvision(
        "swin_transformer:SwinTransformer",
        6,
        patch_size=[4, 4],
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=5,
    ),
    "torchvision maxvit": torchvision(
        "maxvit:MaxVit",
        0,
        input_size=(32, 32),
        stem_channels=8,
        partition_size=2,
        block_channels=[16, 16],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=5,
    ),
    "fair-esm esm1b": Other("fair-esm", 8, esm1b, ids),
    "fair-esm esm2": Other("fair-esm", 8, esm2, ids),
    "fair-esm msa": Other("fair-esm", 16, msa, ids),
    "monai ViT": Other("monai", 8, monai_vit, pictures),
    "monai UNETR": Other("monai", 48, monai_unetr, pictures),
    "monai SwinUNETR": Other(
        "monai",
        0,
        lambda: of("monai.networks.nets:SwinUNETR")(
            3, 2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2), spatial_dims=2
        ),
        lambda: pictures(64),
    ),
    "conformer": Other(
        "conformer", 8, lambda: Two(lambda: of("conformer:ConformerBlock")(dim=D, dim_head=8, heads=H)), vectors
    ),
    "perceiver": Other("perceiver-pytorch", 0, perceiver, pictures),
    "perceiver io": Other("perceiver-pytorch", 0, perceiver_io, vectors),
    "timesformer": Other("timesformer-pytorch", 16, timesformer, pictures),
    "axial": Other(
        "axial-attention",
        8,
        lambda: Called(axial(), lambda model, x: model(x.view(len(x), 24, 16, 8))),
        lambda: torch.randn(3, 24, 16, 8),
    ),
    "open_clip CLIP": Other("open_clip_torch", 16, open_clip, pictures),
    "open_clip ResNet": Other("open_clip_torch", 8, clip_resnet, lambda: pictures(64)),
    "openai-whisper": Other("openai-whisper", 12, lambda: whisper(True), lambda: ids(16)),
    "openai-whisper, not fused": Other("openai-whisper", 12, lambda: whisper(False), lambda: ids(16)),
    "segment-anything encoder": Other("segment-anything", 8, sam_encoder, pictures),
    "segment-anything two-way": Other("segment-anything", 28, sam_two_way, vectors),
    "curated BERT": Other("curated-transformers", 8, lambda: curated("bert"), ids),
    "curated Llama": Other("curated-transformers", 8, lambda: curated("llama"), ids),
    "diffusers DiT": Other("diffusers", 8, dit, lambda: pictures(8)),
    "diffusers UNet": Other("diffusers", 0, unet, lambda: pictures(8)),
    "diffusers Flux": Other("diffusers", 8, flux, vectors, width=8),
    "diffusers SD3": Other("diffusers", 8, sd3, lambda: pictures(8)),
    "pyg GPSConv": Other("torch-geometric", 4, lambda: gps("GPSConv"), vectors),
    "rtdl FTTransformer": Other("rtdl_revisiting_models", 8, ft_transformer, vectors),
    "local-attention": Other(
        "local-attention",
        8,
        lambda: of("local_attention:LocalTransformer")(
            num_tokens=V, max_seq_len=16, dim=D, depth=2, heads=H, dim_head=8, local_attn_window_size=4
        ),
        lambda: ids(16),
    ),
    "colt5 attention": Other(
        "CoLT5-attention",
        8,
        lambda: Two(lambda: of("colt5_attention.transformer_block:Attention")(D, dim_head=8, heads=H)),
        vectors,
    ),
    "x-clip text": Other(
        "x-clip", 8, lambda: of("x_clip.x_clip:Transformer")(dim=D, depth=2, dim_head=8, heads=H), vectors
    ),
    "iTransformer": Other(
        "itransformer",
        8,
        lambda: Called(
            of("iTransformer:iTransformer")(
                num_variates=D, lookback_len=8, dim=D, depth=2, heads=H, dim_head=8, pred_length=(4,)
            ),
            lambda model, x: model(x),
        ),
        vectors,
    ),
    "palm": Other(
        "PaLM-pytorch", 8, lambda: of("palm_pytorch:PaLM")(num_tokens=V, dim=D, depth=2, heads=H, dim_head=8), ids
    ),
    "bidirectional cross": Other(
        "bidirectional-cross-attention",
        4,
        lambda: Called(
            of("bidirectional_cross_attention:BidirectionalCrossAttention")(dim=D, heads=H, dim_head=8, context_dim=D),
            lambda model, x: torch.cat(model(x, x.flip(1)), 1),
        ),
        vectors,
    ),
    "kornia ViT": Other(
        "kornia",
        8,
        lambda: of("kornia.models.vit:VisionTransformer")(
            image_size=32, patch_size=8, embed_dim=D, depth=2, num_heads=H
        ),
        pictures,
    ),
    "linear-attention-transformer": Other(
        "linear-attention-transformer",
        8,
        lambda: Two(lambda: of("linear_attention_transformer.linear_attention_transformer:SelfAttention")(D, heads=H)),
        vectors,
        weighs=False,
    ),
    "linformer": Other(
        "linformer", 8, lambda: Two(lambda: of("linformer:LinformerSelfAttention")(D, 8, k=4, heads=H)), vectors
    ),
    "performer": Other(
        "performer-pytorch",
        8,
        lambda: Two(lambda: of("performer_pytorch:SelfAttention")(D, heads=H, dim_head=8)),
        vectors,
        weighs=False,
    ),
    "reformer": Other(
        "reformer-pytorch",
        8,
        lambda: Two(lambda: of("reformer_pytorch:LSHSelfAttention")(D, heads=H, bucket_size=4)),
        vectors,
        weighs=False,
    ),
    "nystrom": Other(
        "nystrom-attention",
        8,
        lambda: Two(lambda: of("nystrom_attention:NystromAttention")(D, heads=H, dim_head=8, num_landmarks=4)),
        vectors,
        weighs=False,
    ),
    "memory-efficient": Other(
        "memory-efficient-attention-pytorch",
        8,
        lambda: Two(lambda: of("memory_efficient_attention_pytorch:Attention")(dim=D, heads=H, dim_head=8)),
        vectors,
    ),
    "HookedTransformer": Other("transformer-lens", 8, lambda: hooked(), ids),
    "HookedTransformer, two key heads": Other("transformer-lens", 8, lambda: hooked(n_key_value_heads=2), ids),
    "h-transformer": Other(
        "h-transformer-1d",
        8,
        lambda: of("h_transformer_1d:HTransformer1D")(
            num_tokens=V, dim=D, depth=2, max_seq_len=16, heads=H, dim_head=8, block_size=4, causal=False
        ),
        lambda: ids(16),
        weighs=False,
    ),
    "coca parallel": layers("coca_pytorch.coca_pytorch:ParallelTransformerBlock", dim=D, heads=H, **WIDTH),
    "coca cross": layers(
        "coca_pytorch.coca_pytorch:CrossAttention", D, heads=H, **WIDTH, call=lambda layer, x: layer(x, x.flip(1))
    ),
    "flamingo resampler": Other("flamingo-pytorch", 2 * H, resampler, vectors),
    "infini-transformer": of_ids("infini_transformer_pytorch:InfiniTransformer", WIDTH),
    "routing-transformer": of_ids(
        "routing_transformer:RoutingTransformerLM", {}, max_seq_len=16, window_size=4, n_local_attn_heads=H
    ),
    "compressive-transformer": of_ids(
        "compressive_transformer_pytorch:CompressiveTransformer", {}, seq_len=16, mem_len=16, cmem_len=4
    ),
    "feedback-transformer": of_ids("feedback_transformer_pytorch:FeedbackTransformer", WIDTH, seq_len=2, mem_len=8),
    "native sparse attention": layers(
        "native_sparse_attention_pytorch:SparseAttention",
        dim=D,
        heads=H,
        **WIDTH,
        sliding_window_size=2,
        compress_block_size=4,
        compress_block_sliding_stride=2,
        selection_block_size=4,
        num_selected_blocks=2,
    ),
    "graph-transformer": Other("graph-transformer-pytorch", 2 * H, graphs, vectors),
    "halonet": of_pixels("halonet_pytorch:HaloAttention", dim=D, heads=H, **WIDTH, block_size=4, halo_size=2),
    "uformer": of_pixels("uformer_pytorch.uformer_pytorch:Attention", dim=D, heads=H, **WIDTH, window_size=4),
    "bottleneck": Other(
        "bottleneck-transformer-pytorch",
        2 * H,
        lambda: built(
            "bottleneck_transformer_pytorch:BottleStack",
            dim=D,
            fmap_size=(8, 8),
            dim_out=2 * D,
            num_layers=2,
            heads=H,
            dim_head=8,
        ),
        lambda: vectors(64).mT.unflatten(2, (8, 8)),
    ),
}
"""The models by name."""
