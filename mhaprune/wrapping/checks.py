"""Checks of a model before anything is proved: whether it can be called, read and cut."""

from typing import Any

import torch
from torch import nn

from mhaprune.hooks.blocks import Unsupported
from mhaprune.hooks.eval_mode import ModelCall
from mhaprune.hooks.pytree import tensors_in
from mhaprune.measure.outcomes import Diverged, apart, check_weights_finite
from mhaprune.subjects.batches import Batches
from mhaprune.surgery.torch_attention import TorchAttention, has_own_forward
from mhaprune.wrapping.wrapped_model import WrappedModel


def check_call(call: ModelCall) -> None:
    """Raise ValueError, one line, for a model that cannot be called with a batch, or not with one example of it."""

    def failure(call: ModelCall) -> str:
        try:
            with call.at_rest():
                call()
        except Exception as error:  # of a model that may be anybody's
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return ""

    if reason := failure(call.first):
        if not failure(call):
            raise Unsupported(
                f"model: runs on a batch and not on one example alone ({reason}), so what it says of an example depends"
                " on the others, and no score is one of an example"
            )
        own = [each for each in call.model.modules() if each.training and type(each).train is not nn.Module.train]
        if own:  # in evaluation, other code of theirs may need what only their `train` makes
            reason += f"; call model.eval() first, {type(own[0]).__name__} has a train() of its own"
        raise ValueError(
            f"score: the model cannot be called with these batches ({reason}); dicts are given by name, tuples without"
            " their last part; call= names another way"
        )


def check_weights(model: nn.Module) -> None:
    """Raise `Unsupported` for weights that cannot be read or cut."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise Unsupported("model: is a DistributedDataParallel, wrap model.module")
    if hasattr(model, "_orig_mod"):
        raise Unsupported("model: is what torch.compile returned; wrap the model inside, model._orig_mod")
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise Unsupported("model: has no weights of real numbers")
    placed = getattr(model, "hf_device_map", None) or {}
    for path, place in placed.items() if len(set(placed.values())) > 1 else ():
        if place in ("cpu", "disk"):
            raise Unsupported(f"model: {path} is offloaded ({place}), its device_map must name devices that compute")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise Unsupported(f"model: its weight {name} is on the meta device, load the weights first")
    try:
        check_weights_finite(model)
    except Diverged as error:
        raise Unsupported(f"model: {error}") from None
    for path, module in model.named_modules():
        kind = type(module)
        if "quantized" in kind.__module__ or kind.__name__ in ("Linear8bitLt", "Linear4bit"):
            raise Unsupported(f"model: {path} is a {kind.__name__} of {kind.__module__}, must have plain weights")


def check_buffers(call: ModelCall) -> None:
    """Raise `Unsupported` for a NaN in a buffer that the model reads. Fused attention on the CPU turns it into zeros,
    so outputs do not show it. A buffer is read if other numbers in its place change the output."""
    for name, buffer in call.model.named_buffers():
        if not buffer.is_floating_point() or not buffer.isnan().any():
            continue
        outputs = []
        with call.at_rest():
            saved = buffer.clone()
            for value in (1.0, 2.0):
                buffer.nan_to_num_(value)
                outputs.append([x.clone() for x in tensors_in(call())])
                buffer.copy_(saved)
        if not all(map(torch.equal, *outputs)):
            raise Unsupported(
                f"model: its buffer {name} is nan in {int(saved.isnan().sum())} of {saved.numel()} places"
            )


def check_conversion(whole: nn.Module, subject: WrappedModel, batch: Batches, dtype: torch.dtype) -> None:
    """Raise `Unsupported` if the model that the user gave judges a batch differently than its copy with attention of
    ours, or with linear modules: then the numbers would be those of another function. `dtype` is the coarsest precision
    in which the model computes."""
    call = ModelCall(whole, batch, subject.run)
    with call.at_rest():
        ours = subject.judge(subject.run_gated(batch), batch)
        own = subject.judge(call(), batch)
    pairs: list[Any] = [*zip(own, ours, strict=True)]
    passed_by = any(map(has_own_forward, whole.modules()))
    if passed_by:  # by the fused kernel of torch, which runs without gradients only
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with call.at_rest():
                pairs += [*zip(subject.judge(call(), batch), ours, strict=True)]
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
    tolerance = max(1e-3, torch.finfo(dtype).eps ** 0.5)
    for before, after in pairs:
        if not (moved := apart(before, after)) <= tolerance * max(1.0, float(before.nan_to_num(0, 0, 0).abs().max())):
            differently = f"model: an example is judged differently ({moved:.3g} apart) if its"
            if not any(isinstance(part, TorchAttention) for part in subject.model.modules()):
                raise Unsupported(f"{differently} weights are called as linear modules; make them nn.Linear")
            if passed_by:
                raise Unsupported(f"{differently} subclass of nn.MultiheadAttention is computed as that class itself")
            raise Unsupported(
                f"{differently} nn.MultiheadAttention is computed step by step: without gradients,"
                " nn.TransformerEncoder makes padding 0 (nested tensors), and the loss reads it; build it with"
                " enable_nested_tensor=False, or leave padding out of the loss"
            )
