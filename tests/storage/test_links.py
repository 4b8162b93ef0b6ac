"""Links, pipes and folders that lie where a run, a cache or a lock would write: nothing is written through them."""

import os
import re
import shutil
from pathlib import Path

import pytest

import collect
import mhaprune
from mhaprune.lab.cli.command_line import main
from mhaprune.lab.model.checkpoint import load
from mhaprune.lab.runs.run_folder import read_status
from mhaprune.storage.cache import Cache
from mhaprune.storage.locks import is_held, locked
from mhaprune.storage.store import write_bytes
from support.commands import run_here
from support.sizes import TINY, TINY_SEQUENCES

TRAIN = ("experiment=train", *TINY, *TINY_SEQUENCES)
PLACES = (".lock", "run.log", ".hydra/config.yaml")


def laid(folder: Path, name: str, kind: str) -> Path:
    """Lay a link or a pipe into a folder; returns what the link leads to, or would make."""
    precious = folder.parent / f"precious-{kind}"
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        if kind == "link":
            precious.write_text("mine")
        path.symlink_to(precious)
    return precious


def untouched(precious: Path) -> bool:
    return precious.read_text() == "mine" if precious.name == "precious-link" else not precious.exists()


@pytest.mark.parametrize(
    ("name", "kind"), [*zip(PLACES, ("pipe", "link", "dangling"), strict=True), (".hydra", "link")]
)
def test_hydra_and_the_lock_write_through_no_link(name: str, kind: str, tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "run"
    precious = laid(folder, name, kind)
    done = run_here(main, *TRAIN, f"hydra.run.dir={folder}", f"cache={cache}")
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert re.match(f"error: .*{folder}.*{name}|error: .*{name}.*{folder}", error)
    assert untouched(precious)


@pytest.mark.slow
def test_a_job_of_a_sweep_writes_through_no_link(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "sweep"
    arguments = ["-m", *TRAIN, "seed=0,1", f"hydra.sweep.dir={root}", f"cache={cache}"]
    assert run_here(main, *arguments).returncode == 0
    [job] = root.glob("seed_1-*")
    (job / "status.json").write_text("{}")
    for name in PLACES[1:3]:
        shutil.rmtree(job / ".hydra", ignore_errors=True)
        (job / name).unlink(missing_ok=True)
        precious = laid(job, name, "link")
        done = run_here(main, *arguments)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(
            f"error: hydra.sweep.dir={root}: {job.name}/{name.partition('/')[0]}"
        )
        assert untouched(precious)
        (job / name).unlink()
    precious = laid(root, "multirun.yaml", "link")
    assert "multirun.yaml is a link" in run_here(main, *arguments).stderr
    assert untouched(precious)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("hydra.output_subdir=../../x", "x"),
        ("hydra.job.name=../x", "x"),
        ("cache=", "error: cache='': must name a folder"),
        ("hydra.run.dir=''", "error: hydra.run.dir='': must name a folder"),
    ],
)
def test_a_folder_without_a_name_and_one_outside_that_of_the_run_are_refused(
    setting: str, said: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"hydra.run.dir": tmp_path / "run", "cache": cache}
    others = [f"{key}={place}" for key, place in places.items() if key != setting.partition("=")[0]]
    done = run_here(main, *TRAIN, *others, setting)
    assert done.returncode == 1
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_lock_that_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    precious = laid(tmp_path / "cache", "a.lock", kind)
    assert not is_held(tmp_path / "cache" / "a.lock") or kind == "link"
    with pytest.raises(ValueError, match="a.lock: is ") as refused, locked(tmp_path / "cache" / "a.lock"):
        pass
    assert "\n" not in str(refused.value)
    assert untouched(precious)


def test_a_cache_with_links_folders_and_pipes_in_it_is_used_or_refused(tmp_path: Path) -> None:
    def make(state: object, save: object) -> dict[str, int]:
        return {"value": 1}

    cache = Cache(tmp_path / "cache")
    cache.get("trained", {"a": 1}, make)
    [path] = cache.folder.glob("*.pt")
    path.unlink()
    os.mkfifo(path)
    assert cache.get("trained", {"a": 1}, make) == {"value": 1}, "made anew"
    path.with_suffix(".damaged").unlink()
    path.with_suffix(".damaged").mkdir()
    path.write_bytes(b"nothing")
    assert cache.get("trained", {"a": 1}, make) == {"value": 1}
    path.unlink()
    path.with_suffix(".lock").unlink()
    path.with_suffix(".lock").mkdir()
    with pytest.raises(ValueError, match=f"^{path.with_suffix('.lock')}: Is a directory"):
        cache.get("trained", {"a": 1}, make)


def test_a_file_is_written_beside_a_link_not_through_it(tmp_path: Path) -> None:
    for name in ("a", f".a.{os.getpid()}.tmp"):
        precious = laid(tmp_path / "folder", name, "link")
        try:
            write_bytes(tmp_path / "folder" / "a", b"new")
        except OSError:
            assert name != "a"
        assert untouched(precious)


def test_a_collection_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "status.json").write_text("{}")
    precious = laid(tmp_path / "out", ".lock", "link")
    done = run_here(collect.main, str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'out' / '.lock'}: is a link")
    assert untouched(precious)


def test_pipes_block_no_reader(tmp_path: Path) -> None:
    for name in ("status.json", "model.pt"):
        os.mkfifo(tmp_path / name)
    assert read_status(tmp_path) == {}
    with pytest.raises(ValueError, match="model.pt: cannot be read .is no regular file"):
        load(str(tmp_path / "model.pt"))
    with pytest.raises(ValueError, match="is no regular file"):
        mhaprune.load(tmp_path / "model.pt")
