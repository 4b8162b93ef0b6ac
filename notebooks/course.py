"""What the notebooks of the course share: a kernel without noise, and the check of an exercise."""

import io
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

warnings.filterwarnings("ignore", "IProgress not found")  # tqdm wants a widget that is never drawn

QUIET = ExitStack()
"""What hides the progress lines. `QUIET.close()` brings them back."""


def hide_progress() -> None:
    """Hide the lines that long cells write every few seconds."""
    from mhaprune.progress import shown  # here, because it imports tqdm, which warns

    QUIET.enter_context(shown(stream=io.StringIO()))  # the first one shows, all others are silent


def check(
    answer: Callable[..., Any],
    inputs: tuple[Any, ...],
    right: Any,
    mistakes: Mapping[str, Any] | None = None,
) -> bool:
    """Print whether `answer(*inputs)` is `right`, or what is wrong, and return whether it is.

    `mistakes` are wrong results, each by the sentence that explains it. Nothing is raised, so that
    a notebook runs to its end while an exercise is empty.
    """
    name = answer.__name__
    try:
        result = answer(*inputs)
    except Exception as error:
        print(f"{name}: raises {type(error).__name__}: {error}")
        return False
    if result is None:
        print(f"{name}: still empty. Write your line, then run both cells again.")
        return False
    result, right = torch.as_tensor(result), torch.as_tensor(right)
    if _same(result, right):
        print(f"{name}: right")
        return True
    print(f"{name}: not yet. {_fault(result, right, mistakes or {})}")
    return False


def _fault(result: torch.Tensor, right: torch.Tensor, mistakes: Mapping[str, Any]) -> str:
    for sentence, wrong in mistakes.items():
        if _same(result, torch.as_tensor(wrong)):
            return sentence
    if result.shape != right.shape:
        return f"The shape is {tuple(result.shape)} and should be {tuple(right.shape)}."
    if result.dtype.is_floating_point != right.dtype.is_floating_point:
        return f"The numbers are {result.dtype} and should be {right.dtype}."
    right_ones = torch.isclose(result.double(), right.double(), rtol=1e-4, atol=1e-6)
    return f"{(~right_ones).sum()} of {right.numel()} numbers are wrong."


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype.is_floating_point != other.dtype.is_floating_point:
        return False
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
