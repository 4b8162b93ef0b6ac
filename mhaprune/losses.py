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

from mhaprune.hooks.pytree import precise, tensors_in
from mhaprune.subjects.batches import IGNORED, LABELS, MASK, Batches
from mhaprune.subjects.stacks import DENSE

Judge = Callable[[Any, Any], Tensor]
"""A function of the model's output and the batch: one number per example, (B,)."""


def classification(output: Any, batch: Any) -> Tensor:
    """Cross-entropy in nats of logits (B, C) on `labels` (B,), whole numbers below C."""
    logits_BC, labels_B = _classes(output, batch)
    losses_B = F.cross_entropy(logits_BC, labels_B, reduction="none", ignore_index=IGNORED)
    return losses_B.masked_fill(labels_B == IGNORED, torch.nan)


def accuracy(output: Any, batch: Any) -> Tensor:
    """1 where the label has the highest of the logits (B, C), else 0."""
    logits_BC, labels_B = _classes(output, batch)
    return (logits_BC.argmax(dim=-1) == labels_B).to(logits_BC.dtype).masked_fill(labels_B == IGNORED, torch.nan)


def largest_probability(output: Any) -> Tensor:
    """The largest of the probabilities that logits (B, C) give to the classes, (B,)."""
    return _logits(output).softmax(dim=-1).amax(dim=-1)


def language_model(output: Any, batch: Any) -> Tensor:
    """Mean cross-entropy in nats of the next token over the tokens of an example. Logits are (B, T, C).

    The tokens are `labels` or, without these, `input_ids`. A prompt with labels of -100 does not count. Padding in the
    attention mask, on whichever side, is neither predicted nor predicted from.
    """
    return _mean_over_tokens(_logits(output)[:, :-1], _next_tokens(batch), _token_losses)


def next_token_accuracy(output: Any, batch: Any) -> Tensor:
    """The share of tokens, as in `language_model`, that the model ranks first, for each example."""
    return _mean_over_tokens(_logits(output)[:, :-1], _next_tokens(batch), _token_hits)


def seq2seq(output: Any, batch: Any) -> Tensor:
    """Cross-entropy in nats of logits (B, T, C) on `labels` (B, T), the mean over the tokens of each example, (B,).
    Labels of -100 do not count."""
    return _mean_over_tokens(_logits(output), _field(batch, LABELS), _token_losses)


def token_accuracy(output: Any, batch: Any) -> Tensor:
    """The share of the tokens of `labels` (B, T) that the model ranks first, given the true tokens before each."""
    return _mean_over_tokens(_logits(output), _field(batch, LABELS), _token_hits)


def exact_match(output: Any, batch: Any) -> Tensor:
    """1 if the model ranks every token of `labels` first, given the true tokens before it; else 0."""
    return (token_accuracy(output, batch) == 1).to(_logits(output).dtype)


class Drift:
    """One minus the cosine between the model's output and the dense model's output, for each example.

    It needs no labels: `wrap` runs the dense model once over the data and keeps `represent(output, batch)`, (B, D). By
    default that is the mean of the last hidden states over the tokens that are no padding, which is how sentence
    encoders pool; if the output is a tensor, it is the output itself.
    """

    def __init__(self, represent: Judge | None = None) -> None:
        self.represent = represent or mean_of_tokens

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return 1 - F.cosine_similarity(precise(self.represent(output, batch)), _field(batch, DENSE), dim=-1)


class Similarity(Drift):
    """One minus the drift."""

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return 1 - super().__call__(output, batch)


def mean_of_tokens(output: Any, batch: Any) -> Tensor:
    """(B, D): the mean hidden state over the tokens of the attention mask; of an encoder-decoder, over the tokens of
    the decoder's mask, or all of them. NaN for an example that is all padding.

    Raises ValueError for a mask with padding that does not say which states belong to it.
    """
    states = output if isinstance(output, Tensor) else dict(output).get("last_hidden_state")
    if states is None:
        raise ValueError(
            f"drift: the output has no last_hidden_state, only {', '.join(output)}; give Drift(represent=...)"
        )
    states = precise(states)
    if states.dim() == 2:
        return states
    two_sided = not isinstance(output, Tensor) and "encoder_last_hidden_state" in output
    name = f"decoder_{MASK}" if two_sided else MASK
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    if mask is None or bool((mask != 0).all()):
        return states.flatten(1, -2).mean(dim=1)
    if mask.shape != states.shape[:2]:
        raise ValueError(
            f"drift: the states are {tuple(states.shape[:2])} and the {name} is {tuple(mask.shape)}, so padding cannot"
            " be told; give Drift(represent=...)"
        )
    counted = (mask != 0).to(states)[..., None]
    return torch.where(counted != 0, states, 0.0).sum(dim=1) / counted.sum(dim=1)


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
    """Return the unit of a loss: nats for a likelihood, else its attribute `unit`, an empty text without one."""
    return "nats" if loss in (classification, language_model, seq2seq) else str(getattr(loss, "unit", None) or "")


def check_counted(loss: Judge, split: Batches, name: str) -> None:
    """Raise ValueError for examples of a split in which a loss of this module has nothing to judge."""
    for batch in split.batches(len(split)) if loss in COUNTED else ():
        counted = COUNTED[loss](batch.as_given())
        if missing := int((~counted.flatten(1).any(dim=1)).sum()):
            raise ValueError(
                f"{name}: {missing} of {len(batch)} examples of a batch have nothing to judge (labels of {IGNORED}, or"
                " all padding), leave them out"
            )


SHIFTED = (language_model, next_token_accuracy)
ALIGNED = (seq2seq, token_accuracy, exact_match)


def check_fits(model: Any, judges: Mapping[str, Judge], split: Batches) -> None:
    """Raise ValueError for a loss or quality that judges a model one position off. The labels of an encoder-decoder
    belong to its positions; those of a decoder alone to the positions before, unless they were moved already."""
    config, kind = getattr(model, "config", None), type(model).__name__
    two_sided = bool(getattr(config, "is_encoder_decoder", False))
    masked, causal = "MaskedLM" in kind, "CausalLM" in kind or "LMHead" in kind
    for batch in split.batches(len(split)):
        given = batch.as_given()
        named = given if isinstance(given, Mapping) else {}
        ids: Any = named.get("input_ids")
        labels: Any = named.get(LABELS)
        alike = isinstance(ids, Tensor) and isinstance(labels, Tensor) and labels.shape == ids.shape
        same = alike and _equal_where_counted(labels, ids)
        moved = alike and not same and ids.shape[1] > 2 and _equal_where_counted(labels[:, :-1], ids[:, 1:])
        for name, judge in judges.items():
            other = "seq2seq" if name == "loss" else "token_accuracy"
            if judge in SHIFTED and (two_sided or masked or moved):
                why = "whose labels are moved by one already" if moved else "whose labels belong to their own positions"
                raise ValueError(f"{name}: is for the next token, and this is a {kind} {why}; use losses.{other}")
            other = "language_model" if name == "loss" else "next_token_accuracy"
            if judge in ALIGNED and same and causal and not two_sided:
                raise ValueError(
                    f"{name}: judges each label at its own position, and the labels of this {kind} are the tokens that"
                    f" it reads there; use losses.{other}"
                )


def _equal_where_counted(labels: Tensor, ids: Tensor) -> bool:
    counted = labels != IGNORED
    return bool(counted.any()) and bool((labels == ids)[counted].all())


def _real_tokens(batch: Any) -> Tensor:
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    return torch.ones(1, 1) if mask is None else mask != 0


COUNTED: dict[Any, Callable[[Any], Tensor]] = {
    classification: lambda batch: _field(batch, LABELS)[:, None] != IGNORED,
    language_model: lambda batch: _next_tokens(batch) != IGNORED,
    seq2seq: lambda batch: _field(batch, LABELS) != IGNORED,
    drift: _real_tokens,
}
"""What each loss counts in a batch: a mask with a row per example."""


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return precise(output)
    try:
        logits: Tensor = output["logits"] if isinstance(output, dict) else output.logits
    except (AttributeError, KeyError):
        raise ValueError(
            f"loss: the model returns a {type(output).__name__} without logits, name a loss that reads it"
        ) from None
    return precise(logits)


def _field(batch: Any, name: str) -> Tensor:
    """Return the named field of a batch that is a dict; if it is a tuple, its last part, the target."""
    if isinstance(batch, tuple | list) and batch:
        part: Tensor | None = getattr(batch, "dense", None) if name == DENSE else batch[-1]
        if part is not None:
            return part
    if not isinstance(batch, Mapping):
        raise ValueError(f"loss: needs {name}, so a batch must be a dict with {name} or a tuple (inputs, target)")
    if name not in batch:
        raise ValueError(f"loss: needs {name} in every batch, there are {', '.join(batch)}")
    value: Tensor = batch[name]
    return value


def _classes(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits (B, C) and labels (B,)."""
    logits_BC, labels_B = _logits(output), _field(batch, LABELS)
    if logits_BC.dim() != 2 or labels_B.dim() != 1 or logits_BC.shape[-1] < 2:
        raise ValueError(
            f"loss: logits {tuple(logits_BC.shape)} and labels {tuple(labels_B.shape)}, must be (B, C) with two or more"
            " classes and (B,); labels for each token are for losses.seq2seq, several for one example for your own loss"
        )
    return logits_BC, _numbered(labels_B, logits_BC)


def _numbered(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels that are whole numbers of classes, or -100. Raises ValueError for any others."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"loss: labels are {labels.dtype}, must be whole numbers of classes; else give your own loss")
    wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= logits.shape[-1])
    if bool(wrong.any()):
        first = int(labels[wrong][0])
        raise ValueError(f"loss: a label is {first}, must be from 0 to {logits.shape[-1] - 1}, or {IGNORED}")
    return labels.long()


def _next_tokens(batch: Any) -> Tensor:
    """Return the label of the token after each position but the last, (B, T - 1). A label counts only if both the token
    and the position before it are real."""
    named = isinstance(batch, Mapping)
    labels_BT = _field(batch, "input_ids" if named and LABELS not in batch else LABELS)
    mask_BT = batch.get(MASK) if named else None
    if mask_BT is None or mask_BT.shape != labels_BT.shape:
        return labels_BT[:, 1:]
    return labels_BT[:, 1:].masked_fill((mask_BT[:, 1:] == 0) | (mask_BT[:, :-1] == 0), IGNORED)


def _token_losses(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NC, labels_N, reduction="none")


def _token_hits(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    return (logits_NC.argmax(dim=-1) == labels_N).to(logits_NC.dtype)


def _mean_over_tokens(logits_BTC: Tensor, labels_BT: Tensor, values: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the mean over the N tokens that count, (B,); NaN for an example without such tokens. Only these are
    judged: with a large vocabulary that takes time."""
    if logits_BTC.dim() != 3 or logits_BTC.shape[:2] != labels_BT.shape:
        raise ValueError(
            f"loss: logits {tuple(logits_BTC.shape)} and labels {tuple(labels_BT.shape)}, must be (B, T, C) and (B, T)"
        )
    labels_BT = _numbered(labels_BT, logits_BTC)
    counted_BT = labels_BT != IGNORED
    values_BT = torch.zeros_like(logits_BTC[..., 0])
    values_BT[counted_BT] = values(logits_BTC[counted_BT], labels_BT[counted_BT])
    return values_BT.sum(dim=1) / counted_BT.sum(dim=1)


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
        found.append(precise(values).to(found[0].dtype if found else precise(values).dtype))
    return LossAndQuality(*found)


def flat(output: Any, batch: Batches) -> Tensor:
    """Return all floating-point numbers of an output as one row. Padding is left out of tensors (B, T, D) that fit the
    attention mask."""
    mask, parts = batch.mask, []
    for value in tensors_in(output):
        if value.is_floating_point():
            by_token = mask is not None and value.dim() == 3 and mask.shape == value.shape[:2]
            parts.append((value[mask] if by_token else value).flatten())
    return torch.cat(parts) if parts else torch.zeros(0)
