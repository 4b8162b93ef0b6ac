"""Molecules as SMILES, put together from common parts."""

from __future__ import annotations

import itertools
import random

CORES = ("c1ccc({a})cc1{b}", "c1cc({a})cnc1{b}", "c1cc({a})ccc1{b}", "C1CCN({a})CC1{b}", "c1cc({a})sc1{b}")
FIRST = ("C", "OC", "Cl", "F", "C(F)(F)F", "C#N", "N(C)C", "CC", "C(C)C", "S(C)(=O)=O")
SECOND = ("C(=O)NC", "C(=O)O", "CO", "OCC", "NC(C)=O", "C(=O)N1CCOCC1", "CN1CCNCC1", "c1ccccc1", "C(=O)OC", "CCN")


def molecules() -> list[str]:
    """All of them, in an order that is always the same."""
    found = [core.format(a=a, b=b) for core, a, b in itertools.product(CORES, FIRST, SECOND)]
    random.Random(0).shuffle(found)
    return found
