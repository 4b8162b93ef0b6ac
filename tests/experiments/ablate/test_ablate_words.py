from __future__ import annotations

import pandas as pd

from made_tables import all_tables, refitted, said_over_runs, summary
from mhaprune.experiments.ablate.study import Ablate
from mhaprune.tables import INITIAL_GATE, Tables


def said(tables: Tables) -> list[str]:
    return list(Ablate.say(tables))


def test_the_first_sentence_answers_the_question() -> None:
    lines = said({"summary": summary()})
    assert lines[0] == "9 of 24 heads can go: 0.993 exact match is left on the report split (1.000 with all)."
    assert lines[1].startswith("They are, as chosen by ablation (site.layer: heads, counted from 0), cross.1: 0 1 2 3 ")
    assert lines[2].endswith("1.21× as fast (quartiles 1.20–1.22).")
    assert lines[3].endswith(": 3 by gate (1.000), 9 by ablation (0.993).")
    assert lines[4] == "Agreement with ablation over the heads (Spearman): gate at ρ = 0.44."


def test_what_one_random_order_allows_is_said_to_be_that() -> None:
    heads = pd.DataFrame({"scorer": ["gate", "gate", "ablation"], "draw": [0, 1, 0], "score": [1.0, 2.0, 3.0]})
    line = next(line for line in said({"summary": summary(), "heads": heads}) if line.startswith("The largest budget"))
    assert line.endswith("3 by the first draw of gate (1.000), 9 by ablation (0.993).")


def test_a_speed_up_within_the_noise_is_said_to_be_that() -> None:
    after = refitted(summary(), heads_removed=15, speedup=1.4, speedup_q1=1.38, speedup_q3=1.42)
    tables = {"summary": pd.concat([summary().assign(recovery="nothing"), after], ignore_index=True)}
    ends = (0.98, 1.199, False, False), (0.97, 1.2, True, False), (1.22, 1.38, True, True), (1.221, 1.38, False, True)
    for low, high, best, refit in ends:
        rows = [("ablation", 1.3, 0.1, 9.0), ("dense", 1.0, 1.0, 1.0), ("dense again", 1.0, low, high)]
        latency = pd.DataFrame(rows, columns=["scorer", "speedup", "speedup_q1", "speedup_q3"]).assign(
            timed_examples=32
        )
        plain, after_refit = (
            line for line in said(tables | {"latency": latency}) if "1.21×" in line or "1.40×" in line
        )
        noise = f"no clear gain: the dense model against itself is at {low:.2f}–{high:.2f}."
        assert (noise in plain) == best
        assert "greedy decoding of 32 examples is 1.21×" in plain
        assert (noise in after_refit) == refit


def test_what_surely_can_go_is_said_of_the_largest_budgets_alone() -> None:
    """Beside the counts of several scorers it would read as if it compared them."""
    after = refitted(summary(), heads_removed=15, heads_removed_sure=11)
    both = pd.concat([summary().assign(recovery="nothing", heads_removed_sure=[3, 6]), after], ignore_index=True)
    lines = said({"summary": both})
    assert lines[0].startswith("9 of 24 heads can go (6 surely): 0.993 exact match")
    assert lines[3].startswith("After refit 15 can go (11 surely): ")
    assert "surely" not in lines[4]
    assert lines[5].startswith("Surely means that the 95 % interval of the exact match lost on the choose split ends")
    none = said({"summary": both.assign(heads_removed_sure=0)})
    assert none[0].startswith("9 of 24 heads can go (none surely): ")
    for widest, small in ((0.0148, True), (0.0074, False)):  # of 256 equal answers, and of 512
        pruning = pd.DataFrame({"heads_removed": [0, 0, 3], "choose_drop_high": [widest, float("nan"), 0.5]})
        lines = said({"summary": both.assign(heads_removed_sure=0), "pruning": pruning})
        assert any("None can be sure" in line and "0.015" in line for line in lines) == small
    old = said({"summary": both.assign(heads_removed_sure=float("nan"))})
    assert old == said({"summary": both.drop(columns="heads_removed_sure")})
    assert not any("surely" in line.lower() for line in old)
    nothing = said({"summary": both.assign(heads_removed=0, heads_removed_sure=0)})
    assert not any("surely" in line.lower() for line in nothing), "no number is sure, so it needs no explanation"


def test_a_score_that_ranks_nothing_is_named() -> None:
    """Gates of one head per layer are all 1; that they agree with nothing should not be left out in silence."""
    tables = all_tables()
    alike = tables["heads"]["score"].where(tables["heads"]["scorer"] != "gate", 1.0)
    line = "gate scores all heads alike, so it ranks none of them and agrees with no other score."
    assert line in said({"summary": summary(), "heads": tables["heads"].assign(score=alike)})
    assert line not in said({"summary": summary(), "heads": tables["heads"]})


def test_that_nothing_can_go_is_said_plainly() -> None:
    lines = said({"summary": summary().assign(heads_removed=0, tolerance=0.01)})
    assert lines[0] == "None of 24 heads can go within 0.01 of the dense model's 1.000 exact match."
    assert lines[1].endswith("none by gate, none by ablation.")


def test_what_goes_after_a_recovery_is_said_beside_what_goes_without() -> None:
    gone = " ".join(f"cross.1.{n}" for n in range(15))
    after = refitted(summary(), heads_removed=15, removed=gone, quality=0.985, speedup=1.4)
    both = pd.concat([summary().assign(recovery="nothing"), after], ignore_index=True)
    plain, lines = said({"summary": summary()}), said({"summary": both})
    assert lines[3].startswith("After refit 15 can go: 0.985 exact match is left.")
    assert (
        f"as chosen by ablation (site.layer: heads, counted from 0), cross.1: {' '.join(map(str, range(15)))}."
        in lines[3]
    )
    assert "1.40× as fast" in lines[3]
    assert lines[:3] + lines[4:] == plain, "the rest is about models as they are"
    none = both.assign(heads_removed=0)
    assert "After refit none can go." in said({"summary": none})


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
    assert old.startswith("old: 9 of 24")
    assert new.startswith("new: 9 of 24")
    assert list(Ablate.say({"summary": later.reset_index(drop=True)}))[3].startswith("After refit 12 can go")


def test_gates_that_kept_their_initial_order_are_said() -> None:
    agreement = pd.DataFrame([{"scorer": "gate", "other": INITIAL_GATE, "spearman": 0.71}])
    lines = said({"summary": summary(), "agreement": agreement})
    assert lines[-1] == "The learned gates against what they started from: Spearman ρ = 0.71."


def test_of_several_runs_there_is_a_sentence_each_with_its_name() -> None:
    both = pd.concat([summary().assign(label="num_heads=2"), summary().assign(label="num_heads=4")])
    lines = list(said_over_runs(Ablate, {"summary": both}))
    assert [line.split(":")[0] for line in lines] == ["num_heads=2", "num_heads=4"]
