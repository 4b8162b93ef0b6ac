"""Score: how often a head of cross-attention looks at the sound of the word that is written.

Dimensions: B = batch, H = heads of a block, T = tokens, F = frames of sound.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mhaprune.data import Data
from mhaprune.measure.outcomes import BATCH_SIZE
from mhaprune.scorers.base import Scorer, Scores, TokenValues
from mhaprune.subject import Batch, Subject
from mhaprune_models.time_warping import FRAMES


@dataclass(frozen=True)
class WordTimes(Scorer):
    """The share of tokens of words for which the largest weight of the head is on the sound of that word, between the
    times at which it begins and ends. 0 for heads that do not look at the sound. It reads the labels and the times that
    `model=whisper` has, not what the model answers."""

    family: ClassVar[str] = "attention"
    reads_attention: ClassVar[bool] = True
    zero_if_silent: ClassVar[bool] = False

    @torch.no_grad()
    def __call__(self, subject: Subject, examples: Data, seed: int) -> Scores:
        def of_batch(batch: Batch) -> TokenValues:
            given, valid, found = batch.as_given(), subject.queries(batch), []
            if "times" not in given:
                raise ValueError("scorer=word_times: needs the times of words, which model=whisper has; leave it out")
            for block, seen in subject.attention_maps(batch).items():
                hits_BHT = torch.zeros(seen.weights.shape[:3], device=seen.weights.device)
                if "encoder_attn" in str(block):
                    inside_BTF = said(given["words"], given["times"], seen.weights.shape[-1])
                    place_BHT1 = seen.weights.argmax(dim=-1, keepdim=True)
                    places = inside_BTF[:, None].expand(-1, hits_BHT.shape[1], -1, -1)
                    hits_BHT = places.gather(-1, place_BHT1)[..., 0].to(hits_BHT)
                    found.append((hits_BHT, given["words"] >= 0))
                else:
                    found.append((hits_BHT, valid[block]))
            return found

        return Scores.mean_over_tokens(map(of_batch, examples.batches(BATCH_SIZE)), forward_passes=1)


def said(words_BT: Tensor, times_BW2: Tensor, frames: int) -> Tensor:
    """Return True for the frames in which the word of a token is said, (B, T, F)."""
    spans_BT2 = times_BW2.gather(1, words_BT.clamp_min(0)[..., None].expand(-1, -1, 2)) * FRAMES
    middle_F = torch.arange(frames, device=words_BT.device) + 0.5
    return (middle_F >= spans_BT2[..., :1]) & (middle_F < spans_BT2[..., 1:])
