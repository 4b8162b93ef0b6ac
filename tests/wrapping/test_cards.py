"""The numbers of a saved model's card, measured again."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from torch import nn

import mhaprune
from mhaprune import losses
from mhaprune.saving.model_card import front_matter
from support.classifier import batches, classifier

REPORT = batches(2, 2)


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
    model.config = type("Config", (), {"_name_or_path": "someone/something"})()  # type: ignore[assignment]
    mhaprune.save(model, tmp_path / "hub", about={"license": "mit", "tags": ["a: b"]})
    assert front_matter(tmp_path / "hub") == {
        "library_name": "pytorch",
        "tags": ["a: b"],
        "base_model": "someone/something",
        "license": "mit",
    }
    vars(model.config)["_name_or_path"] = str(tmp_path / "hub")
    mhaprune.save(model, tmp_path / "next")
    assert front_matter(tmp_path / "next") == {
        "library_name": "pytorch",
        "tags": ["mhaprune"],
        "base_model": "someone/something",
        "license": "mit",
    }
    assert str(tmp_path) not in (tmp_path / "next" / "README.md").read_text(), "a path is private"


@pytest.mark.parametrize("front", ["- 1", "model-index: 3", "model-index: [{results: 1}]", "a: [", "'"])
def test_a_front_matter_may_be_anything(folder: Path, front: str) -> None:
    card = folder / "README.md"
    card.write_text(f"---\n{front}\n---\n{card.read_text().split('---', 2)[2]}")
    assert verified(folder)["agrees"].dropna().all()


def test_what_cannot_be_verified(folder: Path, heads: Any) -> None:
    with pytest.raises(ValueError, match="whole=None: this loss compares with the whole model"):
        mhaprune.verify(folder, losses.drift, REPORT, model=classifier())
    (folder / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"has no README.md of mhaprune.save"):
        verified(folder)
