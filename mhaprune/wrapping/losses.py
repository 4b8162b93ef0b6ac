"""Losses and qualities of wrapped models, with one number per example, (B,).

Each takes what the model returned and the batch, as the user's own functions do. The output has `logits`, as those of
transformers have, or is the tensor of logits itself. Labels of -100 are ignored.

>>> losses.classification({"logits": torch.zeros(2, 3)}, {"labels": torch.tensor([0, 1])})
tensor([1.0986, 1.0986])

Dimensions: B = batch, T = positions, C = classes or vocabulary, D = width.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mhaprune.wrapping.batches import DENSE, IGNORED, MASK, Batches, Parts
from mhaprune.wrapping.replay import tensors_in

Judge = Callable[[Any, Any], Tensor]
"""A function of the model's output and the batch: one number per example, (B,)."""


def classification(output: Any, batch: Any) -> Tensor:
    """Cross-entropy in nats of logits (B, C) on `labels` (B,)."""
    return F.cross_entropy(_logits(output), _field(batch, "labels"), reduction="none")


def accuracy(output: Any, batch: Any) -> Tensor:
    """1 where the label has the highest of the logits (B, C), else 0."""
    return (_logits(output).argmax(dim=-1) == _field(batch, "labels")).float()


def largest_probability(output: Any) -> Tensor:
    """The largest of the probabilities that logits (B, C) give to the classes, (B,)."""
    return _logits(output).softmax(dim=-1).amax(dim=-1)


def language_model(output: Any, batch: Any) -> Tensor:
    """Mean cross-entropy in nats of the next token over the tokens of an example. Logits are (B, T, C).

    The tokens are `labels` or, without these, `input_ids` where the attention mask is not 0. A prompt with labels of
    -100 does not count, on whichever side the padding stands.
    """
    return _mean_over_tokens(*_next_token(output, batch), _token_losses)


def next_token_accuracy(output: Any, batch: Any) -> Tensor:
    """The share of tokens, as in `language_model`, that the model ranks first, for each example."""
    return _mean_over_tokens(*_next_token(output, batch), _token_hits)


def seq2seq(output: Any, batch: Any) -> Tensor:
    """Cross-entropy in nats of logits (B, T, C) on `labels` (B, T), the mean over the tokens of each example, (B,).
    Labels of -100 do not count."""
    return _mean_over_tokens(_logits(output), _field(batch, "labels"), _token_losses)


def token_accuracy(output: Any, batch: Any) -> Tensor:
    """The share of the tokens of `labels` (B, T) that the model ranks first, given the true tokens before each."""
    return _mean_over_tokens(_logits(output), _field(batch, "labels"), _token_hits)


def exact_match(output: Any, batch: Any) -> Tensor:
    """1 if the model ranks every token of `labels` first, given the true tokens before it; else 0."""
    logits_BTC, labels_BT = _logits(output), _field(batch, "labels")
    return ((logits_BTC.argmax(dim=-1) == labels_BT) | (labels_BT == IGNORED)).all(dim=1).float()


class Drift:
    """One minus the cosine between the model's output and the dense model's output, for each example.

    It needs no labels: `wrap` runs the dense model once over the data and keeps `represent(output, batch)`, (B, D). By
    default that is the mean of the last hidden states over the tokens of the attention mask, which is how sentence
    encoders pool; if the output is a tensor, it is the output itself.
    """

    def __init__(self, represent: Judge | None = None) -> None:
        self.represent = represent or mean_of_tokens

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return 1 - F.cosine_similarity(self.represent(output, batch), _field(batch, DENSE), dim=-1)


class Similarity(Drift):
    """One minus the drift."""

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return 1 - super().__call__(output, batch)


def mean_of_tokens(output: Any, batch: Any) -> Tensor:
    """(B, D): the mean hidden state over the tokens of the attention mask."""
    states = output if isinstance(output, Tensor) else dict(output).get("last_hidden_state")
    if states is None:
        raise ValueError(
            f"drift: the output has no last_hidden_state, only {', '.join(output)}; give Drift(represent=...)"
        )
    if states.dim() == 2:
        return states
    mask = batch.get(MASK) if isinstance(batch, dict) else None
    if mask is None or mask.shape != states.shape[:2]:
        return states.flatten(1, -2).mean(dim=1)
    counted = mask.to(states)[..., None]
    return (states * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)


drift, similarity = Drift(), Similarity()

QUALITIES: dict[Any, Judge] = {
    classification: accuracy,
    language_model: next_token_accuracy,
    seq2seq: exact_match,
    drift: similarity,
}
"""The default quality of each loss."""


def quality_for(loss: Judge) -> Judge:
    """Return the default quality of a loss; minus the loss if there is none."""

    def minus_the_loss(output: Any, batch: Any) -> Tensor:
        return -loss(output, batch)

    return Similarity(loss.represent) if isinstance(loss, Drift) else QUALITIES.get(loss, minus_the_loss)


def name_of(quality: Judge) -> str:
    """Return the name of a quality for figures and sentences, from the name of its function."""
    name = str(getattr(quality, "__name__", type(quality).__name__)).replace("_", " ").strip().lower()
    return name if name and name != "<lambda>" else "quality"


def unit_of(loss: Judge) -> str:
    """Return the unit of a loss: nats for a likelihood, else an empty text."""
    return "nats" if loss in (classification, language_model, seq2seq) else ""


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    try:
        logits: Tensor = output["logits"] if isinstance(output, dict) else output.logits
    except (AttributeError, KeyError):
        raise ValueError(
            f"loss: the model returns a {type(output).__name__} without logits, name a loss that reads it"
        ) from None
    return logits


def _field(batch: Any, name: str) -> Tensor:
    """Return the named field of a batch that is a dict; if it is a tuple, its last part, the target."""
    if isinstance(batch, Parts):
        part: Tensor | None = batch.dense if name == DENSE else batch[-1]
        if part is not None:
            return part
    if not isinstance(batch, Mapping):
        raise ValueError(f"loss: needs {name}, so a batch must be a dict with {name} or a tuple (inputs, target)")
    if name not in batch:
        raise ValueError(f"loss: needs {name} in every batch, there are {', '.join(batch)}")
    value: Tensor = batch[name]
    return value


def _next_token(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, dict) and "labels" not in batch:
        labels_BT = _field(batch, "input_ids")
        if MASK in batch:
            labels_BT = labels_BT.masked_fill(batch[MASK] == 0, IGNORED)
    else:
        labels_BT = _field(batch, "labels")
    return _logits(output)[:, :-1], labels_BT[:, 1:]


def _token_losses(logits_BTC: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTC.mT, labels_BT, reduction="none", ignore_index=IGNORED)


def _token_hits(logits_BTC: Tensor, labels_BT: Tensor) -> Tensor:
    return ((logits_BTC.argmax(dim=-1) == labels_BT) & (labels_BT != IGNORED)).to(logits_BTC.dtype)


def _mean_over_tokens(logits_BTC: Tensor, labels_BT: Tensor, values: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the mean over the tokens that count, (B,); 0 for an example without such tokens."""
    counted_B = (labels_BT != IGNORED).sum(dim=1).clamp(min=1)
    return torch.where(labels_BT != IGNORED, values(logits_BTC, labels_BT), 0.0).sum(dim=1) / counted_B


class LossAndQuality(NamedTuple):
    """A loss and a quality per example, (B,) each."""

    loss: Tensor
    quality: Tensor


def judged(output: Any, given: Any, size: int, loss: Judge, quality: Judge) -> LossAndQuality:
    """Return the loss and the quality of every example of a batch. `given` is the batch in the user's form.

    Raises ValueError for a loss or a quality that is not one real number per example.
    """
    found: list[Tensor] = []
    for name, judge in (("loss", loss), ("quality", quality)):
        values = judge(output, given)
        if not isinstance(values, Tensor) or values.shape != (size,):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"{name}: returns {shape} for a batch of {size}, must be one number per example, ({size},); a mean over"
                f" the batch cannot say how sure it is"
            )
        if name == "loss" and not values.is_floating_point():
            raise ValueError(f"loss: returns {values.dtype}, must be real numbers, such as torch.float32")
        found.append(values.to(found[0].dtype if found else values.dtype))
    return LossAndQuality(*found)


def flat(output: Any, batch: Batches) -> Tensor:
    """Return all floating-point numbers of an output as one row. Padding is left out of tensors (B, T, D) that fit the
    attention mask."""
    mask, parts = batch.fields.get(MASK), []
    for value in tensors_in(output):
        if value.is_floating_point():
            by_token = mask is not None and value.dim() == 3 and mask.shape == value.shape[:2]
            parts.append(value[mask != 0].flatten() if by_token else value.flatten())
    return torch.cat(parts) if parts else torch.zeros(0)
