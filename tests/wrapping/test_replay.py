from __future__ import annotations

import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.front.heads import wrap
from mhaprune.measure.outcomes import all_open, measure, measure_masks
from mhaprune.wrapping.replay import Replay
from support.classifier import Classifier, batches


class InPlace(Classifier):
    """Adds to the output of its embedding where that lies."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for attention, forward in zip(self.attention, self.feed_forward, strict=True):
            x += attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
            x += forward(x.relu())
        return {"logits": self.output(x.mean(dim=1))}


def replayed_and_plain(model: Classifier) -> tuple[Tensor, Tensor]:
    """The losses with each head closed: as many masks at once, and mask by mask."""
    heads = wrap(model, losses.classification, score=batches(2))
    gates_MN = all_open(heads.subject, 1 + len(heads.grid))
    gates_MN[1:].fill_diagonal_(0.0)
    split = heads.splits["score"]
    plain = torch.stack([measure(heads.subject, split, gates_N).loss for gates_N in gates_MN])
    return measure_masks(heads.subject, split, gates_MN).loss, plain


def test_what_was_written_to_in_place_is_computed_again() -> None:
    torch.testing.assert_close(*replayed_and_plain(InPlace()))


class SharedNorm(Classifier):
    """Calls one module in every layer, and writes to what it returned the first time."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer, (attention, forward) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            x = self.feed_forward[0](x)
            if layer == 0:
                x += 1
            x = x + attention(x, x, x, key_padding_mask=attention_mask == 0)[0]
            x = x + forward(x.relu())
        return {"logits": self.output(x.mean(dim=1))}


def test_a_call_that_is_computed_again_does_not_take_what_a_later_call_returned() -> None:
    torch.testing.assert_close(*replayed_and_plain(SharedNorm()))


class Layer(nn.Module):
    """Modules of modules, as the layers of a large model are."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.out, self.inner, self.outer = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.value(x))
        return x + self.outer(self.inner(x).relu())


def test_only_what_can_be_replayed_is_kept() -> None:
    model = nn.Sequential(Layer(), Layer())
    replay = Replay(model, ["0.out", "1.out"])
    with replay.recording():
        model(torch.randn(2, 4))
    paths = {module: path for path, module in model.named_modules()}
    assert [paths[call.module] for call in replay.calls if call.intact] == ["0.value", "0", "1.value", ""]
