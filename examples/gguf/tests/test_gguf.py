"""Files of GGUF: their numbers by layer, their weights, and what llama.cpp says with them."""

from pathlib import Path
from typing import Any

import gguf
import mhaprune_gguf
import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads

transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, LAYERS, K = 32, 3, 8
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 16}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": K, "vocab_size": 20}
    sizes |= {"rope_parameters": ROPE} | more
    config = transformers.LlamaConfig(hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def wrapped(model: Any, **how: Any) -> Heads:
    ids = torch.arange(40).reshape(2, 20) % 20
    return mhaprune.wrap(model, losses.language_model, score=[{"input_ids": ids}], **how)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("base") / "base.gguf", llama())


def written(path: Path, model: Any, theta: float = 1e4, eps: float = 1e-6, linear: float | None = None) -> Path:
    """Write the file of a whole model, as far as its facts go."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(24)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(64)
    writer.add_key_length(K)
    writer.add_token_list([f"t{n}" for n in range(20)])
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(eps)
    if linear is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(linear)
    if model.config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", factors(model).numpy())
    elif linear is None:
        writer.add_tensor("token_embd.weight", model.model.embed_tokens.weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def factors(model: Any) -> torch.Tensor:
    """The factors by which Llama 3 divides the frequencies of rotary positions."""
    return 1e4 ** -(torch.arange(0, K, 2) / K) / model.model.rotary_emb.inv_freq


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("more", "file", "reason"),
    [
        ({}, {}, ""),
        ({}, {"theta": 1e6}, "rope.freq_base 1000000.0, this model has 10000.0"),
        ({}, {"eps": 1e-5}, "attention.layer_norm_rms_epsilon 9.9.*, this model has 1e-06"),
        ({"hidden_act": "gelu"}, {}, "hidden_act=gelu: deci of llama.cpp computes silu"),
        ({"rope_parameters": LINEAR}, {}, "rope.scaling.type none, this model has linear"),
        ({"rope_parameters": LINEAR}, {"linear": 4.0}, "rope.scaling.factor 4.0, this model has 2.0"),
        ({"rope_parameters": LINEAR}, {"linear": 2.0}, ""),
        ({"rope_parameters": PLAIN}, {"linear": 2.0}, "rope.scaling.type linear, this model has none"),
        ({"rope_parameters": PLAIN}, {}, ""),
    ],
)
def test_a_file_of_a_model_that_computes_something_else_is_refused(
    more: Any, file: Any, reason: str, tmp_path: Path
) -> None:
    model = llama(**more)
    base = written(tmp_path / "base.gguf", model, **file)
    if reason:
        with pytest.raises(ValueError, match=rf"^[^\n]*{reason}[^\n]*$"):
            mhaprune_gguf.write(model, tmp_path / "no.gguf", base)
    else:
        mhaprune_gguf.write(model, tmp_path / "yes.gguf", base)


def test_factors_of_another_model_are_refused(base: Path, tmp_path: Path) -> None:
    for rope in (PLAIN, ROPE | {"factor": 4.0}):
        with pytest.raises(ValueError, match="^base=.*: has other factors of rotary positions"):
            mhaprune_gguf.write(llama(rope_parameters=rope), tmp_path / "no.gguf", base)


def test_every_layer_has_its_numbers_and_its_weights(base: Path, tmp_path: Path) -> None:
    model = wrapped(llama()).units("group").prune(mask={0: [0, 2], 1: [2]})
    mhaprune_gguf.write(model, tmp_path / "small.gguf", base)
    read = gguf.GGUFReader(tmp_path / "small.gguf")
    facts = {name: field.contents() for name, field in read.fields.items()}
    assert facts["general.architecture"] == "deci"
    assert facts["deci.attention.head_count"] == [0, 2, 4]
    assert facts["deci.attention.head_count_kv"] == [0, 1, 2]
    assert facts["deci.feed_forward_length"] == [24, 24, 24]
    assert facts["deci.attention.key_length"] == facts["deci.rope.dimension_count"] == K
    assert facts["deci.context_length"] == 64
    assert facts["tokenizer.ggml.tokens"] == [f"t{n}" for n in range(20)]
    found = {each.name: torch.tensor(each.data) for each in read.tensors}
    torch.testing.assert_close(found["rope_freqs.weight"], factors(model))
    assert not any(name.startswith("blk.0.attn") for name in found), "a layer without heads has no attention"
    layer = model.model.layers[1]
    assert torch.equal(found["blk.1.attn_v.weight"], layer.self_attn.v_proj.weight)
    assert torch.equal(found["blk.2.ffn_down.weight"], model.model.layers[2].mlp.down_proj.weight)
    queries = found["blk.1.attn_q.weight"].view(2, K // 2, 2, WIDTH)
    assert torch.equal(queries.transpose(1, 2).reshape(2 * K, WIDTH), layer.self_attn.q_proj.weight)
    assert list(tmp_path.iterdir()) == [tmp_path / "small.gguf"]


def test_what_the_format_cannot_say_is_refused(base: Path, tmp_path: Path) -> None:
    heads, path = wrapped(llama()), tmp_path / "no.gguf"
    stream = heads.units("group").streaming(1, 3).prune(keep=0.5, by="magnitude")
    uneven = heads.prune(mask={0: [0]})
    encoder = transformers.BertModel(
        transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    )
    for model, target, of, reason in (
        (stream, path, base, r"^model\.layers\.\d: has heads that stream, which a file of GGUF cannot say$"),
        (uneven, path, base, r"^model\.layers\.0: has groups of unequal size"),
        (encoder, path, base, r"^model: is a BertModel, only a LlamaForCausalLM can be written$"),
        (llama(attention_bias=True), path, base, r"^model\.layers\.0: has biases"),
        (llama().model, path, base, r"^model: is a LlamaModel, only a LlamaForCausalLM can be written$"),
        (llama(vocab_size=30), path, base, r"^base=.*'tokens': 20}, not of this one with .*'tokens': 30}$"),
        (llama(), tmp_path / "no.bin", base, r"^path=.*: must be a file that ends in \.gguf"),
        (llama(), path, tmp_path / "none.gguf", r"^base=.*: is no file of GGUF that can be read"),
        (llama(num_key_value_heads=4), path, base, None),
    ):
        if reason is None:
            mhaprune_gguf.write(model, target, of)
            continue
        with pytest.raises(ValueError, match=reason):
            mhaprune_gguf.write(model, target, of)
        assert not list(tmp_path.iterdir())
    config = transformers.LlamaConfig(**{**llama().config.to_dict(), "num_hidden_layers": 2})
    with pytest.raises(ValueError, match=r"^base=.*: is of a model of llama with .*'block_count': 3"):
        mhaprune_gguf.write(transformers.LlamaForCausalLM(config), path, base)


@pytest.mark.slow
@pytest.mark.parametrize("units", [("head",), ("head", "neuron")], ids="-".join)
def test_llama_cpp_says_what_the_model_says(units: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With layers of two and of three groups, of fewer neurons, and one without any."""
    server = pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    smollm2 = pytest.importorskip("mhaprune_models.smollm2", reason="pip install -e examples/models")
    if not (smollm2.FOLDER / smollm2.FILE).is_file():
        pytest.skip(smollm2.INSTALL)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = smollm2.language_model(str(tmp_path / "cache"))
    ids = torch.tensor([tokenizer("The capital of France is Paris, and the capital of Italy is").input_ids])
    how: Any = {"units": units, "prove": "none"}
    heads = mhaprune.wrap(model, losses.language_model, score=[{"input_ids": ids}], **how)
    heads = heads.units("group") if units == ("head",) else heads
    drop = [
        unit for unit in heads.grid if unit.site.startswith("neuron") and unit.layer % 3 == 1 and unit.head % 7 == 0
    ]
    if units == ("head",):
        drop = [unit for unit in heads.grid if unit.layer == 3 or (unit.layer % 4 == 1 and unit.head == 0)]
    small = heads.prune(mask=drop)
    mhaprune_gguf.write(small, tmp_path / "small.gguf", smollm2.FOLDER / smollm2.FILE)
    said = small.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, min_new_tokens=24
    )
    params = server.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(tmp_path / "small.gguf"), 128, 1, False
    request = {"prompt": ids[0].tolist(), "n_predict": 24, "temperature": 0.0, "ignore_eos": True}
    found = server.Server(params).handle_completions(request)["choices"][0]["text"]
    assert found == tokenizer.decode(said[0, ids.shape[1] :])
