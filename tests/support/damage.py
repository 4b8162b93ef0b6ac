"""Damage as a disk does it."""

import random


def flipped(data: bytes, draw: random.Random) -> bytes:
    """The same bytes with one bit changed."""
    damaged = bytearray(data)
    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)
