"""Find the heads of a Whisper that align words and sound: what `generation_config.alignment_heads` names.

Dimensions: E = examples, N = heads of cross-attention, L = lists of heads, T = tokens, F = frames of sound, W = words.
"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch

from mhaprune.data import Data
from mhaprune.heads import BlockId, HeadId, HeadMask
from mhaprune.inputs import Known, Study
from mhaprune.lab.experiments.base import Experiment, Findings, Setup, with_proofs
from mhaprune.lab.sources.pretrained import PretrainedSource
from mhaprune.progress import doing, track
from mhaprune.pruning.pruned import EquivalenceCheck
from mhaprune.scorers.scoring import head_columns
from mhaprune.settings.ranges import Ge
from mhaprune.statistics.intervals import difference_interval, mean_interval, share_interval, with_interval
from mhaprune.subject import Subject
from mhaprune.subjects.batches import IGNORED
from mhaprune.wrapping.build import ModelWithData
from mhaprune_models import alignment_report as report
from mhaprune_models.alignment_report import AGREED, ALL, CHOSEN, MOVED, PUBLISHED, RANDOM, TOLERANCES, UNTIMED
from mhaprune_models.time_warping import FRAMES, begins, of_words, standardised

TOGETHER = 4
"""Number of examples in a pass. Cross-attention to 30 seconds of sound is large."""
ROUNDS = 2
"""How often the heads that agree least are left out of what the others agree on."""
CROSS = ("encoder_attn", "cross_attn", "cross")
"""What the names of layers of cross-attention contain."""
NEEDS = "experiment=alignment_heads: needs speech and its words, which model=whisper has"


class Sound(NamedTuple):
    """How a model aligns one utterance: (N, T, F), the word of each token (T,), and the seconds in which each word
    begins and ends (W, 2); None if that is not known."""

    likeness: np.ndarray
    words: np.ndarray
    times: np.ndarray | None
    text: str

    def located(self, lists: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the seconds in which each word begins and ends by each list of heads, (L, W, 2)."""
        means_LTF = np.stack([self.likeness[list(heads)].mean(axis=0) for heads in lists])
        return of_words(begins(means_LTF) / FRAMES, self.words)

    def errors(self, lists: Sequence[Sequence[int]]) -> np.ndarray:
        """Return by how many seconds each list is late at the begin and end of each word, (L, 2W)."""
        return (self.located(lists) - self.times).reshape(len(lists), -1)


@dataclass(frozen=True)
class AlignmentHeads(Experiment):
    """The heads that align words and sound: tables `heads`, `sizes`, `lists`, `words`.

    A head is scored by the mean error of the times of words that dynamic time warping finds by it alone, on the *score*
    split. A list grows by the head that lowers this error most, and has as many heads as are needed on *choose*: the
    fewest with a mean error within one standard error of the smallest (Breiman et al. 1984). If it is not known when
    words are said, times are those of the path that the heads agree on.
    """

    most: Annotated[int, Ge(1)] = 8
    """The largest number of heads in a list."""
    candidates: Annotated[int, Ge(1)] = 16
    """How many heads, the best by themselves, may join a list."""
    draws: Annotated[int, Ge(1)] = 20
    """Number of random lists, of as many heads as the list that is found."""
    copy_to: str | None = None
    """The folder to which the model is copied with its new list; null for none. `generation_config.json` is in the
    folder of the run anyway."""

    question = "Which heads align words and sound?"
    then = "Put `generation_config.json` of this run into the folder of the model, or let `experiment.copy_to` do it."
    steps = ("model", "listen", "heads", "lists", "prove", "figures and page")
    figures = (report.sizes, report.words, report.errors_of_heads)
    say = staticmethod(report.say)
    headline = staticmethod(report.headline)

    def check(self, setup: Setup) -> None:
        path = getattr(getattr(setup.source, "model", None), "path", None)
        if not isinstance(setup.source, PretrainedSource):
            raise ValueError(f"{NEEDS}; add model=whisper")
        if self.copy_to is not None:
            if path is None:
                raise ValueError(f"experiment.copy_to={self.copy_to}: needs the folder of a model, model.path")
            target = Path(self.copy_to).resolve()
            if target.exists() or target.is_relative_to(Path(path).resolve()):
                raise ValueError(
                    f"experiment.copy_to={self.copy_to}: must be a new folder, outside of model.path={path}"
                )

    def __call__(self, study: Study) -> Findings:
        tables = self.tables(study)
        named = as_listed(tables["lists"].set_index("list").loc[CHOSEN, "heads"])
        files, model = {}, cast(Any, study.subject).model
        if config := copy.deepcopy(getattr(model, "generation_config", None)):
            config.alignment_heads, config._from_model_config = named, False  # else a folder without a file drops it
            files["generation_config.json"] = config.to_json_string().encode()
        equivalence = EquivalenceCheck(study.subject, study.splits.proof)
        own = [head for head in study.subject.grid if is_cross(head.block) and [head.layer, head.head] in named]
        equivalence.prove(HeadMask(study.subject.grid).without(*own))
        found = with_proofs(study, tables, equivalence.worst, files)
        if self.copy_to is not None:
            copied(Path(model.config._name_or_path), Path(self.copy_to), files)
        return found

    def tables(self, study: Study) -> dict[str, pd.DataFrame]:
        subject, splits = study.subject, study.splits
        heads = [head for head in subject.grid if is_cross(head.block)]
        if not heads:
            raise ValueError(f"{NEEDS}; these units are no heads of cross-attention: {', '.join(sites(subject))}")
        with doing("listen"):
            score, choose, kept = ([*heard(subject, each)] for each in (splits.score, splits.choose, splits.report))
        timed = kept[0].times is not None
        agree = agreeing([*score, *choose])
        untimed = [[replace_times(each, agree) for each in split] for split in (score, choose, kept)]
        if not timed:
            score, choose, kept = untimed
        with doing("heads"):
            alone_EN = np.array([np.abs(each.errors(single(each))).mean(axis=1) for each in score])
            order = [int(n) for n in alone_EN.mean(axis=0).argsort(kind="stable")]
            sizes = self.grown(order, score, choose)
        chosen = enough(sizes)
        named = {name for name, role in (study.known.roles if study.known else {}).items() if role == "aligns"}
        published = [n for n, head in enumerate(heads) if str(head) in named]
        lists = {CHOSEN: chosen} | ({PUBLISHED: published} if published else {})
        if timed:
            lists[UNTIMED] = enough(self.grown(nearest(untimed[0]), *untimed[:2]))
        lists[ALL] = [*range(len(heads))]
        draw = np.random.default_rng(study.seed)
        at_random = [draw.choice(len(heads), len(chosen), replace=False).tolist() for _ in range(self.draws)]
        with doing("lists"):
            table = judged(kept, choose, lists, at_random, heads)
        best = alone_EN[:, order]
        by_head = pd.DataFrame([head_columns(heads[n]) for n in order]).assign(
            rank=range(1, len(order) + 1),
            **pd.DataFrame([with_interval("error", column) for column in best.T]).to_dict("list"),
            chosen=[n in chosen for n in order],
            published=[n in published for n in order],
        )
        sizes = sizes.assign(head=[str(heads[n]) for n in sizes["head"]])
        against = {"against": "words" if timed else AGREED}
        return {
            "heads": by_head.assign(**against),
            "sizes": sizes.assign(**against),
            "lists": table.assign(**against),
            "words": words_of(kept[0], lists).assign(**against),
        }

    def grown(self, order: Sequence[int], score: Sequence[Sound], choose: Sequence[Sound]) -> pd.DataFrame:
        """Return a row for each size of a list: the head that joins it, and the mean error on both splits."""
        joined: list[int] = []
        rows = []
        for size in track(range(1, min(self.most, self.candidates, len(order)) + 1), "lists"):
            rest = [n for n in order[: self.candidates] if n not in joined]
            tried = [[*joined, n] for n in rest]
            errors_L = np.mean([np.abs(each.errors(tried)).mean(axis=1) for each in score], axis=0)
            joined.append(rest[int(errors_L.argmin())])
            row = {"size": size, "head": joined[-1], "error_score": errors_L.min()}
            rows.append(row | with_interval("error", mean_errors(choose, joined)))
        table = pd.DataFrame(rows)
        best = table["error"].idxmin()
        values_E = mean_errors(choose, joined[: best + 1])
        within = table["error"] <= table["error"][best] + values_E.std(ddof=1) / math.sqrt(len(values_E))
        return table.assign(chosen=table.index == within.idxmax())


def alignment_heads(
    heads: ModelWithData, published: Sequence[Sequence[int]] = (), **settings: Any
) -> tuple[list[list[int]], dict[str, pd.DataFrame]]:
    """Return the `alignment_heads` of a wrapped Whisper, and the tables behind them. Its batches are those of
    `speech.batch_of`; `published` is the list it has, and `settings` are those of `AlignmentHeads`."""
    cross = [block for block in heads.grid.blocks if is_cross(block)]
    roles = {f"{block}.{head}": "aligns" for block in cross for layer, head in published if layer == block.layer}
    study = replace(Study.of(heads), known=Known(roles, ("aligns",), "publication") if roles else None)
    tables = AlignmentHeads(**settings).tables(study)
    return as_listed(tables["lists"]["heads"].iloc[0]), tables


def enough(sizes: pd.DataFrame) -> list[int]:
    """Return the heads of the list that is chosen among those of all sizes."""
    return [int(n) for n in sizes["head"][: int(sizes["chosen"].argmax()) + 1]]


def is_cross(block: BlockId) -> bool:
    return any(name in str(block.site) for name in CROSS)


def sites(subject: Subject) -> list[str]:
    return list(dict.fromkeys(str(block.site) for block in subject.grid.blocks))


def single(sound: Sound) -> list[list[int]]:
    return [[n] for n in range(len(sound.likeness))]


def mean_errors(sounds: Sequence[Sound], heads: Sequence[int]) -> np.ndarray:
    """Return the mean error of a list in each utterance in seconds, (E,)."""
    return np.array([np.abs(each.errors([heads])).mean() for each in sounds])


@torch.no_grad()
def heard(subject: Subject, examples: Data) -> Iterator[Sound]:
    """Yield how the heads of cross-attention align each utterance, over the frames of its sound."""
    cross = [block for block in subject.grid.blocks if is_cross(block)]
    every: Any = examples.batches(TOGETHER)
    for batch in every:
        given = batch.as_given()
        if missing := [name for name in ("words", "labels", "seconds", "text") if name not in given]:
            raise ValueError(f"{NEEDS}; these examples have no {missing[0]}")
        maps = subject.attention_maps(batch, cross)
        for i, seconds in enumerate(given["seconds"].tolist()):
            rows_T = given["labels"][i] != IGNORED
            read_T = torch.arange(len(rows_T), device=rows_T.device) <= rows_T.nonzero().max() + 1  # the end, too
            weights_NTF = torch.cat([maps[block].weights[i][:, read_T] for block in cross])
            likeness_NTF = standardised(weights_NTF[..., : math.ceil(seconds * FRAMES)].float())[:, rows_T[read_T]]
            words_T = given["words"][i][rows_T].cpu().numpy()
            number, times = int(words_T.max()) + 1, given.get("times")
            times_W2 = None if times is None else times[i, :number].double().cpu().numpy()
            yield Sound(likeness_NTF.cpu().numpy(), words_T, times_W2, given["text"][i])


def agreeing(sounds: Sequence[Sound]) -> list[int]:
    """Return the heads that agree: of all heads the half that is nearest to the path of their mean, twice."""
    heads = [*range(len(sounds[0].likeness))]
    for _ in range(ROUNDS):
        found = [replace_times(each, heads) for each in sounds]
        heads = nearest(found)[: max(len(heads) // 2, 1)]
    return heads


def replace_times(sound: Sound, heads: Sequence[int]) -> Sound:
    return sound._replace(times=sound.located([heads])[0])


def nearest(sounds: Sequence[Sound]) -> list[int]:
    """Return the heads in the order of their mean errors."""
    errors_EN = np.array([np.abs(each.errors(single(each))).mean(axis=1) for each in sounds])
    return [int(n) for n in errors_EN.mean(axis=0).argsort(kind="stable")]


def judged(
    sounds: Sequence[Sound],
    choose: Sequence[Sound],
    lists: dict[str, list[int]],
    at_random: Sequence[Sequence[int]],
    heads: Sequence[HeadId],
) -> pd.DataFrame:
    """Return a row for each list: its heads, its errors, what they are if all times are moved by the median error on
    the *choose* split, and by how much more of its times are right than by the published list; one row for the mean of
    all random lists."""
    every = [*lists.values(), *at_random]
    errors = [each.errors(every) for each in sounds]
    usual_L1 = np.median(np.concatenate([each.errors(every) for each in choose], axis=1), axis=1, keepdims=True)
    moved_EL = np.array([(np.abs(each - usual_L1) <= TOLERANCES[1]).mean(axis=1) for each in errors])
    error_EL = np.array([np.abs(each).mean(axis=1) for each in errors])
    within_KEL = np.array([[(np.abs(each) <= limit).mean(axis=1) for each in errors] for limit in TOLERANCES])
    late_L = np.median(np.concatenate(errors, axis=1), axis=1)
    columns: dict[str, list[int]] = {name: [i] for i, name in enumerate(lists)}
    columns[RANDOM] = [*range(len(lists), len(lists) + len(at_random))]
    rows = []
    for name, own in columns.items():
        drawn = name == RANDOM
        row: dict[str, Any] = {"list": name, "size": len(at_random[0]) if drawn else len(lists[name])}
        row |= {"heads": "" if drawn else " ".join(f"{heads[n].layer}.{heads[n].head}" for n in lists[name])}
        row |= with_interval("error", error_EL[:, own].mean(axis=1)) | {"late": float(late_L[own].mean())}
        for limit, within_EL in zip(TOLERANCES, within_KEL, strict=True):
            row |= with_interval(f"within_{1000 * limit:g}", within_EL[:, own].mean(axis=1), share_interval)
        row |= with_interval(MOVED, moved_EL[:, own].mean(axis=1), share_interval)
        if PUBLISHED in lists and name != PUBLISHED:
            theirs = columns[PUBLISHED]
            more_E = within_KEL[1][:, own].mean(axis=1) - within_KEL[1][:, theirs].mean(axis=1)
            row |= with_interval("more", more_E, difference_interval)
            less_E = error_EL[:, own].mean(axis=1) - error_EL[:, theirs].mean(axis=1)
            row |= with_interval("error_more", less_E, mean_interval)
        rows.append(row)
    return pd.DataFrame(rows)


def words_of(sound: Sound, lists: dict[str, list[int]]) -> pd.DataFrame:
    """Return a row for each word of an utterance: when it is said, and when by each list of heads."""
    found, shown = sound.located([*lists.values()]), sound.text.split("\n")
    assert sound.times is not None
    table = pd.DataFrame({"word": shown, "begin": sound.times[:, 0], "end": sound.times[:, 1]})
    return table.assign(**{f"begin_{name}": found[i, :, 0] for i, name in enumerate(lists)})


def as_listed(heads: str) -> list[list[int]]:
    """Return heads such as "3.2 3.3" as `generation_config.alignment_heads` has them."""
    return sorted([int(part) for part in name.split(".")] for name in heads.split())


def copied(source: Path, target: Path, files: dict[str, bytes]) -> None:
    """Copy the folder of a model and replace files in it. The copy has its name only when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder, target.name)
        shutil.copytree(source, part)
        for name, content in files.items():
            (part / name).write_bytes(content)
        part.rename(target)
