"""One damaged run neither breaks nor thins what is collected from many, and nothing outside a folder is touched."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_collect import change_status, make_run, sealed_again

from collect import main as collect_script
from mhaprune.lab.runs.collecting import collect
from mhaprune.lab.runs.run_folder import RunFolder, read_status
from support.made_tables import pruning_table

Damage = Callable[[Path], None]


def rewritten(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Damage:
    def damage(run: Path) -> None:
        frame = change(pd.read_csv(run / "summary.csv"))
        sealed_again(run, "summary.csv", frame.to_csv(index=False).encode())

    return damage


def replaced(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(data)


def linked(name: str) -> Damage:
    """A file that lies elsewhere."""

    def damage(run: Path) -> None:
        other = run.parent.parent / f"elsewhere-{name}"
        (run / name).rename(other)
        (run / name).symlink_to(other)

    return damage


def instead(make: Callable[[Path], object]) -> Damage:
    """Something else in the place of the status."""

    def damage(run: Path) -> None:
        (run / "status.json").unlink()
        make(run / "status.json")

    return damage


def status(**fields: Any) -> Damage:
    return lambda run: change_status(run, **fields)


UNREADABLE, NO_FILE = "status.json cannot be read", "status.json is not a file of this folder"
MISFIT, CHANGED = "its tables do not fit, ", "summary.csv has changed since the run wrote it"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "status cut": (replaced("status.json", b'{"status": "do'), UNREADABLE),
    "status binary": (replaced("status.json", bytes(range(256))), UNREADABLE),
    "status a list": (replaced("status.json", b"[1]"), UNREADABLE),
    "status nested deeply": (replaced("status.json", b"[" * 100_000), UNREADABLE),
    "status a pipe": (instead(os.mkfifo), NO_FILE),
    "status a link": (linked("status.json"), NO_FILE),
    "identity nested": (status(identity={"seed": [1]}), "identity in status.json must be names with, each, a text or"),
    "map of no rows": (status(head_map={"title": ""}), "head_map in status.json must be a title and rows"),
    "map of twos": (status(head_map={"title": "", "rows": ["2"]}), "head_map in status.json must be a title and rows"),
    "overrides a text": (status(overrides="seed=1"), "overrides in status.json must be a list, each a text"),
    "seconds a text": (status(seconds="long"), "seconds in status.json must be a finite number or null"),
    "seconds infinite": (status(seconds=float("inf")), "seconds in status.json must be a finite number or null"),
    "map of others": (status(head_map={"rows": 3}), "head_map in status.json must be names with, each, a text or a"),
    "files without checksums": (status(files=["summary.csv"]), "files in status.json must be names with, each, a"),
    "files of others": (status(files={"../a/summary.csv": ""}), "../a/summary.csv is not a file of this folder"),
    "no files": (status(files={}), f"{MISFIT}KeyError"),
    "table missing": (lambda run: (run / "summary.csv").unlink(), "summary.csv: No such file or directory"),
    "table a link": (linked("summary.csv"), "summary.csv is not a file of this folder"),
    "table cut": (lambda run: os.truncate(run / "summary.csv", 40), CHANGED),
    "table of other columns": (rewritten(lambda frame: frame.drop(columns="heads_removed")), f"{MISFIT}KeyError"),
    "table of texts": (rewritten(lambda frame: frame.assign(heads_removed="x")), MISFIT),
    "table with an infinite quality": (
        rewritten(lambda frame: frame.assign(quality=[1.0, math.inf])),
        "summary.csv has an infinite quality in row 2",
    ),
    "table with an infinite speed-up downwards": (
        rewritten(lambda frame: frame.assign(speedup=-math.inf)),
        "summary.csv has an infinite speedup in row 1",
    ),
    "rows twice": (rewritten(lambda frame: pd.concat([frame, frame])), "summary.csv has row 3 twice"),
    "no rows": (rewritten(lambda frame: frame[:0]), "summary.csv has no rows"),
    "fewer heads than none": (
        rewritten(lambda frame: frame.assign(heads_removed=-5)),
        "heads that can be removed is -5, of 24 for the whole model",
    ),
    "more heads than all": (
        rewritten(lambda frame: frame.assign(heads_removed=25)),
        "heads that can be removed is 25, of 24 for the whole model",
    ),
    "slower than never": (rewritten(lambda frame: frame.assign(speedup=-1.2)), "times as fast is -1.2, of 1 for"),
    "table of bytes": (lambda run: sealed_again(run, "summary.csv", b"\xff\xfe" * 50), f"{MISFIT}Unicode"),
}


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Runs `a`, `b` and `c`."""
    for run, heads in (("a", 2), ("b", 4), ("c", 8)):
        make_run(tmp_path / "runs" / run, num_heads=heads)
    return tmp_path / "runs"


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_named_and_the_others_are_collected_whole(name: str, three: Path, tmp_path: Path) -> None:
    damage, reason = DAMAGE[name]
    damage(three / "b")
    first, second, damaged = collect([three], tmp_path / "out")
    assert first.startswith("num_heads=2: 9 of 24 heads can go")
    assert second.startswith("num_heads=8: 9 of 24 heads can go")
    assert f" is not in here, damaged: {reason}" in damaged
    assert damaged.endswith(f" ({three / 'b'}).")
    assert "\n" not in damaged
    assert list(pd.read_csv(tmp_path / "out" / "pruning.csv")["label"].unique()) == ["num_heads=2", "num_heads=8"]
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["state"].str[:7]) == ["done", "damaged", "done"]


def test_a_terminal_shows_what_others_wrote_and_does_not_obey_it(three: Path, tmp_path: Path, capsys: Any) -> None:
    """No escape and no further line from a foreign run: in a finding, a reason, a setting, the name of a folder."""
    change_status(three / "a", findings=["fine\x1b]0;title\x07\nall of it is fine"])
    change_status(three / "b", status="failed", reason="no\x9b31m\u2028all of it is fine\u202e")
    change_status(three / "c", overrides=["task.kind=\x1b[2J"])
    make_run(tmp_path / "runs" / "d\x1b[8m\nall of it is fine", num_heads=2)
    assert collect_script([str(three), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert r"\x1b]0;title\x07\nall of it is fine" in shown
    assert not any(line.startswith("all of it is fine") for line in shown.splitlines())


def test_runs_that_cannot_be_drawn_together_are_said_all_the_same(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(figures: Any, tables: dict[str, pd.DataFrame]) -> list[Any]:
        raise ValueError("cannot\ndraw")

    monkeypatch.setattr("mhaprune.lab.runs.collecting.draw", draw)
    said, *lines = collect([three], tmp_path / "out")
    assert said == "Runs of ablate cannot be compared, ValueError: cannot draw."
    assert len(lines) == 3
    assert pd.read_csv(tmp_path / "out" / "pruning.csv")["label"].nunique() == 3


def test_a_linked_run_and_a_folder_without_runs_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", num_heads=2)
    make_run(tmp_path / "other" / "b", num_heads=4)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "other" / "b")
    (tmp_path / "empty").mkdir()
    *_, link, empty = collect([tmp_path / "runs", tmp_path / "empty"], tmp_path / "out")
    assert link.startswith("link is not in here, damaged: a link, name the folder that it leads to")
    assert empty == f"{tmp_path / 'empty'} holds no run."


@pytest.mark.parametrize("name", ["../victim", "link/victim", "{victim}", ".", "folder", "a\0b", "loop"])
def test_nothing_outside_a_folder_is_removed(name: str, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    make_run(tmp_path / "runs" / "a", num_heads=2)
    (out / "folder").mkdir(parents=True)
    (out / "link").symlink_to(tmp_path)
    (out / "loop").symlink_to(out / "loop")
    written = {"kind": "collection", "files": [name.format(victim=victim), "old.csv", 5]}
    (out / "status.json").write_text(json.dumps(written))
    (out / "old.csv").write_text("old")
    collect([tmp_path / "runs"], out)
    assert victim.read_text() == "precious"
    assert (out / "folder").is_dir()
    assert not (out / "old.csv").exists()


def test_a_run_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a").recorded():
        assert read_status(tmp_path / "a")["status"] == "running"
        left = (tmp_path / "a" / "status.json").read_bytes()
    (tmp_path / "a" / "status.json").write_bytes(left)
    assert read_status(tmp_path / "a")["status"] == "died"
    make_run(tmp_path / "b", num_heads=4)
    with RunFolder(tmp_path / "c").recorded() as folder:
        folder.note(kind="run", overrides=["seed=1"])
        folder.write_table("pruning", pruning_table())
        lines = collect([tmp_path], tmp_path / "out")
    assert [line.split(" is not in here, ")[1].split(" (")[0] for line in lines[2:]] == [
        "died: its process is gone, killed or without power",
        "running",
    ]


def test_a_folder_whose_name_is_no_text_is_collected(tmp_path: Path) -> None:
    for name in (b"a\xff", b"b"):
        make_run(tmp_path / "runs" / os.fsdecode(name))
    make_run(tmp_path / "runs" / "c", task="\ud800")
    (tmp_path / "runs" / os.fsdecode(b"a\xff") / "report.html").write_text("here")
    lines = collect([tmp_path / "runs"], tmp_path / "out")
    assert "\n".join(lines).encode()
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["state"]) == ["done"] * 3
    assert 'href="../runs/a%FF/report.html"' in (tmp_path / "out" / "index.html").read_text()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "figures").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(ValueError, match="figures/a.png leads out of this folder, by a link"),
        RunFolder(tmp_path / "run").recorded() as folder,
    ):
        folder.write("figures/a.png", b"1")
    assert not list((tmp_path / "elsewhere").iterdir())
