from __future__ import annotations

import pandas as pd

from made_tables import all_tables, refitted, said_over_runs, summary
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.tables import INITIAL_GATE, Tables


def said(tables: Tables) -> list[str]:
    return list(Ablate.say(tables))


def test_the_first_sentence_answers_the_question() -> None:
    lines = said({"summary": summary()})
    assert lines[0].startswith("9 of 24 heads can go at 0.99 exact match (1.00 with all), as chosen by ablation;")
    assert "1.21× as fast (quartiles 1.20–1.22)" in lines[0]
    assert lines[1].startswith("They are (site.layer: heads, counted from 0) cross.1: 0 1 2 3 ")
    assert lines[2] == (
        "The largest budget within 0.01 of exact match on the choose split, scorer by scorer: 3 by gate (at 1.00), 9 by"
        " ablation (at 0.99)."
    )
    assert lines[3] == "Agreement with ablation over the heads (Spearman): gate at ρ = 0.44."


def test_what_one_random_order_allows_is_said_to_be_that() -> None:
    heads = pd.DataFrame({"scorer": ["gate", "gate", "ablation"], "draw": [0, 1, 0], "score": [1.0, 2.0, 3.0]})
    line = next(line for line in said({"summary": summary(), "heads": heads}) if line.startswith("The largest budget"))
    assert line.endswith("3 by the first draw of gate (at 1.00), 9 by ablation (at 0.99).")


def test_a_speed_up_within_the_noise_is_said_to_be_that() -> None:
    after = refitted(summary(), heads_removed=15, speedup=1.4, speedup_q1=1.38, speedup_q3=1.42)
    tables = {"summary": pd.concat([summary().assign(recovery="nothing"), after], ignore_index=True)}
    plain = said(tables)[0]
    ends = (0.98, 1.199, False, False), (0.97, 1.2, True, False), (1.22, 1.38, True, True), (1.221, 1.38, False, True)
    for low, high, best, refit in ends:
        rows = [("ablation", 1.3, 0.1, 9.0), ("dense", 1.0, 1.0, 1.0), ("dense again", 1.0, low, high)]
        latency = pd.DataFrame(rows, columns=["scorer", "speedup", "speedup_q1", "speedup_q3"])
        line = said(tables | {"latency": latency})[0]
        noise = f"; no clear gain, dense against itself: {low:.2f}–{high:.2f})"
        assert (f"1.21× as fast (quartiles 1.20–1.22{noise}" in line) == best
        assert (f"(1.40× as fast{noise}" in line) == refit
        assert line.replace(noise, ")") == plain


def test_what_surely_can_go_is_said_wherever_a_number_of_heads_is() -> None:
    after = refitted(summary(), heads_removed=15, heads_removed_sure=11)
    both = pd.concat([summary().assign(recovery="nothing", heads_removed_sure=[3, 6]), after], ignore_index=True)
    lines = said({"summary": both})
    assert lines[0].startswith("9 of 24 heads can go (6 surely) at 0.99 exact match")
    assert "; after refit 15 can go (11 surely) at " in lines[0]
    assert "scorer by scorer: 3 (3 surely) by gate (at 1.00), 9 (6 surely) by ablation (at 0.99)." in lines[3]
    assert lines[4].startswith("Surely means that the 95 % interval of the exact match lost on the choose split ends")
    none = said({"summary": both.assign(heads_removed_sure=0)})
    assert none[0].startswith("9 of 24 heads can go (none surely) at 0.99")
    old = said({"summary": both.assign(heads_removed_sure=float("nan"))})
    assert old == said({"summary": both.drop(columns="heads_removed_sure")})
    assert not any("surely" in line.lower() for line in old)


def test_a_score_that_ranks_nothing_is_named() -> None:
    """Gates of one head per layer are all 1; that they agree with nothing should not be left out in silence."""
    tables = all_tables()
    alike = tables["heads"]["score"].where(tables["heads"]["scorer"] != "gate", 1.0)
    line = "gate scores all heads alike, so it ranks none of them and agrees with no other score."
    assert line in said({"summary": summary(), "heads": tables["heads"].assign(score=alike)})
    assert line not in said({"summary": summary(), "heads": tables["heads"]})


def test_that_nothing_can_go_is_said_plainly() -> None:
    lines = said({"summary": summary().assign(heads_removed=0, tolerance=0.01)})
    assert lines[0] == "None of 24 heads can go within 0.01 of the dense model's 1.00 exact match."
    assert lines[1].endswith("scorer by scorer: none by gate, none by ablation.")


def test_what_goes_after_a_recovery_is_said_beside_what_goes_without() -> None:
    gone = " ".join(f"cross.1.{n}" for n in range(15))
    after = refitted(summary(), heads_removed=15, removed=gone, quality=0.985, speedup=1.4)
    both = pd.concat([summary().assign(recovery="nothing"), after], ignore_index=True)
    plain, lines = said({"summary": summary()}), said({"summary": both})
    assert lines[0] == plain[0].removesuffix(".") + "; after refit 15 can go at 0.98 (1.40× as fast)."
    assert lines[2] == f"After refit these can go, as chosen by ablation: cross.1: {' '.join(map(str, range(15)))}."
    assert lines[1:2] + lines[3:] == plain[1:], "the rest is about models as they are"
    none = both.assign(heads_removed=0)
    assert said({"summary": none})[0].endswith(" exact match; after refit none can.")


def test_a_recovery_that_failed_is_named() -> None:
    recovered = refitted(summary()).assign(note="diverged, so it is as it was: why")
    assert said({"summary": summary(), "recovered": recovered})[-1] == (
        "refit failed for 1 of the models (diverged, so it is as it was: why)."
    )
    as_read_back = recovered.assign(note=float("nan"))
    assert said({"summary": summary(), "recovered": as_read_back}) == said({"summary": summary()})


def test_runs_from_before_there_were_recoveries_are_said_beside_later_ones() -> None:
    later = pd.concat([summary().assign(recovery="nothing"), refitted(summary(), heads_removed=12)])
    both = pd.concat([summary().assign(label="old"), later.assign(label="new")], ignore_index=True)
    old, new = said_over_runs(Ablate, {"summary": both})
    assert "after refit" not in old
    assert "after refit 12 can go" in new


def test_gates_that_kept_their_initial_order_are_said() -> None:
    agreement = pd.DataFrame([{"scorer": "gate", "other": INITIAL_GATE, "spearman": 0.71}])
    lines = said({"summary": summary(), "agreement": agreement})
    assert lines[-1] == "The learned gates against what they started from: Spearman ρ = 0.71."


def test_of_several_runs_there_is_a_sentence_each_with_its_name() -> None:
    both = pd.concat([summary().assign(label="num_heads=2"), summary().assign(label="num_heads=4")])
    lines = list(said_over_runs(Ablate, {"summary": both}))
    assert [line.split(":")[0] for line in lines] == ["num_heads=2", "num_heads=4"]
