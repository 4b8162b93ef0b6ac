"""The cache, and files in which a changed bit is never taken for what was written."""

from __future__ import annotations

import errno
import io
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mhaprune.storage.cache import Cache, sources
from mhaprune.storage.seals import Damaged, opened, sealed

RECIPE = {"task": "sort", "seed": 0}


class Maker:
    """Counts how often it is asked; saves a state first and can be told to stop there."""

    def __init__(self, stop: bool = False) -> None:
        self.calls, self.stop, self.state = 0, stop, None

    def __call__(self, state: dict[str, Any] | None, save: Any) -> dict[str, Any]:
        self.calls, self.state = self.calls + 1, state
        save({"step": 3, "weights": torch.arange(3)})
        if self.stop:
            raise KeyboardInterrupt
        return {"weights": torch.arange(4), "rows": [{"loss": 0.5}]}


def test_the_same_recipe_is_made_once(tmp_path: Path) -> None:
    make = Maker()
    first, second = (Cache(tmp_path).get("trained", RECIPE, make) for _ in range(2))
    assert make.calls == 1
    assert torch.equal(first["weights"], second["weights"])
    assert second["rows"] == [{"loss": 0.5}]
    Cache(tmp_path).get("trained", {**RECIPE, "seed": 1}, make)
    assert make.calls == 2


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    calls = []

    def slow(state: Any, save: Any) -> dict[str, Any]:
        calls.append(1)
        time.sleep(0.3)
        return {"value": len(calls)}

    threads = [threading.Thread(target=lambda: Cache(tmp_path).get("trained", RECIPE, slow)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_an_interrupted_one_goes_on_from_its_state(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Cache(tmp_path).get("trained", RECIPE, Maker(stop=True))
    again = Maker()
    Cache(tmp_path).get("trained", RECIPE, again)
    assert again.state is not None
    assert again.state["step"] == 3
    assert not list(tmp_path.glob("*.partial.pt"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"cache=.*file/x: cannot be written \(Not a directory\), name a folder that can"
    ):
        Cache(tmp_path / "file" / "x")


def test_a_folder_that_cannot_be_written_serves_if_it_holds_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker()
    Cache(tmp_path).get("trained", RECIPE, make)
    (tmp_path / next(tmp_path.glob("*.lock")).name).unlink()
    before = sorted(tmp_path.iterdir())

    def refuse(**named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert torch.equal(Cache(tmp_path).get("trained", RECIPE, make)["weights"], torch.arange(4))
    assert make.calls == 1
    with pytest.raises(
        ValueError, match=r"cache=.*: cannot be written \(Read-only file system\), name a folder that can"
    ):
        Cache(tmp_path).get("trained", {**RECIPE, "seed": 1}, make)
    assert make.calls == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_loses_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """It is said, and once there is room the content is kept."""

    def full(temporary: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    make = Maker()
    with monkeypatch.context() as patch:
        patch.setattr("mhaprune.storage.store.os.replace", full)
        assert torch.equal(Cache(tmp_path).get("trained", RECIPE, make)["weights"], torch.arange(4))
    assert re.search(r"trained-\w+\.pt: not kept \(No space left on device\), so it will be made again", caplog.text)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    for calls in (2, 2):
        Cache(tmp_path).get("trained", RECIPE, make)
        assert make.calls == calls


def test_the_digest_is_that_of_the_code_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_module.py").write_text("x = 1\n")
    before = sources("edited_module")
    (tmp_path / "edited_module.py").write_text("x = 2\n")
    assert sources("edited_module") == before
    (tmp_path / "other_module.py").write_text("x = 2\n")
    assert sources("other_module")["other_module"] != before["edited_module"]


def test_the_digest_of_a_module_is_that_of_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plug-in it is that of its whole package, with the YAML files of its options."""
    assert sources("mhaprune.model.training", "mhaprune.heads") == sources("mhaprune.heads", "mhaprune.model.network")
    assert set(sources("mhaprune.model.training", "mhaprune.heads")) == {"mhaprune.heads", "mhaprune.model"}
    assert sources("mhaprune.heads")["mhaprune.heads"] != sources("mhaprune.data")["mhaprune.data"]
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for package, power in (("first_heads", 1), ("second_heads", 2)):
        (tmp_path / package / "conf").mkdir(parents=True)
        (tmp_path / package / "peak.py").write_text("x = 1\n")
        (tmp_path / package / "conf" / "peak.yaml").write_text(f"power: {power}\n")
        found += sources(f"{package}.peak").values()
    assert found[0] != found[1]
    with pytest.raises(ImportError, match="nowhere: is not there"):
        sources("nowhere.module")


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
