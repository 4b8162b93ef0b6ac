"""Nothing rots silently: a file of ours in which a bit has changed is never taken for what was written."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mhaprune.storage.cache import Cache
from mhaprune.storage.seals import Damaged, opened, sealed

CONTENT = {"weights": {"w": torch.arange(300.0)}, "history": [{"step": 0, "loss": 2.5}], "facts": {"seed": 3}}
RECIPE = {"task": "sort", "seed": 0}
FLIPS = 40
"""As many as take a second; tests/test_hostile.py has more."""


def flipped(data: bytes, draw: random.Random) -> bytes:
    """The same bytes with one bit changed."""
    damaged = bytearray(data)
    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def plain(content: Any) -> bytes:
    """What torch writes, without a checksum."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_what_was_sealed_is_opened_also_by_torch_alone() -> None:
    for read in (opened(sealed(CONTENT)), torch.load(io.BytesIO(sealed(CONTENT)), weights_only=True)):
        assert torch.equal(read["weights"].pop("w"), CONTENT["weights"]["w"])  # type: ignore[index]
        assert read == {**CONTENT, "weights": {}}


def test_every_flipped_bit_in_a_cached_content_is_found(tmp_path: Path, caplog: Any) -> None:
    """And what is given is what was made, not what lies there."""
    made = []

    def make(state: Any, save: Any) -> dict[str, Any]:
        made.append(1)
        return CONTENT

    Cache(tmp_path).get("trained", RECIPE, make)
    [path] = tmp_path.glob("trained-*.pt")
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(FLIPS):
        path.write_bytes(flipped(whole, draw))
        caplog.clear()
        content = Cache(tmp_path).get("trained", RECIPE, make)
        assert torch.equal(content["weights"]["w"], CONTENT["weights"]["w"])  # type: ignore[index]
        assert f"cache file {path} is damaged or foreign" in caplog.text
    assert len(made) == 1 + FLIPS
    assert path.read_bytes() == whole


class Harmful:
    """Runs code where it is read without care."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


FORMS = [plain(torch.zeros(3)), plain([1, 2]), plain(CONTENT), b"hello\n", b"", sealed(CONTENT)[:-1], sealed(Harmful())]


@pytest.mark.parametrize("data", FORMS)
def test_any_other_form_is_refused_in_a_few_words(data: bytes) -> None:
    """Without what torch says about it: to read the file with less care."""
    with pytest.raises(Damaged) as raised:
        opened(data)
    assert len(str(raised.value).splitlines()) == 1
    assert "weights_only" not in str(raised.value)
    assert not Path("harm").exists()


@pytest.mark.parametrize("data", FORMS)
def test_a_cache_file_of_another_form_is_made_anew(tmp_path: Path, data: bytes, caplog: Any) -> None:
    def make(state: Any, save: Any) -> dict[str, Any]:
        return {"value": 1}

    Cache(tmp_path).get("trained", RECIPE, make)
    [path] = tmp_path.glob("trained-*.pt")
    foreign = {"recipe": RECIPE | {"seed": 1}, "content": {"value": 2}}
    for damaged in (data, sealed([1, 2]), sealed({"recipe": RECIPE}), sealed(foreign)):
        caplog.clear()
        path.write_bytes(damaged)
        assert Cache(tmp_path).get("trained", RECIPE, make) == {"value": 1}
        assert path.with_suffix(".damaged").read_bytes() == damaged
        assert "is damaged or foreign" in caplog.text
    assert "weights_only" not in caplog.text
