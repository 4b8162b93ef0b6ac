"""What heads look at is told from their maps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mhaprune_models.behaviours import BEHAVIOURS, behaviours

from mhaprune.heads import BlockId, HeadGrid, HeadId
from mhaprune.subject import AttentionMap
from mhaprune.subjects.batches import Batches

LENGTH = 5


def heads_that_look(keys: dict[int, Any], tokens: int = 1 + 2 * LENGTH) -> Any:
    """One block whose head n looks from place i at place `keys[n](i)` alone, and another with equal weights."""
    there, other = BlockId("self_attn", 0), BlockId("self_attn", 1)

    def maps(batch: Batches) -> dict[BlockId, AttentionMap]:
        given = range(len(batch))
        weights = torch.zeros(len(given), len(keys), tokens, tokens)
        for head, key in keys.items():
            for i in range(tokens):
                weights[:, head, i, max(0, key(i))] = 1
        real = torch.ones(len(given), tokens, dtype=torch.bool)
        equal = torch.full_like(weights[:, :1], 1 / tokens)
        return {block: AttentionMap(each, real, real) for block, each in ((there, weights), (other, equal))}

    subject = SimpleNamespace(attention_maps=maps, device=torch.device("cpu"), dtype=torch.float32)
    heads = (*(HeadId(*there, head) for head in keys), HeadId(*other, 0))
    return SimpleNamespace(subject=subject, grid=HeadGrid((there, other), heads))


def test_each_behaviour_is_seen_and_none_other() -> None:
    keys = {0: lambda i: 0, 1: lambda i: i - 1, 2: lambda i: i - LENGTH, 3: lambda i: i - LENGTH + 1}
    table = behaviours(heads_that_look(keys), range(5, 50), texts=11, length=LENGTH)
    expected = torch.cat([torch.eye(4), torch.full((1, 4), 1 / (1 + 2 * LENGTH))])
    torch.testing.assert_close(torch.tensor(table[list(BEHAVIOURS)].to_numpy(), dtype=torch.float32), expected)
    assert table["layer"].tolist() == [0, 0, 0, 0, 1]


def test_attention_that_is_not_between_all_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="looks at 4 places of 11 tokens"):
        behaviours(heads_that_look({0: lambda i: 0}, tokens=4), range(5, 50), texts=1, length=LENGTH)
