"""The heads that align words and sound: found where they were planted, with and without the times of words."""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from mhaprune_models import alignment_heads
from mhaprune_models.alignment_heads import AlignmentHeads, copied, heard, judged, mean_errors
from mhaprune_models.alignment_report import (
    ALL,
    CHOSEN,
    PUBLISHED,
    RANDOM,
    UNTIMED,
    errors_of_heads,
    headline,
    say,
    sizes,
    words,
)
from mhaprune_models.time_warping import FRAMES, begins, of_words, standardised

from mhaprune.heads import BlockId, HeadGrid
from mhaprune.inputs import Known
from mhaprune.lab.experiments.base import Setup
from mhaprune.lab.runs.run import build
from mhaprune.lab.sources.pretrained import PretrainedSource
from mhaprune.subject import AttentionMap
from mhaprune.subjects.batches import Batches
from sounds import sound
from support.composing import compose

PLUGIN = "plugins=[mhaprune_models]"


def paths(tokens: int, frames: int) -> Any:
    """Yield every path from the first cell to the last one."""
    stack = [[(0, 0)]]
    while stack:
        path = stack.pop()
        if path[-1] == (tokens - 1, frames - 1):
            yield path
        t, f = path[-1]
        nexts = [(t + 1, f + 1), (t + 1, f), (t, f + 1)]
        stack += [[*path, (i, j)] for i, j in nexts if i < tokens and j < frames]


def test_the_path_is_the_best_of_all_paths() -> None:
    likeness = np.random.default_rng(0).normal(size=(5, 3, 5))
    for one, found in zip(likeness, begins(likeness), strict=True):
        best = max(paths(3, 5), key=lambda path: sum(one[cell] for cell in path))
        assert [min(f for t, f in best if t == row) for row in range(3)] == found.tolist()


def test_weights_are_compared_over_tokens_and_smoothed_over_frames() -> None:
    weights = torch.rand(2, 4, 9)
    found = standardised(weights)
    shares = (weights / weights.sum(dim=-1, keepdim=True)).numpy()
    scaled = (shares - shares.mean(axis=1, keepdims=True)) / shares.std(axis=1, keepdims=True)
    np.testing.assert_allclose(found[1, 2, 4], np.median(scaled[1, 2, 1:8]), rtol=1e-4)
    np.testing.assert_allclose(found[0, 3, 0], np.median([*scaled[0, 3, 3:0:-1], *scaled[0, 3, :4]]), rtol=1e-4)


def test_a_word_ends_where_the_next_token_begins() -> None:
    found = of_words(np.array([[0.0, 1, 2, 5, 7, 8]]), np.array([0, 0, 1, 2, -1, -1]))
    assert found.tolist() == [[[0, 2], [2, 5], [5, 7]]]


BLOCKS = [BlockId("encoder.self_attn", 0), BlockId("decoder.encoder_attn", 0), BlockId("decoder.encoder_attn", 1)]
GRID = HeadGrid.full(BLOCKS, 6)
ALIGN, LATE = frozenset({(0, 4), (1, 1), (1, 5)}), frozenset({(0, 2), (1, 0)})
"""Layer and head of those that look at the sound of the word, and of those that do so 0.2 s late."""


class Listener:
    """A subject whose cross-attention looks where it was planted, at words of `times`; in the examples of some splits
    other heads do. Beyond the end of the sound all heads look most."""

    grid = GRID

    def __init__(self, other: Mapping[int, Collection[tuple[int, int]]] | None = None) -> None:
        self.other = other or {}

    def attention_maps(self, batch: Batches, of: Any) -> dict[BlockId, AttentionMap]:
        assert list(of) == BLOCKS[1:], "those of the encoder are large and not asked for"
        given, maps = batch.as_given(), {}
        _, tokens = given["labels"].shape
        frames = torch.arange(220) / FRAMES
        draw = torch.Generator().manual_seed(int(given["hidden"].sum() * 100))
        for block in of:
            weights = torch.rand(len(batch), 6, tokens, 220, generator=draw)
            weights[..., 210:] = 5.0
            for i, spans in enumerate(given["hidden"]):
                aligning = self.other.get(int(given["split"][i]), ALIGN)
                for row in range(tokens):
                    word = int(given["words"][i, row])
                    begin, end = spans[word].tolist() if word >= 0 else (float(spans.max()), 4.2)
                    for head in range(6):
                        late = 0.2 * ((block.layer, head) in LATE)
                        if late or (block.layer, head) in aligning:
                            inside = (frames >= begin + late) & (frames < end + late)
                            weights[i, head, row] = 0.05 * weights[i, head, row] + inside.float()
            maps[block] = AttentionMap(weights / weights.sum(dim=-1, keepdim=True), given["words"] >= 0, frames >= 0)
        return maps


def examples(count: int, seed: int, timed: bool) -> Batches:
    draw = np.random.default_rng(seed)
    batches = []
    for _ in range(count):
        cuts = np.cumsum([0.05, *draw.uniform(0.25, 0.6, 6)]).round(2)  # a path begins with the sound
        heard = torch.tensor([*pairwise(cuts.tolist())])[None]
        words = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, -1]])
        labels = torch.tensor([[-100, 5, 6, 7, 8, 9, 10, 2]])
        batch = {"labels": labels, "words": words, "seconds": torch.tensor([4.2]), "text": ["a\nb\nc\nd\ne\nf"]}
        batches.append(batch | {"hidden": heard, "split": torch.tensor([seed])} | ({"times": heard} if timed else {}))
    return Batches.of(batches, "score")


@cache
def tables(timed: bool, published: frozenset[tuple[int, int]] = LATE, other: Any = (), **settings: Any) -> Any:
    splits = SimpleNamespace(**{name: examples(5, i, timed) for i, name in enumerate(("score", "choose", "report"))})
    roles = {f"decoder.encoder_attn.{layer}.{head}": "aligns" for layer, head in published}
    known = Known(roles, ("aligns",), "publication") if published else None
    study: Any = SimpleNamespace(subject=Listener(dict(other)), splits=splits, known=known, seed=0)
    return AlignmentHeads(**{"most": 3, "draws": 5} | settings).tables(study)


@pytest.mark.slow
def test_planted_heads_are_found_and_a_published_list_that_is_late_is_said_to_be() -> None:
    found = tables(timed=True)
    lists = found["lists"].set_index("list")
    alone = found["heads"]
    assert {*zip(alone["layer"][:3], alone["head"][:3], strict=True)} == ALIGN
    assert {tuple(map(int, head.split("."))) for head in lists.loc[CHOSEN, "heads"].split()} <= ALIGN
    assert lists.loc[CHOSEN, "within_100"] > 0.95
    assert lists.loc[CHOSEN, "error"] < 0.02 < 0.1 < lists.loc[PUBLISHED, "error"] < 0.3
    assert lists.loc[PUBLISHED, "late"] == pytest.approx(0.2, abs=0.05)
    assert lists.loc[PUBLISHED, "within_100_moved"] > lists.loc[PUBLISHED, "within_100"]
    assert lists.loc[CHOSEN, "more_low"] > 0
    assert lists.loc[CHOSEN, "error_more_high"] < 0
    assert lists.loc[RANDOM, "within_100"] < lists.loc[CHOSEN, "within_100"]
    assert {tuple(map(int, head.split("."))) for head in lists.loc[UNTIMED, "heads"].split()} <= ALIGN | LATE
    assert lists.loc[ALL, "size"] == 12
    said = " ".join(say(found))
    assert "the list found here is better" in said
    assert re.search(r"Its times are (1[5-9]|2[0-4])\d ms late", said)
    assert "`generation_config.alignment_heads` is [[" in said
    number, count = headline(found)
    assert number.value == lists.loc[CHOSEN, "within_100"]
    assert count.whole == 12
    assert all([*figure(found)] for figure in (sizes, words, errors_of_heads))


def test_without_times_of_words_the_heads_that_agree_are_found() -> None:
    found = tables(timed=False, published=frozenset())
    own = found["lists"].set_index("list").loc[CHOSEN]
    assert {tuple(map(int, head.split("."))) for head in own["heads"].split()} <= ALIGN | LATE
    assert (found["lists"]["against"] == "agreement").all()
    assert PUBLISHED not in {*found["lists"]["list"]}
    assert "as the times of words are not known" in next(iter(say(found)))
    assert all([*figure(found)] for figure in (sizes, words, errors_of_heads))


def chosen_of(found: Any, name: str = CHOSEN) -> set[tuple[int, int]]:
    heads = found["lists"].set_index("list").loc[name, "heads"].split()
    return {(int(layer), int(head)) for layer, head in (each.split(".") for each in heads)}


SCORE, CHOOSE, REPORT = 0, 1, 2
OTHERS = frozenset({(0, 0), (0, 5), (1, 3)})


def test_heads_are_found_on_one_split_counted_on_another_and_reported_on_the_third() -> None:
    usual = tables(timed=True)
    report = tables(timed=True, other=((REPORT, OTHERS),))
    assert chosen_of(report) == chosen_of(usual), "the report split decides nothing"
    assert chosen_of(report, UNTIMED) == chosen_of(usual, UNTIMED)
    pd.testing.assert_frame_equal(report["heads"], usual["heads"])
    pd.testing.assert_frame_equal(report["sizes"], usual["sizes"])
    right = [found["lists"].set_index("list").loc[CHOSEN, "within_100"] for found in (usual, report)]
    assert right[0] > 0.9 > 0.7 > right[1]
    score = tables(timed=True, other=((SCORE, OTHERS),))
    first = score["heads"][["layer", "head"]].head(3)
    assert {*map(tuple, first.to_numpy().tolist())} == OTHERS, "the score split says which"
    one = tables(timed=True, other=((CHOOSE, OTHERS),))
    assert one["sizes"]["error_score"].tolist() == usual["sizes"]["error_score"].tolist()
    assert one["sizes"]["error"].tolist() != usual["sizes"]["error"].tolist()


def test_a_sound_is_heard_to_its_end_and_a_text_from_its_first_word_to_its_last() -> None:
    for each in heard(cast(Any, Listener()), examples(2, 0, True)):
        assert each.likeness.shape == (12, 7, 210), "six words and the end, 4.2 seconds"
        assert each.words.tolist() == [0, 1, 2, 3, 4, 5, -1]


@pytest.mark.slow
def test_random_lists_are_as_long_as_the_one_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment_heads, "enough", lambda sizes: [int(n) for n in sizes["head"]])
    drawn: list[list[int]] = []
    judged = alignment_heads.judged

    def kept(sounds: Any, choose: Any, lists: Any, at_random: Any, heads: Any) -> pd.DataFrame:
        drawn.extend(at_random)
        return judged(sounds, choose, lists, at_random, heads)

    monkeypatch.setattr(alignment_heads, "judged", kept)
    tables.__wrapped__(timed=True)
    assert len(drawn) == 5
    assert all(len(set(each)) == 3 for each in drawn), "three different heads, as in the list"


@pytest.mark.slow
def test_only_candidates_join_a_list() -> None:
    assert len(tables(timed=True, candidates=2)["sizes"]) == 2
    sounds = [*heard(cast(Any, Listener()), examples(4, 0, True))]
    grown = AlignmentHeads(most=3, candidates=3).grown([0, 1, 3, *sorted({*range(12)} - {0, 1, 3})], sounds, sounds)
    assert {*grown["head"]} == {0, 1, 3}, "those that align stand further back"


def test_a_list_grows_by_the_head_that_helps_most_and_is_no_longer_than_is_sure_to_help() -> None:
    sounds = [*heard(cast(Any, Listener()), examples(6, 0, True))]
    grown = AlignmentHeads(most=3, candidates=4).grown([0, 1, 4, 7, *({*range(12)} - {0, 1, 4, 7})], sounds, sounds)
    assert grown["head"][0] in (4, 7), "the first two do not align"
    best = int(grown["error"].idxmin())
    values = mean_errors(sounds, list(grown["head"][: best + 1]))
    within = grown["error"] <= grown["error"][best] + values.std(ddof=1) / 6**0.5
    assert grown["chosen"].tolist() == [row == within.idxmax() for row in range(len(grown))]
    flat = [
        each._replace(times=each.times + np.random.default_rng(0).normal(0, 1, each.times.shape)) for each in sounds
    ]
    assert AlignmentHeads(most=3).grown([4, 7, 11, *({*range(12)} - {4, 7, 11})], sounds, flat)["chosen"][0]


def test_all_times_are_moved_by_what_suits_the_choose_split() -> None:
    sounds = [*heard(cast(Any, Listener()), examples(4, 0, True))]
    early = [each._replace(times=each.times - 0.3) for each in sounds]
    for choose, right in ((sounds, 1.0), (early, 0.0)):
        row = judged(sounds, choose, {CHOSEN: [4]}, [[0]], GRID.heads[6:]).iloc[0]
        assert abs(row["within_100_moved"] - right) < 0.2
        assert row["within_100"] > 0.9


@pytest.mark.slow
def test_a_list_is_no_longer_than_allowed() -> None:
    found = tables(timed=True, most=1)
    assert found["sizes"]["size"].tolist() == [1]
    assert any("Longer lists were not tried" in sentence for sentence in say(found))


def test_examples_without_words_and_models_without_cross_attention_are_refused() -> None:
    plain = Batches.of([{"labels": torch.zeros(2, 3)}], "score")
    study: Any = SimpleNamespace(
        subject=Listener(), splits=SimpleNamespace(score=plain, choose=plain, report=plain), known=None, seed=0
    )
    with pytest.raises(ValueError, match=r"needs speech and its words, .* these examples have no words"):
        AlignmentHeads().tables(study)
    study.subject = SimpleNamespace(grid=HeadGrid.full(BLOCKS[:1], 2))
    with pytest.raises(ValueError, match="these units are no heads of cross-attention: encoder.self_attn"):
        AlignmentHeads().tables(study)
    ours: Any = build(compose("experiment=train")).source
    with pytest.raises(ValueError, match="add model=whisper"):
        AlignmentHeads().check(Setup(ours, {}, {}, {}))


def test_a_copy_of_a_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "generation_config.json").write_text("old")
    copied(source, target, {"generation_config.json": b"new"})
    assert (target / "config.json").read_text() == "{}"
    assert (target / "generation_config.json").read_text() == "new"
    assert (source / "generation_config.json").read_text() == "old"

    ours: Any = object.__new__(PretrainedSource)
    object.__setattr__(ours, "model", SimpleNamespace(path=str(source)))
    for place in (target, source / "aligned"):
        with pytest.raises(ValueError, match=r"experiment.copy_to=.*: must be a new folder, outside of model.path="):
            AlignmentHeads(copy_to=str(place)).check(Setup(ours, {}, {}, {}))

    def fail(*given: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="full"):
        copied(source, tmp_path / "other", {"generation_config.json": b"new"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "source"]


LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module", params=[(2, 2), (3, 1)], ids=["small", "distilled"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper with random weights and its speech; a distilled one has fewer layers in the decoder."""
    transformers = pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")
    tokenizers = pytest.importorskip("tokenizers")
    path: Path = tmp_path_factory.mktemp("whisper")
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    names = [*special, *LETTERS, " ", "."]
    model = tokenizers.models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[])
    plain = tokenizers.Tokenizer(model)
    plain.add_special_tokens(special)
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=special[0]).save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2).save_pretrained(path)
    encoder, decoder = request.param
    config = transformers.WhisperConfig(
        vocab_size=len(names),
        d_model=16,
        encoder_layers=encoder,
        decoder_layers=decoder,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=100,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    network = transformers.WhisperForConditionalGeneration(config)
    known = {"alignment_heads": [[0, 1]], "is_multilingual": True, "_from_model_config": False}
    for name, value in known.items():
        setattr(network.generation_config, name, value)
    network.save_pretrained(path)
    lines, draw = ["audio,word,start,end"], np.random.default_rng(0)
    for i in range(9):
        sound(path / f"{i}.wav", seconds=1.5, frequency=float(draw.uniform(200, 2000)))
        for at in range(4):
            lines.append(f"{i}.wav,{''.join(draw.choice([*LETTERS], 3))},{0.3 * at:.1f},{0.3 * at + 0.3:.1f}")
    (path / "words.csv").write_text("\n".join(lines) + "\n")
    return path


def test_any_whisper_gets_its_list(folder: Path, tmp_path: Path) -> None:
    given = [PLUGIN, "experiment=alignment_heads", f"model.path={folder}", f"data={folder / 'words.csv'}"]
    sizes = ["model.score=4", "model.choose=2", "model.report=3", "experiment.most=2", "experiment.draws=2"]
    study = build(compose(*given, *sizes, f"cache={tmp_path / 'cache'}")).study()
    found = AlignmentHeads(most=2, draws=2, copy_to=str(tmp_path / "copy"))(study)
    listed = json.loads(found.files["generation_config.json"])["alignment_heads"]
    assert listed == json.loads((tmp_path / "copy" / "generation_config.json").read_text())["alignment_heads"]
    assert all(0 <= head < 4 and 0 <= layer < study.subject.grid.blocks[-1].layer + 1 for layer, head in listed)
    copy: Any = pytest.importorskip("transformers").WhisperForConditionalGeneration.from_pretrained(tmp_path / "copy")
    assert copy.generation_config.alignment_heads == listed
    lists = found.tables["lists"].set_index("list")
    assert lists.loc[PUBLISHED, "heads"] == "0.1"
    utterances = [text for split in ("score", "choose", "report") for text in texts_of(study.splits[split])]
    assert len(utterances) == len(set(utterances)) == 9, "no two splits share one"
    assert lists.loc[ALL, "size"] == 4 * sum("encoder_attn" in str(block) for block in study.subject.grid.blocks)
    assert found.checks["max_difference_masked_removed"] < 1e-9


def texts_of(split: Any) -> list[str]:
    return [text for batch in split.batches(1) for text in batch.as_given()["text"]]


def test_a_folder_without_a_file_for_generation_keeps_its_list(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    (old / "generation_config.json").unlink()
    given = [PLUGIN, "experiment=alignment_heads", f"model.path={old}", f"data={folder / 'words.csv'}"]
    sizes = ["model.score=4", "model.choose=2", "model.report=3", "model.language=de"]
    study = build(compose(*given, *sizes, f"cache={tmp_path / 'cache'}")).study()
    assert study.known is None
    found = AlignmentHeads(most=1, draws=2, copy_to=str(tmp_path / "copy"))(study)
    copy: Any = pytest.importorskip("transformers").WhisperForConditionalGeneration.from_pretrained(tmp_path / "copy")
    assert (
        copy.generation_config.alignment_heads == json.loads(found.files["generation_config.json"])["alignment_heads"]
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.language=fr", r"model.language=fr: the tokenizer has no token <\|fr\|>"),
        ("model.path=nowhere", "model.path=nowhere: must be the folder of a Whisper, and is no folder"),
        (
            "model.report=30",
            r"words.csv: has 9 utterances, model.score=4 model.choose=2 model.report=30 need 36, ask for fewer",
        ),
    ],
)
def test_what_does_not_fit_a_whisper_is_refused(folder: Path, setting: str, message: str, tmp_path: Path) -> None:
    given = [PLUGIN, "experiment=alignment_heads", f"model.path={folder}", f"data={folder / 'words.csv'}"]
    sizes = ["model.score=4", "model.choose=2", "model.report=3", f"cache={tmp_path}"]
    with pytest.raises(ValueError, match=message):
        build(compose(*given, *sizes, setting)).study()
