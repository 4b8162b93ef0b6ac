"""The page of all runs, its thumbnails, and the link to the latest run."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.reporting.head_map import SmallMap, Verdict, in_small, thumbnail
from mhaprune.lab.reporting.headline import Number
from mhaprune.lab.runs.collecting import link_latest
from mhaprune.lab.runs.index import index_of
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.lab.runs.run_reader import FoundRun
from mhaprune.settings.options import target
from support.browser import after, needs_browser

HEADS = pd.DataFrame(
    [("encoder_self", 0, 0, True), ("encoder_self", 0, 1, False), ("cross", 0, 0, True)],
    columns=["site", "layer", "head", "stays"],
)
SMALL = in_small(Verdict(HEADS, "ablation", "1 of <3> heads", ""))


def index(folder: Path, count: int = 12, title: str = "t") -> str:
    """The page of so many runs. Every third has failed and knows no number."""
    runs = []
    for i in range(count):
        run = FoundRun(folder / "a b" / f"{i}#?", {}, label=f"num_heads={i}", settings={"num_heads": str(i)})
        status: dict[str, Any] = {"status": "failed", "reason": "killed <by> SIGKILL"}
        if i % 3 != 2:
            status = {"status": "done", "experiment": target(Ablate()), "findings": [f"{i} heads can go"]}
            status["head_map"] = SMALL._asdict()
            run = replace(run, headline=[Number("exact match", (7 * i % 12) / 12)])
            run.folder.mkdir(parents=True, exist_ok=True)
            page = f"<html><head><title>the report of {run.label}</title></head></html>"
            (run.folder / "report.html").write_text(page)
        runs.append(replace(run, status=status))
    return index_of(title, runs, ["num_heads"], {}, folder)


def test_every_run_is_a_row_of_one_file(tmp_path: Path) -> None:
    page = index(tmp_path, title="ablate <sort>, by num_heads")
    assert page.count("<tr>") + page.count('<tr class="open">') == 1 + 12
    assert "12 runs: 8 done, 4 failed." in page
    assert "ablate &lt;sort&gt;, by num_heads" in page
    assert "killed &lt;by&gt; SIGKILL" in page
    assert 'href="a%20b/0%23%3F/report.html"' in page
    assert not re.search(r"https?://|<link|src=", page), "it needs no network"


def test_the_last_folder_has_a_link_and_all_runs_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhaprune.lab.runs.collecting.results_folder", lambda: tmp_path)
    monkeypatch.setattr("mhaprune.lab.runs.collecting.MOST_LISTED", 2)
    places = [
        tmp_path / "runs" / kind / "2026-01-02" / f"0{i}-00" for i, kind in enumerate(["ablate", "prune", "speed"])
    ]
    for i, place in enumerate(places):
        with RunFolder(place).recorded() as folder:
            said = {"findings": [f"sentence {i}."], "experiment": target(Ablate())}
            folder.note(kind="run", overrides=["experiment=ablate", f"seed={i}"], **said)
        link_latest(place)
        assert (tmp_path / "latest").resolve() == place
    page = (tmp_path / "runs" / "index.html").read_text()
    assert "The newest 2 of 3 runs" in page
    assert [f"sentence {i}." in page for i in range(3)] == [False, True, True]
    assert page.index("<td>2026-01-02/02-00</td>") < page.index("<td>2026-01-02/01-00</td>"), "the newest first"
    assert re.search(r"<td>speed</td>\s*<td class=.said.>.*sentence 2\..*<td>seed=2</td>", page, re.DOTALL)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()  # the user's own: it stays
    link_latest(places[0])
    assert not (tmp_path / "latest").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "runs"}


def test_what_others_left_among_the_runs_does_not_stop_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mhaprune.lab.runs.collecting.results_folder", lambda: tmp_path)
    odd = tmp_path / "runs" / "train" / "2026-01-02" / os.fsdecode(b"\xff<b>")
    odd.mkdir(parents=True)
    (odd / "status.json").write_text('{"status": "done", "started": "0001-01-01T00:00:00+23:59", "kind": "run"}')
    place = odd.parent / "other"
    place.mkdir()
    (place / "status.json").write_text("[")
    link_latest(place)
    page = (tmp_path / "runs" / "index.html").read_text()
    assert "2 runs" in page
    assert "&lt;b&gt;" in page


def test_a_folder_elsewhere_leaves_no_trace_in_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhaprune.lab.runs.collecting.results_folder", lambda: tmp_path / "results")
    (tmp_path / "results").mkdir()
    link_latest(tmp_path / "elsewhere")
    assert list((tmp_path / "results").iterdir()) == []


def test_a_thumbnail_is_the_map_of_heads_in_small() -> None:
    picture = thumbnail(SMALL)
    stay, go = re.findall(r'<path style="[^"]*" d="([^"]*)"/>', picture)
    assert stay.count("z") == 2
    assert go == "M8 1h5v5h-5z", "the second of the first row"
    assert "fill:none" in picture
    assert "fill:none" not in thumbnail(SmallMap("all stay", ["1 1"]))
    assert "<title>1 of &lt;3&gt; heads</title>" in picture
    assert thumbnail(None) == ""


SHOWN = (
    "return [...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).map(r => r.cells[4].textContent).join()"
)


@needs_browser
def test_it_is_sorted_and_filtered_by_clicks(tmp_path: Path) -> None:
    page = index(tmp_path)
    click = "const all = [...document.querySelectorAll('th button')];"
    by_exact = sorted((i for i in range(12) if i % 3 != 2), key=lambda i: 7 * i % 12)
    failed = [2, 5, 8, 11]
    for script, expected in (
        ("", list(range(12))),
        (f"{click} all[3].click(); all[3].click();", list(range(12))[::-1]),  # by value: 11 comes before 2
        (f"{click} all[4].click();", [*by_exact, *failed]),
        (f"{click} all[4].click(); all[4].click();", [*by_exact[::-1], *failed]),
        ("field.value = 'FAILED sigkill'; field.dispatchEvent(new Event('input'));", failed),
        ("field.value = 'num_heads=4 state=done'; field.dispatchEvent(new Event('input'));", [4]),
    ):
        assert after(page, script + SHOWN, tmp_path) == ",".join(map(str, expected)), script
