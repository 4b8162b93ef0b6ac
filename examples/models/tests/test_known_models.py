"""The models that come as packages: their texts are what they are said to be. The weights need not be installed."""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mhaprune_models import dinov2, rxnmapper, smollm2, speech, whisper, word_times
from mhaprune_models.rxnmapper import Rxnmapper
from mhaprune_models.smollm2 import Pair, Smollm2
from mhaprune_models.whisper import Whisper

from mhaprune import losses


class Words:
    """A tokenizer whose tokens are words."""

    eos_token_id = 99

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str, **options: Any) -> Any:
        ids = [self.known.setdefault(word, len(self.known) + 1) for word in text.split()]
        return type("Encoding", (), {"input_ids": ids})()

    def decode(self, ids: list[int]) -> str:
        return f" {next(word for word, at in self.known.items() if at == ids[0])}"


@pytest.mark.parametrize("name", ["repeats", "indirect_object", "agreement", "years", "pronouns"])
def test_pairs_of_texts_have_equal_lengths_and_differ(name: str) -> None:
    pairs = smollm2.pairs_of(name, Smollm2(length=5), Words(), random.Random(0))
    for pair in (next(pairs) for _ in range(20)):
        assert len(pair.text) == len(pair.corrupt)
        assert pair.text != pair.corrupt
        if name == "repeats":
            assert pair.text[:5] == pair.text[5:] == pair.corrupt[5:] != pair.corrupt[:5]
        else:
            assert pair.right != pair.wrong
            changed = [own != other for own, other in zip(pair.text, pair.corrupt, strict=True)]
            assert sum(changed) == 1


def test_the_right_name_is_the_one_who_is_given_something() -> None:
    for seed in range(30):
        text, corrupt, right, wrong = smollm2.indirect_object(random.Random(seed))
        names = [word.strip(",") for word in text.split() if word.strip(",") in smollm2.NAMES.split()]
        assert sorted(names) == sorted([right.strip(), wrong.strip(), wrong.strip()]), "the giver is named twice"
        others = [word.strip(",") for word in corrupt.split() if word.strip(",") in smollm2.NAMES.split()]
        assert len(set(others)) == 3, "in the counterpart nobody is"
        text, corrupt, right, wrong = smollm2.agreement(random.Random(seed))
        assert (text.split()[1][-1] == "s") == (right == " are") != (corrupt.split()[1][-1] == "s")


def test_the_right_decade_is_a_later_one_and_the_right_pronoun_that_of_the_name() -> None:
    for seed in range(30):
        text, corrupt, right, wrong = smollm2.years(random.Random(seed))
        begun, others = (words.split("year 17")[1][:2] for words in (text, corrupt))
        assert int(wrong) < int(begun[0]) < int(right)
        assert others == "01", "after which any decade may come"
        text, corrupt, right, wrong = smollm2.pronouns(random.Random(seed))
        hers = [words.split()[1] in smollm2.HERS.split() for words in (text, corrupt)]
        assert hers == [right == " she", wrong == " she"]


def test_texts_in_a_batch_are_padded_on_the_right_and_the_loss_reads_what_is_asked() -> None:
    pairs = [Pair([5, 6, 7], [5, 9, 7], 1, 2), Pair([5, 6, 7, 8], [5, 9, 7, 8], 2, 1)]
    batch = smollm2.batch_of(pairs, "agreement")
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [5, 6, 7, 8]]
    logits = torch.zeros(2, 4, 10)
    logits[0, 2, 1], logits[1, 3, 1] = 3.0, 2.0
    output = {"logits": logits[torch.arange(2), batch["attention_mask"].sum(dim=1) - 1]}
    assert smollm2.contrast(output, batch).tolist() == [-3.0, 2.0]
    assert losses.unit_of(smollm2.contrast) == "nats"
    assert smollm2.right_word(output, batch).tolist() == [1.0, 0.0]
    labels = smollm2.batch_of([Pair([1, 2, 3, 1, 2, 3], [4, 5, 6, 1, 2, 3])], "repeats")["labels"]
    assert labels.tolist() == [[-100, -100, -100, -100, 2, 3]]


def test_a_reaction_keeps_its_atoms_but_for_what_leaves_and_only_masks_are_asked_for() -> None:
    found = rxnmapper.reactions(random.Random(0))
    assert len({str(each) for each in found}) == len(found) > 300
    for each in found:
        before, after = (sum(bool(rxnmapper.ATOM.match(token)) for token in part) for part in each)
        assert before - after == 1, "one atom leaves"
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", ">>", *sorted({t for each in found for part in each for t in part})]
    ids = {word: n for n, word in enumerate(words)}
    clean, corrupt = Rxnmapper(masked=2).batches_of(found[:16], found, ids, random.Random(0))
    masked = clean["input_ids"] == ids["[MASK]"]
    assert torch.equal(masked, clean["labels"] != -100)
    assert (masked.sum(dim=1) == 2).all()
    for row, own, other in zip(range(16), clean["input_ids"].tolist(), corrupt["input_ids"].tolist(), strict=True):
        arrow = own.index(ids[">>"])
        assert own[arrow:] == other[arrow:], "the product is the same"
        assert own[:arrow] != other[:arrow]
        assert clean["attention_mask"][row].sum() == len(own) - own.count(0)


def test_a_file_of_weights_is_read_and_joined_projections_are_taken_apart(tmp_path: Path) -> None:
    def text(words: str) -> bytes:
        return struct.pack("<H", len(words) + 1) + words.encode() + b"\0"

    width, values = 2, np.arange(12, dtype=np.float16).reshape(6, 2)
    name = "decoder/layer_3/self_attention/linear_0/weight"
    head = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, 1)
    shape = struct.pack("<BIIBI", 2, 6, 2, 4, values.nbytes)
    (tmp_path / "model.bin").write_bytes(head + text(name) + shape + values.tobytes())
    ((found, read),) = whisper.variables(tmp_path / "model.bin")
    assert (found, read.tolist()) == (name, values.tolist())
    weights = {name: torch.from_numpy(read.astype(np.float32)), "decoder/scale_embeddings": torch.zeros(1)}
    parts = dict(whisper.renamed(weights, width))
    assert {key.split(".")[-2]: part.tolist() for key, part in parts.items()} == {
        "q_proj": [[0, 1], [2, 3]],
        "k_proj": [[4, 5], [6, 7]],
        "v_proj": [[8, 9], [10, 11]],
    }
    assert set(parts) == {f"model.decoder.layers.3.self_attn.{each}_proj.weight" for each in "qkv"}


def test_the_decoder_reads_what_it_should_write_one_token_before() -> None:
    batch = speech.written([["one", "two", "three"], ["one"]], Words(), [50, 51])
    reads, labels = batch["decoder_input_ids"], batch["labels"]
    assert reads.tolist() == [[50, 51, 1, 2, 3, 99], [50, 51, 1, 99, 99, 99]]
    assert labels[0].tolist() == [-100, 1, 2, 3, 99, -100]
    assert labels[1].tolist() == [-100, 1, 99, -100, -100, -100]
    assert batch["words"].tolist() == [[-1, 0, 1, 2, -1, -1], [-1, 0, -1, -1, -1, -1]]


def test_punctuation_belongs_to_no_word_but_where_it_is_all_there_is() -> None:
    class Pieces(Words):
        def __call__(self, text: str, **options: Any) -> Any:
            return super().__call__(text.replace(".", " ."), **options)

    batch = speech.written([["one.", "...", "two"]], Pieces(), [50])
    assert batch["words"].tolist() == [[0, -1, 1, 1, 1, 2, -1, -1]]


def test_parts_of_letters_are_spoken() -> None:
    class Parts(Words):
        def decode(self, ids: list[int]) -> str:
            return {1: " \ufffd", 2: "\ufffd", 3: "a", 4: "!"}[ids[0]]

        def __call__(self, text: str, **options: Any) -> Any:
            return type("Encoding", (), {"input_ids": [1, 2, 3, 4]})()

    assert speech.written([["ça!"]], Parts(), [50])["words"].tolist() == [[0, 0, 0, -1, -1, -1]]


def test_a_word_is_right_if_all_its_tokens_are_and_full_stops_do_not_count() -> None:
    words = torch.tensor([[-1, 0, 0, 1, -1], [-1, 0, -1, -1, -1]])
    labels = torch.tensor([[-100, 5, 6, 7, 8], [-100, 5, 8, -100, -100]])
    says = torch.tensor([[1, 5, 9, 7, 9], [1, 5, 9, 9, 9]])
    output = type("Output", (), {"logits": torch.nn.functional.one_hot(says, 10).float()})()
    assert whisper.words_right(output, {"labels": labels, "words": words}).tolist() == [0.5, 1.0]


def test_a_token_belongs_to_the_frames_in_which_its_word_is_said() -> None:
    words, times = torch.tensor([[-1, 0, 1, 1]]), torch.tensor([[[0.0, 1.0], [1.0, 2.5]]])
    inside = word_times.said(words, times, frames=125)
    assert inside[0, 1].nonzero().flatten().tolist() == [*range(50)]
    assert inside[0, 2].nonzero().flatten().tolist() == inside[0, 3].nonzero().flatten().tolist() == [*range(50, 125)]


def test_espeak_says_when_each_word_is_said() -> None:
    try:
        said = speech.spoken(" A tall soldier painted a heavy box in the morning.")
    except ValueError as error:
        pytest.skip(str(error))
    times = said.times or ()
    assert len(times) == len(said.words) == 10, "words that are said as one, 'in the', have the same times"
    starts = [start for start, _ in times]
    assert starts == sorted(starts)
    assert len(set(times)) >= 9
    assert all(0 <= start < end <= said.seconds + 0.01 for start, end in times)


@pytest.mark.parametrize(("model", "module"), [(Smollm2(), smollm2), (Rxnmapper(), rxnmapper), (Whisper(), whisper)])
def test_a_package_that_is_missing_and_foreign_data_are_said_in_one_line(
    model: Any, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "FOLDER", tmp_path / "nothing")
    with pytest.raises(ValueError, match=rf"^model={model.title}: (is not installed|needs transformers): pip install"):
        model.read(None, None, str(tmp_path))
    if module is not whisper:  # it reads speech
        with pytest.raises(ValueError, match=rf"^data=a.txt: model={model.title} has \w+ of its own, leave it out"):
            model.read("a.txt", None, str(tmp_path))
    with pytest.raises(ValueError, match=rf"^objective=poetry: model={model.title} is judged by \w+"):
        model.read(None, "poetry", str(tmp_path))


def test_digits_become_images_and_a_probe_tells_states_apart() -> None:
    pixels = torch.zeros(2, 8, 8)
    pixels[1] = 16
    made = dinov2.images(pixels)
    assert made.shape == (2, 3, dinov2.PIXELS, dinov2.PIXELS)
    for image, value in zip(made, (-2.0, 0.55 / 0.225), strict=True):
        torch.testing.assert_close(image, torch.full_like(image, value), atol=1e-5, rtol=0)
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = torch.nn.Linear(6, 10)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.classifier(states)

    centres, labels = torch.randn(10, 6), torch.arange(10).repeat(30)
    states = centres[labels] + 0.01 * torch.randn(300, 6)
    weight, bias = dinov2.probe(Model(), states, labels, ridge=1e-6)
    X = torch.cat([states, torch.ones(300, 1)], dim=1).double()
    expected = torch.linalg.lstsq(X, 10 * torch.nn.functional.one_hot(labels, 10).double() - 5).solution
    torch.testing.assert_close(torch.cat([weight.T, bias[None]]).double(), expected, atol=1e-2, rtol=1e-2)


def test_the_weights_of_dinov2_fit_its_class() -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    if not dinov2.FILE.is_file():
        pytest.skip(dinov2.INSTALL)
    found = dinov2.weights()
    expected = transformers.Dinov2Model(transformers.Dinov2Config(**dinov2.SIZES)).state_dict()
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in expected.items()}


def test_logits_are_computed_where_the_loss_reads_them_and_equal_all_others() -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 6, 4)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head, self.seen = torch.nn.Linear(4, 10), 0

        def model(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
            return type("States", (), {"last_hidden_state": states})()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> Any:
            self.seen = logits_to_keep
            return type("Output", (), {"logits": self.lm_head(states[:, -logits_to_keep:])})()

    model = Model()
    pairs = [Pair([1, 2, 3, 1, 2, 3], [4, 5, 6, 1, 2, 3], 1, 2)] * 2
    batch = smollm2.batch_of(pairs, "repeats")
    found, whole = smollm2.called(model, batch), {"logits": model.lm_head(states)}
    assert model.seen == 3, "from the token before the first label on"
    torch.testing.assert_close(*(smollm2.losses.language_model(each, batch) for each in (found, whole)))
    asked = smollm2.batch_of(pairs, "agreement")
    torch.testing.assert_close(smollm2.called(model, asked)["logits"], whole["logits"][:, -1])


def test_a_language_model_is_judged_by_its_own_next_tokens() -> None:
    logits, labels = torch.randn(2, 4, 5), torch.tensor([[0, 3, -100, 1], [2, -100, 4, 0]])
    logs = logits.log_softmax(dim=-1)
    expected = torch.stack([logs[0, 0, 3] + logs[0, 2, 1], logs[1, 1, 4] + logs[1, 2, 0]]) / -2
    found = smollm2.losses.language_model(logits, {"labels": labels, "input_ids": labels})
    torch.testing.assert_close(found, expected)
