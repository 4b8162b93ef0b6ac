"""Speech is read from files: sound, words, and when each of them is said."""

import wave
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mhaprune_models import speech

from sounds import sound


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8_000, 1)])
def test_sound_is_read_at_one_rate(tmp_path: Path, rate: int, channels: int) -> None:
    sound(tmp_path / "a.wav", rate, channels=channels)
    (tmp_path / "words.csv").write_text("audio,word,start,end\na.wav,null,0,0.4\na.wav,two,0.4,1\n")
    [read] = speech.read_speech(str(tmp_path / "words.csv"))
    assert (read.words, read.times) == (("null", "two"), ((0.0, 0.4), (0.4, 1.0)))
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    np.testing.assert_allclose(read.samples[500:-500], expected[500:-500], atol=2e-3)


def test_a_tone_that_the_lower_rate_cannot_hold_is_silent() -> None:
    tone = np.sin(2 * np.pi * 12_000 * np.arange(44_100) / 44_100)
    assert np.abs(speech.resampled(tone, 44_100)).max() < 1e-3


GRID_OF_PRAAT = '''File type = "ooTextFile"
Object class = "TextGrid"
item []:
    item [1]:
        class = "IntervalTier"
        name = "phones"
        intervals: size = 1
        intervals [1]:
            xmin = 0
            xmax = 1
            text = "P"
    item [2]:
        class = "IntervalTier"
        name = "words"
        intervals: size = 3
        intervals [1]:
            xmin = 0
            xmax = 0.3
            text = "he"
        intervals [2]:
            xmin = 0.3
            xmax = 0.4
            text = ""
        intervals [3]:
            xmin = 0.4
            xmax = 1
            text = "said ""no"""
'''


def test_words_are_read_from_a_text_grid(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav")
    (tmp_path / "a.TextGrid").write_text(GRID_OF_PRAAT)
    [read] = speech.read_speech(str(tmp_path))
    assert read.words == ("he", 'said "no"')
    assert read.times == ((0.0, 0.3), (0.4, 1.0))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_text_grids_are_read_as_praat_writes_them(tmp_path: Path, encoding: str) -> None:
    sound(tmp_path / "a.wav")
    (tmp_path / "a.TextGrid").write_bytes(GRID_OF_PRAAT.replace('"he"', '"hé\nlas"').encode(encoding))
    assert speech.read_speech(str(tmp_path))[0].words[0] == "hé las"
    (tmp_path / "a.TextGrid").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ValueError, match=r"^data=.*: a.TextGrid cannot be read as UTF-8 or UTF-16"):
        speech.read_speech(str(tmp_path))


def test_a_sound_that_was_cut_off_is_read_to_its_last_whole_sample(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav", channels=2)
    (tmp_path / "a.wav").write_bytes((tmp_path / "a.wav").read_bytes()[:-3])
    (tmp_path / "words.csv").write_text("audio,word\na.wav,one\n")
    assert len(speech.read_speech(str(tmp_path / "words.csv"))[0].samples) == 15_999


def test_words_without_times_are_read(tmp_path: Path) -> None:
    sound(tmp_path / "a.wav")
    (tmp_path / "words.csv").write_text("audio,word\na.wav,one\na.wav,two\n")
    assert speech.read_speech(str(tmp_path / "words.csv"))[0].times is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("audio,start,end\na.wav,0,1\n", "has no column word, its columns must be audio, word, start, end"),
        ("audio,word,start\na.wav,one,0\n", "has no column end"),
        ("audio,word\na.wav,\n", "line 2 has no word; sound without words cannot be aligned"),
        (
            "audio,word,start,end\na.wav,one,0.5,0.2\n",
            r"'one' of a.wav is said from 0.5 to 0.2 s, and must begin before",
        ),
        ("audio,word,start,end\na.wav,one,0.5,0.6\na.wav,two,0.2,0.4\n", "'one' of a.wav is said from 0.5 to 0.6 s"),
        ("audio,word,start,end\na.wav,one,0,7\n", "end before the sound does, at 1.00 s"),
        ("audio,word,start,end\na.wav,one,0,x\n", "a.wav has a start or end that is no number"),
        ("audio,word\nb.wav,one\n", "b.wav cannot be read as WAV"),
        ("audio,word\nwords.csv,one\n", "words.csv cannot be read as WAV"),
    ],
)
def test_speech_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    sound(tmp_path / "a.wav")
    (tmp_path / "words.csv").write_text(content)
    with pytest.raises(ValueError, match=f"^data=.*words.csv: .*{message}") as refused:
        speech.read_speech(str(tmp_path / "words.csv"))
    assert "\n" not in str(refused.value)


def test_folders_without_words_and_files_that_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no TextGrid"):
        speech.read_speech(str(tmp_path))
    (tmp_path / "a.TextGrid").write_text("xmin = 0")
    with pytest.raises(ValueError, match="a.TextGrid has no tier of intervals"):
        speech.read_speech(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be read as CSV"):
        speech.read_speech(str(tmp_path / "none.csv"))


def test_sounds_that_are_too_long_or_of_eight_bits_are_refused(tmp_path: Path) -> None:
    long = speech.Utterance("a.wav", np.zeros(2 * speech.RATE), ("one",), None)
    listener = SimpleNamespace(chunk_length=1)
    with pytest.raises(ValueError, match="data: the sound a.wav takes 2.0 s, and the model hears 1; cut it"):
        speech.batch_of([long], None, listener, [1])
    with wave.open(str(tmp_path / "a.wav"), "wb") as opened:
        opened.setnchannels(1), opened.setsampwidth(1), opened.setframerate(16_000)
        opened.writeframes(b"\x80" * 1000)
    (tmp_path / "words.csv").write_text("audio,word\na.wav,one\n")
    with pytest.raises(ValueError, match="a.wav must be a WAV with 16 bits and some sound, it has 8 bits"):
        speech.read_speech(str(tmp_path / "words.csv"))
