"""The README of a saved model: what was removed, how well the model does, how to read it, and how it was made.

Its first lines, the front matter, are what a hub of models reads: the base model, the licence, and measurements.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from torch import nn

from mhaprune.storage.store import write_bytes
from mhaprune.tables import by_block, head_names

CARD, MARK = "README.md", "\nSaved by mhaprune. "
RECOVERED = ("refitted", "distilled", "trained")
FITTED = (
    "It was fitted to examples. On kinds of examples that are unlike them it may keep less, so measure it on yours."
)
LOST = "_lost_by_mhaprune"
"""The attribute of a pruned model that lists what it has lost, in words."""
HUB_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.S)
METRICS = ("quality", "loss")
"""The columns of a table that go into the front matter, with the names that the table gives them in `attrs`."""
TEXT = """{front}
# {name}
{mark}{removed}{fitted}

## How to read it

`{read}`

## How it was made

{command}, with {versions}.
"""


def write_card(model: Any, folder: Path, read: str) -> None:
    """Write the card of a model into a folder, unless a README of somebody else is there. `read` is a line of code that
    reads the folder."""
    if (folder / CARD).exists() and not wrote_card(folder):
        return
    name, lost = type(model).__name__, vars(model).get(LOST, [])
    removed = f"Removed from a `{name}` (site.layer: units, counted from 0 in the model before):" if lost else ""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").name  # its arguments may be private
    library = "transformers" if "from_pretrained" in read else "pytorch"
    text = TEXT.format(
        front=_front({"library_name": library, "tags": ["mhaprune"], **_of_origin(model)}),
        name=name,
        mark=MARK.lstrip("\n"),
        removed="".join([removed, *(f"\n- {each}" for each in lost)]),
        fitted=f"\n\n{FITTED}" if any(f", then {done}" in each for each in lost for done in RECOVERED) else "",
        read=read,
        command=f"By `{script}`" if script else "By hand",
        versions=", ".join(filter(None, map(_version, ("mhaprune", "torch", "transformers")))),
    )
    write_bytes(folder / CARD, text.encode())


def complete_card(folder: Path, about: Mapping[str, Any], table: pd.DataFrame | None, tokenizer: bool) -> None:
    """Add to the card in a folder what its hub shall show `about` the model, how well it does, and how its tokenizer is
    read, unless the README is somebody else's."""
    if not wrote_card(folder):
        return
    front, text = front_matter(folder), FRONT.sub("", (folder / CARD).read_text())
    if tokenizer and "trust_remote_code" in text:
        text = text.replace(
            "trust_remote_code=True)`\n",
            "trust_remote_code=True)`, `AutoTokenizer.from_pretrained(folder, trust_remote_code=True)`\n\nWithout the"
            " last words transformers asks whether to run the code in the folder, even for a tokenizer.\n",
        )
    if table is not None:
        table = table if isinstance(table.index, pd.RangeIndex) else table.reset_index()
        rows = [list(table), ["---"] * len(table.columns), *table.itertuples(index=False)]
        cells = [[written(x) if isinstance(x, float) else " ".join(str(x).split()) for x in row] for row in rows]
        lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in cells]
        text = "\n".join([text, f"{TABLE}\n", *lines, ""])
        front |= _measured(folder, table)
    write_bytes(folder / CARD, (_front({**front, **about}) + text).encode())


TABLE = "## How well it does"


def written(number: float) -> str:
    """Return a number as cards write it."""
    return f"{number:.4g}"


def _front(content: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None, allow_unicode=True)}---\n"


def front_matter(folder: Path) -> dict[str, Any]:
    """Return the front matter of the README in a folder; nothing if it has none that can be read."""
    with suppress(Exception):  # it may be anybody's
        found = FRONT.match((folder / CARD).read_text(errors="replace"))
        text = found[1] if found else ""
        if sum(map(text.count, "[{")) > 500:  # nested, they take minutes to read
            return {}
        if not any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            return {**yaml.safe_load(text)}  # an alias may stand for gigabytes
    return {}


def _of_origin(model: Any) -> dict[str, str]:
    """Return the base model and the licence, as far as the place tells them that a model was read from: its name if
    that is one on a hub, else what the card there says, which may be anybody's. The path of a folder is private."""
    config = getattr(model, "config", None)
    origin = str(getattr(config, "_name_or_path", "") or "")
    of_hub = isinstance(getattr(config, "_commit_hash", None), str)  # which transformers notes of what a hub gave
    known = front_matter(Path(origin)) if origin else {}
    base = origin if of_hub else known.get("base_model")
    found = {"base_model": (base, HUB_NAME), "license": (known.get("license"), re.compile(r"[\w.-]{1,96}"))}
    return {name: each for name, (each, allowed) in found.items() if isinstance(each, str) and allowed.fullmatch(each)}


def _measured(folder: Path, table: pd.DataFrame) -> dict[str, Any]:
    """Return the row of a table that is of the model in a folder, see `own_rows`, as the `model-index` of a hub; of
    several kinds of examples that of the worst. A table without such a row gives nothing."""
    lines = lines_of((folder / CARD).read_text())
    if table.columns.has_duplicates or not {*METRICS, "heads_kept", "removed"} <= {*table}:
        return {}
    rows = table[own_rows([dict(row) for _, row in table.astype(str).iterrows()], lines, strictly=True)]
    rows = rows[rows["worst"].astype(str) == "True"] if "worst" in rows else rows
    names = {column: str(table.attrs.get(column, column)) for column in METRICS}
    numbers = [rows[column].iloc[0] for column in METRICS] if len(rows) == 1 else [math.nan]
    if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
        return {}
    metrics = [
        {"type": column if column == "loss" else name, "name": name, "value": float(written(rows[column].iloc[0]))}
        for column, name in names.items()
    ]
    data = {"name": "the report split of mhaprune", "type": "other"}
    result = {"task": {"type": "other"}, "dataset": data, "metrics": metrics}
    name = (folder / CARD).read_text().partition("\n# ")[2].partition("\n")[0]
    return {"model-index": [{"name": name, "results": [result]}]}


def counts_in(line: str) -> tuple[int, int, str]:
    """Return how many heads a line of a card says went, of how many, and which, as `by_block` writes them."""
    removed, before = map(int, re.findall(r"\d+", line)[:2])
    return removed, before, line.partition(": ")[2].partition(", then ")[0].partition(" (")[0]


def own_rows(rows: Sequence[Mapping[str, str]], lines: Sequence[str], strictly: bool = False) -> list[bool]:
    """Return which rows of a table of `Heads.evaluate`, as texts, are of the model of a card: those of the mask that
    its last line names, unless the model was recovered afterwards, and those of a whole model that has lost these heads
    before. Unless `strictly`, a row that may be this model's but for a number that was altered counts too."""
    removed, before, which = counts_in(lines[-1]) if lines else (0, 0, "")
    recovered, left = bool(lines) and ", then " in lines[-1], str(before - removed)
    known = {str(counts_in(line)[1]) for line in lines}
    masks = [gone_in(row) for row in rows]
    found = []
    for row, mask in zip(rows, masks, strict=True):
        kept = row.get("heads_kept", "")
        if mask:
            alike = mask == which and "units" not in which and (kept == left or not strictly)
            own = not recovered and (alike or (not strictly and which not in masks and kept == left))
        else:
            own = not lines or kept == left or (not strictly and kept not in known)
        found.append(own and "removed" in row)
    return found


def gone_in(row: Mapping[str, str]) -> str:
    """Return which heads a row of a table has removed, as `by_block` writes them; the text itself if it names none."""
    cell = row.get("removed", "")
    try:
        return by_block(head_names(cell))
    except ValueError:
        return cell


def lines_of(card: str) -> list[str]:
    """Return the lines of a card that say what was removed, one for each removal."""
    text = FRONT.sub("", card).partition("\n## ")[0]
    return [line[1] for line in map(LINE.fullmatch, text.splitlines()) if line]


BLOCK = r"([\w.]{1,200})(?:@\d{1,3})?\.\d{1,5}: (?:\d{1,6}(?: \d{1,6}){0,200}|\d{1,6} units)"
LINE = re.compile(
    r"- (\d{1,6} of \d{1,6} (?:heads|neurons|units|sublayers|key-value groups|attention layers|heads of single calls): "
    rf"{BLOCK}(?:, {BLOCK})*"
    rf"(?: \(they still see the first \d+ tokens and the last \d+\))?(?:, then (?:{'|'.join(RECOVERED)}))*)"
)
"""A line of a card that says what was removed, as `folders.tell` writes it."""


def lost_before(folder: Path, model: nn.Module) -> list[str]:
    """Return what the model in a folder has lost, as its card says, for the next card. The card may be anybody's, so
    only lines that we could have written of this model are taken over."""
    text = (folder / CARD).read_text(errors="replace") if wrote_card(folder) else ""
    words = {"attention", "layer", "neuron", *(word for path, _ in model.named_modules() for word in path.split("."))}
    sites = re.compile(BLOCK)
    return [line for line in lines_of(text) if {w for s in sites.findall(line) for w in s.split(".")} <= words]


def wrote_card(folder: Path) -> bool:
    """Return whether the README in a folder is one of `write_card`."""
    path = folder / CARD
    return path.is_file() and MARK in path.read_text(errors="replace")


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    return ""
