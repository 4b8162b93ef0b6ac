"""Heads that stream in models of transformers, their caches, and the folders that hold them."""

import inspect
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads
from mhaprune.hooks.blocks import Unsupported
from mhaprune.hooks.windows import GROWS, streaming_cache
from mhaprune.measure.outcomes import measure
from mhaprune.proofs import block_by_block as block_proof

transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
pytestmark = pytest.mark.filterwarnings("ignore")

SINK, RECENT = 2, 5
SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
KINDS = {
    "Llama": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    "Qwen3": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    "GPTNeoX": {"num_attention_heads": 4},
}


def model_of(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**SIZES, **KINDS.get(kind, {}), **more)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 3 if weight.dim() > 1 else 1
    return model.eval()


def texts() -> list[dict[str, torch.Tensor]]:
    draw, made = torch.Generator().manual_seed(0), []
    for padded in (slice(0, 0), slice(0, 7), slice(-9, None)):
        ids = torch.randint(1, 64, (3, 30), generator=draw)
        real = torch.ones_like(ids)
        real[0, padded] = 0
        made.append({"input_ids": ids, "attention_mask": real})
    return made


def wrapped(model: Any) -> Heads:
    return mhaprune.wrap(model, losses.language_model, score=texts(), choose=texts(), report=texts(), prove="none")


@pytest.fixture(scope="module", params=KINDS)
def stream(request: pytest.FixtureRequest) -> Heads:
    unit = "block" if request.param == "Qwen3" else "group"  # one head of keys and values for all
    return wrapped(model_of(request.param)).units(unit).streaming(SINK, RECENT)


def some(heads: Heads) -> Any:
    return [*heads.subject.heads_of(heads.subject.names[0]), heads.subject.heads_of(heads.subject.names[2])[-1]]


def answer(model: Any, ids: torch.Tensor, **how: Any) -> Any:
    how = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20, **how}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)


def keeping(model: Any, cache: Any) -> dict[str, Any]:
    """Return a cache as the argument that this version of transformers names it by."""
    named = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in named else "past_key_values": cache}


def test_a_model_with_streaming_heads_computes_what_the_masked_one_does(
    stream: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved, double = list[str](), block_proof.in_double
    monkeypatch.setattr(
        block_proof, "in_double", lambda part, of: proved.append(type(part).__name__) or double(part, of)
    )
    small = stream.without(some(stream))
    assert {"Attention" in name for name in proved} == {True}, "layer by layer, not by copies of the model"
    masked = stream.evaluate(some(stream))["loss"].iloc[1]
    assert float(measure(small, stream.splits.report).loss.mean()) == pytest.approx(masked, rel=1e-5)
    assert abs(masked - stream.evaluate()["loss"].iloc[0]) > 1e-4 > 1e-9 > stream.proven.difference
    assert len(small.grid) == len(stream.grid) - len(some(stream))


def test_generation_keeps_a_ring_and_says_what_the_masked_model_says(stream: Heads) -> None:
    model, ids = stream.prune(mask=some(stream)), texts()[0]["input_ids"]
    expected = answer(model, ids, use_cache=False)
    with stream.closed(some(stream)) as masked:
        assert torch.equal(answer(masked, ids, use_cache=False), expected)
    kept = streaming_cache(model)
    assert torch.equal(answer(model, ids), expected)
    assert torch.equal(answer(model, ids, num_beams=3), answer(model, ids, num_beams=3, use_cache=False))
    whole = transformers.DynamicCache(config=model.config)
    assert torch.equal(answer(model, ids, **keeping(model, whole)), expected), (
        "a cache of all tokens is as good, but larger"
    )
    with torch.no_grad():
        for part in ids.split([9, 1, 1, 12, 7], dim=1):  # in pieces of any size
            logits = model(part, **keeping(model, kept), use_cache=True).logits[:, -1]
    torch.testing.assert_close(logits, model(ids).logits[:, -1], atol=1e-4, rtol=0)
    held = sum(x.nbytes for layer in kept.layers if hasattr(layer, "ring") for x in (*layer.all, *layer.ring))
    held += sum(2 * layer.keys.nbytes for layer in kept.layers if not hasattr(layer, "ring"))
    counted, whole = (stream.cache_bytes(each, batch_size=3, length=30) for each in (some(stream), None))
    assert counted <= held <= counted + GROWS * whole // 30
    assert counted < whole


def test_padding_keeps_all_tokens_and_is_refused_in_a_ring(stream: Heads) -> None:
    model, padded = stream.prune(mask=some(stream)), texts()[1]
    alone = answer(model, padded["input_ids"][:1, 7:])
    together = model.generate(**padded, do_sample=False, max_new_tokens=20, min_new_tokens=20)
    assert torch.equal(alone[0, 23:], together[0, 30:])
    with pytest.raises(ValueError, match=r"^padding: a cache of streaming heads is for prompts of one length"):
        model.generate(**padded, do_sample=False, max_new_tokens=3, **keeping(model, streaming_cache(model)))
    with pytest.raises(ValueError, match="cannot be cropped"):
        next(layer for layer in streaming_cache(model).layers if hasattr(layer, "few")).crop(-1)


def test_a_folder_is_read_without_mhaprune(stream: Heads, tmp_path: Path) -> None:
    model, ids = stream.prune(mask=some(stream)), texts()[0]["input_ids"][:1]
    mhaprune.save(model, tmp_path / "small")
    again = mhaprune.load(tmp_path / "small")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(answer(again, ids), answer(model, ids))
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM;"
        " model = AutoModelForCausalLM.from_pretrained('small', trust_remote_code=True);"
        f" ids = torch.tensor({ids.tolist()});"
        " found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,"
        " max_new_tokens=20, min_new_tokens=20); assert 'mhaprune' not in sys.modules; print(found.tolist())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert said.stdout.strip().endswith(str(answer(model, ids).tolist()))


def test_streaming_and_removed_heads_go_together() -> None:
    stream = wrapped(model_of("Llama")).units("group").streaming(SINK, RECENT)
    heads = wrapped(stream.prune(mask=some(stream)))
    assert heads.cache_bytes(length=100) == stream.cache_bytes(some(stream), length=100)
    fewer = heads.prune(mask={0: [0, 1, 2], 2: [7]})
    groups = heads.units("group").prune(keep=0.5, by="magnitude")
    first = wrapped(wrapped(model_of("Llama")).units("group").prune(keep=0.6, by="magnitude"))
    later = first.units("group").streaming(SINK, RECENT).prune(keep=0.5, by="magnitude")
    ids = texts()[0]["input_ids"]
    for model, kind in itertools.product((fewer, groups, later), ("sdpa", "eager")):
        model.set_attn_implementation(kind)
        assert torch.equal(answer(model, ids), answer(model, ids, use_cache=False))
    with pytest.raises(Unsupported, match="has heads that stream already, choose all of them at once"):
        heads.units("group").streaming(SINK, RECENT)


def test_a_budget_in_bytes_of_a_context_is_kept() -> None:
    stream = wrapped(model_of("Llama")).units("group").streaming(SINK, RECENT)
    for share in (0.3, 0.5, 0.9):
        mask = stream.mask(cache_bytes=share, context=200, by="magnitude")
        larger = stream.mask(keep=len(mask.kept) + 1, by="magnitude")
        whole = stream.cache_bytes(length=200)
        assert stream.cache_bytes(mask, length=200) <= share * whole < stream.cache_bytes(larger, length=200)
    with pytest.raises(ValueError, match=r"^cache_bytes=0.01: must be a share, 0.035 to 1.0"):
        stream.mask(cache_bytes=0.01, context=200)


def test_a_refit_and_a_report_work_on_them(tmp_path: Path) -> None:
    stream = wrapped(model_of("Llama")).units("group").streaming(SINK, RECENT)
    models = (stream.without(some(stream), refit) for refit in (False, True))
    assert not torch.equal(*(measure(model, stream.splits.score).loss for model in models))
    found = stream.report(tmp_path / "page.html", by=["taylor"], budgets=[0.5], rounds=2, refit=False)
    assert found.tables["pruning"]["heads_removed"].tolist()[:2] == [0, 6]
    assert found.sentences[1].startswith("“Removed” key-value groups stream here: they still see the first ")
    assert "can stream, that is, see only the first" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("Llama", {}, r'its heads share keys and values, so they stream together; write heads.units\("group"\)'),
        ("Qwen3", {}, r'so they stream together; write heads.units\("block"\)'),
        ("Mistral", {"sliding_window": 8, "num_attention_heads": 8, "num_key_value_heads": 8}, "has a window of its"),
        ("Bloom", {"n_head": 4, "n_layer": 2}, "cannot stream"),
    ],
)
def test_what_cannot_stream_is_refused(kind: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        wrapped(model_of(kind, **more)).streaming(SINK, RECENT)


@pytest.mark.parametrize("refit", [False, True])
def test_without_a_copy_the_smaller_model_has_the_weights_that_stay(refit: bool) -> None:
    model = model_of("Llama")
    heads = wrapped(model).units("group")
    smaller, copied = (heads.prune(mask=some(heads), refit=refit, copy=copy) for copy in (False, True))
    mine = {id(weight) for weight in model.parameters()}
    shared = sum(id(weight) in mine for weight in smaller.parameters())
    assert (shared > 20) == (not refit)
    assert not any(id(weight) in mine for weight in copied.parameters())
    ids = texts()[0]["input_ids"]
    torch.testing.assert_close(smaller(ids).logits, copied(ids).logits, atol=1e-5, rtol=0)


def test_other_caches_and_settings_say_the_same() -> None:
    stream = wrapped(model_of("Llama")).units("group").streaming(SINK, RECENT)
    model, ids = stream.prune(mask=some(stream)), texts()[0]["input_ids"]
    expected = answer(model, ids, use_cache=False)
    length = {"do_sample": False, "max_new_tokens": 20, "min_new_tokens": 20}
    for more in ({"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}):
        rows = ids[:1] if "prompt_lookup_num_tokens" in more else ids
        config = transformers.GenerationConfig(**length, **more)
        said = model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), generation_config=config)
        assert torch.equal(said, expected[: len(rows)]), more
    with torch.inference_mode():
        assert torch.equal(
            answer(model_of("Llama"), ids[:1], assistant_model=model), answer(model_of("Llama"), ids[:1])
        )
    model.train()(ids, labels=ids).loss.backward()
    places = torch.tensor([[*range(18), *range(12)]])
    together = model.eval()(ids[:1], position_ids=places, use_cache=False).logits  # two texts side by side
    torch.testing.assert_close(together[:, :18], model(ids[:1, :18]).logits, atol=1e-5, rtol=0)


def test_eager_attention_is_scored_as_fused_attention_is() -> None:
    eager, fused = (
        wrapped(model_of("Llama", attn_implementation=kind)).units("group").streaming(SINK, RECENT)
        for kind in ("eager", "sdpa")
    )
    torch.testing.assert_close(
        *(torch.tensor(heads.score("ablation")["score"].to_numpy()) for heads in (eager, fused)), atol=1e-5, rtol=0
    )
    for name in ("ablation_mean", "ablation_resample"):
        with pytest.raises(ValueError, match="closed heads see a window, so nothing may replace"):
            fused.score(name)
    with pytest.raises(ValueError, match=r"^schedule: scores smaller models"):
        fused.mask(keep=6, by="taylor", rescore_every=2)
