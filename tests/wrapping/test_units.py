"""Sets of heads as units, even removal, and masks and scores that users bring."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")

import transformers
from tiny_families import FAMILIES, batch_of, heads_of, size_of_output

import mhaprune
from mhaprune import losses
from mhaprune.api.timing import generating
from mhaprune.api.wrap import Heads, wrap
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import output_difference
from mhaprune.schedules.iterative import Iterative
from mhaprune.scorers.base import Scorer
from mhaprune.settings.options import conf_folder, option
from support.figures import drawing

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def llama() -> Heads:
    """Two heads share keys and values."""
    return heads_of("llama")


def names(heads: Any) -> list[str]:
    return [".".join(str(head).split(".")[-2:]) for head in heads]


def test_a_group_is_named_after_its_first_head_and_a_block_too(llama: Heads) -> None:
    assert names(llama.units("group").grid) == ["0.0", "0.2", "1.0", "1.2"]
    assert names(llama.units("block").grid) == ["0.0", "1.0"]
    assert repr(llama.units("group")) == "4 key-value groups in 2 blocks, all with an effect, all removable"
    assert (
        llama.units("head") is llama.units("group").units("head") or len(llama.units("group").units("head").grid) == 8
    )
    assert llama.units("group") is llama.units("group"), "its scores are kept"


def test_a_report_counts_groups_and_shows_each_in_a_column(llama: Heads) -> None:
    with drawing():
        found = llama.units("group").report(budgets=[0.5], rounds=1, refit=False, tolerance=1.0)
    assert re.match(r"\d of 4 key-value groups can be removed", found.sentences[0])
    axes = found.figures["matter"].figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2"]
    assert axes.get_xlim() == (-0.5, 1.5), "no empty column"
    assert found.figures["accuracy"].figure.axes[0].get_xlabel() == "key-value groups removed, of 4"


@pytest.mark.parametrize("unit", ["group"])
@pytest.mark.parametrize("path", sorted((conf_folder() / "scorer").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_score_works_on_units_but_those_of_attention_weights(path: Path, unit: Any, llama: Heads) -> None:
    heads, scorer = llama.units(unit), option(path.stem, {"scorer": Scorer})
    if scorer.reads_attention or scorer.needs_gates or scorer.reads_pairs:
        why = f"attention weights of single heads, not of a {unit}" if scorer.reads_attention else "needs"
        with pytest.raises(ValueError, match=why):
            heads.score(path.stem)
        return
    table = heads.score(path.stem)
    assert len(table.query("draw == 0")) == len(heads.grid)
    assert np.isfinite(table["score"]).all()


@pytest.mark.parametrize("by", ["ablation", "gate_output", "greedy", "greedy_refit"])
@pytest.mark.parametrize("unit", ["group", "block"])
def test_whole_units_go_and_removed_is_masked(unit: Any, by: str, llama: Heads) -> None:
    mask = llama.mask(keep=0.5, by=by, unit=unit)
    assert len(mask.removed) == 4
    layers = [{head for head in mask.removed if head.layer == layer} for layer in (0, 1)]
    assert {len(each) for each in layers} <= ({0, 2, 4} if unit == "group" else {0, 4})
    double = llama.subject.in_double()
    batch = llama.splits.score
    assert output_difference(double, double.without(mask), batch, mask.gates()) < 1e-9
    assert llama.cache_bytes(mask, 3, 7) == cached(llama.prune(mask=mask))


def cached(model: Any) -> int:
    """Count the bytes that a model of transformers keeps for a batch of three with seven positions."""
    with torch.no_grad():
        layers = model(**batch_of(FAMILIES["llama"]), use_cache=True).past_key_values.layers
    return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))


def test_half_of_the_groups_take_half_of_the_cache(llama: Heads) -> None:
    mask = llama.mask(keep=0.5, by="magnitude", unit="group", even=True)
    assert 2 * llama.cache_bytes(mask, 3, 7) == llama.cache_bytes(batch_size=3, length=7) == cached(llama.subject.model)
    assert llama.cache_bytes(mask, 3, 7) == cached(llama.prune(mask=mask))


@pytest.mark.parametrize("by", ["magnitude", "greedy", "greedy_refit"])
def test_as_many_groups_stay_as_fit_into_the_cache(by: str, llama: Heads) -> None:
    groups, whole = llama.units("group"), llama.cache_bytes()
    subject: Any = groups.subject
    assert cached(groups.prune(cache_bytes=0.5, by=by)) == cached(llama.subject.model) / 2
    for budget, left in ((1.0, 4), (whole, 4), (0.74, 2), (whole - 1, 3), (whole // 2, 2)):
        mask = groups.mask(by=by, cache_bytes=budget)
        assert groups.cache_bytes(mask) == whole * left / 4
        assert llama.mask(by=by, unit="group", cache_bytes=budget) == subject.mask_of_heads(mask)


@pytest.mark.parametrize("unit", ["head", "group"])
def test_half_of_the_weights_is_kept_at_most(unit: Any, llama: Heads) -> None:
    heads = llama.units(unit)
    held, half = heads.subject.held_weights(), heads.mask(keep=0.5, by="gate_output", of="weights")
    assert float(held.sum()) == float(llama.subject.held_weights().sum())
    assert float(held @ half.gates()) <= float(held.sum()) / 2


def test_a_schedule_chooses_by_a_score(llama: Heads) -> None:
    stepwise = llama.mask(3, by="taylor", schedule=Iterative(every=2))
    assert stepwise == llama.mask(3, by="taylor", rescore_every=2)
    assert llama.mask(3, by="taylor", schedule="iterative") == llama.mask(3, by="taylor", rescore_every=1)
    assert llama.mask(3, schedule="greedy") == llama.mask(3, by="greedy")


def test_a_layer_without_heads_keeps_a_part_of_the_cache(llama: Heads) -> None:
    """Its silent head does. So a third group must go before two of four leave the cache."""
    groups = llama.units("group")
    assert names(groups.mask(by=[1, 2, 3, 4], cache_bytes=0.5).kept) == ["1.2"]
    assert names(groups.mask(by=[1, 3, 2, 4], cache_bytes=0.5).kept) == ["0.2", "1.2"]
    assert names(groups.mask(by=[1, 2, 3, 4], cache_bytes=0.74, even=True).kept) == ["0.2", "1.2"]
    assert len(llama.mask(by="magnitude", unit="block", cache_bytes=0.8).kept) == 4


def test_heads_of_an_encoder_keep_nothing_in_the_cache() -> None:
    heads = heads_of("bart")
    by = {str(head): head.head + ("encoder" not in str(head)) for head in heads.grid}
    mask, whole = heads.mask(by=by, cache_bytes=0.5), heads.cache_bytes()
    assert {head.site for head in mask.removed} == {"decoder.encoder_attn", "decoder.self_attn"}
    assert heads.cache_bytes(mask) <= whole / 2 < heads.cache_bytes(heads.mask(len(mask.kept) + 1, by=by))


def test_a_cache_that_cannot_become_so_small_is_refused(llama: Heads) -> None:
    with pytest.raises(ValueError, match='^cache_bytes=0.5: heads share keys and values, write unit="group" too$'):
        llama.prune(cache_bytes=0.5)
    with pytest.raises(ValueError, match="^cache_bytes=0.5: all heads of a layer share keys and values"):
        sharing_all().prune(cache_bytes=0.5)
    whole = llama.cache_bytes()
    for budget in (0.4, whole // 2 - 1, whole + 1, 1.5, -1):
        with pytest.raises(
            ValueError, match=rf"={budget}: must be a share, 0.5 to 1.0, or a .* {whole // 2} to {whole}$"
        ):
            llama.mask(unit="group", cache_bytes=budget)
    for how in ({"keep": 2}, {"even": {0: 1}}):
        with pytest.raises(ValueError, match="cache_bytes=0.5: says how many heads stay, as keep= or even= does"):
            llama.mask(unit="group", cache_bytes=0.5, **how)
    for name, wrong in {"divisible_by": 0, "even": "yes", "by": "one_shot", "rescore_every": 0.5}.items():
        with pytest.raises(ValueError, match=f"^{name}={wrong}|^{name}='{wrong}'"):
            llama.mask(**{"unit": "group", "cache_bytes": 0.5, "even": True, name: wrong})
    with pytest.raises(ValueError, match="cache_bytes=0.5: the model cannot generate"):
        heads_of("bert").mask(cache_bytes=0.5)


def test_sets_of_heads_generate_and_keep_what_a_silent_head_keeps(llama: Heads) -> None:
    groups = llama.units("group")
    mask = groups.mask(keep=2, by="magnitude")
    smaller, batch = generating(groups.subject, 3).without(mask), groups.splits["report"]
    assert smaller.predict(batch).shape[1] == batch.fields["input_ids"].shape[1] + 3
    emptied = HeadMask(groups.grid).without(*groups.grid.heads[:2])
    assert groups.cache_bytes(emptied, 3, 7) == cached(llama.prune(mask={0: [0, 1, 2, 3]}))


def test_the_table_of_speed_says_how_large_the_cache_is(llama: Heads) -> None:
    table = llama.units("group").speed(keep=2, by="magnitude", batch_sizes=2, new_tokens=3, rounds=2)
    whole, kept = llama.cache_bytes(None, 2, 7 + 3), llama.units("group").mask(keep=2, by="magnitude")
    assert table["cache_bytes"].tolist() == [llama.units("group").cache_bytes(kept, 2, 10), whole, whole]
    assert "cache_bytes" not in llama.speed(keep=2, by="magnitude", batch_sizes=1, rounds=2)


def test_the_last_group_of_a_block_stays_a_group(llama: Heads) -> None:
    mask = llama.mask(keep=1, by="taylor", unit="group", rescore_every=1)
    first, second = mask.kept
    assert first.block == second.block
    assert (first.head % 2, second.head) == (0, first.head + 1)


def test_single_heads_of_groups_keep_the_cache_and_groups_of_unequal_size_are_refused(llama: Heads) -> None:
    mask = HeadMask(llama.grid).without(llama.grid.heads[0], llama.grid.heads[2])
    assert llama.cache_bytes(mask) == llama.cache_bytes()
    smaller = mhaprune.wrap(llama.prune(mask={0: [0]}), size_of_output, score=[batch_of(FAMILIES["llama"])])
    with pytest.raises(ValueError, match=r"unit=group: the groups of model.layers.0.self_attn have 1, 2 heads"):
        smaller.units("group")


def sharing_all() -> Heads:
    """Return the heads of a model in which all heads of a layer share keys and values."""
    torch.manual_seed(0)
    settings = {**FAMILIES["llama"].settings, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    return wrap(model, size_of_output, score=[batch_of(FAMILIES["llama"])])


def test_where_all_heads_share_keys_each_head_is_a_unit() -> None:
    heads = sharing_all()
    assert heads.units("group") is heads
    assert len(heads.units("block").grid) == 2


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_an_even_removal_of_groups_is_a_plain_model(name: str, tmp_path: Path) -> None:
    """Which plain transformers loads, and whose config says the truth."""
    heads = heads_of(name)
    small = heads.prune(keep=0.5, by="gate_output", unit="group", even=True)
    config: Any = small.config
    assert small.model.config is config, "all parts of the model read it"
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
    assert not hasattr(config, "mhaprune")
    mhaprune.save(small, tmp_path / "small")
    assert not list((tmp_path / "small").glob("*.py"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=False)
    batch = batch_of(FAMILIES[name])
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch).logits, small(**batch).logits)


class Scaled(transformers.LlamaForCausalLM):
    """A model whose scores depend on how many heads its config counts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.scaling = (config.hidden_size / config.num_attention_heads) ** -0.5


def test_a_config_that_would_build_another_model_is_not_taken() -> None:
    torch.manual_seed(0)
    model = Scaled(transformers.LlamaConfig(**FAMILIES["llama"].settings)).eval()
    heads = wrap(model, size_of_output, score=[batch_of(FAMILIES["llama"])])
    small: Any = heads.prune(keep=0.5, by="magnitude", unit="group", even=True)
    assert hasattr(small.config, "mhaprune")
    assert small.config.num_attention_heads == 4


def test_even_counts_are_whole_and_divisible(llama: Heads) -> None:
    assert [len(m.kept) for m in llama.masks([0.5, 0.25, 8], "magnitude", even=True)] == [4, 2, 8]
    with pytest.raises(ValueError, match=r"keep=3: leaves 1.5 of 4 in a block, must be a whole number$"):
        llama.mask(3, "magnitude", even=True)
    with pytest.raises(ValueError, match=r"keep=0.25: leaves 1 of 4 in a block, must be a whole number that 2 divides"):
        llama.mask(0.25, "magnitude", even=True, divisible_by=2)


@pytest.mark.parametrize("by", ["ablation", "greedy", "greedy_refit"])
def test_each_block_keeps_the_number_that_is_given_for_it(by: str, llama: Heads) -> None:
    small: Any = llama.prune(by=by, even={"self_attn.0": 1, 1: 3})
    assert [layer.self_attn.q_proj.out_features for layer in small.model.layers] == [8, 24]
    assert llama.mask(by=by, even={1: 2}).kept[:4] == llama.grid.heads[:4], "a block without a number keeps all"
    assert not llama.mask(by=by, even={}).removed


def test_each_block_keeps_its_best_heads_or_groups(llama: Heads) -> None:
    by = [8, 7, 6, 5, 1, 2, 3, 4]
    assert names(llama.mask(by=by, even={0: 1, 1: 3}).kept) == ["0.0", "1.1", "1.2", "1.3"]
    groups = llama.mask(by=[2, 1, 0, 3], even={0: 1}, unit="group")
    assert names(groups.kept) == ["0.0", "0.1", "1.0", "1.1", "1.2", "1.3"]
    assert [len(mask.kept) for mask in llama.masks(by=by, even={0: 0, 1: 2})] == [2]
    with pytest.raises(ValueError, match="even=0: keeps 3, must be a whole number from 0 to 2$"):
        llama.mask(unit="group", even={0: 3})
    with pytest.raises(ValueError, match=r"even=0.5: names 0 layers, must be one of self_attn.0, self_attn.1"):
        llama.mask(even={0.5: 3})


FORMS: list[Any] = [
    {0: [1], "1": [0, 3]},
    ["self_attn.0.1", "self_attn.1.0", "self_attn.1.3"],
    '{"self_attn.0": [1], "1": [0, 3]}',
    np.array([[1, 0, 1, 1], [0, 1, 1, 0]]),
    torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 0]),
]


@pytest.mark.parametrize("given", FORMS, ids=range(len(FORMS)))
def test_a_mask_has_many_forms(given: Any, llama: Heads, tmp_path: Path) -> None:
    small = llama.prune(mask=given)
    assert [layer.self_attn.q_proj.out_features for layer in small.model.layers] == [24, 16]  # type: ignore[union-attr]
    mask = HeadMask(llama.grid).without(*FORMS[1])
    (tmp_path / "mask.json").write_text(mask.to_json())
    assert json.loads(mask.to_json()) == FORMS[1]
    rows = llama.evaluate(given, tmp_path / "mask.json", mask)
    assert rows["removed"].nunique() == 2
    assert rows["heads_kept"].tolist() == [8, 5, 5, 5]
    assert rows["loss"].nunique() == 2


def test_scores_of_ones_own_choose_heads(llama: Heads, tmp_path: Path) -> None:
    table = llama.score("ablation")
    expected = llama.mask(keep=3, by="ablation")
    values = table["score"].to_numpy()
    named = dict(zip(map(str, llama.grid), values, strict=True))
    table.to_json(tmp_path / "scores.json")
    for by in (
        values,
        values.reshape(2, 4),
        torch.tensor(values),
        named,
        table,
        pd.read_json(tmp_path / "scores.json"),
    ):
        assert llama.mask(keep=3, by=by) == expected
    with pytest.raises(ValueError, match="by: NaN for self_attn.0.2, must be numbers"):
        llama.mask(by=[1, 1, float("nan"), 1, 1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"by: numbers of shape \(9,\), must be \(8,\) or \(2, 4\)"):
        llama.mask(by=np.ones(9))
    with pytest.raises(ValueError, match="by: self_attn.0.1 is missing"):
        llama.mask(by={name: value for name, value in named.items() if name != "self_attn.0.1"})
    with pytest.raises(ValueError, match="several scores of one head"):
        llama.mask(by=llama.score("ablation", "magnitude"))


@torch.no_grad()
def test_a_model_is_called_with_heads_closed(llama: Heads) -> None:
    batch, mask = batch_of(FAMILIES["llama"]), llama.mask(keep=3, by="magnitude")

    def logits() -> Tensor:
        found: Tensor = llama.subject.model(**batch).logits
        return found

    before = logits()
    with llama.closed(mask) as model:
        assert model is llama.subject.model
        closed = logits()
    assert torch.equal(before, logits()), "nothing stays behind"
    torch.testing.assert_close(closed, llama.prune(mask=mask)(**batch).logits)
    assert not torch.allclose(closed, before)


@pytest.mark.parametrize(("idle", "named"), [([0], []), ([0, 1], ["0.0"]), ([1, 2, 3], ["0.2"]), ([], [])])
def test_a_group_has_no_effect_only_if_none_of_its_heads_has(idle: list[int], named: list[str], llama: Heads) -> None:
    """Two heads are a group: with one that is read, the group is read."""
    subject: Any = llama.subject
    without_effect = frozenset(subject.grid.heads[n] for n in idle)
    assert names(subject.changed(without_effect=without_effect).grouped("group").without_effect) == named


def in_cache(model: Any, batch: Any) -> int:
    """Count the bytes that a model keeps after a pass."""
    with torch.no_grad():
        layers = model(**batch, use_cache=True).past_key_values.layers
    return sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))


def sliding(name: str) -> Any:
    """A decoder in which both layers, or one of two, keep a window of 8 tokens only."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 64, "head_dim": 8, "sliding_window": 8}
    more: Any = {"layer_types": ["sliding_attention", "full_attention"]} if name == "Gemma3" else {}
    torch.manual_seed(0)
    if name == "Llama":
        sizes.pop("sliding_window")
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**sizes, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("name", ["Gemma3", "Mistral"])
def test_a_layer_with_a_window_counts_what_it_keeps(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    batch, longer = ({"input_ids": torch.randint(64, (2, length), generator=draw)} for length in (9, 40))
    model = sliding(name)
    groups = mhaprune.wrap(model, losses.language_model, score=[batch]).units("group")
    other = [{"toks": batch["input_ids"]}]
    called = mhaprune.wrap(model, size_of_output, score=other, call=lambda model, given: model(input_ids=given["toks"]))
    assert called.cache_bytes(length=40) == groups.cache_bytes(length=40)
    for each in (batch, longer):
        assert groups.cache_bytes(batch_size=2, length=each["input_ids"].shape[1]) == in_cache(model, each)
    weakest_first = {str(head): head.layer + head.head / 10 for head in groups.grid}
    small = groups.prune(cache_bytes=0.75, context=40, by=weakest_first)
    assert in_cache(small, longer) <= 0.75 * in_cache(model, longer)


def test_the_heads_of_a_tower_free_nothing_and_are_not_chosen_for_the_cache() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=16)
    text = transformers.LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=2)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=62, vision_feature_layer=-1
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.randint(60, (2, 10), generator=torch.Generator().manual_seed(0))
    ids[:, 1:5] = 62
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8)}
    groups = mhaprune.wrap(model, losses.language_model, score=[batch]).units("group")
    assert groups.cache_bytes(batch_size=2, length=10) == in_cache(model, batch)
    towers = {str(head): float("vision" not in head.site) + head.head / 10 for head in groups.grid}
    mask = groups.mask(cache_bytes=0.75, by=towers)
    assert len(mask.removed) == 1
    assert not any("vision" in head.site for head in mask.removed)
    with pytest.raises(ValueError, match=r"stay: it keeps nothing in the cache"):
        groups.mask(cache_bytes=0.75, even=True)


def test_a_window_as_wide_as_the_texts_chooses_nothing() -> None:
    ids = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    groups = mhaprune.wrap(sliding("Llama"), losses.language_model, score=[{"input_ids": ids}]).units("group")
    stream = groups.streaming(sink=1, recent=8)
    message = (
        r"^by=taylor: is 0 for all 4 [^\n]*, so it cannot choose: no text of \*score\* is longer than the window, 9 t"
    )
    with pytest.raises(ValueError, match=message):
        stream.mask(keep=2, by="taylor")
    mask = groups.streaming(sink=1, recent=3).mask(keep=2, by="taylor")
    assert len(stream.prune(mask=mask).model.layers) == 2, "chosen by a narrow window, used with a wide one"


def test_full_layers_stream_beside_layers_with_a_window_of_their_own() -> None:
    batch = {"input_ids": torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))}
    stream = mhaprune.wrap(sliding("Gemma3"), losses.language_model, score=[batch]).units("group").streaming(1, 3)
    assert [str(block) for block in stream.proven.stuck] == [str(stream.grid.blocks[0])]
    assert "has a window of its own" in next(iter(stream.proven.stuck.values()))
    mask = stream.mask(keep=3, by="taylor")
    assert {head.layer for head in mask.removed} == {1}
    small = stream.prune(mask=mask)
    with stream.closed(mask) as closed, torch.no_grad():
        torch.testing.assert_close(small(**batch).logits, closed(**batch).logits)
