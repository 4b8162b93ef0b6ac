"""The tasks of words as a plug-in: their options, and what their tables and lexicons say."""

import builtins
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune_words.inflection import Inflection, table
from mhaprune_words.pronounce import Pronounce, lexicon, rarely_spelt
from support.composing import compose, every, tables_in
from tasks.test_every_task import decoded_rows

WORDS = "plugins=[mhaprune_words]"


def test_a_task_chooses_its_recipe_and_can_be_overruled() -> None:
    assert build(compose(WORDS, "task=inflection")).training.steps == 1200
    assert build(compose(WORDS, "task=inflection", "training.steps=7")).training.steps == 7
    assert build(compose(WORDS, "task=inflection", "training=default")).training.steps == 600
    assert build(compose(WORDS, "task=pronounce")).model.d_model == 128


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["shift=[longer]"], r"shift=\[longer\]: task inflection has none at all"),
        (["experiment=explain", "example=Walk verb3"], "example='Walk verb3': W is not in the vocabulary"),
    ],
)
def test_what_a_task_does_not_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(compose(WORDS, "task=inflection", *overrides)).prepare()


@pytest.mark.slow
def test_inflection_is_learnt(tmp_path: Path) -> None:
    settings = ["task=inflection", "scorer=[ablation]", "experiment.latency_rounds=1", f"cache={tmp_path / 'cache'}"]
    with RunFolder(tmp_path / "run").recorded() as folder:
        build(compose(WORDS, *settings))(folder)
    table = tables_in(tmp_path / "run")["pruning"]
    assert table.loc[table["heads_removed"] == 0, "quality"].item() >= 0.80


def test_a_kind_without_a_word_is_no_shift() -> None:
    assert list(Pronounce(max_letters=40).shifts()) == ["rare spellings"]


def test_inflection_is_real_and_splits_share_no_lemma() -> None:
    task = Inflection(valid=100, score=100, choose=100, report=100)
    splits = dict(task.splits().items())
    shown = {name: list(map(task.show, s.source.tolist(), s.target.tolist())) for name, s in splits.items()}
    everything = {line for lines in shown.values() for line in lines}
    assert {"walk verb3 -> walks", "child noun0 -> children", "go verb0 -> went", "big adj1 -> biggest"} <= everything
    assert len(shown["train"]) > 30000
    lemmas = [{line.split()[0] for line in lines} for lines in shown.values()]
    assert sum(map(len, lemmas)) == len(set.union(*lemmas))


@pytest.mark.parametrize(
    ("read", "task", "package"), [(table, "inflection", "lemminflect"), (lexicon, "pronounce", "gruut-lang-en")]
)
def test_words_without_their_package_say_how_to_install_it(
    read: Any, task: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"task={task}: needs {package}: pip install 'mhaprune\[words\]'$"):
        read.__wrapped__()


@pytest.mark.parametrize("task", [Inflection, Pronounce])
def test_more_words_than_there_are_are_refused(task: Any) -> None:
    with pytest.raises(ValueError, match="report=99999999: the splits need more than the"):
        task(report=99999999).splits()


def test_inflection_reads_the_table_without_importing_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        assert not name.startswith("lemminflect")
        return plain(name, *arguments, **keywords)

    table.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert Inflection().answer([*"walk", "verb3"]) == "walks"


def test_a_typed_word_is_inflected_as_the_table_says() -> None:
    task = Inflection()
    assert task.read("walk  verb3") == ["w", "a", "l", "k", "verb3"]
    assert "".join(task.answer(["w", "a", "l", "k", "verb3"]) or ()) == "walks"
    assert task.answer(task.read("mhaprune verb3")) is None
    for text in ("walk", "verb3", "walk verb3 verb0", "verb3 walk"):
        with pytest.raises(ValueError, match=f"example='{text}': must be a lemma and one of noun0 .plural"):
            task.read(text)
    with pytest.raises(ValueError, match="example='walk verb9': verb9 is not in the vocabulary"):
        task.read("walk verb9")


def aligned(word: str) -> list[str]:
    """The letters that each phoneme of a word stands for."""
    task = Pronounce()
    encode = task.vocabulary.encode
    places = task.aligned(encode(word), encode(task.answer([*word]) or ()))
    return ["".join(word[i] for i in each) for each in places]


def test_words_are_pronounced_and_aligned_as_the_lexicon_says() -> None:
    task = Pronounce()
    assert task.answer([*"phone"]) == ("f", "oʊ", "n"), "without its stress"
    assert aligned("phone") == ["ph", "o", "n"], "the last letter is silent"
    assert aligned("box") == ["b", "o", "x", "x"], "one letter is two phonemes"
    assert task.answer([*"tomato"]) == ("t", "ə", "m", "eɪ", "t", "oʊ"), "the first of two pronunciations"
    assert task.answer([*"mhaprune"]) is None
    assert list(task.aligned(task.vocabulary.encode("mhaprune"), [])) == []


def test_words_with_a_rare_spelling_are_learnt_nowhere() -> None:
    task = every("task")["pronounce"]
    for _, examples in task.splits().items():
        assert not {"".join(source) for source, _ in decoded_rows(task, examples[:2000])} & rarely_spelt()
    rare, long = (task.shifts()[name] for name in ("rare spellings", "longer words"))
    assert all("".join(source) in rarely_spelt() for source, _ in decoded_rows(task, rare))
    assert min(max(map(len, pair)) for pair in decoded_rows(task, long)) == task.max_letters + 1


def test_an_alignment_of_another_pronunciation_is_not_used() -> None:
    said = {word: entry.phonemes for word, entry in lexicon().items()}
    for word, entry in lexicon().items():
        if entry.spellings:
            letters, sounds = zip(*(part.split("}") for part in entry.spellings), strict=True)
            assert "".join(letters).replace("|", "") == word
            assert [sound for each in sounds for sound in each.split("|") if sound != "_"] == list(said[word])
