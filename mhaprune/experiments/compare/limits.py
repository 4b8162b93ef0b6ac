"""What a choice of heads costs, and the limits of cost under which choices are compared. No torch in here."""

from __future__ import annotations

import math
from typing import Any


def passes(methods: Any) -> Any:
    """What a choice costs, of a row or of a whole table: forward passes over the score split, a backward pass counts
    two."""
    return methods["forward_passes"] + 2 * methods["backward_passes"]


def limit_words(most_passes: float) -> str:
    """How figures and sentences name the choices that cost at most so much."""
    return "at any cost" if math.isinf(most_passes) else f"with at most {most_passes:g} forward passes"
