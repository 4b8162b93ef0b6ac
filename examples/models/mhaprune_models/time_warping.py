"""The times of words from attention to sound, by dynamic time warping.

Dimensions: N = heads or lists of heads, T = tokens that are written, F = frames of sound, W = words.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FRAMES = 50
"""Frames of sound that Whisper's decoder sees in a second."""
MEDIAN = 7
"""The width of the median filter over frames, as in the code of Whisper."""


def standardised(weights_NTF: Tensor) -> Tensor:
    """Return attention weights by which token and sound are aligned, as in the code of Whisper (Radford et al. 2023):
    with a sum of 1 over frames, in standard deviations over tokens, and smoothed by a median over frames."""
    weights_NTF = weights_NTF / weights_NTF.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    deviation, mean = torch.std_mean(weights_NTF, dim=-2, keepdim=True, unbiased=False)
    mode = "reflect" if weights_NTF.shape[-1] > MEDIAN // 2 else "replicate"  # which sounds of 0.06 s need
    around = F.pad((weights_NTF - mean) / deviation.clamp_min(1e-12), (MEDIAN // 2, MEDIAN // 2), mode=mode)
    return around.unfold(-1, MEDIAN, 1).median(dim=-1).values


def begins(likeness_NTF: np.ndarray) -> np.ndarray:
    """Return the frame in which each token begins, (N, T): the first on the path from the first token and frame to the
    last ones, in steps of one token, one frame or both, along which `likeness` adds up to most (Sakoe & Chiba 1978)."""
    count, tokens, frames = likeness_NTF.shape
    t, f = np.arange(tokens), np.arange(tokens + frames - 1)[:, None] - np.arange(tokens)
    slanted_NDT = np.where((f >= 0) & (f < frames), likeness_NTF[:, t, f.clip(0, frames - 1)], -np.inf)
    sums = np.full((len(f) + 2, count, tokens + 1), -np.inf)  # with two diagonals before the first, a token before it
    sums[0, :, 0] = 0
    before, came_DNT = np.empty((3, count, tokens)), np.zeros((len(f), count, tokens), np.int8)
    for diagonal in range(len(f)):  # cells of one diagonal do not need each other
        before[0] = sums[diagonal, :, :-1]  # from one token and frame before
        before[1] = sums[diagonal + 1, :, :-1]  # from one token before
        before[2] = sums[diagonal + 1, :, 1:]  # from one frame before
        came_DNT[diagonal] = before.argmax(axis=0)
        sums[diagonal + 2, :, 1:] = slanted_NDT[:, diagonal] + before.max(axis=0)
    return np.array([_begins_of_path(came_DNT[:, n].tolist(), frames) for n in range(count)])


def _begins_of_path(came_DT: list[list[int]], frames: int) -> list[int]:
    """Go back along one path from its end."""
    t, f = len(came_DT) - frames, frames - 1
    found = [0] * (t + 1)
    while t >= 0 and f >= 0:
        found[t] = f
        step = came_DT[t + f][t]
        t, f = t - (step != 2), f - (step != 1)
    return found


def of_words(values_NT: np.ndarray, words_T: np.ndarray) -> np.ndarray:
    """Return begin and end of each word in the sound, (N, W, 2), from the begin of each token: a word ends where the
    next token begins. `words` has the word of each token, -1 for others; the last token is no word."""
    number = int(words_T.max()) + 1
    first = [int(np.argmax(words_T == word)) for word in range(number)]
    after = [len(words_T) - int(np.argmax(words_T[::-1] == word)) for word in range(number)]
    return np.stack([values_NT[:, first], values_NT[:, after]], axis=2)
