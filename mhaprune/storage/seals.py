"""Files with plain content and a checksum of all bytes at the end, so that damage is noticed.

`torch.load(path, weights_only=True)` can read such a file too, but only `opened` notices a changed bit.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

MARK = b"\nsha256:"
LENGTH = len(MARK) + 64


class Damaged(ValueError):
    """Raised for a file that has changed since it was written; the message is a short reason."""


def sealed(content: Any) -> bytes:
    """Return the bytes of a file with this content: plain containers, numbers, texts and tensors."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    return data + MARK + checksum(data).encode()


def opened(data: bytes) -> Any:
    """Return the content that was given to `sealed`. Raises Damaged if the bytes are not exactly as `sealed` made them.
    Code in the bytes is not run."""
    body, seal = data[:-LENGTH], data[-LENGTH:]
    if not seal.startswith(MARK):
        raise Damaged("no checksum at its end, so truncated, foreign or written by an older mhaprune")
    if seal != MARK + checksum(body).encode():
        raise Damaged("its checksum does not fit, so it has changed since it was written")
    try:
        return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
    except Exception:
        raise Damaged("holds something else than plain content") from None  # torch advises to run its code


def checksum(data: bytes) -> str:
    """Return a text that changes when the bytes change."""
    return hashlib.sha256(data).hexdigest()


def checksum_of(path: Path) -> str:
    """Return the checksum of a file, which is never in memory as a whole."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
