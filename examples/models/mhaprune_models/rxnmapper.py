"""RXNMapper, a model of chemical reactions that is installed as a package, with the head that its authors name.

Dimensions: B = batch, T = tokens.
"""

from __future__ import annotations

import itertools
import random
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from mhaprune import losses
from mhaprune.inputs import Known
from mhaprune.lab.sources.pretrained import Pretrained, PretrainedModel, batched, chosen
from mhaprune.lab.tasks.base import SplitSize
from mhaprune.settings.ranges import Ge
from mhaprune.subjects.batches import IGNORED

FOLDER = Path(sysconfig.get_path("purelib"), "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k")
INSTALL = "pip install --no-deps rxnmapper==0.4.3"
LAYER, HEAD = 10, 5
"""The head that maps atoms, as the package has it in its settings (Schwaller et al. 2021); both are counted from 0."""

TOKEN = re.compile(r"\[[^\]]*\]|Br|Cl|>>|.")
ATOM = re.compile(r"Br|Cl|[A-Za-z]|\[")
ACIDS = ("CC", "CCC", "CC(C)C", "c1ccccc1", "Cc1ccc(Cl)cc1", "COCC", "CC(F)(F)C", "c1ccncc1C", "N#Cc1cccc(C)c1")
PARTNERS = ("CC", "CCC", "CCOC", "C(C)C", "CC(F)F", "Cc1ccccc1", "c1ccc(Br)cc1", "CCC#N", "CCSC")
KINDS = (("C(=O)O", "N", "C(=O)N"), ("C(=O)Cl", "N", "C(=O)N"), ("C(=O)O", "O", "C(=O)O"), ("CBr", "O", "CO"))
"""The end of the first molecule, the begin of the second, and what both are in the product."""


class Reaction(NamedTuple):
    """The tokens before and after the arrow."""

    before: list[str]
    after: list[str]


@dataclass(frozen=True)
class Rxnmapper(Pretrained):
    """An ALBERT that passes one layer of eight heads twelve times (Schwaller et al. 2021). Its texts are reactions that
    are put together from parts. Some atoms of the product are masked, and it is judged by how well it predicts them; in
    the counterpart the molecules before the arrow are others. The package maps atoms by head 5 in the eleventh call."""

    score: SplitSize = 32
    """Number of reactions that heads are scored on."""
    choose: SplitSize = 32
    """Number of reactions that choices are made on."""
    report: SplitSize = 32
    """Number of reactions that results are reported on."""
    masked: Annotated[int, Ge(1)] = 3
    """Number of atoms of the product that are masked."""
    draw: Annotated[int, Ge(0)] = 0
    """The number of the draw of reactions and masks."""
    calls: bool = True
    """Whether a head is scored in each of the twelve calls. False for experiments that remove heads, which go out of
    all calls."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        if data is not None:
            raise ValueError(f"data={data}: model=rxnmapper has reactions of its own, leave it out")
        judged = {"likelihood": (losses.seq2seq, losses.token_accuracy)}
        name, judged_by = chosen(objective, judged, "model=rxnmapper")
        try:
            from transformers import AlbertForMaskedLM
            from transformers.utils import logging
        except ImportError:
            raise ValueError("model=rxnmapper: needs transformers: pip install 'mhaprune[hf]'") from None
        if not FOLDER.is_dir():
            raise ValueError(f"model=rxnmapper: is not installed: {INSTALL}")
        logging.set_verbosity_error()  # its pooler is not needed
        model: Any = AlbertForMaskedLM.from_pretrained(FOLDER, attn_implementation="eager")
        words = (FOLDER / "vocab.txt").read_text(encoding="utf-8").splitlines()
        draw = random.Random(self.draw)
        found = reactions(draw)
        if len(found) < sum(self.sizes.values()):
            raise ValueError(f"model.score={self.score}: there are {len(found)} reactions, ask for fewer")
        rest = iter(found)
        splits = {split: batched([next(rest) for _ in range(size)]) for split, size in self.sizes.items()}
        made = {
            split: [self.batches_of(part, found, {word: n for n, word in enumerate(words)}, draw) for part in parts]
            for split, parts in splits.items()
        }
        return PretrainedModel(
            model=model,
            splits={split: [clean for clean, _ in parts] for split, parts in made.items()},
            corrupt={split: [corrupt for _, corrupt in parts] for split, parts in made.items()},
            objective=judged_by,
            facts={"model_task": "masked-lm", "objective": name},
            packages=("transformers", "rxnmapper"),
            call=lambda model, batch: model(batch["input_ids"], batch["attention_mask"]),
            tokens=lambda batch: [
                [words[i] for i in row[real != 0].tolist()]
                for row, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)
            ],
            unit="call" if self.calls else "head",
            known=Known({f"attention.0.{HEAD}@{LAYER}": "maps atoms"}, ("maps atoms",), "publication")
            if self.calls
            else None,
        )

    def batches_of(
        self, part: Sequence[Reaction], others: Sequence[Reaction], ids: dict[str, int], draw: random.Random
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return reactions with some atoms masked, and their counterparts, as two batches."""
        rows, corrupt, labels = list[list[str]](), list[list[str]](), list[list[int]]()
        for reaction in part:
            fits = [other.before for other in others if len(other.before) == len(reaction.before)]
            other = draw.choice([before for before in fits if before != reaction.before] or [reaction.before[::-1]])
            atoms = [n for n, token in enumerate(reaction.after) if ATOM.match(token)]
            masked = set(draw.sample(atoms, min(self.masked, len(atoms))))
            after = ["[MASK]" if n in masked else token for n, token in enumerate(reaction.after)]
            for made, before in ((rows, reaction.before), (corrupt, other)):
                made.append(["[CLS]", *before, ">>", *after, "[SEP]"])
            asked = [ids[token] if n in masked else IGNORED for n, token in enumerate(reaction.after)]
            labels.append([IGNORED] * (len(reaction.before) + 2) + asked + [IGNORED])
        longest = max(map(len, rows))

        def padded(values: Sequence[Sequence[int]], filling: int) -> Tensor:
            return torch.tensor([[*row, *[filling] * (longest - len(row))] for row in values])

        shared = {"labels": padded(labels, IGNORED), "attention_mask": padded([[1] * len(row) for row in rows], 0)}
        both = [padded([[ids[token] for token in row] for row in made], ids["[PAD]"]) for made in (rows, corrupt)]
        return {"input_ids": both[0], **shared}, {"input_ids": both[1], **shared}


def reactions(draw: random.Random) -> list[Reaction]:
    """Return all reactions in random order."""
    found = []
    for (end, begin, joined), first, second in itertools.product(KINDS, ACIDS, PARTNERS):
        before, after = f"{first}{end}.{begin}{second}", f"{first}{joined}{second}"
        found.append(Reaction(TOKEN.findall(before), TOKEN.findall(after)))
    draw.shuffle(found)
    return found
