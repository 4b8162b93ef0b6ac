from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mhaprune.api.wrap import wrap
from mhaprune.attention.gates import Softmax
from mhaprune.data import Splits
from mhaprune.heads import BlockId, HeadMask
from mhaprune.lab.model.config import Transformer
from mhaprune.lab.model.decoding import attention_step, decode_greedily
from mhaprune.lab.model.layers import AttentionSublayer, FeedForward, sinusoids
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import BOS, EOS, PAD, AnswerOutcome, Examples, shift_right
from mhaprune.measure.outcomes import mean_outputs, measure, measure_masks
from mhaprune.scorers.ablation import resample
from mhaprune.scorers.base import Scorer
from mhaprune.settings.options import option
from support.models import decoded_plainly

GONE: dict[str, tuple[int, ...]] = {
    "none": (),
    "ragged": (0, 1, 5, 7, 11, 12, 17),
    "a whole block": (15, 16, 17),
    "a site": tuple(range(6)),
    "all": tuple(range(18)),
}
"""Of the 18 heads of `model`, those of the encoder first, then block by block of the decoder."""


@pytest.mark.parametrize("which", GONE)
def test_masked_equals_removed_in_two_steps(model: Seq2Seq, batch: Examples, which: str) -> None:
    grid = model.grid
    mask = HeadMask(grid, frozenset(grid.heads[n] for n in GONE[which]))
    first = HeadMask(grid, frozenset([head for head in grid if head in mask.removed][::2]))
    once = model.without(first)
    smaller = once.without(HeadMask(once.grid, mask.removed - first.removed))
    masked = model.run_gated(batch, mask.gates())
    torch.testing.assert_close(smaller.call(batch), masked)
    assert smaller.grid == model.grid.without(mask.removed)
    assert smaller.count_parameters() < model.count_parameters()
    decoded = model.decode_greedily(batch.source, 6, mask.gates())
    assert torch.equal(smaller.decode_greedily(batch.source, 6), decoded)
    for seen in (smaller.head_outputs(batch), {b: m.weights for b, m in smaller.attention_maps(batch).items()}):
        assert [heads.shape[1] for heads in seen.values()] == list(smaller.grid.sizes)


NEURONS = Transformer(d_model=8, num_heads=2, dim_feedforward=5, units=("head", "neuron"))


@pytest.mark.parametrize("left", ["some", "no neuron of a layer", "none"])
def test_neurons_of_our_network_are_removed_as_its_heads_are(left: str, batch: Examples) -> None:
    torch.manual_seed(0)
    model = Seq2Seq(NEURONS, 30).double()
    assert model.grid.sizes == (2,) * 6 + (5,) * 4
    kept = {"some": lambda n: n % 3, "no neuron of a layer": lambda n: n < 12 or n > 16, "none": lambda n: False}[left]
    mask = HeadMask(model.grid, frozenset(unit for n, unit in enumerate(model.grid) if not kept(n)))
    small = model.without(mask)
    torch.testing.assert_close(small.call(batch), model.run_gated(batch, mask.gates().double()), rtol=0, atol=1e-12)
    assert torch.equal(small.predict(batch), model.decode_greedily(batch.source, batch.target.shape[1], mask.gates()))
    assert small.count_flops(batch) < model.count_flops(batch)
    again = Seq2Seq(NEURONS, 30, grid=small.grid).double()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again.call(batch), small.call(batch))


def test_gates_per_token_close_a_head_where_they_say(model: Seq2Seq, batch: Examples) -> None:
    gates_BN = torch.rand(len(batch), len(model.grid), dtype=torch.float64)
    lengths = {block: valid.shape[1] for block, valid in model.queries(batch).items()}
    split = model.grid.split(gates_BN)
    per_token = {block: gates.unsqueeze(-1).repeat(1, 1, lengths[block]) for block, gates in split.items()}
    torch.testing.assert_close(model.run_gated(batch, per_token), model.run_gated(batch, gates_BN))
    # In the last layer of the decoder what happens at one position reaches no other.
    last = BlockId(Site.CROSS, 1)
    per_token[last][:, 0, 2] += 1.0
    changed = (model.run_gated(batch, per_token) - model.run_gated(batch, gates_BN)).abs().amax(dim=(0, 2))
    assert changed[2] > 1e-4
    assert changed[torch.arange(len(changed)) != 2].max() < 1e-12


@torch.no_grad()
def test_attention_maps_are_distributions_over_real_keys(model: Seq2Seq, batch: Examples) -> None:
    maps = model.attention_maps(batch)
    assert list(maps) == list(model.grid.blocks)
    for block, (weights, queries, keys) in maps.items():
        attended = weights.transpose(1, 2)[model.queries(batch)[block]]
        torch.testing.assert_close(attended.sum(-1), torch.ones_like(attended[..., 0]))
        source = batch.source if block.site != Site.DECODER_SELF else None
        if source is not None:
            assert float(weights.masked_fill((source != PAD)[:, None, None], 0.0).abs().max()) == 0
            assert torch.equal(keys, (source != PAD) & (source != EOS))
        assert torch.equal(queries, keys if block.site == Site.ENCODER_SELF else batch.target != PAD)
    some = model.grid.blocks[1:3]
    of_some = model.attention_maps(batch, some)
    assert list(of_some) == list(some)
    assert all(torch.equal(each.weights, maps[block].weights) for block, each in of_some.items())
    # Weighted values are what the heads put out.
    block = BlockId(Site.ENCODER_SELF, 0)
    sublayer = model.attention_sublayers()[block]
    x = sublayer.norm(model.embed(model.source_embedding, batch.source))
    values = sublayer.attention.project(x, x, x)[2]
    torch.testing.assert_close(maps[block].weights @ values, model.head_outputs(batch)[block])


@pytest.mark.parametrize("stop", [True, False])
def test_cached_decoding_equals_uncached(model: Seq2Seq, batch: Examples, stop: bool) -> None:
    gates = torch.rand(len(model.grid))
    for arguments in ({}, {"gates": gates}):
        cached = model.decode_greedily(batch.source, 9, stop=stop, **arguments)
        assert torch.equal(cached, decoded_plainly(model, batch.source, 9, stop=stop, **arguments))


def test_decoding_is_the_loop_over_full_passes(model: Seq2Seq, batch: Examples) -> None:
    tokens = torch.full((len(batch), 1), BOS)
    for _ in range(7):
        tokens = torch.cat([tokens, model(batch.source, tokens)[:, -1:].argmax(-1)], dim=1)
    expected = tokens[:, 1:]
    after_end = ((expected == EOS).cumsum(1) - (expected == EOS).int()) > 0
    assert torch.equal(model.decode_greedily(batch.source, 7), expected.masked_fill(after_end, PAD))
    assert not model.predict(batch).is_inference(), "autograd could not save it"


def test_flops_equal_what_torch_counts(batch: Examples) -> None:
    config = Transformer(d_model=12, num_heads=3, num_encoder_layers=2, num_decoder_layers=1, dim_feedforward=20)
    model = Seq2Seq(config, 11, Softmax())
    for subject in (model, model.without(HeadMask(model.grid).without(*model.grid.heads[:4]))):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            subject.train().call(batch)
        assert subject.count_flops(batch) == counter.get_total_flops()


def test_variants_have_the_parameters_that_they_say(batch: Examples) -> None:
    config = Transformer(d_model=8, num_heads=2, num_encoder_layers=0, num_decoder_layers=1)
    plain, gated = Seq2Seq(config, 11), Seq2Seq(config, 11, Softmax())
    untied = Seq2Seq(replace(config, tie_output=False), 11)
    assert plain.output.weight is plain.target_embedding.weight
    assert untied.count_parameters() - plain.count_parameters() == 11 * 8
    assert gated.count_parameters() - plain.count_parameters() == len(gated.grid)
    gates = gated.learned_gates()
    assert plain.learned_gates() is None
    assert gates is not None
    assert gates.tolist() == [1.0] * len(gated.grid)
    assert plain.call(batch).shape == (*batch.target.shape, 11), "without encoder layers too"


def test_sinusoids_of_float32_are_bit_for_bit_what_models_were_trained_with() -> None:
    angles = torch.arange(64)[:, None] / 10000 ** (torch.arange(0, 48, 2) / 48)
    assert sinusoids(64, 48).equal(torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1))


def test_a_sequence_that_is_too_long_is_refused() -> None:
    model = Seq2Seq(Transformer(d_model=8, num_heads=2, max_length=4), 11)
    with pytest.raises(ValueError, match="max_length=4: the model has no position for a sequence of 5 tokens"):
        model(torch.full((1, 5), 3), torch.full((1, 2), 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 5}, "num_heads=5: must divide d_model=64, so one of 1, 2, 4, 8, 16, 32, 64"),
        ({"d_model": 7, "num_heads": 1}, "d_model=7: must be even"),
        ({"num_decoder_layers": 0}, "num_decoder_layers=0: must be from 1 to 1000"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Transformer(**settings)


def test_heads_may_have_a_width_of_their_own(batch: Examples) -> None:
    """Five heads of two columns each in a model of twelve, which five does not divide."""
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 16}
    config = Transformer(d_model=12, num_heads=5, head_dim=2, **sizes)
    model = Seq2Seq(config, 8, Softmax()).double()
    assert model.head_dim == 2
    for block, weights_HKD in model.output_weights().items():
        assert weights_HKD.shape == (5, 2, 12), block
    mask = HeadMask(model.grid, frozenset(model.grid.heads[::2]))
    torch.testing.assert_close(model.without(mask).call(batch), model.run_gated(batch, mask.gates()))
    attention = 3 * (3 * 10 * (12 + 1) + 12 * (10 + 1)) + 3 * 5
    without_heads = Seq2Seq(config, 8, None, model.grid.without(model.grid.heads)).count_parameters() - 3 * 12
    assert model.count_parameters() == attention + without_heads
    assert config.bytes_to_train(8) < Transformer(d_model=12, num_heads=3, **sizes).bytes_to_train(8)


def test_the_network_is_a_module_like_any_other(model: Seq2Seq, batch: Examples) -> None:
    """Wrapped as a stranger's, its heads are found by tracing it, and have the scores that it has itself."""

    def loss(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
        return AnswerOutcome.of(logits, given["labels"]).loss

    given = {"source": batch.source, "prefix": shift_right(batch.target), "labels": batch.target}
    heads = wrap(model, loss, score=[given], call=lambda network, each: network(each["source"], each["prefix"]))
    assert repr(heads) == "18 heads in 6 blocks, all with an effect, all removable"
    places = {block.path: n for n, block in enumerate(model.blocks)}
    order = [places[block.path] for block in heads.subject.blocks]
    for name in ("ablation", "taylor_example", "gate"):
        scorer: Scorer = option(name, {"scorer": Scorer})
        theirs = scorer(heads.subject, heads.splits.score, 0).values[0].split(3)
        ours = scorer(model, batch, 0).values[0].split(3)
        torch.testing.assert_close(torch.stack(theirs), torch.stack([ours[n] for n in order]))


@pytest.mark.parametrize("gone", [0, 1, 5, 18])
@torch.no_grad()
def test_the_last_map_ends_where_the_network_does(model: Seq2Seq, batch: Examples, gone: int) -> None:
    """With live gates, with folded ones, with ragged and with empty blocks. Padding is left out."""
    for one in (model, model.without(HeadMask(model.grid, frozenset(model.grid.heads[:gone])))):
        last = [*one.last_maps([batch])][-1].parts[0][1]
        torch.testing.assert_close(one.output(one.decoder_norm(last)), one.outputs(batch))
        widths = {each.name: each.parts[0][0].shape for each in one.last_maps([batch])}
        of_encoder, of_decoder = int((batch.source != PAD).sum()), int((batch.target != PAD).sum())
        assert of_encoder < batch.source.numel(), "the fixture must have padding"
        heads = {block.out: block.heads for block in one.blocks}
        own, cross = "self_attention.attention.out_proj", "cross.attention.out_proj"
        of_layers = {"encoder": (own, "feed_forward.4"), "decoder": (own, cross, "feed_forward.4")}
        assert list(widths) == [f"{side}.{n}.{last}" for side in of_layers for n in (0, 1) for last in of_layers[side]]
        for name, shape in widths.items():
            width = heads[name] * one.head_dim if name in heads else one.config.dim_feedforward
            assert shape == (of_encoder if name.startswith("encoder") else of_decoder, width)


def test_dropout_acts_in_training_only_and_token_by_token_also_without_heads() -> None:
    torch.manual_seed(0)
    x_BTD = torch.randn(2, 5, 12)
    for heads in (3, 0):
        sublayer = AttentionSublayer(BlockId(Site.ENCODER_SELF, 0), 12, heads, 4, 0.5, None)
        torch.nn.init.ones_(sublayer.attention.out_proj.bias)
        assert torch.equal(sublayer.eval()(x_BTD), sublayer(x_BTD))
        dropped = (sublayer.train()(x_BTD) == x_BTD).flatten(0, 1)
        assert dropped.any()
        assert not (dropped == dropped[0]).all(), heads  # a token has its own
    layer = FeedForward(12, 24, 0.5)
    assert torch.equal(layer.eval()(x_BTD), layer(x_BTD))
    assert torch.equal(layer(x_BTD), x_BTD + torch.nn.Sequential.forward(layer, x_BTD))
    assert not torch.equal(layer.train()(x_BTD), layer(x_BTD))


TOKENS = 5


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*arguments, **(named or {}))


def operations(call: Callable[[], object]) -> Counter[str]:
    with Operations() as seen:
        call()
    return seen.counts


def emptied(model: Seq2Seq, *blocks: BlockId) -> Seq2Seq:
    return model.without(HeadMask(model.grid, frozenset(head for head in model.grid if head.block in blocks)))


@pytest.mark.parametrize("site", [Site.DECODER_SELF, Site.CROSS])
def test_a_block_without_heads_is_one_addition(model: Seq2Seq, batch: Examples, site: Site) -> None:
    """That of W_O's bias: no normalisation, no projection, no cache, no attention."""
    block = BlockId(site, 1)
    pruned = emptied(model, block)
    sublayer, x_BD = pruned.attention_sublayers()[block], torch.randn(3, 12, dtype=torch.float64)
    step = attention_step(sublayer, None, TOKENS)
    assert operations(lambda: sublayer(x_BD[None]))["add"] == sum(operations(lambda: step(x_BD)).values()) == 1
    # In decoding, then, everything else that the block did is saved for every token.
    before, after = (operations(lambda m=m: m.decode_greedily(batch.source, TOKENS)) for m in (emptied(model), pruned))
    assert not after - before
    saved = before - after
    assert saved["native_layer_norm"] == TOKENS
    # Queries, keys and values are one product. Those of the source are one for all layers.
    assert saved["addmm"] == 2 * TOKENS
    assert saved["_scaled_dot_product_flash_attention_for_cpu"] == TOKENS


def test_without_cross_heads_the_encoder_does_not_run(
    model: Seq2Seq, batch: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = emptied(model, *(block for block in model.grid.blocks if block.site == Site.CROSS))

    def refuse(*arguments: object) -> None:
        raise AssertionError("the encoder was run")

    monkeypatch.setattr(deaf, "encode", refuse)
    assert deaf.predict(batch).shape == batch.target.shape


def test_the_cache_spares_the_prefix(model: Seq2Seq, batch: Examples) -> None:
    """Of eight tokens the last costs what the first does; without the cache it would cost eight times that."""
    flops = []
    bare = emptied(model, *model.grid.blocks)
    for decode in (bare.decode_greedily, partial(decoded_plainly, bare)):
        with FlopCounterMode(display=False) as counter:
            decode(batch.source, 8)
        flops.append(counter.get_total_flops())
    assert flops[1] > 3 * flops[0]


def test_decoding_stops_when_the_last_sequence_has_ended() -> None:
    def next_logits(tokens_BT: Tensor) -> Tensor:  # the first sequence ends after one token, the second after three
        ends = torch.tensor([tokens_BT.shape[1] > 1, tokens_BT.shape[1] > 3])
        return F.one_hot(torch.where(ends, EOS, 5), 7)

    source, expected = torch.zeros(2, 1, dtype=torch.long), [[5, EOS, PAD, PAD, PAD], [5, 5, 5, EOS, PAD]]
    assert decode_greedily(next_logits, source, 5, stop=True).tolist() == expected


def some_gates(model: Seq2Seq) -> Tensor:
    """All open, each head closed, random sets, half-open gates, the same mask twice, all closed."""
    draw, n = torch.Generator().manual_seed(0), len(model.grid)
    sets = (torch.rand(10, n, generator=draw) < 0.5).double()
    halves = torch.rand(3, n, generator=draw, dtype=torch.double)
    return torch.cat([torch.ones(1, n), 1 - torch.eye(n), sets, halves, sets[3:5], torch.zeros(1, n)]).double()


def test_many_masks_at_once_are_each_alone(model: Seq2Seq, splits: Splits) -> None:
    gates = some_gates(model)
    together = measure_masks(model, splits.score, gates)
    for row, gates_N in enumerate(gates):
        for ours, plain in zip(together, measure(model, splits.score, gates_N), strict=True):
            torch.testing.assert_close(ours[row], plain)


@pytest.mark.parametrize("kind", ["mean", "resample", "pruned"])
def test_what_closed_heads_give_instead_is_the_same_also_beside_an_empty_block(
    model: Seq2Seq, splits: Splits, kind: str
) -> None:
    if kind == "pruned":
        empty = [head for head in model.grid if head.block == BlockId(Site.CROSS, 0)]
        model = model.without(HeadMask(model.grid, frozenset([*empty, model.grid.heads[0]])))
    means = mean_outputs(model, splits.score)
    replacement = resample(splits.score, seed=0) if kind == "resample" else lambda *_: means
    gates = some_gates(model)
    together = measure_masks(model, splits.score, gates, replacement)
    for row, gates_N in enumerate(gates):
        torch.testing.assert_close(together.loss[row], measure(model, splits.score, gates_N, replacement).loss)
