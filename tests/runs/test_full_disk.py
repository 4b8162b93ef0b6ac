"""Disks that fill up: the path is named, nothing done is lost, and with more room the same command goes on."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mhaprune.storage.store import read_status
from support import ROOT
from support.sizes import TINY, TINY_ABLATE, TINY_SEQUENCES

pytestmark = pytest.mark.faults

SMALL = ["scorer=[ablation]", "recovery=[]", "experiment.budgets=[0.5]"]
WIDE = ["model.d_model=128", "model.dim_feedforward=256", *SMALL]
"""A model of some megabytes."""


class Disk:
    """A small one, in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, kilobytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", self.path], check=True)

    def protect(self) -> None:
        """Make it read-only. The rights of files would not stop root."""
        subprocess.run(["mount", "-o", "remount,ro", self.path], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", place], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a disk here: {mounted.stderr.strip()}")
    yield Disk(place)
    subprocess.run(["umount", "--lazy", place], check=True)


def run(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    settings = [*TINY, *TINY_SEQUENCES, *TINY_ABLATE, *WIDE, f"hydra.run.dir={folder}", f"cache={cache}"]
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), "experiment=ablate", *settings]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def done(folder: Path, cache: Path) -> str:
    """What a run says that is done."""
    found = run(folder, cache)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("kilobytes", [12, 40, 60, 100, 200])
def test_a_run_folder_on_a_full_disk(disk: Disk, tmp_path: Path, kilobytes: int) -> None:
    disk.resize(kilobytes)
    folder = disk.path / "run"
    full = run(folder, tmp_path / "cache")
    assert full.returncode == 1
    error = full.stderr.splitlines()[-1]
    assert error.startswith(f"error: {folder}/" if kilobytes > 12 else "error: No space left on device; hydra.run.dir")
    assert "No space left on device" in error
    status = read_status(folder)
    assert not status or (status["status"], status["reason"][:8]) == ("failed", "OSError:")
    assert status or kilobytes == 12, "not even room for a status"
    disk.resize(100_000)
    said = done(folder, tmp_path / "cache")
    assert kilobytes == 12 or "trained: taken from the cache" in said
    assert read_status(folder)["status"] == "done"


@pytest.mark.parametrize("kilobytes", [200, 1000, 5000])
def test_a_cache_on_a_full_disk(disk: Disk, tmp_path: Path, kilobytes: int) -> None:
    disk.resize(kilobytes)
    cache = disk.path / "cache"
    not_kept = rf"{cache}/trained-\w+\.pt: not kept \(No space left on device\), so it will be made again"
    small = re.search(not_kept, done(tmp_path / "run", cache))
    assert bool(small) == (kilobytes < 5000)
    assert not list(cache.glob(".*.tmp")), "nothing half-written is left to fill the disk"
    disk.resize(100_000)
    for expected in ("trained: made in" if small else "trained: taken", "trained: taken"):
        assert expected in done(tmp_path / "run", cache)


def test_a_read_only_cache_is_used_where_it_holds_what_is_wanted(disk: Disk, tmp_path: Path) -> None:
    cache = disk.path / "cache"
    done(tmp_path / "run", cache)
    disk.protect()
    assert "trained: taken from the cache" in done(tmp_path / "again", cache)


def test_read_only_folders_are_named_before_anything_is_trained(disk: Disk, tmp_path: Path) -> None:
    disk.protect()
    refused = run(disk.path / "run", tmp_path / "cache")
    assert refused.stderr.startswith(
        f"error: {disk.path / 'run'}: Read-only file system; hydra.run.dir and cache must name"
    )
    refused = run(tmp_path / "run", disk.path / "cache")
    assert refused.stderr.startswith(f"error: cache={disk.path / 'cache'}: cannot be written (Read-only file system)")
    assert not (tmp_path / "run").exists()
