"""Hidden neurons of feed-forward layers: found by gradients, gated, removed and saved as heads are."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import mhaprune
from mhaprune.api.choosing import usual_scores
from mhaprune.api.wrap import Heads
from mhaprune.attention.layer import MultiHeadAttention
from mhaprune.heads import HeadMask
from mhaprune.hooks.blocks import Unsupported
from mhaprune.measure.outcomes import output_difference
from mhaprune.proofs.block_by_block import BlockProof
from mhaprune.proofs.whole_model import prove_removal

WIDTH, HIDDEN = 8, 6
Forward = Callable[["Layer", Tensor], Tensor]


def interleaved(layer: "Layer", x: Tensor) -> Tensor:
    made: Tensor = layer.both(x)
    return layer.down(made[..., 1::2] * torch.sigmoid(made[..., ::2]))


def packed(layer: "Layer", x: Tensor) -> Tensor:
    gate, up = layer.both(x).chunk(2, dim=-1)
    return layer.down(F.silu(gate) * up)


LAYERS: dict[str, tuple[Forward, dict[str, list[tuple[int, ...]]]]] = {
    "gelu": (lambda layer, x: layer.down(F.gelu(layer.up(x))), {"up": [(n,) for n in range(HIDDEN)]}),
    "relu": (lambda layer, x: layer.down(layer.up(x).relu()), {"up": [(n,) for n in range(HIDDEN)]}),
    "flat": (lambda layer, x: layer.down(layer.up(x.flatten(0, 1)).relu()).view_as(x), {"up": [(0,), (1,), (2,)]}),
    "gated": (
        lambda layer, x: layer.down(F.silu(layer.gate(x)) * layer.up(x)),
        {"gate": [(0,), (1,)], "up": [(0,), (1,)]},
    ),
    "packed": (packed, {"both": [(n, HIDDEN + n) for n in range(HIDDEN)]}),
    "interleaved": (interleaved, {"both": [(2 * n, 2 * n + 1) for n in range(HIDDEN)]}),
}
"""How W_2 is called, and the rows of other maps that make the first neurons."""


class Layer(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.attention, self.how = MultiHeadAttention(WIDTH, 2), forward
        self.up, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.both, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)[0]
        return x + self.how(self, x)


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.mT, batch[1], reduction="none").mean(dim=1)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(LAYERS[name][0]) for _ in range(2)), nn.Linear(WIDTH, 3)).eval()


def wrapped(model: nn.Module, units: Any = ("head", "neuron")) -> Heads:
    draw = torch.Generator().manual_seed(1)
    batch = (torch.randn(6, 5, WIDTH, generator=draw), torch.randint(3, (6, 5), generator=draw))
    return mhaprune.wrap(model, loss, score=[batch], choose=[batch], report=[batch], units=units)


def proved(heads: Heads, mask: HeadMask) -> None:
    """Masked equals removed in float64, and the mask bites."""
    double, batch = heads.subject.in_double(), heads.splits.score
    assert output_difference(double, double.without(mask), batch, mask.gates()) < 1e-9
    assert output_difference(double, double, batch, mask.gates(), mask.gates() * 0 + 1) > 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_they_are_found_and_masked_equals_removed_once_and_twice(name: str) -> None:
    heads = wrapped(network(name))
    assert [block.kind for block in heads.subject.blocks] == ["head", "head", "neuron", "neuron"]
    assert repr(heads.units("block")).startswith("4 sublayers in 4 blocks, all with an effect")
    assert list(map(str, heads.grid.blocks)) == ["attention.0", "attention.1", "neuron.0", "neuron.1"]
    for source, (path, rows) in zip(heads.subject.blocks[2].made_by, sorted(LAYERS[name][1].items()), strict=True):
        assert source.rows.path == f"0.{path}"
        assert list(source.rows.heads[: len(rows)]) == rows
    units = list(heads.grid)
    proved(heads, HeadMask(heads.grid).without(units[0], *units[5:8], *units[-2:]))
    small = heads.prune(mask=[*units[4:7], units[1]])
    again = wrapped(small)
    assert set(again.grid) == set(units) - {*units[4:7], units[1]}, "by the names they had before"
    proved(again, HeadMask(again.grid).without(again.grid.heads[3], again.grid.heads[-1]))


def test_alone_they_are_counted_as_neurons_and_all_of_a_layer_may_go(tmp_path: Path) -> None:
    model = network("gated")
    heads = wrapped(model, ["neuron"])
    assert repr(heads) == "12 neurons in 2 blocks, all with an effect, all removable"
    small: Any = heads.prune(mask=list(heads.grid)[:6], refit=True)
    assert [small[0].down.in_features, small[1].down.in_features] == [1, 6]
    mhaprune.save(small, tmp_path / "small")
    read = mhaprune.load(tmp_path / "small", model=network("gated"))
    x = torch.randn(2, 5, WIDTH)
    assert torch.equal(read(x), small(x))


def test_without_a_name_neurons_are_chosen_by_a_score_whose_cost_does_not_grow_with_them() -> None:
    heads = wrapped(network("gated"))
    assert heads.mask(keep=0.4) == heads.mask(keep=0.4, by="surgeon") != heads.mask(keep=0.4, by="ablation")
    assert usual_scores(heads) == ("surgeon", "gate_output", "random")
    scored = heads.report(budgets=[0.5], refit=False, rounds=1).tables["heads"]["scorer"]
    assert {*usual_scores(heads)} == {*scored}
    assert usual_scores(wrapped(network("gated"), ["head"]))[0] == usual_scores(heads.units("block"))[0] == "ablation"


def test_a_budget_of_operations_leaves_that_share_of_them() -> None:
    """By the counter of torch; that biases count as products is a part in sixteen here."""
    model, none = network("gated"), wrapped(network("gated")).mask(keep=0.0)
    heads, x = wrapped(model), torch.randn(6, 5, WIDTH)

    def counted(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(x)
        return counter.get_total_flops()

    bare, whole = counted(heads.without(none).model), counted(model)
    for keep in (0.25, 0.6):
        left = counted(heads.prune(keep=keep, of="operations", by=torch.rand(len(heads.grid)).tolist()))
        assert 0 <= keep - (left - bare) / (whole - bare) < 0.25, "at most one head less"
    with pytest.raises(ValueError, match=r"^head=neuron\.0\.99: no such head, the model has attention\.0\.0, [^\n]*$"):
        heads.prune(mask=["neuron.0.99"])


def test_a_dead_neuron_is_idle_and_the_others_are_not() -> None:
    model: Any = network("relu")
    model[0].up.bias.data[[1, 4]] = -100.0
    heads = wrapped(model)
    assert set(map(str, heads.proven.without_effect)) == {"neuron.0.1", "neuron.0.4"}


def test_neurons_that_are_paired_with_the_rows_of_others_are_not_removable() -> None:
    """Of many neurons a random part goes in the proof: taking the first ones would not show it."""

    class Wide(Layer):
        def __init__(self) -> None:
            super().__init__(LAYERS["relu"][0])
            self.up, self.down = nn.Linear(WIDTH, 400), nn.Linear(400, WIDTH)

    torch.manual_seed(0)
    heads = wrapped(nn.Sequential(Wide(), Wide(), nn.Linear(WIDTH, 3)).eval(), ["neuron"])
    assert repr(heads) == "800 neurons in 2 blocks, all with an effect, all removable"
    for name, block in heads.subject.by_name.items():
        (source,) = block.made_by
        rows = source.rows.heads
        turned = replace(source, rows=replace(source.rows, heads=(*rows[:150], *rows[151:250], rows[150], *rows[250:])))
        blocks = [replace(block, made_by=(turned,)) if each is block else each for each in heads.subject.blocks]
        proof = BlockProof(heads.subject, heads.splits.proof).recorded()
        _, stuck = prove_removal(proof, heads.subject.changed(blocks=tuple(blocks)), "blocks")
        assert name in stuck


def test_a_state_that_others_read_is_no_layer_of_neurons() -> None:
    """As the embedding of ALBERT, which is projected and then read by every map."""

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.layer, self.end = nn.Linear(WIDTH, WIDTH), Layer(LAYERS["gelu"][0]), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.end(self.layer(self.project(x)))
            return out

    assert [block.out for block in wrapped(Projected().eval()).subject.blocks] == [
        "layer.attention.out_proj",
        "layer.down",
    ]


def test_a_model_without_neurons_is_refused_in_one_line() -> None:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.end = MultiHeadAttention(WIDTH, 2), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.end((x + self.attention(x, x, x)[0]).tanh())
            return out

    with pytest.raises(Unsupported, match=r"^units=\['head', 'neuron'\]: Attentive has no neurons: [^\n]*$"):
        wrapped(Attentive().eval())
    packed = Attentive().eval()
    packed.experts = nn.Parameter(torch.ones(2, WIDTH, WIDTH))
    with pytest.raises(Unsupported, match="and experts is a tensor of several experts, which cannot be cut$"):
        wrapped(packed)
    for units, message in (["layer"], "must be"), ([], "must name head, neuron or both"):
        with pytest.raises(ValueError, match=rf"^units=\[.*\]: {message}"):
            wrapped(Attentive().eval(), units)


def test_a_model_without_attention_has_neurons_alone() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.end = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.end(x + self.down(F.gelu(self.up(x))))
            return out

    heads = wrapped(Mixed().eval(), ["neuron"])
    assert repr(heads) == "6 neurons in 1 block, all with an effect, all removable"
    proved(heads, HeadMask(heads.grid).without(*list(heads.grid)[1:3]))
    with pytest.raises(Unsupported, match="Mixed: no attention found"):
        wrapped(Mixed().eval())


FAMILIES = "bert vit distilbert albert gpt2 opt gpt_neox llama qwen3 gemma3 bart t5".split()  # noqa: SIM905


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_those_of_families_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    import tiny_families as tiny

    family, split = tiny.FAMILIES[name], [tiny.batch_of(tiny.FAMILIES[name])]
    model = tiny.make(family)
    heads = mhaprune.wrap(model, tiny.size_of_output, score=split, units=["neuron"])
    assert not heads.proven.stuck
    neurons = list(heads.grid)
    proved(heads, HeadMask(heads.grid).without(*neurons[::3]))
    plain = heads.prune(keep=0.5, by="gate_output", even=True)
    mhaprune.save(plain, tmp_path / "plain")
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    ragged = heads.prune(mask=neurons[:5])
    mhaprune.save(ragged, tmp_path / "ragged")
    for small, folder in ((plain, "plain"), (ragged, "ragged")):
        read = mhaprune.load(tmp_path / folder)
        with torch.no_grad():
            expected, found = (tiny.size_of_output(each(**split[0]), split[0]) for each in (small.eval(), read))
        assert torch.equal(expected, found)
