"""What a run is doing, and the line that says so, at a terminal and where stderr is a file."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mhaprune import progress
from mhaprune.lab.experiments.base import Experiment
from mhaprune.lab.runs.clock import left_in_all, timed
from mhaprune.progress import Step, doing, duration, line, seconds_left, shown, track, under_way
from mhaprune.settings.options import option
from support import ROOT
from support.sizes import TINY, once


def said() -> list[tuple[str, int, int | None]]:
    return [(step.what, step.done, step.total) for step in list(under_way)]


def test_a_loop_says_how_far_it_is_and_where_it_belongs() -> None:
    seen = []
    with doing("score"):
        for name in track(["gate", "ablation"], "scorers", name=str.upper):
            for _ in track(iter("abc"), "masks"):
                pass
            *_, last = list(under_way)
            assert last.on is not None
            seen.append((name, last.on(), said()))
    assert seen == [
        ("gate", "GATE", [("score", 0, None), ("scorers", 0, 2)]),
        ("ablation", "ABLATION", [("score", 0, None), ("scorers", 1, 2)]),
    ]
    assert not list(under_way)
    goes_on = [said() for _ in track(range(3, 5), "steps", done=3)]
    assert goes_on == [[("steps", 3, 5)], [("steps", 4, 5)]], "counted from where it was"


def test_nothing_is_left_under_way_after_a_break_or_an_error() -> None:
    for _ in track(range(9), "masks"):
        break
    assert not list(under_way)
    with pytest.raises(ZeroDivisionError), doing("run"), doing("score"):
        raise ZeroDivisionError
    assert not list(under_way)
    late = track(range(2), "plans")
    with doing("first"):
        next(late)
    with doing("second"):
        late.close()
        assert said() == [("second", 0, None)], "a generator that ends late takes no other step with it"


def test_a_line_names_every_step_with_what_it_is_done_to() -> None:
    """A time to wait is a round number."""
    assert list(map(duration, (0, 44, 100, 7200))) == ["5 s", "45 s", "2 min", "2.0 h"]
    with doing("ablate on sort"), doing("prune", 3) as step, doing("masks") as inner:
        assert seconds_left(list(under_way)) is None, "nothing is finished"
        step.on = lambda: "ablation, 6 of 24 heads removed"
        inner.note = "loss 0.5"
        assert line(list(under_way)) == "ablate on sort: prune 1 of 3, ablation, 6 of 24 heads removed: masks, loss 0.5"
        assert line(list(under_way), "seed=1").startswith("seed=1: ablate on sort: ")
    with doing("ablate on sort", parts=("model", "score")), doing("score"), doing("gate"):
        assert line(list(under_way)) == "ablate on sort, step 2 of 2: score: gate"


class Clock:
    now = 100.0

    def left(self) -> float | None:
        return seconds_left(list(under_way))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(time, "monotonic", lambda: found.now)
    return (found := Clock())


def test_the_time_left_is_that_of_the_outermost_step_that_counts_by_its_finished_share(clock: Clock) -> None:
    with doing("ablation"), doing("batches", 4) as batches, doing("masks", 10) as masks:
        assert clock.left() is None
        clock.now += 12
        for masks.done, left in ((3, None), (4, pytest.approx(108))):  # less than a tenth says little
            assert clock.left() == left
        assert line(list(under_way)) == "ablation, about 2 min left in this step: batches 1 of 4: masks 5 of 10"
        batches.done, masks.done = 2, 0
        assert clock.left() == pytest.approx(12)
    with doing("ablation"), doing("prove"):
        assert clock.left() is None, "nothing is counted"


def test_what_will_take_more_than_a_minute_says_so_before_it_begins(clock: Clock) -> None:
    said: list[str] = []
    for expected in (19.0, 21.0, None):
        for n in track(range(3), "batches"):
            for m in track(range(50), "masks", expected=expected):
                said += [line(under_way)] if (n, m % 25) == (0, 4) else []
                clock.now += 0.25 + n
        clock.now += 100
    assert [each.partition(":")[0] for each in said] == [
        "batches 1 of 3",  # 57 s in all
        "batches 1 of 3, about 30 s left",  # told by what was done
        "batches 1 of 3, about 60 s left",  # 63 s in all, of which 1 is over
        "batches 1 of 3, about 30 s left",
        "batches 1 of 3",
        "batches 1 of 3, about 30 s left",
    ]
    with doing("batches", 100) as step:
        step.expected = 61.0
        clock.now += 70
        assert clock.left() is None, "the time that was expected is over, and nothing is known"


def test_what_an_earlier_run_has_done_makes_this_one_no_faster(clock: Clock) -> None:
    with doing("run"), doing("training", 100, done=80) as training:
        clock.now += 6
        training.done += 5
        assert clock.left() == pytest.approx(18), "15 steps, 5 of which have taken 6 s"
    with doing("run"), doing("subsets", 9, done=9):
        assert clock.left() == 0


RECORDED = json.loads((ROOT / "tests" / "support" / "clocks.json").read_bytes())
"""Runs of five experiments: what was under way, at which second of processor time, so that other work on the machine
does not count, and how long their steps took in another run."""


def told(run: dict[str, Any], usual: dict[str, float], clock: Clock) -> Iterator[tuple[float, float]]:
    """The seconds that are said to be left and those that are, from a fifth of a run on."""
    for moment in run["clock"]:
        clock.now, (outer, *inside) = moment["at"], moment["steps"]
        first = Step(outer[0], parts=[*usual], left=partial(left_in_all, usual), took=moment["took"], begun=0.0)
        steps = [first, *(Step(what, total, done, before=b, begun=at) for what, total, done, b, at in inside)]
        if inside and moment["at"] > run["seconds"] / 5 and (left := seconds_left(steps)) is not None:
            yield left, run["seconds"] - moment["at"]


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("first_run", [False, True])
def test_the_time_left_of_a_run_is_right_within_half_from_a_fifth_on(name: str, first_run: bool, clock: Clock) -> None:
    """Told from another run, or from what the steps usually take. A time is said in steps of 5 s."""
    run, kind = RECORDED[name], option(name, {"experiment": Experiment})
    usual = dict(zip(kind.steps, kind.seconds, strict=True)) if first_run else run["usual"]
    found = list(told(run, usual, clock))
    assert len(found) > 10
    off = [(left, true) for left, true in found if not true / 1.5 - 5 <= left <= 1.5 * true + 5]
    assert not off


def test_the_next_run_knows_how_long_its_steps_take(tmp_path: Path, clock: Clock) -> None:
    """From the cache, or from memory without one. A step that came from the cache this time keeps its time."""

    def run(seconds: tuple[float, float], cache: Path | None) -> list[float | None]:
        said = []
        with timed("ablate on sort", ("model", "score"), cache=cache):
            for step, spent in zip(("model", "score"), seconds, strict=True):
                with doing(step):
                    clock.now += spent
                    said.append(clock.left())
        return said

    for cache in (tmp_path, None):
        assert run((20, 10), cache) == [None, None], "nothing is known"
        assert run((0.5, 5), cache) == [None, pytest.approx(5)], (
            "the model came from a cache; half of the score is left"
        )
        assert run((20, 5), cache)[0] == pytest.approx(5), "a time falls by half at most, so the model has 10 s"
        assert run((0.5, 0.5), cache)[1] == pytest.approx(4.5), "and rises at once"
        with timed("ablate on sort", ("model", "score"), cache=cache), doing("model"):
            clock.now += 2
            assert clock.left() == pytest.approx(8 + 2.5), "half of what both took before the cache was there"
    (tmp_path / "clock.json").write_text("[1, 2]")
    assert run((20, 10), tmp_path) == [None, None], "a file that is not ours"


def test_a_line_fits_its_width_and_says_nothing_twice() -> None:
    with (
        doing("ablate on sort"),
        doing("ablation", 3) as step,
        doing("ablation"),
        doing("batches", 4),
        doing("masks", 9),
    ):
        step.on = lambda: "ablation"
        assert line(list(under_way)) == "ablate on sort: ablation 1 of 3: batches 1 of 4: masks 1 of 9"
        assert line(list(under_way), "", 50) == "ablate on sort: ablation 1 of 3: batches 1 of 4"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress.EVERY < 10
    monkeypatch.setattr(progress, "EVERY", 0.02)
    monkeypatch.setattr(progress, "REDRAWN", 0.02)


@pytest.mark.usefixtures("often")
def test_a_file_gets_a_line_each_time_and_also_of_a_stage_that_calls_nothing() -> None:
    to = io.StringIO()
    with shown("seed=1", to), doing("ablate on sort"), doing("prune"):
        deadline = time.monotonic() + 10
        while to.getvalue().count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = to.getvalue().splitlines()
    assert len(lines) >= 3
    assert set(lines) == {"seed=1: ablate on sort: prune"}
    assert not [thread for thread in threading.enumerate() if thread.name == "progress line"]


@pytest.mark.usefixtures("often")
def test_within_another_there_is_one_line_and_without_a_stderr_none(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = io.StringIO(), io.StringIO()
    with shown("", outer), doing("a sweep", 2), shown("", inner), doing("ablate on sort"):
        time.sleep(0.2)
    assert "a sweep 1 of 2: ablate on sort\n" in outer.getvalue()
    assert inner.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)  # as in a process that was started with 2>&-
    with shown(), doing("ablate on sort"):
        pass


@pytest.mark.usefixtures("often")
def test_at_a_terminal_there_is_one_bar_that_is_gone_at_the_end() -> None:
    to = Terminal()
    with shown("", to), doing("ablate on sort"):
        for _ in track(range(5), "prune", name=lambda i: f"plan {i}"):
            time.sleep(0.08)
    shares = [int(share) for share in re.findall(r"(\d+)%", to.getvalue())]
    assert "ablate on sort, about 5 s left in this step: prune 4 of 5, plan 3" in to.getvalue()
    assert shares == sorted(shares)
    assert shares[-1] > 50
    assert "\n" not in to.getvalue()
    assert to.getvalue().rpartition("\r")[0].rpartition("\r")[2].strip() == "", "the bar is wiped out"


@pytest.mark.usefixtures("often")
def test_each_step_has_its_bar_from_the_beginning() -> None:
    to = Terminal()
    with shown("", to):
        for name, count in (("first", 6), ("second", 30)):
            for _ in track(range(count), name):
                time.sleep(0.06)
    shares = [int(share) for share in re.findall(r"(\d+)%[^%]*second", to.getvalue())]
    assert shares[0] < 30
    assert shares == sorted(shares)


def at_a_terminal(*arguments: str) -> tuple[int, str]:
    """The exit code and what is said, in a terminal of its own."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    command = [sys.executable, str(ROOT / "scripts" / "run.py"), *arguments]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return process.wait(), text.decode()


@pytest.mark.slow
def test_a_run_at_a_terminal_shows_the_bar_and_ends_in_its_findings(tmp_path: Path) -> None:
    where = [f"cache={tmp_path / 'cache'}", f"hydra.run.dir={tmp_path / 'run'}"]
    code, said = at_a_terminal("experiment=ablate", *once(*TINY, "training.steps=300"), *where)
    assert code == 0
    assert re.search(
        r"%\|.*ablate on sort, step 1 of 8(, about \d+ s left in all)?: model: training \d+ of 300, loss", said
    )
    assert said.endswith("report.html\r\n")
