"""Run folders and the locks that they are held by."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mhaprune.storage.locks import is_held, locked
from mhaprune.storage.store import RunFolder, read_status, write_bytes


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


def test_status_says_running_then_done(tmp_path: Path) -> None:
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


def test_a_status_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) == {}
    (tmp_path / "status.json").write_text('{"status": "do')
    assert read_status(tmp_path) == {}


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


def test_who_is_waited_for_is_said_after_a_second(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "lock"
    held = threading.Event()

    def hold(seconds: float) -> None:
        with locked(path):
            held.set()
            time.sleep(seconds)

    for seconds, said in ((0.1, False), (1.3, True)):
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
