from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhaprune.heads import Block, HeadGrid, HeadId, HeadMask, Site

GRID = HeadGrid.full([Block(Site.ENCODER_SELF, 0), Block(Site.CROSS, 0)], 3)


@given(st.sampled_from(Site), st.integers(0, 99), st.integers(0, 99))
def test_a_name_parses_back(site: Site, layer: int, head: int) -> None:
    assert HeadId.parse(str(HeadId(site, layer, head))) == HeadId(site, layer, head)


@pytest.mark.parametrize("text", ["encoder_self.0", "nowhere.0.1", "cross.a.1", "cross.0.-1", ".0.1", ""])
def test_a_bad_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"head='{text}': .*must read SITE.LAYER.HEAD"):
        HeadId.parse(text, list(Site))


def test_a_site_may_have_any_name() -> None:
    assert HeadId.parse("bert.encoder.layer.attention.3.7") == HeadId("bert.encoder.layer.attention", 3, 7)


def test_index_is_the_inverse_of_the_order() -> None:
    assert [GRID.index(head) for head in GRID] == list(range(6))


def test_an_unknown_head_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"head=cross.0.3: no such head, the model has encoder_self.0.0, .* cross.0.2"):
        HeadMask(GRID).without(HeadId(Site.CROSS, 0, 3))


def test_names_stay_when_others_go() -> None:
    ragged = GRID.without([HeadId(Site.ENCODER_SELF, 0, 1)])
    assert ragged.sizes == (2, 3)
    assert [head.head for head in ragged] == [0, 2, 0, 1, 2]
    assert ragged.index(HeadId(Site.CROSS, 0, 0)) == 2


def test_split_cuts_the_last_axis_block_by_block() -> None:
    ragged = GRID.without([HeadId(Site.ENCODER_SELF, 0, 1)])
    pieces = ragged.split(torch.arange(10).view(2, 5))
    assert pieces[Block(Site.ENCODER_SELF, 0)].tolist() == [[0, 1], [5, 6]]
    assert pieces[Block(Site.CROSS, 0)].tolist() == [[2, 3, 4], [7, 8, 9]]
    with pytest.raises(ValueError, match="must hold all 5 heads"):
        ragged.split(torch.ones(6))


def test_heads_must_stand_block_by_block() -> None:
    with pytest.raises(ValueError, match="block by block"):
        HeadGrid(GRID.blocks, GRID.heads[::-1])


def test_a_mask_is_ones_and_zeros() -> None:
    mask = HeadMask(GRID).without(GRID.heads[1], GRID.heads[4])
    assert mask.gates().tolist() == [1, 0, 1, 1, 0, 1]
    assert mask.kept == tuple(GRID.heads[n] for n in (0, 2, 3, 5))
    assert HeadMask(GRID).gates().tolist() == [1] * 6
