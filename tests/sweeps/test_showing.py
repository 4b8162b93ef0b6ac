"""The line that says what a run is doing, at a terminal and where stderr is a file."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from conftest import ROOT, TINY
from mhaprune import progress
from mhaprune.progress import doing, line, seconds_left, shown, track, under_way

STAGES = {"model": 30, "score": 10, "prune": 20, "figures": 4}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_names_every_step_with_what_it_is_done_to() -> None:
    with doing("ablate on sort"), doing("prune", 3) as step, doing("masks") as inner:
        step.advance()
        step.on = lambda: "ablation, 6 of 24 heads removed"
        inner.note = "loss 0.5"
        assert line(under_way()) == "ablate on sort: prune 2 of 3, ablation, 6 of 24 heads removed: masks, loss 0.5"
        assert line(under_way(), "seed=1").startswith("seed=1: ablate on sort: ")


def test_the_time_left_is_that_of_the_stages_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with doing("run", stages=STAGES):
        assert seconds_left(under_way()) == 64
        with doing("model", 1), doing("training", 100) as training:
            now += 6
            assert seconds_left(under_way()) == 24 + 34
            training.advance(50)
            assert seconds_left(under_way()) == 6 + 34
        assert seconds_left(under_way()) == 34
        with doing("score"):
            now += 20
            assert seconds_left(under_way()) is None, "it should be over, and nothing is known of how far it is"
            assert line(under_way()) == "run: score"
        # This machine takes twice as long.
        assert seconds_left(under_way()) == 48
        with doing("prune", 4) as step:
            now += 10
            step.advance()
            assert seconds_left(under_way()) == 30 + 8
        assert ", about 10 s left" in line(under_way())


@pytest.mark.parametrize(("took", "left"), [(60, 68), (0.1, 34)], ids=["trained", "from the cache"])
def test_a_slow_training_makes_what_follows_slow_and_a_cached_one_no_faster(
    took: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with doing("run", stages=STAGES):
        with doing("model", 1):
            now += took
        assert seconds_left(under_way()) == left


def test_what_an_earlier_run_has_done_makes_this_one_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with doing("run", stages={"model": 30}), doing("model", 1), doing("training", 100, done=80) as training:
        now += 6
        training.advance(5)
        assert seconds_left(under_way()) == 18, "15 steps, 5 of which have taken 6 s"
    with doing("run", stages={"best subset": 30}), doing("best subset", 1), doing("subsets", 9, done=9):
        assert seconds_left(under_way()) == 0


def test_items_that_take_longer_than_others_count_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three quarters of the items are done, and a third of the work."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with doing("run", stages={"sizes": 30}), doing("sizes", 4, costs=[1, 1, 1, 6]) as sizes:
        now += 6
        sizes.advance(3)
        assert seconds_left(under_way()) == 12
        with doing("round", 2) as rounds:
            rounds.advance()
            assert seconds_left(under_way()) == 3, "half of the last item: two thirds of the work"
    with doing("run", stages={"sizes": 30}), doing("sizes", 1), doing("size", 3, done=1, costs=[9, 1, 1]) as sizes:
        now += 6
        sizes.advance()
        assert seconds_left(under_way()) == 6, "what an earlier run has done does not count"


def test_nothing_is_promised_where_no_stages_are_known() -> None:
    with doing("train again"):
        assert seconds_left(under_way()) is None
        assert line(under_way()) == "train again"


def test_a_file_gets_a_line_each_time_and_also_of_a_stage_that_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.05)
    to = io.StringIO()
    with shown("seed=1", to), doing("ablate on sort", stages=STAGES), doing("prune"):
        deadline = time.monotonic() + 10
        while to.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = to.getvalue().splitlines()
    assert len(lines) >= 3
    assert all(each.startswith("seed=1: ablate on sort, about 20 s left: prune") for each in lines)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress line"]


def test_within_another_there_is_one_line_and_without_a_stderr_none(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = io.StringIO(), io.StringIO()
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with shown("", outer), doing("a sweep", 2), shown("", inner), doing("ablate on sort"):
        time.sleep(0.2)
    assert "a sweep 1 of 2: ablate on sort\n" in outer.getvalue()
    assert inner.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)  # as in a process that was started with 2>&-
    with shown(), doing("ablate on sort"):
        pass


def test_lines_come_often_enough() -> None:
    assert progress.EVERY < 10


def test_a_short_run_says_nothing() -> None:
    to = io.StringIO()
    with shown("", to), doing("ablate on sort", stages=STAGES):
        pass
    assert to.getvalue() == ""


def test_at_a_terminal_there_is_one_bar_that_never_goes_back_and_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "REDRAWN", 0.02)
    to = Terminal()
    with shown("", to), doing("ablate on sort", stages={"model": 0.1, "prune": 0.4, "figures": 0.1}):
        with doing("model"):
            time.sleep(0.15)
        for _ in track(range(5), "prune", name=lambda i: f"plan {i}"):
            time.sleep(0.08)
    shares = [int(share) for share in re.findall(r"(\d+)%", to.getvalue())]
    assert "prune 4 of 5, plan 3" in to.getvalue()
    assert shares == sorted(shares)
    assert shares[-1] > 50
    assert "\n" not in to.getvalue()
    assert to.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == "", "the bar is wiped out"


def test_a_line_of_the_log_does_not_end_up_inside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAWN", 0.02)
    to = Terminal()
    monkeypatch.setattr(sys, "stderr", to)
    handler = logging.StreamHandler(to)
    logging.getLogger().addHandler(handler)
    try:
        with shown(), doing("ablate on sort", stages=STAGES):
            time.sleep(0.1)
            logging.getLogger("mhaprune").warning("trained: taken from the cache")
    finally:
        logging.getLogger().removeHandler(handler)
    assert re.search(r"\r *\r?trained: taken from the cache\n", to.getvalue())


def test_jobs_side_by_side_write_lines_at_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    to = Terminal()
    with shown("seed=1", to, lines=True), doing("ablate on sort", stages=STAGES):
        time.sleep(0.1)
    assert "\r" not in to.getvalue()
    assert to.getvalue().startswith("seed=1: ablate on sort, about 60 s left\n")


def at_a_terminal(*arguments: str) -> tuple[int, str]:
    """The exit code and what is said, in a terminal of its own."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), *arguments]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    return process.wait(), text.decode()


@pytest.mark.slow
def test_a_run_at_a_terminal_shows_the_bar_and_ends_in_its_findings(tmp_path: Path) -> None:
    where = [f"cache={tmp_path / 'cache'}", f"hydra.run.dir={tmp_path / 'run'}"]
    code, said = at_a_terminal("experiment=ablate", *TINY, "training.steps=300", *where)
    assert code == 0
    assert re.search(r"%\|.*ablate on sort, about \d+ s left: model: training \d+ of 300", said)
    assert said.endswith("start with report.html\r\n")


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "bars"), [("basic", True), ("joblib", False)])
def test_jobs_of_a_sweep_share_a_terminal(launcher: str, bars: bool, tmp_path: Path) -> None:
    where = [f"cache={tmp_path / 'cache'}", f"hydra.sweep.dir={tmp_path / 'sweep'}", f"launch={launcher}"]
    code, said = at_a_terminal("-m", "experiment=train", "seed=0,1", *TINY, "training.steps=1000", *where)
    assert code == 0
    assert bool(re.search(r"%\|.*seed=\d: train on sort", said)) == bars
