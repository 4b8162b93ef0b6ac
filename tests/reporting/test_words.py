"""The meanings of words, tables and columns."""

import pytest

from mhaprune.experiments.base import Experiment
from mhaprune.reporting.words import words
from support.composing import run_of
from support.sizes import options


def test_every_table_of_every_experiment_has_a_meaning_and_no_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.mktemp("cache")
    kinds: dict[str, type[Experiment]] = {name: type(run_of(name, cache).experiment) for name in options("experiment")}
    wrote = {table: {name for name, kind in kinds.items() if table in kind.tables} for table in words().tables}
    assert {name for kind in kinds.values() for name in kind.tables} == set(words().tables)
    same = {"evaluate": "train"}  # one class under two names
    for name, found in wrote.items():
        assert set(words().tables[name]["experiments"]) == {same.get(each, each) for each in found}, name


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
