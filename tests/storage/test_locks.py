from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mhaprune.storage.locks import is_held, locked


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
