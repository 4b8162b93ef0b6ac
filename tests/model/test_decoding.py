"""What decoding spends on what, counted in operations, which are the same on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mhaprune.data import Examples
from mhaprune.heads import Block, HeadMask, Site
from mhaprune.model.transformer import Seq2Seq

TOKENS = 5


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*arguments, **(named or {}))


def operations(call: Callable[[], object]) -> Counter[str]:
    with Operations() as seen:
        call()
    return seen.counts


def emptied(model: Seq2Seq, *blocks: Block) -> Seq2Seq:
    return model.without(HeadMask(model.grid, frozenset(head for head in model.grid if head.block in blocks)))


@pytest.mark.parametrize("site", [Site.DECODER_SELF, Site.CROSS])
def test_a_block_without_heads_is_one_addition(model: Seq2Seq, batch: Examples, site: Site) -> None:
    """That of W_O's bias: no normalisation, no projection, no cache, no attention."""
    block = Block(site, 1)
    pruned = emptied(model, block)
    sublayer, x_BD = pruned.attention_sublayers()[block], torch.randn(3, 12, dtype=torch.float64)
    step = pruned.attention_step(sublayer, None, TOKENS)
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
    for cached in (True, False):
        with FlopCounterMode(display=False) as counter:
            emptied(model, *model.grid.blocks).decode_greedily(batch.source, 8, use_cache=cached)
        flops.append(counter.get_total_flops())
    assert flops[1] > 3 * flops[0]
