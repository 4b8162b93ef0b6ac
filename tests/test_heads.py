"""Names of heads, masks and examples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhaprune.heads import BlockId, HeadGrid, HeadId, HeadMask
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import EOS, PAD, Examples, Vocabulary, pad

GRID = HeadGrid.full([BlockId(Site.ENCODER_SELF, 0), BlockId(Site.CROSS, 0)], 3)


@given(st.sampled_from(Site), st.integers(0, 99), st.integers(0, 99))
def test_a_name_parses_back(site: Site, layer: int, head: int) -> None:
    assert HeadId.parse(str(HeadId(site, layer, head))) == HeadId(site, layer, head)


@pytest.mark.parametrize("text", ["encoder_self.0", "nowhere.0.1", "cross.a.1", "cross.0.-1", ".0.1", ""])
def test_a_bad_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"head='{text}': .*must read SITE.LAYER.HEAD"):
        HeadId.parse(text, list(Site))


def test_names_stay_when_others_go_and_split_cuts_the_last_axis_block_by_block() -> None:
    assert HeadId.parse("bert.encoder.layer.attention.3.7") == HeadId("bert.encoder.layer.attention", 3, 7)
    ragged = GRID.without([HeadId(Site.ENCODER_SELF, 0, 1)])
    assert ragged.sizes == (2, 3)
    assert [head.head for head in ragged] == [0, 2, 0, 1, 2]
    assert [ragged.index(head) for head in ragged] == list(range(5))
    pieces = ragged.split(torch.arange(10).view(2, 5))
    assert pieces[BlockId(Site.ENCODER_SELF, 0)].tolist() == [[0, 1], [5, 6]]
    assert pieces[BlockId(Site.CROSS, 0)].tolist() == [[2, 3, 4], [7, 8, 9]]
    with pytest.raises(ValueError, match="must hold all 5 heads"):
        ragged.split(torch.ones(6))

    with pytest.raises(ValueError, match="block by block"):
        HeadGrid(GRID.blocks, GRID.heads[::-1])
    with pytest.raises(ValueError, match=r"head=cross.0.3: no such head, the model has encoder_self.0.0, .* cross.0.2"):
        HeadMask(GRID).without(HeadId(Site.CROSS, 0, 3))


def test_a_mask_is_ones_and_zeros() -> None:
    mask = HeadMask(GRID).without(GRID.heads[1], GRID.heads[4])
    assert mask.gates().tolist() == [1, 0, 1, 1, 0, 1]
    assert mask.kept == tuple(GRID.heads[n] for n in (0, 2, 3, 5))
    assert HeadMask(GRID).gates().tolist() == [1] * 6


LETTERS = Vocabulary(("a", "b", "c"))


@given(st.lists(st.sampled_from(LETTERS.symbols)))
def test_decode_is_the_inverse_of_encode(symbols: list[str]) -> None:
    ids = LETTERS.encode(symbols)
    assert ids[-1] == EOS
    assert max(ids) < len(LETTERS)
    assert LETTERS.decode([*ids, PAD, PAD]) == symbols


def test_batches_are_all_examples_trimmed() -> None:
    rows = [[3, 2], [3, 4, 5, 2], [4, 2], [5, 2]]
    examples = Examples(pad(rows), pad(rows[::-1]))
    batches = list(examples.batches(3))
    assert [len(batch) for batch in batches] == [3, 1]
    assert batches[0].source.shape == (3, 4)
    assert batches[1].source.tolist() == [[5, 2]]
    assert torch.equal(torch.cat([batch.source for batch in examples.batches(1)][:1]), torch.tensor([[3, 2]]))


def test_an_unknown_symbol_and_a_loop_over_examples_are_refused() -> None:
    """The loop would find no example."""
    with pytest.raises(ValueError, match="symbol='x': not in the vocabulary a b c"):
        LETTERS.encode("abx")
    with pytest.raises(TypeError, match=r"for batch in examples.batches\(128\)"):
        list(Examples(torch.ones(2, 3), torch.ones(2, 3)))


def test_a_few_examples_are_limited_by_their_tokens() -> None:
    short, long = (Examples(torch.ones(40, n).long(), torch.ones(40, 1).long()) for n in (9, 99))
    assert len(short.few()) == 16
    assert len(long.few()) == 5
    assert len(Examples(torch.ones(4, 600).long(), torch.ones(4, 1).long()).few()) == 1
    assert len(short[:0].few()) == 0
