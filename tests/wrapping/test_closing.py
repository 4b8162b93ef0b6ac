"""Maps beside W_O and W_2 that read the same units: adapters that are not merged."""

from typing import Any

import pytest
import torch
from test_feed_forwards import HIDDEN, WIDTH, Block, Net, texts, wrapped
from torch import Tensor, nn
from torch.nn import functional as F


class Adapter(nn.Module):
    """A linear map with a low-rank one beside it, under names that nobody knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.less, self.more = nn.Linear(width, WIDTH), nn.Linear(width, 3), nn.Linear(3, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.more(self.less(self.drop(x)))


class Weights(Adapter):
    """The same, computed without a call of the small maps."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(F.linear(x, self.less.weight), self.more.weight)


class Beside(Block):
    """An adapter that stands beside W_O in the code of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        said = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.o(said) + 0.5 * self.side(said)


def adapted(kind: type[Adapter], where: str) -> Net:
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    for block in blocks:
        setattr(block, where, kind(WIDTH if where == "o" else HIDDEN))
    return Net(*blocks).train()


@torch.no_grad()
def by_hand(model: nn.Module, path: str, columns: list[int]) -> float:
    """The rise of the loss if a module reads zeros in these columns."""

    def shut(module: Any, inputs: Any) -> Any:
        x = inputs[0].clone()
        x[..., columns] = 0
        return (x,)

    def loss() -> Tensor:
        return torch.stack([F.cross_entropy(model(x), y) for x, y in texts()]).mean()

    model.eval()
    before = loss()
    hook = model.get_submodule(path).register_forward_pre_hook(shut)
    after = loss()
    hook.remove()
    return float(after - before)


@pytest.mark.parametrize("kind", [Adapter, Weights])
@pytest.mark.parametrize(("where", "units"), [("o", ("head",)), ("down", ("neuron",)), ("down", ("head", "neuron"))])
def test_closing_a_unit_closes_it_for_the_adapter_too(kind: type[Adapter], where: str, units: Any) -> None:
    model = adapted(kind, where)
    heads = wrapped(model, units)
    table = heads.score("ablation").set_index(["site", "layer", "head"])["score"]
    for site, path in (("blocks", "o"), ("neuron", "down")):
        for layer in (0, 1) if site in {head.site for head in heads.grid} else ():
            columns = [4, 5, 6, 7] if path == "o" else [1]
            assert table[site, layer, 1] == pytest.approx(by_hand(model, f"blocks.{layer}.{path}", columns), abs=1e-5)
    stuck = {block.site for block in heads.proven.stuck}
    assert stuck == {"blocks" if where == "o" else "neuron"}
    assert f"blocks.0.{where}.inner and other maps of blocks.0.{where} read them" in heads.proven.stuck.values()


def test_scores_of_weights_see_what_the_adapter_adds() -> None:
    model = adapted(Adapter, "o").eval()
    merged = adapted(Adapter, "o").eval()
    for block in merged.blocks:
        weight = block.o.inner.weight.data + block.o.more.weight.data @ block.o.less.weight.data
        bias = block.o.inner.bias.data + block.o.more(block.o.less.bias.data)
        block.o = nn.Linear(WIDTH, WIDTH)
        block.o.weight.data, block.o.bias.data = weight, bias.detach()
    for name in ("gate_output", "fisher", "taylor", "ablation_mean"):
        ours, theirs = (wrapped(each, ("head",)).score(name)["score"].tolist() for each in (model, merged))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), name
    with pytest.raises(ValueError, match="^scorer=magnitude: needs the weights of the values, which are not known"):
        wrapped(model, ("head",)).score("magnitude")


def test_a_reader_beside_w_o_is_refused_in_one_line() -> None:
    torch.manual_seed(0)
    with pytest.raises(
        ValueError, match=r"^blocks.0.o: is not all that reads its units, so closing them leaves[^\n]*$"
    ):
        wrapped(Net(Beside(), Beside()), ("head",))
