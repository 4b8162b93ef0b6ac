from __future__ import annotations

import pandas as pd

from made_tables import summary
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.tables import INITIAL_GATE, Tables


def said(tables: Tables) -> list[str]:
    return list(Ablate.say(tables))


def test_the_first_sentence_answers_the_question() -> None:
    lines = said({"summary": summary()})
    assert lines[0].startswith("9 of 24 heads can go at 0.99 exact match (1.00 with all), as chosen by ablation;")
    assert "1.21× as fast (quartiles 1.20–1.22)" in lines[0]
    assert lines[1].startswith("They are (site.layer.head, counted from 0): cross.1.0, cross.1.1, cross.1.2,")
    assert lines[2] == (
        "The largest budget within 0.01 of exact match on the choose split, scorer by scorer: 3 by gate (at 1.00), 9 by"
        " ablation (at 0.99)."
    )
    assert lines[3] == "Agreement with ablation over the heads (Spearman): gate at ρ = 0.44."


def test_that_nothing_can_go_is_said_plainly() -> None:
    lines = said({"summary": summary().assign(heads_removed=0, tolerance=0.01)})
    assert lines[0] == "None of 24 heads can go within 0.01 of the dense model's 1.00 exact match."
    assert lines[1].endswith("scorer by scorer: none by gate, none by ablation.")


def test_gates_that_kept_their_initial_order_are_said() -> None:
    agreement = pd.DataFrame([{"scorer": "gate", "other": INITIAL_GATE, "spearman": 0.71}])
    lines = said({"summary": summary(), "agreement": agreement})
    assert lines[-1] == "The learned gates against what they started from: Spearman ρ = 0.71."


def test_of_several_runs_there_is_a_sentence_each_with_its_name() -> None:
    both = pd.concat([summary().assign(label="num_heads=2"), summary().assign(label="num_heads=4")])
    lines = list(Ablate.say_over_runs({"summary": both}))
    assert [line.split(":")[0] for line in lines] == ["num_heads=2", "num_heads=4"]
