"""Sounds for tests."""

import wave
from pathlib import Path

import numpy as np


def sound(file: Path, rate: int = 16_000, seconds: float = 1.0, channels: int = 1, frequency: float = 440.0) -> None:
    """Write a tone as a WAV with 16 bits."""
    at = np.arange(int(rate * seconds)) / rate
    samples = (np.sin(2 * np.pi * frequency * at) * 2**14).astype("<i2").repeat(channels)
    with wave.open(str(file), "wb") as opened:
        opened.setnchannels(channels), opened.setsampwidth(2), opened.setframerate(rate)
        opened.writeframes(samples.tobytes())
