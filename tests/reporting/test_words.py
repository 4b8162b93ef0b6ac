"""The meanings of words, tables and columns."""

from mhaprune.lab.reporting.words import words


def test_a_column_is_known_with_and_without_an_ending() -> None:
    quality = words().column("quality")
    assert quality
    assert words().column("quality_low") == f"{quality} Here its lower end of the 95 % interval."
    assert words().column("gate_cross.1.2") == "Gate of the head cross.1.2."
    assert words().column("speedup_q3").endswith("Here its upper quartile.")
    assert words().column("a_plug_ins_own") == words().column("a_plug_ins_own_low") == ""


def test_terms_are_found_as_whole_words_in_any_case() -> None:
    found = words().used_in("12 heads Can be removed at 95 % confidence, chosen by gate_output: a rise of 0.2 nats.")
    assert list(found) == ["at 95 % confidence", "can be removed", "gate_output", "head", "nats"]
    assert "gate" not in found
    assert words().used_in("nothing of this kind") == {}
