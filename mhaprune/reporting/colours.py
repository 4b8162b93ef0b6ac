"""What colours mean, the same in every figure: blue matters, red is lost, white is nothing of either.

All maps grow darker from white, so a figure is read in grey print too. Signed ones differ by hue alone there: such a
figure writes the sign, or says it at its colour bar.
"""

from __future__ import annotations

from typing import Any

MATTERS = "Blues"
"""The darker, the more: how much a head matters, or how much it attends."""
WEIGHTS: Any = {"cmap": MATTERS, "vmin": 0, "vmax": 1}
"""Attention weights from 0 to 1, beside other numbers; maps of attention alone end at their largest weight."""
LOST = "Reds"
"""The darker, the more is lost: accuracy that a choice, a group or a mistake costs."""
EXTRA_COST = "RdBu_r"
"""Signed: red costs more than it should, blue less."""
ALIKE = "RdBu"
"""Signed: blue agrees, red contradicts."""
VALUES = "PuOr_r"
"""Signed numbers that are neither good nor bad: orange is positive, purple negative."""
MISSING = "#d9d9d9"
"""A cell without a number: a head that is gone, or nothing measured."""
