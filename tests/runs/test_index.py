"""The page over many runs: in one file, with every run in it, and it sorts and filters in a browser."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.experiments.ablate.study import Ablate
from mhaprune.reporting.head_map import SmallMap, Verdict, in_small
from mhaprune.reporting.headline import Number
from mhaprune.runs.found import FoundRun
from mhaprune.runs.index import index_of, thumbnail
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


def test_a_thumbnail_is_the_map_of_heads_in_small() -> None:
    picture = thumbnail(SMALL)
    stay, go = re.findall(r'<path class="(?:s|g)" d="([^"]*)"/>', picture)
    assert stay.count("z") == 2
    assert go == "M8 1h5v5h-5z", "the second of the first row"
    assert '<path class="g"' not in thumbnail(SmallMap("all stay", ["1 1"]))
    assert "<title>1 of &lt;3&gt; heads</title>" in picture
    assert thumbnail(None) == ""


SHOWN = (
    "return [...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).map(r => r.cells[3].textContent).join()"
)


@needs_browser
def test_it_is_sorted_and_filtered_by_clicks(tmp_path: Path) -> None:
    page = index(tmp_path)
    click = "const all = [...document.querySelectorAll('th button')];"
    by_exact = sorted((i for i in range(12) if i % 3 != 2), key=lambda i: 7 * i % 12)
    failed = [2, 5, 8, 11]
    for script, expected in (
        ("", list(range(12))),
        (f"{click} all[2].click(); all[2].click();", list(range(12))[::-1]),  # by value: 11 comes before 2
        (f"{click} all[3].click();", [*by_exact, *failed]),
        (f"{click} all[3].click(); all[3].click();", [*by_exact[::-1], *failed]),
        ("field.value = 'FAILED sigkill'; field.dispatchEvent(new Event('input'));", failed),
        ("field.value = 'num_heads=4 state=done'; field.dispatchEvent(new Event('input'));", [4]),
    ):
        assert after(page, script + SHOWN, tmp_path) == ",".join(map(str, expected)), script
