"""The numbers of a saved model's card, measured again."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import mhaprune
from mhaprune import losses
from mhaprune.saving.model_card import front_matter
from support.classifier import batches, classifier

REPORT = batches(2, 2)
DRIFT = losses.Drift(represent=lambda output, batch: output["logits"])


@pytest.fixture(scope="module")
def heads() -> Any:
    return mhaprune.wrap(classifier(), losses.classification, score=batches(2, 0), choose=batches(2, 1), report=REPORT)


@pytest.fixture
def folder(heads: Any, tmp_path: Path) -> Path:
    mask = heads.mask(keep=5)
    mhaprune.save(heads.prune(mask=mask), tmp_path, table=heads.evaluate(heads.mask(keep=3), mask))
    return tmp_path


def verified(folder: Path, whole: nn.Module | None = None, **more: Any) -> pd.DataFrame:
    return mhaprune.verify(folder, losses.classification, REPORT, model=classifier(), whole=whole, **more)


def test_a_card_agrees_with_what_it_was_made_from_and_each_altered_number_is_found(folder: Path) -> None:
    found = verified(folder, classifier())
    assert found["agrees"].dropna().all()
    assert found.loc[found["agrees"].isna(), "number"].str.startswith("row 2 ").all(), "of another mask"
    card = (folder / "README.md").read_text()
    other = card.index("| 3 | "), card.index("\n", card.index("| 3 | "))
    prose = [(place.start(), place.end()) for place in re.finditer(r"counted from 0|, with mhaprune.*", card)]
    places = re.finditer(r"\d+(?=[\s:,|])", card)
    facts = [place for place in places if not any(low <= place.start() < high for low, high in (other, *prose))]
    assert len(facts) > 20
    for place in facts[:: len(facts) // 20]:
        digit = str((int(place[0][-1]) + 1) % 10)
        (folder / "README.md").write_text(f"{card[: place.end() - 1]}{digit}{card[place.end() :]}")
        altered = verified(folder, classifier())
        assert (altered["agrees"] == False).any(), (place, card[place.start() - 60 : place.end() + 10])  # noqa: E712
    (folder / "README.md").write_text(card)
    assert verified(folder)["agrees"].isna().sum() > found["agrees"].isna().sum(), "the row of the whole model"


def test_a_row_of_the_mask_is_not_of_the_model_that_was_refitted(heads: Any, tmp_path: Path) -> None:
    mask = heads.mask(keep=5)
    small = heads.prune(mask=mask, refit=True)
    mhaprune.save(small, tmp_path / "mask", table=heads.evaluate(mask))
    assert "model-index" not in front_matter(tmp_path / "mask")
    found = verified(tmp_path / "mask").set_index("number")["agrees"]
    assert found["row 2 loss"] is None
    again = mhaprune.wrap(small, losses.classification, score=batches(2, 0), report=REPORT)
    mhaprune.save(small, tmp_path / "small", table=again.evaluate())
    assert "model-index" in front_matter(tmp_path / "small")
    assert verified(tmp_path / "small").set_index("number")["agrees"]["row 1 loss"]


def test_what_a_hub_reads(folder: Path, tmp_path: Path) -> None:
    row = front_matter(folder)["model-index"][0]
    metrics = {each["type"]: each["value"] for each in row["results"][0]["metrics"]}
    table = (folder / "README.md").read_text().splitlines()[-1].split(" | ")
    assert metrics == {"accuracy": float(table[4]), "loss": float(table[1])}
    model = classifier()
    model.config = type("Config", (), {"_name_or_path": "someone/something", "_commit_hash": "1f"})()  # type: ignore[assignment]
    mhaprune.save(model, tmp_path / "hub", about={"license": "mit", "tags": ["a: b"]})
    assert front_matter(tmp_path / "hub") == {
        "library_name": "pytorch",
        "tags": ["a: b"],
        "base_model": "someone/something",
        "license": "mit",
    }
    vars(model.config).update(_name_or_path="private/folder", _commit_hash=None)
    mhaprune.save(model, tmp_path / "private")
    assert "base_model" not in front_matter(tmp_path / "private"), "no hub has given it"
    vars(model.config)["_name_or_path"] = str(tmp_path / "hub")
    mhaprune.save(model, tmp_path / "next")
    assert front_matter(tmp_path / "next") == {
        "library_name": "pytorch",
        "tags": ["mhaprune"],
        "base_model": "someone/something",
        "license": "mit",
    }
    assert str(tmp_path) not in (tmp_path / "next" / "README.md").read_text(), "a path is private"


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
ODD = [
    "- 1",
    "model-index: 3",
    "model-index: [{results: 1}]",
    "model-index: [{results: [{metrics: [3]}]}]",
    "a: [",
    "'",
]
ODD += ["date: 2024-02-30", "a: !!int x", "a: " + 3000 * "[", f"{BOMB}\nlicense: *a11", f"n: {5000 * '1'}"]


@pytest.mark.parametrize("front", ODD, ids=range(len(ODD)))
def test_a_front_matter_may_be_anything(folder: Path, front: str, tmp_path: Path) -> None:
    card = folder / "README.md"
    card.write_bytes(f"---\n{front}\n---\n{card.read_text().split('---', 2)[2]}\x1b[2J".encode() + b"\xff")
    found = verified(folder)
    assert found["agrees"].dropna().all()
    assert "\x1b" not in repr(found)
    model = classifier()
    model.config = type("Config", (), {"_name_or_path": str(folder)})()  # type: ignore[assignment]
    mhaprune.save(model, tmp_path / "again")
    assert "license" not in front_matter(tmp_path / "again")


TABLES = [
    pd.DataFrame({"task": ["sst2"], "accuracy": [0.9]}),
    pd.DataFrame({"heads_kept": [5], "quality": ["58 %"], "loss": [None], "removed": ["half of it"]}),
    pd.DataFrame([[5, 5]], columns=["heads_kept", "heads_kept"]),
    pd.DataFrame({"heads_kept": [5], "quality": [0.5], "loss": [0.1], "removed": ["attention.1.1"], "worst": ["no"]}),
    pd.DataFrame(),
]


@pytest.mark.parametrize("table", TABLES, ids=range(len(TABLES)))
def test_a_table_may_be_anything_too(heads: Any, table: pd.DataFrame, tmp_path: Path) -> None:
    mhaprune.save(heads.prune(keep=5), tmp_path / "small", table=table)
    assert "model-index" not in front_matter(tmp_path / "small")
    verified(tmp_path / "small")
    with pytest.raises(ValueError, match=r"^about=\{'x': .*\}: must be texts, numbers and lists of them"):
        mhaprune.save(heads.prune(keep=5), tmp_path / "none", about={"x": Path("a")})
    assert not (tmp_path / "none").exists()


def test_a_measure_and_a_call_of_ones_own_and_a_column_with_a_bar(tmp_path: Path) -> None:
    def hits(output: Any, batch: Any) -> Any:
        return (output.argmax(-1) == batch["labels"]).float() / 2

    def call(network: Any, batch: Any) -> Any:
        return network(batch["input_ids"], batch["attention_mask"])["logits"]

    def loss(output: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(output, batch["labels"], reduction="none")

    own: Any = {"quality": hits, "call": call}
    heads = mhaprune.wrap(classifier(), loss, score=batches(2, 0), report=REPORT, **own)
    mask = heads.mask(keep=5)
    mhaprune.save(heads.prune(mask=mask), tmp_path, table=heads.evaluate(mask).assign(**{"a|b": "c|d"}))
    found = mhaprune.verify(tmp_path, loss, REPORT, model=classifier(), **own).set_index("number")
    assert found["agrees"].dropna().all()
    assert found.loc["row 2 quality", "agrees"]
    assert found.loc["row 1 a|b", "card"] == "c|d"


def test_numbers_of_another_mask_are_not_published(heads: Any, tmp_path: Path) -> None:
    ours, other = heads.mask(keep=5), heads.mask(keep=5, by="random")
    assert ours != other
    mhaprune.save(heads.prune(mask=ours), tmp_path / "small", table=heads.evaluate(other))
    assert "model-index" not in front_matter(tmp_path / "small")
    assert not verified(tmp_path / "small")["agrees"].dropna().all()


def test_kinds_rounded_tables_and_a_model_that_was_pruned_twice(tmp_path: Path) -> None:
    kinds = {"near": batches(2, 2), "far": batches(2, 3)}
    heads = mhaprune.wrap(classifier(), losses.classification, score=batches(2, 0), report=kinds)
    for keep in (2, 5):
        mask = heads.mask(keep=keep)
        mhaprune.save(heads.prune(mask=mask), tmp_path / "kinds", table=heads.evaluate(mask).round(2))
        found = mhaprune.verify(tmp_path / "kinds", losses.classification, kinds, model=classifier())
        assert found["agrees"].dropna().all()
        assert found["number"].str.startswith("model-index").sum() == 2
    again = mhaprune.wrap(heads.prune(keep=5), losses.classification, score=batches(2, 0), report=REPORT)
    mask = again.mask(keep=3)
    for table in (heads.evaluate(), again.evaluate(mask)):
        mhaprune.save(again.prune(mask=mask), tmp_path / "twice", table=table)
        assert verified(tmp_path / "twice")["agrees"].dropna().all()


def test_the_second_removal_begins_with_what_the_first_left(heads: Any, tmp_path: Path) -> None:
    again = mhaprune.wrap(heads.prune(keep=5), losses.classification, score=batches(2, 0))
    mhaprune.save(again.prune(keep=3), tmp_path)
    assert verified(tmp_path)["agrees"].all()
    card = tmp_path / "README.md"
    card.write_text(card.read_text().replace("- 2 of 5 heads", "- 2 of 6 heads"))
    assert not verified(tmp_path)["agrees"].all()


def test_a_licence_is_a_short_name(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit, see http://evil.example\nbase_model: a/b c\n---\n")
    model = classifier()
    model.config = type("Config", (), {"_name_or_path": str(tmp_path)})()  # type: ignore[assignment]
    mhaprune.save(model, tmp_path / "again")
    assert not {"license", "base_model"} & front_matter(tmp_path / "again").keys()


LIES = {
    "a line is missing": ("\n- 3 of 8 heads: ", "\n3 of 8 heads: "),
    "heads of one block only": ("3 of 8 heads: attention.0: 0 2, attention.1: 1", "1 of 8 heads: attention.1: 1"),
    "fewer than are left": ("3 of 8 heads", "3 of 4 heads"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_card_without_a_table_says_of_the_removal(heads: Any, lie: str, tmp_path: Path) -> None:
    mhaprune.save(heads.prune(mask={0: [0, 2], 1: [1]}), tmp_path / "small")
    assert verified(tmp_path / "small")["agrees"].all()
    card = tmp_path / "small" / "README.md"
    assert LIES[lie][0] in card.read_text()
    card.write_text(card.read_text().replace(*LIES[lie]))
    assert not verified(tmp_path / "small")["agrees"].all()


def test_a_drift_is_measured_with_the_whole_model_which_stays_as_it_is(tmp_path: Path) -> None:
    given = REPORT
    heads = mhaprune.wrap(classifier(), DRIFT, score=given, report=given)
    mask, whole = heads.mask(keep=5, by="gate_output"), classifier().train()
    mhaprune.save(heads.prune(mask=mask), tmp_path / "small", table=heads.evaluate(mask))
    found = mhaprune.verify(tmp_path / "small", DRIFT, given, model=classifier(), whole=whole)
    assert found["agrees"].all()
    assert whole.training


def test_heads_of_an_encoder_decoder_and_the_line_for_its_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 20}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    ids = (torch.arange(24).reshape(4, 6) % 19) + 1
    batch = {"input_ids": ids, "labels": ids}
    heads = mhaprune.wrap(model, losses.seq2seq, score=[batch], report=[batch])
    mask = [str(head) for head in heads.grid if head.head == 1]

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    small: Any = heads.prune(mask=[*mask, str(heads.grid.heads[0])])
    mhaprune.save(small, tmp_path / "small", Tokenizer())
    assert mhaprune.verify(tmp_path / "small", losses.seq2seq, [batch])["agrees"].all()
    line = "`AutoTokenizer.from_pretrained(folder, trust_remote_code=True)`"
    assert line in (tmp_path / "small" / "README.md").read_text()


def test_what_cannot_be_verified(folder: Path, heads: Any) -> None:
    with pytest.raises(ValueError, match="whole=None: this loss compares with the whole model"):
        mhaprune.verify(folder, losses.drift, REPORT, model=classifier())
    (folder / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"has no README.md of mhaprune.save"):
        verified(folder)
