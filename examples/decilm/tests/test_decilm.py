"""Folders of DeciLM: read as its readers do, and by mlx-lm."""

import copy
import json
from itertools import islice
from pathlib import Path
from typing import Any

import mhaprune_decilm
import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads

transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, LAYERS, TOKENS = 48, 4, 20
IDS = torch.arange(24).reshape(2, 12) % TOKENS


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": TOKENS, "intermediate_size": 24, **more}
    config = transformers.LlamaConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def wrapped(model: Any, **how: Any) -> Heads:
    wrap: Any = mhaprune.wrap
    return wrap(model, losses.language_model, score=[{"input_ids": IDS}], **how)


def as_readers_do(folder: Path) -> Any:
    """A Llama whose layers have the sizes that the config says, with the weights of the folder: none may be missing."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    plain = json.loads((folder / "config.json").read_text())
    rope = (plain["rope_scaling"] or {"rope_type": "default"}) | {"rope_theta": plain["rope_theta"]}
    more = {"intermediate_size": 1, "rope_parameters": rope}
    base = transformers.LlamaConfig(**{name: plain[name] for name in mhaprune_decilm.KEPT}, **more)
    model = transformers.LlamaForCausalLM(base)
    for n, block in enumerate(config.block_configs):
        own = copy.deepcopy(model.config)
        if not block.attention.no_op:
            own.num_key_value_heads = config.num_attention_heads // block.attention.n_heads_in_group
        if not block.ffn.no_op:
            neurons = int(2 * block.ffn.ffn_mult * config.hidden_size / 3)
            own.intermediate_size = -(-neurons // 256) * 256
        layer = type(model.model.layers[n])(own, n)
        if block.attention.no_op:
            layer.self_attn, layer.input_layernorm = Nothing(), torch.nn.Identity()
        if block.ffn.no_op:
            layer.mlp, layer.post_attention_layernorm = Nothing(), torch.nn.Identity()
        model.model.layers[n] = layer
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model.eval()


class Nothing(torch.nn.Module):
    """A part that adds nothing."""

    def forward(self, x: Any = None, hidden_states: Any = None, **_: Any) -> Any:
        return torch.zeros_like(x) if x is not None else (torch.zeros_like(hidden_states), None)


ROPE = {"rope_type": "llama3", "rope_theta": 900.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8}
CASES: dict[str, Any] = {
    "nothing removed": (("head",), []),
    "narrow heads with other positions": (("head",), ["2.0", "2.1"]),
    "a group, a layer, all but one group": (("head",), ["0.2", "0.3", "0.0", "0.1", "1", "3.4"]),
    "heads of a group, unevenly": (("head",), ["2.1", "3.0", "3.3"]),
    "neurons too, and a whole part": (("head", "neuron"), ["0.0", "0.1", "0.2", "0.3", "n1", "n2.0", "n2.5"]),
}


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_reader_computes_what_the_model_does(case: str, tied: bool, tmp_path: Path) -> None:
    units, names = CASES[case]
    more = {"head_dim": 4, "rope_parameters": ROPE} if "narrow" in case else {}
    heads = wrapped(llama(tie_word_embeddings=tied, **more), units=units)
    gone = []
    for unit in heads.grid:
        name = f"{'n' * unit.site.startswith('neuron')}{unit.layer}"
        gone += [unit] * (name in names or f"{name}.{unit.head}" in names)
    small: Any = heads.prune(mask=gone)
    mhaprune_decilm.write(small, tmp_path / "small")
    read = as_readers_do(tmp_path / "small")
    torch.testing.assert_close(read(IDS).logits, small(IDS).logits)
    blocks = json.loads((tmp_path / "small/config.json").read_text())["block_configs"]
    if case.startswith("a group"):
        assert [block["attention"]["n_heads_in_group"] for block in blocks] == [6, None, 2, 2]
    assert [block["ffn"]["no_op"] for block in blocks] == [False, case.startswith("neurons"), False, False]


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    heads = wrapped(llama())
    stream = heads.units("group").streaming(1, 3).prune(keep=0.5, by="random")
    two_groups = heads.units("group").prune(mask={1: [2]})
    for model, reason in (
        (stream, r"^model\.layers\.\d: has heads that stream, which DeciLM cannot say$"),
        (
            wrapped(llama(num_attention_heads=3)).units("group").prune(mask={1: [2]}),
            "has 2 key-value heads for 3 query",
        ),
        (llama(attention_bias=True), r"^model: its heads must fit into its width, .* have no biases$"),
        (llama(head_dim=10), r"^model: its heads must fit into its width"),
        (llama(head_dim=16), r"^model: its heads must fit into its width"),
        (llama(hidden_act="gelu_pytorch_tanh"), r"^model: its activation is gelu_pytorch_tanh, must be one of silu, "),
        (llama().model, r"^model: is a LlamaModel, only a LlamaForCausalLM can be written$"),
        (heads.prune(mask=list(heads.grid)), r"^model: has no attention left"),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            mhaprune_decilm.write(model, tmp_path / "no")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "no").exists()
    for _ in range(2):
        mhaprune_decilm.write(two_groups, tmp_path / "two")  # of 6 query heads
    (tmp_path / "two/model-00001-of-00002.safetensors").write_bytes(b"old")
    with pytest.raises(ValueError, match="^folder=.*: holds model-00001-of-00002.safetensors, which readers would"):
        mhaprune_decilm.write(two_groups, tmp_path / "two")


@pytest.mark.parametrize(("neurons", "width"), [(256, 576), (1536, 576), (14336, 4096), (28672, 8192), (256, 16384)])
def test_readers_find_the_number_of_neurons_in_six_digits(neurons: int, width: int) -> None:
    said = round(mhaprune_decilm.multiplier(neurons, width) or 0.0, 6)
    assert -(-int(2 * said * width / 3) // 256) * 256 == neurons


@pytest.mark.slow
def test_mlx_says_what_the_model_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 without attention in two layers, with one group of three in ten others, and with fewer neurons."""
    mlx = pytest.importorskip("mlx.core", reason="pip install 'mlx[cpu]' mlx-lm")
    generate = pytest.importorskip("mlx_lm.generate")
    load = pytest.importorskip("mlx_lm.utils").load_model
    smollm2 = pytest.importorskip("mhaprune_models.smollm2", reason="pip install -e examples/models")
    if not (smollm2.FOLDER / smollm2.FILE).is_file():
        pytest.skip(smollm2.INSTALL)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = smollm2.language_model(str(tmp_path / "cache"))
    ids = torch.tensor([tokenizer("The capital of France is Paris, and the capital of Italy is").input_ids])
    wrap: Any = mhaprune.wrap
    units = ("head", "neuron")
    heads = wrap(model, losses.language_model, score=[{"input_ids": ids}], prove="none", units=units)
    gone = [
        unit
        for unit in heads.grid
        if (unit.site.startswith("neuron") and unit.layer % 3 == 1 and unit.head % 7 == 0)
        or (not unit.site.startswith("neuron") and (unit.layer in (20, 27) or (unit.layer % 3 == 0 and unit.head > 2)))
    ]
    small: Any = heads.prune(mask=gone)
    mhaprune_decilm.write(small, tmp_path / "small", tokenizer)
    mlx.set_default_device(mlx.cpu)
    read, _ = load(tmp_path / "small")
    with torch.no_grad():
        wanted = small(ids).logits[0]
    found = torch.tensor(read(mlx.array(ids.tolist())).tolist()[0])
    assert (found - wanted).abs().max() < 1e-3 * wanted.abs().max()
    said = small.generate(ids, max_new_tokens=48, do_sample=False)[0, ids.shape[1] :].tolist()
    steps = islice(generate.generate_step(mlx.array(ids[0].tolist()), read), 48)
    tokens = [int(token) for token, _ in steps]
    assert tokens[: len(said)] == said
