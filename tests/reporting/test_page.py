from __future__ import annotations

import re

from made_tables import all_tables, summary
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.reporting.page import proof_sentences, render
from mhaprune.reporting.plots import draw


def test_the_proofs_are_said() -> None:
    lines = proof_sentences(
        {"max_difference_masked_removed": 2e-14, "min_difference_open_closed": 2.5, "greedy_decoding_disagreements": 0}
    )
    assert len(lines) == 3
    assert "2.0e-14" in lines[0]
    assert proof_sentences({}) == []


def test_the_page_stands_alone() -> None:
    tables = all_tables() | {"summary": summary()}
    plots = list(draw(Ablate.figures, tables))
    page = render("ablate on <sort>", ["9 of 24"], plots, tables, {"command": "python x"}, ["proved"])
    assert "ablate on &lt;sort&gt;" in page
    assert page.count('<img src="data:image/svg+xml;base64,') == len(plots)
    assert all(f'alt="{plot.alt or plot.caption}"' in page for plot in plots if "'" not in plot.caption)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<b>pruning</b>, 15 rows" in page
    assert page.index("9 of 24") < page.index("<img") < page.index("<table")
