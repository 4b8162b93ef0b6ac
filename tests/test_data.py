from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mhaprune.data import EOS, PAD, Examples, Vocabulary, pad

LETTERS = Vocabulary(("a", "b", "c"))


@given(st.lists(st.sampled_from(LETTERS.symbols)))
def test_decode_is_the_inverse_of_encode(symbols: list[str]) -> None:
    ids = LETTERS.encode(symbols)
    assert ids[-1] == EOS
    assert max(ids) < len(LETTERS)
    assert LETTERS.decode([*ids, PAD, PAD]) == symbols


def test_an_unknown_symbol_is_named_with_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="symbol='x': not in the vocabulary a b c"):
        LETTERS.encode("abx")


def test_batches_are_all_examples_trimmed() -> None:
    rows = [[3, 2], [3, 4, 5, 2], [4, 2], [5, 2]]
    examples = Examples(pad(rows), pad(rows[::-1]))
    batches = list(examples.batches(3))
    assert [len(batch) for batch in batches] == [3, 1]
    assert batches[0].source.shape == (3, 4)
    assert batches[1].source.tolist() == [[5, 2]]
    assert torch.equal(torch.cat([batch.source for batch in examples.batches(1)][:1]), torch.tensor([[3, 2]]))


def test_a_loop_over_examples_is_refused_as_it_would_find_none() -> None:
    with pytest.raises(TypeError, match=r"for batch in examples.batches\(128\)"):
        list(Examples(torch.ones(2, 3), torch.ones(2, 3)))


def test_a_few_examples_are_limited_by_their_tokens() -> None:
    short, long = (Examples(torch.ones(40, n).long(), torch.ones(40, 1).long()) for n in (9, 99))
    assert len(short.few()) == 16
    assert len(long.few()) == 5
    assert len(Examples(torch.ones(4, 600).long(), torch.ones(4, 1).long()).few()) == 1
    assert len(short[:0].few()) == 0
