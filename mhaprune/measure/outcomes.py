"""Loss and quality of a subject on every example of a split, under gates; and their derivatives.

Dimensions: E = examples of a split, M = masks, N = all heads, K = head_dim, B = batch, T = positions, V = vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mhaprune.data import Data
from mhaprune.heads import BlockId, HeadMask
from mhaprune.progress import track
from mhaprune.subject import Batch, DecodesGreedily, Evaluated, Fallback, Outcome, Subject

Measured = TypeVar("Measured", bound=Evaluated)
BATCH_SIZE = 128

Replacement = Callable[[Subject, Batch, Tensor], Fallback]
"""A function that takes a subject, a batch and the positions (B,) of its examples in the split. It returns the
replacement for the outputs of closed heads."""


MAX_DIFFERENCE = 1e-9
"""The largest allowed `relative_difference`, in float64, of outputs with heads masked and with the same heads removed.
In float32 rounding alone makes 1e-5, which could hide a small fault."""


class ProofFailed(RuntimeError):
    """Raised if removing heads is not the same as masking them, or if masking has no effect."""


class Diverged(ValueError):
    """Raised for a loss, a quality or a weight that is not finite. All results that use it would be meaningless."""


@torch.no_grad()
def measure(
    subject: Measured,
    examples: Data,
    gates: Tensor | None = None,
    replacement: Callable[[Measured, Batch, Tensor], Fallback] | None = None,
    batch_size: int = BATCH_SIZE,
) -> Outcome:
    """Return the outcome of every example, in the order of the examples; each field is (E,). `gates` (N,) are equal for
    all examples."""
    order, batches = by_length(examples, batch_size)
    parts = [subject.evaluate(batch, gates, replacement and replacement(subject, batch, at)) for batch, at in batches]
    return joined(parts, lambda values: torch.cat(values)[order.argsort()])


@torch.no_grad()
def measure_masks(subject: Subject, examples: Data, gates: Tensor, replacement: Replacement | None = None) -> Outcome:
    """Return the outcome of every example under every row of `gates` (M, N). Each field is (M, E), equal to `measure`
    row by row up to rounding."""
    order, batches = by_length(examples, BATCH_SIZE)
    parts, total = [], sum(1 for _ in examples.passes(order, BATCH_SIZE))
    for batch, at in track(batches, "batches", total):
        fallback = replacement and replacement(subject, batch, at)
        parts.append(subject.evaluate_masks(batch, gates, fallback))
    return joined(parts, lambda values: torch.cat(values, dim=1)[:, order.argsort()])


def joined(parts: Iterable[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Join several outcomes into one, field by field. Raises `Diverged` for a value that is not finite."""
    every = list(parts)
    whole = type(every[0])(*(join(list(values)) for values in zip(*every, strict=True)))
    for name, values in whole._asdict().items():
        if not (finite := values.isfinite()).all():
            bad = values[~finite]
            raise Diverged(f"the {name} is {bad[0].item()} for {len(bad)} of {values.numel()} examples")
    return whole


def check_weights_finite(model: nn.Module) -> None:
    """Raise `Diverged` for a weight that is not finite. Fused attention on the CPU turns a NaN in W_Q into zeros, so
    outputs do not show it."""
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        weight = torch.view_as_real(weight) if weight.is_complex() else weight
        # A sum is finite only if all are, and makes no tensor of this size; that of finite numbers can be too large.
        half = weight.is_floating_point() and weight.itemsize < 4
        if not weight.sum(dtype=torch.float if half else None).isfinite() and len(bad := weight[~weight.isfinite()]):
            raise Diverged(f"its weight {name} is {bad[0].item()} in {len(bad)} of {weight.numel()} places")


CHUNK = 2**16
"""The number of weights that are added up at once."""


@torch.no_grad()
def weight_sums(model: nn.Module) -> tuple[int, ...]:
    """Return a number for each weight and saved buffer that changes if one of its bits does, or if its values change
    places: the sum of the values, read as whole numbers, times factors drawn for their places. Buffers that are not
    saved, as tables of rotations, are what a call may keep for the next."""
    saved = (
        buffer
        for part in model.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    )
    return tuple(_sum_of_bits(tensor.detach()) for tensor in (*model.parameters(), *saved))


def _sum_of_bits(tensor: Tensor) -> int:
    if tensor.is_meta or not tensor.numel():
        return 0
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = {1: torch.uint8, 2: torch.int16}.get(values.itemsize, torch.int32)
    factors, total = _factors(values.device), 0
    product = torch.empty_like(factors)
    for chunk in values.reshape(-1).view(whole).split(CHUNK):
        part = torch.mul(chunk, factors[: len(chunk)], out=product[: len(chunk)])
        total = (total * 1_000_003 + int(part.sum(dtype=part.dtype))) % 2**64
    return total


@lru_cache(maxsize=4)
def _factors(device: torch.device) -> Tensor:
    """Return an odd number for each place of a chunk, so that no change of one value is lost."""
    drawn = torch.randint(2**30, (CHUNK,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return (2 * drawn + 1).to(device)


def measure_removed(subject: Subject, examples: Data, masks: Sequence[HeadMask]) -> Outcome:
    """Return the outcome of every example with the removed heads of each mask closed: fields of (M, E)."""
    return measure_masks(subject, examples, torch.stack([mask.gates(examples.device) for mask in masks]))


def all_open(subject: Subject, rows: int) -> Tensor:
    """Return open gates (rows, N), in the precision and on the device of the subject."""
    return torch.ones(rows, len(subject.grid), dtype=subject.dtype, device=subject.device)


def by_length(examples: Data, batch_size: int) -> tuple[Tensor, Iterator[tuple[Batch, Tensor]]]:
    """Return the positions (E,) of the examples, sorted by length, and batches in this order, which hold little
    padding. A batch has at most `batch_size` examples and comes with their positions in the split."""
    order = examples.by_length()
    return order, ((examples[at], at) for at in examples.passes(order, batch_size))


@torch.enable_grad()
def gate_gradients(
    subject: Subject,
    examples: Data,
    gates: Tensor | None = None,
    batch_size: int = BATCH_SIZE,
    replacement: Replacement | None = None,
) -> Tensor:
    """Return the derivative of each example's loss with respect to every gate, (E, N), at the gates `gates` (N,), by
    default all open; for several points (S, N), (S, E, N). What a gate closes is 0, or what `replacement` returns.

    One backward pass per batch and point is enough: each example has its own row of gates.
    """
    order, batches = by_length(examples, batch_size)
    points = all_open(subject, 1) if gates is None else torch.atleast_2d(gates)
    no_heads = not len(subject.grid)  # then no gate is read; in any other model that would be a fault
    parts = []
    for batch, at in batches:
        fallback, found = replacement and replacement(subject, batch, at), []
        for gates_N in points:
            gates_BN = gates_N.repeat(len(batch), 1).requires_grad_()
            loss = subject.evaluate(batch, gates_BN, fallback).loss.sum()
            (gradients_BN,) = torch.autograd.grad(loss, gates_BN, allow_unused=no_heads, materialize_grads=no_heads)
            found.append(gradients_BN.detach().double())  # of no heads it has a gradient in torch 2.6
        parts.append(torch.stack(found))
    gradients_SEN = torch.cat(parts, dim=1)[:, order.argsort()]
    return gradients_SEN if gates is not None and gates.dim() == 2 else gradients_SEN[0]


@torch.enable_grad()
def token_gradients(
    subject: Subject, examples: Data, batch_size: int = BATCH_SIZE, replacement: Replacement | None = None
) -> Tensor:
    """Return for every example and head the sums over tokens of ∂ℓ/∂ξ and of |∂ℓ/∂ξ|, (2, E, N). ξ is an open gate of
    one head at one token. What it closes is 0, or what `replacement` returns."""
    dtype = all_open(subject, 1).dtype
    order, batches = by_length(examples, batch_size)
    parts = []
    for batch, at in batches:
        shapes = zip(subject.queries(batch).items(), subject.grid.sizes, strict=True)
        gates = {
            block: torch.ones(len(batch), heads, valid_BT.shape[1], dtype=dtype, device=valid_BT.device)
            for (block, valid_BT), heads in shapes
        }
        for gates_BHT in gates.values():
            gates_BHT.requires_grad_()
        loss = subject.evaluate(batch, gates, replacement and replacement(subject, batch, at)).loss.sum()
        gradients = torch.autograd.grad(loss, list(gates.values()), allow_unused=True, materialize_grads=True)
        both = [torch.stack([x.sum(dim=2), x.abs().sum(dim=2)]) for x in (g.detach().double() for g in gradients)]
        parts.append(torch.cat(both, dim=2))
    return torch.cat(parts, dim=1)[:, order.argsort()]


@torch.enable_grad()
def gate_effects(subject: Subject, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return how much each gate changes the outputs, (N,), and the outputs with all gates open. The effect of a gate is
    the absolute derivative, with all gates open, of a random weighted sum of all outputs.

    It is exactly 0 if a gate changes nothing on this batch. The difference of two passes would not be exact: it would
    contain rounding.
    """
    gates_N = all_open(subject, 1)[0].requires_grad_()
    outputs = subject.outputs(batch, gates_N)
    if not outputs.requires_grad:
        return torch.zeros_like(gates_N), outputs
    direction = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
    (effects_N,) = torch.autograd.grad((outputs * direction).sum(), gates_N, materialize_grads=True, allow_unused=True)
    return effects_N.detach().abs(), outputs.detach()


@torch.no_grad()
def head_norms(subject: Subject, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Return for each block ‖c_n O_n‖₂ of every head and token, (B, H, T), and a mask of the real tokens, (B, T). c_n
    is the output of a head, O_n the slice of W_O that reads it."""
    outputs, weights, valid = subject.head_outputs(batch), subject.output_weights(), subject.queries(batch)
    return [((outputs[block] @ of_equal_norm(weights[block])).norm(dim=-1), valid[block]) for block in outputs]


def of_equal_norm(weights_HKD: Tensor) -> Tensor:
    """Return R (H, K, K), or (H, K, D) if that is smaller, with ‖c R_n‖ = ‖c O_n‖ for every c: a product with it is
    small, also for thousands of units. O_n = R_n Q with orthonormal rows Q."""
    H, K, D = weights_HKD.shape
    weights_HKD = weights_HKD.to(torch.promote_types(weights_HKD.dtype, torch.float))  # half precision has no QR
    return torch.linalg.qr(weights_HKD.mT, mode="r").R.mT if H and K < D else weights_HKD


@torch.no_grad()
def mean_outputs(subject: Subject, examples: Data, batch_size: int = BATCH_SIZE) -> dict[BlockId, Tensor]:
    """Return each head's mean output before gate and W_O over all real tokens of a split: (H, 1, K) per block."""
    sums: dict[BlockId, Tensor] = {}
    tokens: dict[BlockId, Tensor] = {}
    for batch in examples.batches(batch_size):
        valid_BT, outputs = subject.queries(batch), subject.head_outputs(batch)
        for block, context_BHTK in outputs.items():
            counted_BT = valid_BT[block].double()
            sum_HK = torch.einsum("bhtk,bt->hk", context_BHTK.double(), counted_BT)
            sums[block] = sums[block] + sum_HK if block in sums else sum_HK
            tokens[block] = tokens[block] + counted_BT.sum() if block in tokens else counted_BT.sum()
    return {block: (sums[block] / tokens[block]).to(outputs[block].dtype).unsqueeze(1) for block in sums}


@torch.no_grad()
def output_difference(
    first: Subject, second: Subject, batch: Batch, gates: Tensor | None = None, second_gates: Tensor | None = None
) -> float:
    """Return the largest absolute difference between outputs of the subject `first` under `gates` and of the subject
    `second` under `second_gates`. Padding is excluded."""
    return float((first.outputs(batch, gates) - second.outputs(batch, second_gates)).abs().max())


def apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference. Numbers that are not finite, as on padding, must be the same in both."""
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(same, 0).max()) if a.numel() else 0.0


def relative_difference(outputs: Tensor, others: Tensor) -> float:
    """Return `apart` with every number divided by its size: |output|, at least 1 and at least the median of those that
    differ. The largest |output| is not used, because a constant such as -1e9 in the outputs would hide a fault."""
    differing = outputs.abs()[(outputs != others) & outputs.isfinite()]
    size = max(1.0, float(differing.median())) if differing.numel() else 1.0
    sizes = outputs.abs().nan_to_num(size, size).clamp(min=size)
    return apart(outputs / sizes, others / sizes)


@torch.no_grad()
def greedy_disagreements(subject: DecodesGreedily, examples: Data, batch_size: int = BATCH_SIZE) -> int:
    """Return the number of examples on which greedy decoding and exact match disagree.

    In theory they always agree, by induction over the tokens. A number above 0 means that rounding broke a tie between
    two tokens, or that the code has an error.
    """
    disagreements = 0
    for batch in examples.batches(batch_size):
        disagreements += int((subject.decodes_right(batch) != subject.evaluate(batch).quality.bool()).sum())
    return disagreements
