import json
import re
from pathlib import Path

import pandas as pd
import pytest

from mhaprune.experiments.ablate.study import Ablate
from mhaprune.reporting.page import proof_sentences, render
from mhaprune.reporting.plots import draw
from support.browser import after, needs_browser
from support.made_tables import all_tables, summary


def test_the_proofs_are_said() -> None:
    names = ("max_difference_masked_removed", "smallest_gate_effect", "greedy_decoding_disagreements")
    lines = proof_sentences(dict(zip(names, (2e-14, 2.5, 0), strict=True)))
    assert len(lines) == 3
    assert "2.0e-14" in lines[0]
    assert proof_sentences({}) == []


MADE = pd.DataFrame({"scorer": ["b", "a", "c"], "task": "sort", "cost": [1e-5, 30.0, 4.0], "gap": [None, 2.0, 1.0]})
MADE = MADE.assign(draws=1, none=None)


@pytest.fixture(scope="module")
def page() -> str:
    tables = all_tables() | {"summary": summary(), "made": MADE}
    plots = list(draw(Ablate.figures, tables))
    page = render("ablate on <sort>", ["9 of 24"], plots, tables, {"command": "python x"}, ["proved"])
    assert page.count('<img src="data:image/svg+xml;base64,') == len(plots)
    assert all(f'alt="{plot.alt or plot.caption}"' in page for plot in plots if "'" not in plot.caption)
    return page


def test_columns_that_never_vary_are_folded_away_with_their_value() -> None:
    """A table of a plug-in may hold lists."""
    lists = pd.DataFrame({"heads": [[1], [1, 2]], "layers": [[0], [0]]})
    page = render("t", [], [], {"made": MADE, "one": MADE[:1], "empty": MADE[:0], "lists": lists}, {})
    made, one, empty, of_lists = page.split('<div class="scroll"')[1:]
    assert re.findall("<button>(.*?)</button>", made) == ["scorer", "cost", "gap"]
    assert "3 columns are the same in all rows" in made
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", made) == [("task", "sort"), ("draws", "1"), ("none", "empty")]
    assert len(re.findall("<button>", one)) == 6, "of a single row there is nothing to compare"
    assert len(re.findall("<button>", empty)) == 6
    assert re.findall("<button>(.*?)</button>", of_lists) == ["heads"]
    assert "<dt>layers</dt><dd>[0]</dd>" in of_lists


def test_the_page_stands_alone_and_its_contents_lead_to_every_figure_and_table(page: str) -> None:
    assert "ablate on &lt;sort&gt;" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<b>pruning</b>, 15 rows" in page
    assert page.index("9 of 24") < page.index("<img") < page.index("<table")
    leads = re.findall('href="#(.*?)"', page)
    assert {f"table-{name}" for name in all_tables()} <= set(leads)
    assert sum(lead.startswith("figure-") for lead in leads) == page.count("<figure ")
    assert all(page.count(f'id="{lead}"') == 1 for lead in leads)


@needs_browser
def test_tables_are_sorted_by_a_click(tmp_path: Path) -> None:
    page = render("t", [], [], {"other": MADE, "made": MADE}, {})
    rows = "[...table.rows].slice(1).map(row => row.cells[0].textContent).join('')"
    for clicks, order in ((["cost"], "bca"), (["cost", "cost"], "acb"), (["gap"], "cab"), (["scorer"], "abc")):
        script = "const table = document.querySelector('#table-made table');"
        for name in clicks:
            script += f"[...table.querySelectorAll('button')].find(b => b.textContent === '{name}').click();"
        assert after(page, f"{script} return {rows}", tmp_path) == order, clicks


@needs_browser
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_its_window_and_takes_the_colours_of_the_system(
    width: int, dark: bool, page: str, tmp_path: Path
) -> None:
    script = """
      const all = name => [...document.querySelectorAll(name)], style = name => getComputedStyle(all(name)[0]);
      const light = colour => colour.match(/[0-9.]+/g).slice(0, 3).reduce((sum, each) => sum + Number(each), 0) / 765;
      all('details').forEach(each => each.open = true);
      return JSON.stringify({
        ground: light(style('body').backgroundColor),
        ink: light(style('body').color),
        soft: light(style('figcaption').color),
        head: light(style('th').backgroundColor),
        card: light(style('figure img').backgroundColor),
        wide: document.documentElement.scrollWidth,
        images: Math.max(...all('.picture').map(each => each.getBoundingClientRect().right)),
        least: Math.min(...all('img').map(each => each.getBoundingClientRect().width / each.naturalWidth)),
        most: Math.max(...all('img').map(each => each.getBoundingClientRect().width / each.naturalWidth)),
        across: all('.picture').filter(each => each.scrollWidth > each.clientWidth).length,
        scrolls: all('.scroll').filter(each => each.scrollWidth > each.clientWidth).length,
        drawn: all('img').every(each => each.naturalWidth > 0),
      });
    """
    system = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    found = json.loads(after(page, script, tmp_path, system, width=width))
    assert found["drawn"]
    assert found["wide"] <= width, "the page itself does not scroll sideways"
    assert found["images"] <= width
    assert found["scrolls"] or width > 400, "wide tables do"
    assert bool(found["across"]) == (width == 400), "so do wide figures"
    assert 0.53 < found["least"] <= found["most"] < 1.1, "letters of a figure stay more than half as large as they are"
    assert found["card"] == 1, "figures are drawn for white"
    assert abs(found["ground"] - found["ink"]) > 0.6
    assert abs(found["ground"] - found["soft"]) > 0.4
    assert (found["ground"] < 0.5) == dark
    assert found["head"] == found["ground"]
