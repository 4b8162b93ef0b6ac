"""Speech whose words are known, and when each of them is said: from files, or spoken by espeak-ng.

Dimensions: B = batch, F = frames of sound, T = tokens, W = words.
"""

from __future__ import annotations

import ctypes
import random
import re
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from mhaprune.subjects.batches import IGNORED

RATE = 16_000
"""Samples of sound in a second, as Whisper hears it."""
COLUMNS = ("audio", "word", "start", "end")
ESPEAK = "needs espeak-ng: apt install espeak-ng"

WHO = ["The old farmer", "My little sister", "A tall soldier", "The new teacher", "Her best friend", "The young doctor"]
DOES = ["bought", "found", "painted", "carried", "forgot", "sold"]
WHAT = ["a red bicycle", "the wooden table", "two green apples", "an empty bottle", "the broken window", "a heavy box"]
WHEN = ["in the morning", "after lunch", "last summer", "on the bridge", "before the storm", "near the station"]


@dataclass(frozen=True)
class Utterance:
    """A sound, its words in order, and the seconds in which each begins and ends; None if that is not known."""

    name: str
    samples: np.ndarray
    words: tuple[str, ...]
    times: tuple[tuple[float, float], ...] | None

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


def sentences(draw: random.Random) -> list[str]:
    """Return all sentences in random order."""
    found = [f" {who} {does} {what} {when}." for who in WHO for does in DOES for what in WHAT for when in WHEN]
    draw.shuffle(found)
    return found


def read_speech(data: str) -> list[Utterance]:
    """Return the utterances of a CSV with the columns audio, word and, if the times of words are known, start and end
    in seconds; or those of a folder, each a TextGrid of Praat (long format) beside a WAV of the same name. Files of
    sound are named from the folder of the CSV on. Raises ValueError, which names the line or the file."""
    path = Path(data)
    if path.is_dir():
        grids = sorted(path.glob("*.TextGrid"))
        if not grids:
            raise ValueError(f"data={data}: holds no TextGrid, and must: NAME.TextGrid beside NAME.wav")
        return [_utterance(data, grid.with_suffix(".wav"), *_words_in(grid, data)) for grid in grids]
    try:
        table = pd.read_csv(path, dtype={"audio": str, "word": str}, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"data={data}: cannot be read as CSV: {str(error).splitlines()[0]}") from None
    timed = {"start", "end"} & set(table.columns)
    if missing := [name for name in COLUMNS if name not in table.columns and (timed or name in COLUMNS[:2])]:
        raise ValueError(f"data={data}: has no column {missing[0]}, its columns must be {', '.join(COLUMNS)}")
    if wordless := [i for i, word in enumerate(table["word"], 2) if not word.strip()]:
        raise ValueError(f"data={data}: line {wordless[0]} has no word; sound without words cannot be aligned")
    found = []
    for audio, rows in table.groupby("audio", sort=False):
        times = None
        if timed:
            try:
                times = [*zip(rows["start"].astype(float), rows["end"].astype(float), strict=True)]
            except ValueError:
                raise ValueError(f"data={data}: {audio} has a start or end that is no number") from None
        found.append(_utterance(data, path.parent / str(audio), [*map(_word, rows["word"])], times))
    return found


def _utterance(data: str, file: Path, words: list[str], times: list[tuple[float, float]] | None) -> Utterance:
    samples = _samples(data, file)
    end = len(samples) / RATE
    for word, (start, stop), (after, _) in zip(words, times or (), [*(times or [])[1:], (end, end)], strict=False):
        if not 0 <= start <= stop <= end + 0.1 or start > after:
            raise ValueError(
                f"data={data}: {word!r} of {file.name} is said from {start:g} to {stop:g} s, and must begin before the"
                f" next word does and end before the sound does, at {end:.2f} s"
            )
    return Utterance(file.name, samples, tuple(words), tuple(times) if times else None)


def _words_in(grid: Path, data: str) -> tuple[list[str], list[tuple[float, float]]]:
    """Return the words and times of the tier `words` of a TextGrid; of the first tier if none has this name."""
    try:
        content = grid.read_bytes()
        written = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data={data}: {grid.name} cannot be read as UTF-8 or UTF-16: {error}") from None
    tiers = re.split(r"item \[\d+\]:", written)[1:]
    tiers = [tier for tier in tiers if '"IntervalTier"' in tier]
    if not tiers:
        raise ValueError(f"data={data}: {grid.name} has no tier of intervals in Praat's long format")
    tier = next((each for each in tiers if re.search(r'name = "words?"', each, re.IGNORECASE)), tiers[0])
    found = re.findall(r'intervals \[\d+\]:\s+xmin = (\S+)\s+xmax = (\S+)\s+text = "((?:[^"]|"")*)"', tier)
    said = [(_word(text.replace('""', '"')), (float(low), float(high))) for low, high, text in found if text.strip()]
    if not said:
        raise ValueError(f"data={data}: {grid.name} has no words; sound without words cannot be aligned")
    return [word for word, _ in said], [times for _, times in said]


def _word(text: str) -> str:
    return " ".join(text.split())


def _samples(data: str, file: Path) -> np.ndarray:
    """Return the mean of the channels of a WAV with 16 bits, at `RATE`."""
    try:
        with wave.open(str(file), "rb") as opened:
            rate, width, channels = opened.getframerate(), opened.getsampwidth(), opened.getnchannels()
            content = opened.readframes(opened.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise ValueError(f"data={data}: {file.name} cannot be read as WAV: {error}") from None
    if width != 2 or not content:
        raise ValueError(f"data={data}: {file.name} must be a WAV with 16 bits and some sound, it has {8 * width} bits")
    whole = len(content) // (2 * channels) * channels
    return resampled(np.frombuffer(content, "<i2", whole).reshape(-1, channels).mean(axis=1) / 2**15, rate)


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """Return a sound at `RATE`, without the frequencies that this rate cannot hold."""
    count = max(round(len(samples) * RATE / rate), 1)
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * count / len(samples)).astype(np.float32)


def batch_of(part: Sequence[Utterance], tokenizer: Any, listener: Any, prefix: Sequence[int]) -> dict[str, Any]:
    """Return the batch of utterances that Whisper reads: `input_features`, (B, 80, 2F), `decoder_input_ids`, (B, T);
    and what is known of them: `labels`, (B, T); of which word the token is that is written next, `words`, (B, T), -1
    for punctuation and the end; the length of each sound, `seconds`, (B,); its words, a line for each, `text`; and the
    `times` of words, (B, W, 2). `prefix` are the tokens before a text."""
    for each in part:
        if each.seconds > listener.chunk_length:
            raise ValueError(
                f"data: the sound {each.name} takes {each.seconds:.1f} s, and the model hears"
                f" {listener.chunk_length}; cut it"
            )
    samples = [each.samples for each in part]
    batch = written([each.words for each in part], tokenizer, prefix)
    batch["input_features"] = listener(samples, sampling_rate=RATE, return_tensors="pt").input_features
    batch |= {
        "seconds": torch.tensor([each.seconds for each in part]),
        "text": ["\n".join(each.words) for each in part],
    }
    if all(each.times for each in part):
        times = [torch.tensor(each.times) for each in part]
        batch["times"] = nn.utils.rnn.pad_sequence(times, batch_first=True)
    return batch


def written(texts: Sequence[Sequence[str]], tokenizer: Any, prefix: Sequence[int]) -> dict[str, Any]:
    """Return `decoder_input_ids`, `labels` and `words` of texts, see `batch_of`."""
    end, rows = tokenizer.eos_token_id, []
    for text in texts:
        pieces = [[*tokenizer(f" {word}", add_special_tokens=False).input_ids] for word in text]
        rows.append(
            ([token for piece in pieces for token in piece], [i for i, each in enumerate(pieces) for _ in each])
        )
    longest = len(prefix) + max(len(row) for row, _ in rows) + 1  # Whisper's own alignment reads the end, too
    reads = torch.full((len(rows), longest), end)
    labels, words = torch.full_like(reads, IGNORED), torch.full_like(reads, -1)
    begin = len(prefix) - 1
    for i, (row, of_word) in enumerate(rows):
        reads[i, : len(prefix) + len(row)] = torch.tensor([*prefix, *row])
        labels[i, begin : len(prefix) + len(row)] = torch.tensor([*row, end])
        pieces = [tokenizer.decode([token]) for token in row]  # � stands for a part of a letter
        spoken = [any(letter.isalnum() or letter == "\ufffd" for letter in piece) for piece in pieces]
        alone = {word for word, said in zip(of_word, spoken, strict=True) if said}
        kept = [word if said or word not in alone else -1 for word, said in zip(of_word, spoken, strict=True)]
        words[i, begin : begin + len(row)] = torch.tensor(kept)
    return {"decoder_input_ids": reads, "labels": labels, "words": words}


def prefix_of(tokenizer: Any, language: str | None) -> list[int]:
    """Return the tokens before a text without marks of time; `language` is None for a model of English alone. Raises
    ValueError for a language that the tokenizer does not know."""
    middle = [] if language is None else [f"<|{language}|>", "<|transcribe|>"]
    names = ["<|startoftranscript|>", *middle, "<|notimestamps|>"]
    known = tokenizer.get_vocab()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"model.language={language}: the tokenizer has no token {unknown[0]}")
    return [known[name] for name in names]


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
    """Return the library of espeak-ng, and its samples in a second."""
    try:
        library = ctypes.CDLL("libespeak-ng.so.1")
    except OSError:
        raise ValueError(f"model=whisper: {ESPEAK}") from None
    rate = library.espeak_Initialize(SYNCHRONOUS, 0, None, 0)
    if rate <= 0:
        raise ValueError("model=whisper: espeak-ng does not start, is it installed whole? apt install espeak-ng")
    return library, rate


def spoken(text: str, voice: str = "en-us") -> Utterance:
    """Return a sentence, spoken by espeak-ng. Words that it says as one, as "in the", have the same times."""
    (library, rate), parts, begins = espeak(), list[bytes](), dict[int, float]()
    if library.espeak_SetVoiceByName(voice.encode()) != 0:
        raise ValueError(f"model.voice={voice}: espeak-ng has no such voice, `espeak-ng --voices` lists them")

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
    samples = np.frombuffer(b"".join(parts), np.int16) / 2**15
    times = tuple(_times(text, begins, len(samples) / rate))
    return Utterance(text.strip(), resampled(samples, rate), tuple(text.split()), times)


def _times(text: str, begins: dict[int, float], seconds: float) -> Iterator[tuple[float, float]]:
    starts = sorted(begins)
    ends = {start: begins[after] for start, after in pairwise(starts)} | {starts[-1]: seconds}
    for place, (before, letter) in enumerate(zip(f" {text}", text, strict=False)):
        if before == " " != letter:
            start = max(each for each in starts if each <= place)
            yield begins[start], ends[start]
