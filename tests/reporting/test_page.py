from __future__ import annotations

import re

import pandas as pd
from mhaprune.figures import draw
from mhaprune.report import answers
from test_plots import all_tables

from mhaprune.reporting.page import check_answers, render
from mhaprune.tables import INITIAL_GATE


def summary() -> pd.DataFrame:
    row = {
        "heads_total": 24,
        "choose_sequence_accuracy": 0.99,
        "dense_sequence_accuracy": 1.0,
        "sequence_accuracy_low": 0.97,
        "sequence_accuracy_high": 1.0,
        "speedup": 1.21,
        "tolerance": 0.01,
        "speedup_q1": 1.2,
        "speedup_q3": 1.22,
    }
    return pd.DataFrame(
        [
            row
            | {"scorer": "gate", "heads_removed": 3, "sequence_accuracy": 1.0, "spearman_with_ablation": 0.44}
            | {"removed": "cross.0.0 cross.0.1 cross.1.2"},
            row
            | {"scorer": "ablation", "heads_removed": 9, "sequence_accuracy": 0.993, "spearman_with_ablation": None}
            | {"removed": " ".join(f"cross.1.{n}" for n in range(9))},
        ]
    )


def test_the_first_sentence_answers_the_question() -> None:
    lines = answers({"summary": summary()})
    assert lines[0].startswith("9 of 24 heads can go at 0.99 exact match (1.00 with all), as chosen by ablation;")
    assert "1.21× as fast (quartiles 1.20–1.22)" in lines[0]
    assert lines[1].startswith("They are (site.layer.head, counted from 0): cross.1.0, cross.1.1, cross.1.2,")
    assert lines[2] == (
        "The largest budget within 0.01 of exact match on the choose split, scorer by scorer: 3 by gate (at 1.00), 9 by"
        " ablation (at 0.99)."
    )
    assert lines[3] == "Agreement with ablation over the heads (Spearman): gate at ρ = 0.44."


def test_that_nothing_can_go_is_said_plainly() -> None:
    lines = answers({"summary": summary().assign(heads_removed=0, tolerance=0.01)})
    assert lines[0] == "None of 24 heads can go within 0.01 of the dense model's 1.00 exact match."
    assert lines[1].endswith("scorer by scorer: none by gate, none by ablation.")


def test_gates_that_kept_their_initial_order_are_said() -> None:
    agreement = pd.DataFrame([{"scorer": "gate", "other": INITIAL_GATE, "spearman": 0.71}])
    lines = answers({"summary": summary(), "agreement": agreement})
    assert lines[-1] == "The learned gates against what they started from: Spearman ρ = 0.71."


def test_of_several_runs_there_is_a_sentence_each_with_its_name() -> None:
    both = pd.concat([summary().assign(label="num_heads=2"), summary().assign(label="num_heads=4")])
    lines = answers({"summary": both})
    assert [line.split(":")[0] for line in lines] == ["num_heads=2", "num_heads=4"]


def test_the_proofs_are_said() -> None:
    lines = check_answers(
        {"max_difference_masked_removed": 2e-14, "min_difference_open_closed": 2.5, "greedy_decoding_disagreements": 0}
    )
    assert len(lines) == 3
    assert "2.0e-14" in lines[0]
    assert check_answers({}) == []


def test_the_page_stands_alone() -> None:
    tables = all_tables() | {"summary": summary()}
    plots = list(draw(tables))
    page = render("ablate on <sort>", ["9 of 24"], plots, tables, {"command": "python x"}, ["proved"])
    assert "ablate on &lt;sort&gt;" in page
    assert page.count('<img src="data:image/svg+xml;base64,') == len(plots)
    assert all(f'alt="{plot.alt or plot.caption}"' in page for plot in plots if "'" not in plot.caption)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<b>pruning</b>, 15 rows" in page
    assert page.index("9 of 24") < page.index("<img") < page.index("<table")
