"""Run folders, the locks that they are held by, and the cache, in which a changed bit is never taken."""

import errno
import io
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from mhaprune.lab.runs.run_folder import RunFolder, read_status
from mhaprune.lab.sources.trained import COMPUTES
from mhaprune.storage import cache, locks
from mhaprune.storage.cache import Cache, code_digests
from mhaprune.storage.locks import is_held, locked
from mhaprune.storage.seals import Damaged, opened, sealed
from mhaprune.storage.store import as_csv, read_table, write_bytes
from support.damage import flipped


def test_a_file_is_old_or_new_but_never_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.csv"
    write_bytes(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match=f"disk full: '{path}'"):
            write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]


FORMULAS = ["=1+1", '=HYPERLINK("http://x","y")', "+1", "-", "-0.5", "@SUM(1)", "\t=1", "\r=1", "a\r=1", " =1"]


@pytest.mark.parametrize("text", [*FORMULAS, "'=1", "''", "a=1"])
def test_no_text_of_a_table_is_a_formula_and_reading_returns_the_text(text: str) -> None:
    """Neither a cell nor the name of a column; a number stays a number, a negative one too."""
    frame = pd.DataFrame({"x": [-1.5, 2.0], "n": [-1, 2], "yes": [True, False], "t": [text, "word"], text: ["a", "b"]})
    data = as_csv(frame)
    pd.testing.assert_frame_equal(read_table(data), frame)
    raw = pd.read_csv(io.BytesIO(data), dtype=str, keep_default_na=False)
    cells = [*raw["t"], *raw.columns]
    assert not any(cell.lstrip().startswith(("=", "+", "-", "@")) for cell in cells)
    assert (list(raw["x"]), list(raw["n"])) == (["-1.5", "2"], ["-1", "2"])


def test_status_says_running_then_done(tmp_path: Path) -> None:
    """One that cannot be read says nothing."""
    assert read_status(tmp_path) == {}
    (tmp_path / "status.json").write_text('{"status": "do')
    assert read_status(tmp_path) == {}
    with RunFolder(tmp_path / "run").recorded() as folder:
        assert read_status(folder.path)["status"] == "running"
        folder.write_table("heads", pd.DataFrame({"score": [0.1234567891]}))
    status = read_status(folder.path)
    assert status["status"] == "done"
    assert list(status["files"]) == ["heads.csv"]
    assert status["finished"] >= status["started"]
    assert (folder.path / "heads.csv").read_text() == "score\n0.123456789\n"


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyboardInterrupt(), "interrupted"), (ValueError("x=1: no"), "ValueError: x=1: no")]
)
def test_status_says_failed_and_why(tmp_path: Path, error: BaseException, reason: str) -> None:
    with pytest.raises(type(error)), RunFolder(tmp_path).recorded():
        raise error
    assert read_status(tmp_path)["status"] == "failed"
    assert read_status(tmp_path)["reason"] == reason


def test_a_second_run_removes_what_the_first_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with RunFolder(tmp_path).recorded() as folder:
        folder.write("figures/heads.png", b"1")
        folder.write("old.csv", b"1")
    with pytest.raises(RuntimeError), RunFolder(tmp_path).recorded():
        raise RuntimeError("at once")
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [".lock", "mine.txt", "status.json"]


def test_a_lock_is_held_once_and_says_by_whom(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    with locked(path):
        assert is_held(path)
        refused = pytest.raises(ValueError, match=f"^in use by process {os.getpid()} on .* since 2.*, sorry$")
        with refused, locked(path, "in use by {holder}, sorry"):
            pass
    assert not is_held(path)
    with locked(path, "busy"):
        pass


def test_who_is_waited_for_is_said_after_a_while(tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locks.PATIENCE == 1.0
    monkeypatch.setattr(locks, "PATIENCE", 0.15)
    path = tmp_path / "lock"
    held = threading.Event()

    def hold(seconds: float) -> None:
        with locked(path):
            held.set()
            time.sleep(seconds)

    for seconds, said in ((0.02, False), (0.4, True)):
        caplog.clear()
        held.clear()
        thread = threading.Thread(target=hold, args=(seconds,))
        thread.start()
        held.wait()
        with caplog.at_level(logging.WARNING), locked(path):
            pass
        thread.join()
        assert (f"waits for process {os.getpid()} on " in caplog.text) == said
        assert (f"which holds {path}" in caplog.text) == said


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = f"import fcntl, time\nf = open({str(path)!r}, 'a')\nfcntl.flock(f, fcntl.LOCK_EX)\nprint(1, flush=True)\n"
    holder = subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    assert is_held(path)
    holder.kill()
    holder.communicate()
    with locked(path, "busy"):
        assert is_held(path)


RECIPE = {"task": "sort", "seed": 0}


class Maker:
    """Counts how often it is asked; saves a state first, takes a while, and can be told to stop then."""

    def __init__(self, stop: bool = False, seconds: float = 0) -> None:
        self.calls, self.stop, self.seconds, self.state = 0, stop, seconds, None

    def __call__(self, state: dict[str, Any] | None, save: Any) -> dict[str, Any]:
        self.calls, self.state = self.calls + 1, state
        save({"step": 3, "weights": torch.arange(3)})
        time.sleep(self.seconds)
        if self.stop:
            raise KeyboardInterrupt
        return {"weights": torch.arange(4), "rows": [{"loss": 0.5}]}


def test_the_same_recipe_is_made_once_also_by_several_at_once(tmp_path: Path) -> None:
    make = Maker(seconds=0.3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: Cache(tmp_path).get("trained", RECIPE, make), range(3)))
    assert make.calls == 1
    assert all(torch.equal(each["weights"], torch.arange(4)) and each["rows"] == [{"loss": 0.5}] for each in found)
    Cache(tmp_path).get("trained", {**RECIPE, "seed": 1}, make)
    assert make.calls == 2


def test_an_interrupted_one_goes_on_from_its_state(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Cache(tmp_path).get("trained", RECIPE, Maker(stop=True))
    again = Maker()
    Cache(tmp_path).get("trained", RECIPE, again)
    assert again.state is not None
    assert again.state["step"] == 3
    assert not list(tmp_path.glob("*.partial.pt"))


def test_a_folder_that_cannot_be_written_is_named_and_serves_if_it_holds_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, cannot = Maker(), r"cache=.*: cannot be written \(Read-only file system\), name a folder that can"
    Cache(tmp_path).get("trained", RECIPE, make)
    (tmp_path / next(tmp_path.glob("*.lock")).name).unlink()
    before = sorted(tmp_path.iterdir())

    def refuse(**named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert torch.equal(Cache(tmp_path).get("trained", RECIPE, make)["weights"], torch.arange(4))
    with pytest.raises(ValueError, match=cannot):
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
    before = code_digests("edited_module")
    (tmp_path / "edited_module.py").write_text("x = 2\n")
    assert code_digests("edited_module") == before
    (tmp_path / "other_module.py").write_text("x = 2\n")
    assert code_digests("other_module")["other_module"] != before["edited_module"]


@pytest.mark.parametrize(
    ("edited", "matters"),
    [
        ("mhaprune.attention.layer", True),
        ("mhaprune.lab.model.config", True),
        ("mhaprune.lab.model.layers", True),
        ("mhaprune.training.loop", True),
        ("mhaprune.saving.model_card", False),
        ("mhaprune.saving.hf_folder", False),
        ("mhaprune.proofs.whole_model", False),
        ("mhaprune.lab.reporting.page", False),
    ],
)
def test_a_model_is_trained_again_only_if_code_that_it_imports_changes(
    edited: str, matters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = cache._source

    def digests(source: Any) -> dict[str, str]:
        for cached in (cache._imports, cache._digest_with_imports):
            cached.cache_clear()
        monkeypatch.setattr(cache, "_source", source)
        return code_digests(*COMPUTES)

    before = digests(read)
    after = digests(lambda module: read(module) + b"# a comment" * (module == edited))
    digests(read)
    assert (before != after) == matters


def test_the_digest_of_a_plug_in_is_that_of_its_package_with_its_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for package, power in (("first_heads", 1), ("second_heads", 2)):
        (tmp_path / package / "conf").mkdir(parents=True)
        (tmp_path / package / "peak.py").write_text("x = 1\n")
        (tmp_path / package / "conf" / "peak.yaml").write_text(f"power: {power}\n")
        found += code_digests(f"{package}.peak").values()
    assert found[0] != found[1]
    with pytest.raises(ImportError, match="nowhere: is not there"):
        code_digests("nowhere.module")


CONTENT = {"weights": {"w": torch.arange(300.0)}, "history": [{"step": 0, "loss": 2.5}], "facts": {"seed": 3}}
FLIPS = 40
"""As many as take a second; tests/test_hostile.py has more."""


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
def test_any_other_form_is_refused_in_a_few_words_and_a_cache_file_made_anew(
    tmp_path: Path, data: bytes, caplog: Any
) -> None:
    """Without what torch says about it: to read the file with less care."""
    with pytest.raises(Damaged) as raised:
        opened(data)
    assert len(str(raised.value).splitlines()) == 1
    assert "weights_only" not in str(raised.value)
    assert not Path("harm").exists()

    def make(state: Any, save: Any) -> dict[str, Any]:
        return {"value": 1}

    Cache(tmp_path).get("trained", RECIPE, make)
    [path] = tmp_path.glob("trained-*.pt")
    foreign = {"key": RECIPE | {"seed": 1}, "content": {"value": 2}}
    for damaged in (data, sealed([1, 2]), sealed({"key": RECIPE}), sealed(foreign)):
        caplog.clear()
        path.write_bytes(damaged)
        assert Cache(tmp_path).get("trained", RECIPE, make) == {"value": 1}
        assert path.with_suffix(".damaged").read_bytes() == damaged
        assert "is damaged or foreign" in caplog.text
    assert "weights_only" not in caplog.text
