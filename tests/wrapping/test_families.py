"""What holds for every family of transformers that is supported: identities, in float64."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")

import transformers
from tiny_families import FAMILIES, GATES_ONLY, SINGLE, UNKNOWN, Family, batch_of, heads_of, make, said, size_of_output

import mhaprune
from mhaprune.api.wrap import wrap
from mhaprune.heads import HeadGrid, HeadMask
from mhaprune.measure.outcomes import all_open, measure, measure_masks, output_difference
from mhaprune.saving.folders import load_folder, make_plain
from support.attention import close_by_hooks

pytestmark = [pytest.mark.filterwarnings("ignore")]


def masks(grid: HeadGrid) -> dict[str, HeadMask]:
    """None, one head, a ragged mask, a layer, another layer, and all heads."""
    everything, heads, size = HeadMask(grid), list(grid), grid.sizes[0]
    return {
        "none": everything,
        "one": everything.without(heads[1]),
        "ragged": everything.without(heads[0], *heads[size + 1 : size + 3]),
        "layer": everything.without(*heads[:size]),
        "last": everything.without(*heads[-size:]),
        "all": everything.without(*heads),
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_what_heads_hold_is_what_their_removal_takes(name: str) -> None:
    """A head, or all heads that share its keys: they hold a part of these each, which leaves with the last of them."""
    heads = heads_of(name)
    of_kv = zip(heads.subject.heads_of(heads.grid.blocks[-1]), heads.subject.blocks[-1].of_kv, strict=True)
    mask = HeadMask(heads.grid, frozenset(head for head, group in of_kv if group == 0))
    taken = heads.subject.count_parameters() - heads.subject.without(mask).count_parameters()
    assert taken == float(heads.subject.held_weights() @ (1 - mask.gates())) > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_masked_equals_removed_once_and_twice(name: str, attention: str) -> None:
    heads = heads_of(name, attention)
    assert heads.proven.why_not == ""
    assert heads.proven.smallest_effect > 1e-6
    assert not heads.proven.without_effect
    assert not heads.unseen
    precise, batch = heads.subject.in_double(), heads.splits["score"]
    for kind, mask in masks(heads.grid).items():
        smaller = precise.without(mask)
        assert output_difference(precise, smaller, batch, mask.gates()) < 1e-9, kind
        assert list(smaller.grid) == list(mask.kept)
        if len(smaller.grid) > 3:
            further = HeadMask(smaller.grid).without(smaller.grid.heads[0], smaller.grid.heads[-1])
            both = mask.without(*further.removed)
            assert output_difference(precise, smaller.without(further), batch, both.gates()) < 1e-9, kind


@pytest.mark.parametrize("name", ["bert", "albert", "clip_vision", "wav2vec2", "gpt2", "llama", "t5", "whisper"])
def test_the_model_stays_as_it_was(name: str) -> None:
    model, batch = make(FAMILIES[name]).train(), batch_of(FAMILIES[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learns = [parameter.requires_grad for parameter in model.parameters()]
    heads = wrap(model, size_of_output, score=[batch])
    heads.score("ablation", "taylor", "gate_output")
    heads.prune(0.5, refit=True)
    assert all(module.training for module in model.modules())
    assert learns == [parameter.requires_grad for parameter in model.parameters()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not hasattr(model.config, "mhaprune")


def test_the_alignment_heads_of_a_whisper_stay_the_same_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_of("whisper")
    model: Any = heads.subject.model
    cross = [head for head in heads.grid if "encoder_attn" in str(head.block)]
    named = [[head.layer, head.head] for head in cross]
    monkeypatch.setattr(model.generation_config, "alignment_heads", named, raising=False)
    beside = [h for h in heads.grid if h.layer == cross[0].layer and h.block != cross[0].block and h.head < 2]
    smaller: Any = heads.without(
        HeadMask(heads.grid).without(cross[0], *beside)
    )  # of self-attention, which counts apart
    expected = [[layer, head - (layer == cross[0].layer)] for layer, head in named[1:]]
    assert smaller.model.generation_config.alignment_heads == expected
    assert model.generation_config.alignment_heads == named, "of the model that stays"
    rest = [h for h in smaller.grid if "encoder_attn" in str(h.block)]
    again: Any = smaller.without(HeadMask(smaller.grid).without(*rest[1:]))
    assert again.model.generation_config.alignment_heads == [expected[0]]
    mhaprune.save(again.model, tmp_path)
    kept = json.loads((tmp_path / "generation_config.json").read_text())
    assert kept["alignment_heads"] == [expected[0]]
    none: Any = again.without(HeadMask(again.grid).without(rest[0]))
    assert none.model.generation_config.alignment_heads is None, "which transformers refuses in words"


@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_passes_equal_plain_ones(name: str) -> None:
    subject = (heads := heads_of(name)).subject
    gates_MN = all_open(subject, 1 + len(subject.grid))
    gates_MN[1:].fill_diagonal_(0.0)
    batch = heads.splits["score"]
    plain = torch.stack([measure(subject, batch, gates_N).loss for gates_N in gates_MN])
    torch.testing.assert_close(measure_masks(subject, batch, gates_MN).loss, plain)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.generates])
def test_generation_with_a_cache_equals_that_without(name: str) -> None:
    heads, family = heads_of(name), FAMILIES[name]
    given = {key: value for key, value in batch_of(family).items() if not key.startswith("decoder")}
    given = {key: value[1:] for key, value in given.items()}  # without padding, which these toys continue
    for kind in ("ragged", "layer"):
        model: Any = heads.without(masks(heads.grid)[kind]).model
        how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
        cached, plain = (model.generate(**given, **how, use_cache=flag) for flag in (True, False))
        assert torch.equal(cached, plain), kind


@pytest.mark.parametrize("name", SINGLE)
@torch.no_grad()
def test_removed_is_masked_by_hooks_of_ones_own_and_a_folder_brings_it_back(name: str, tmp_path: Path) -> None:
    """Experts that have no float64, gated attention, sizes that a layer reads from its config, no fused attention."""
    model, batch = make(SINGLE[name]), batch_of(SINGLE[name])
    heads = wrap(model, size_of_output, score=[batch])
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    gone = {0: [0], 1: [1, 2, 3]}
    small: Any = heads.prune(mask=gone)
    removed = small(**batch).logits
    close_by_hooks([model.get_submodule(block.out) for block in heads.subject.blocks], 8, gone)
    masked = model(**batch).logits
    torch.testing.assert_close(removed, masked, rtol=1e-4, atol=1e-4 * float(masked.abs().max()))
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "input_ids": batch["input_ids"][1:]}
    if small.can_generate():
        assert torch.equal(*(small.generate(**how, use_cache=flag) for flag in (True, False)))
    mhaprune.save(small, tmp_path / name)
    torch.testing.assert_close(mhaprune.load(tmp_path / name)(**batch).logits, removed, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ragged folder of every family, with code and without, for some also one without a layer and an even one, and
    what the models say."""
    root = tmp_path_factory.mktemp("saved")
    for name, family in FAMILIES.items():
        grid = (heads := heads_of(name)).grid
        kinds = masks(grid) | {"even": HeadMask(grid).without(*(head for head in grid if head.head >= 2))}
        kinds["coded"] = kinds["ragged"]
        for kind in ("coded", "ragged", *(("layer", "even") if name in ("bert", "llama", "bart", "t5") else ())):
            model: Any = heads.without(kinds[kind]).model
            folder = root / f"{name}-{kind}"
            if kind == "coded":
                mhaprune.save(model, folder)
                assert not hasattr(model.config, "auto_map")
            else:
                model.save_pretrained(folder)
            torch.save(said(model, family), f"{folder}.pt")
    torch.save(heads_of("llama").without(masks(heads_of("llama").grid)["ragged"]).model, root / "llama.pickle")
    return root


READ_BACK = """
import json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
sys.modules["mhaprune"] = None
sys.path.append(sys.argv[2])
import torch, transformers
from tiny_families import FAMILIES, said

def check(model, folder):
    # A convolution rounds by where its memory lies, so outputs of two processes are compared to rounding.
    found = said(model, FAMILIES[folder.name.rpartition("-")[0]])
    expected = torch.load(Path(sys.argv[1], f"{folder.name}.pt"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda why: folder.name + why)

folders = [file.with_suffix("") for file in sorted(Path(sys.argv[1]).glob("*.pt"))]
for folder in folders:
    if folder.name.endswith("coded"):
        (auto, *_) = json.loads((folder / "config.json").read_text())["auto_map"]
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
        check(model, folder)
        model.save_pretrained(folder / "again")
        assert (folder / "again" / "modeling_mhaprune.py").exists()
del sys.modules["mhaprune"]
import mhaprune
for folder in folders:
    check(mhaprune.load(folder), folder)
check(torch.load(Path(sys.argv[1], "llama.pickle"), weights_only=False), Path("llama-ragged"))
print(len(folders))
"""


def test_saved_models_are_equal_in_a_new_process_with_mhaprune_and_without(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was pickled."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    command = [sys.executable, "-c", READ_BACK, str(saved), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == 2 * len(FAMILIES) + 2 * 4


def test_a_model_that_was_read_with_its_code_is_pruned_and_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    family = FAMILIES["llama"]
    heads = heads_of("llama")
    ragged: Any = heads.without(masks(heads.grid)["ragged"]).model
    mhaprune.save(ragged, tmp_path / "ragged")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ragged", trust_remote_code=True)
    again = wrap(read, size_of_output, score=[batch_of(family)])
    assert list(again.grid) == list(heads.without(masks(heads.grid)["ragged"]).grid)
    kept = [head for head in again.grid if head.head == 3]
    smaller = again.without(HeadMask(again.grid, frozenset(again.grid) - frozenset(kept))).model
    for name in ("smaller", "smaller"):  # twice into one folder
        mhaprune.save(smaller, tmp_path / name)
        assert torch.equal(said(mhaprune.load(tmp_path / name), family), said(smaller, family))
    last = next(head for head in again.grid if head.head == 3)  # two heads of each layer are left, one for each key
    even: Any = again.without(HeadMask(again.grid, frozenset([last]))).model
    assert make_plain(even)
    mhaprune.save(even, tmp_path / "even")
    by_code = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "even", trust_remote_code=True)
    for model in (by_code, mhaprune.load(tmp_path / "even")):
        assert torch.equal(said(model, family), said(even, family))


def test_a_changed_bit_in_a_saved_folder_is_found(tmp_path: Path) -> None:
    """Transformers itself would load other numbers without a word."""
    mhaprune.save(make(FAMILIES["bert"]), tmp_path / "bert")
    for name in ("model.safetensors", "config.json", "checksums.json"):
        path = tmp_path / "bert" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        with pytest.raises(ValueError, match=f"bert: damaged, .*{name.replace('checksums.json', '')}") as refused:
            mhaprune.load(tmp_path / "bert")
        assert "\n" not in str(refused.value)
        path.write_bytes(whole)
    assert mhaprune.load(tmp_path / "bert") is not None


def test_a_saved_model_keeps_the_names_of_its_heads(saved: Path) -> None:
    family = FAMILIES["bart"]
    again = wrap(load_folder(saved / "bart-ragged"), size_of_output, score=[batch_of(family)])
    dense = heads_of("bart")
    assert list(again.grid) == list(masks(dense.grid)["ragged"].kept)
    emptied = wrap(load_folder(saved / "bart-layer"), size_of_output, score=[batch_of(family)])
    assert list(emptied.grid) == list(masks(dense.grid)["layer"].kept)


def test_an_even_model_is_plain_where_the_config_has_a_place_for_it(tmp_path: Path) -> None:
    plain = set()
    for name in ("bert", "llama", "qwen3", "gemma3", "gpt2"):
        heads = heads_of(name)
        kept = [head for head in heads.grid if head.head < 2]
        mask = HeadMask(heads.grid, frozenset(heads.grid) - frozenset(kept))
        model: Any = heads.without(mask).model
        before = said(model, FAMILIES[name])
        if make_plain(model):
            plain.add(name)
            model.save_pretrained(tmp_path / name)
            again = getattr(transformers, FAMILIES[name].model).from_pretrained(tmp_path / name)
            assert torch.equal(said(again, FAMILIES[name]), before)
    assert plain == {"llama", "qwen3", "gemma3"}
    heads = heads_of("llama")
    first = [head for head in heads.grid if head.block == heads.grid.blocks[0] and head.head >= 2]
    uneven: Any = heads.without(HeadMask(heads.grid, frozenset(first))).model
    assert not make_plain(uneven)
    assert uneven.config.mhaprune


def test_attention_that_a_user_registered_is_found() -> None:
    """It multiplies by einsum, so that the attention interface of transformers alone shows it."""

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = torch.einsum("bhtk,bhuk->bhtu", query, key) * options["scaling"]
        weights = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)
        return torch.einsum("bhtu,bhuk->bthk", weights, value), weights

    transformers.AttentionInterface.register("by_einsum", attend)
    batch = {"input_ids": batch_of(FAMILIES["llama"])["input_ids"]}
    heads = wrap(make(FAMILIES["llama"], "by_einsum"), size_of_output, score=[batch])
    assert repr(heads) == repr(heads_of("llama"))
    for seen in heads.subject.attention_maps(heads.splits["score"]).values():
        torch.testing.assert_close(seen.weights.sum(-1), torch.ones(seen.weights.shape[:-1]))


def test_an_eager_model_that_lost_heads_unevenly_still_shows_its_attention_weights() -> None:
    small: Any = heads_of("llama", "eager").prune(mask={0: [1], 1: [0, 3]})
    shown = small(**batch_of(FAMILIES["llama"]), output_attentions=True).attentions
    assert [weights.shape[1] for weights in shown] == [3, 2]


@pytest.mark.parametrize("name", ["llama", "phi3", "t5", "umt5"])
def test_a_model_that_lost_heads_unevenly_can_be_switched_to_eager_and_back(name: str, tmp_path: Path) -> None:
    """Also after it was saved, and a part of it; phi3 has a config of its own in each layer that was cut."""
    family = FAMILIES.get(name) or SINGLE[name]
    heads = wrap(make(family), size_of_output, score=[batch_of(family)])
    mhaprune.save(heads.prune(mask=HeadMask(heads.grid).without(heads.grid.heads[0])), tmp_path / "small")
    small: Any = load_folder(tmp_path / "small")
    expected = said(small, family)
    for model in (small, small.get_encoder() if "t5" in name else small.model):
        for kind in ("eager", "sdpa"):
            model.set_attn_implementation(kind)
            used = {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")}
            assert used == {f"mhaprune_uneven_{kind}"}
            torch.testing.assert_close(said(small, family), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="attn_implementation=flex_attention: must be sdpa, eager or a function"):
        small.set_attn_implementation("flex_attention")


def test_eager_heads_that_share_one_key_are_found() -> None:
    sizes = {"vocab_size": 41, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = make(Family("FalconForCausalLM", sizes | {"multi_query": True}), "eager")
    heads = wrap(model, size_of_output, score=[batch_of(FAMILIES["llama"])])
    assert repr(heads) == "8 heads in 2 blocks, all with an effect, all removable"
    assert {block.of_kv for block in heads.subject.blocks} == {(0, 0, 0, 0)}


@pytest.mark.parametrize("family", UNKNOWN.values(), ids=UNKNOWN)
def test_attention_that_is_not_found_is_refused_with_a_template(family: Family) -> None:
    with pytest.raises(ValueError, match=f"no attention found.*{re.escape(family.why_not)}") as refused:
        wrap(make(family), size_of_output, score=[batch_of(family)])
    assert "\n" not in str(refused.value)


def test_a_damaged_folder_is_refused_in_one_line(saved: Path, tmp_path: Path) -> None:
    def broken(change: dict[str, Any]) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(saved / "bert-ragged", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        (folder / "checksums.json").unlink(missing_ok=True)  # as one does who changes it on purpose
        return folder

    noted = json.loads((saved / "bert-ragged" / "config.json").read_text())["mhaprune"]
    shapes = {path: [7, shape[1]] for path, shape in noted["shapes"].items()}
    for folder, message in (
        (broken({"mhaprune": {**noted, "version": 99}}), "config.mhaprune: is of version 99, this mhaprune reads 1"),
        (broken({"mhaprune": {**noted, "shapes": shapes}}), "cannot be loaded|damaged"),
        (broken({"mhaprune": None}), "cannot be loaded|damaged"),
        (broken({"architectures": ["NoSuchModel"]}), "its architecture NoSuchModel is none that transformers has"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            load_folder(folder)
        assert "\n" not in str(refused.value)
    from safetensors.torch import load_file, save_file

    weights = load_file((folder := broken({})) / "model.safetensors")
    name = next(name for name in weights if name.endswith("query.weight"))
    poisoned = weights | {name: weights[name].index_fill(0, torch.tensor([0]), torch.nan)}
    save_file(poisoned, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"damaged, its weight {name} is nan in 32 of"):
        load_folder(folder)
    del weights[lost := sorted(weights)[-1]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"damaged, missing keys: {lost}"):
        load_folder(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="its config.json cannot be read"):
        load_folder(tmp_path / "empty")


@pytest.mark.parametrize("name", GATES_ONLY)
def test_what_cannot_be_removed_can_be_gated(name: str) -> None:
    heads = heads_of(name)
    assert GATES_ONLY[name].why_not in heads.proven.why_not
    assert f"{len(heads.grid)} heads in 2 blocks, all with an effect, none removable: " in repr(heads)
    assert len(heads.score("ablation")) == len(heads.grid)
    with pytest.raises(ValueError, match="heads of this model can be gated, not removed: "):
        heads.prune(0.5)
