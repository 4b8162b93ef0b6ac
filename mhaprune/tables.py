"""Names of columns and of special rows in tables, shared by studies and figures.

No torch in here: figures, words and the collection of many runs work on tables alone.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pandas as pd

from mhaprune.heads import HeadId
from mhaprune.moved import names_in

if not TYPE_CHECKING:  # which would take any name for one of these
    __getattr__ = names_in(
        "mhaprune.lab.reporting.names",
        *("quality_name", "in_percent", "timed_name", "unit_name", "loss_unit", "loss_suffix", "in_brackets"),
    )

Tables = Mapping[str, pd.DataFrame]
"""Tidy tables by name: one row per measurement."""

HEAD = ["site", "layer", "head"]
"""The columns that name a head."""
MOMENTS = ["score", "stderr", "skewness"]
"""The columns from which the confidence interval of a score is computed."""
BLOCK = HEAD[:2]
"""The columns that name a block, one attention layer."""
LABEL = "label"
"""The column with the label of a run, which distinguishes it from other runs."""
SETTING = "setting"
"""The column with the label of a run without its seed. Runs that differ only in their seed have equal texts here."""
QUALITY = "quality"
"""The column of the quality of a model: exact match for our own, see `quality_name`."""
CONFIDENCE = "confidence"
"""The column of the mean probability that the model itself gives to being right."""
ECE = "ece"
"""The column of the expected calibration error: how far confidence and quality are apart."""
ERROR_RATE = "symbol_error_rate"
"""The column of the edits that the greedy answers need, per symbol of the right answers."""
QUALITY_NAME = "quality_name"
"""The column with the name of the quality, if it is not exact match."""
TIMED_NAME = "timed"
"""The column with the name of the timed call, if it is not greedy decoding."""
LOSS_UNIT = "loss_unit"
"""The column of the unit of a loss that is not in nats."""
VALID_QUALITY = f"valid_{QUALITY}"
"""The column of the quality on the valid split, which is measured during training."""
UNITS = "units"
"""The column with the name of what is counted as one head, if that is a set of heads: `key-value groups`."""
CHOOSE_QUALITY = f"choose_{QUALITY}"
"""The column of the quality on the choose split. It is never reported as a result."""
CHOOSE_DROP = "choose_drop"
"""The column of the drop in quality on the choose split: quality of the dense model minus quality of the pruned model.
Two columns beside it hold the paired 95 % interval."""
CHOOSE_MOST = f"{CHOOSE_DROP}_most"
"""The column of the largest drop on the choose split at 95 % confidence: the one-sided upper end."""
DENSE_QUALITY = "dense_quality"
"""The column of the quality of the whole model, in rows of smaller ones."""
CHOOSE_EXAMPLES = "choose_examples"
"""The column of the number of examples of the choose split."""
ALL_KINDS = "all"
"""The entry of the column `kind` in rows of all kinds of examples together."""
KIND, CHOOSE_KIND = "kind", "choose_kind"
"""The columns of the kind of examples that a row is about, where a user tells kinds apart."""
SURE = "heads_removed_sure"
"""The column with the number of heads that can be removed at 95 % confidence, see `lab.experiments.tolerance`."""
LOSS_RISE = "loss_rise"
"""The column of the mean rise of the loss with heads closed, in nats."""
ENDS = ("", "_low", "_high")
"""The endings of the names of three columns: a number, and the lower and upper end of its 95 % interval."""
QUARTILES = ("", "_q1", "_q3")
"""The endings of the names of three columns: a median, and its lower and upper quartile."""

DENSE = "dense"
"""The name of the row of the dense model, which has all its heads."""
DENSE_AGAIN = "dense again"
"""The name of a second row of the dense model, which is timed twice as an A/A control: the ratio of the two times is
noise."""
NOTHING = "nothing"
"""The entry of the column `recovery` for a model without recovery, as the removal left it."""
REFERENCE = "ablation"
"""The name of the scorer with which all others are compared."""
UNINFORMED = "control"
"""The family of scorers that know nothing about the model. They are never chosen from, and figures draw them in
grey."""
GATE = "gate_"
"""The prefix of the columns of gates in a table of training; the name of the head follows."""
USUAL = "report split"
"""The entry of the column `examples_of` in rows of the report split, which stand beside those of other examples."""
BEST_OF_SIZE = "best of each size"
"""The entry of the columns `schedule` and `scorer` in rows of the control: models trained from scratch, for each number
of heads in the shape of the best pruned model."""


def head_names(cell: object) -> list[HeadId]:
    """Return the names of the heads in a cell of a table, where blanks separate them. An empty cell, which a file
    returns as NaN, has none."""
    return [HeadId.parse(name) for name in cell.split()] if isinstance(cell, str) else []


def join_names(heads: Iterable[object]) -> str:
    """Return names as one text that `head_names` reads back; empty for no heads."""
    return " ".join(map(str, heads))


LISTED = 32
"""The largest number of units of a block that a sentence lists."""


def by_block(heads: Iterable[HeadId]) -> str:
    """Return heads as text, block by block: `encoder_self.0: 1 2, cross.1: 0`. Of many, only their number is said."""
    by_name: dict[str, list[str]] = {}
    for head in heads:
        by_name.setdefault(f"{head.site}.{head.layer}", []).append(str(head.head))
    lists = {block: " ".join(each) if len(each) <= LISTED else f"{len(each)} units" for block, each in by_name.items()}
    return ", ".join(f"{block}: {words}" for block, words in lists.items())


def told(frame: pd.DataFrame, **names: str) -> pd.DataFrame:
    """Return a table that knows, in `attrs`, what its columns are called elsewhere."""
    frame.attrs |= names
    return frame


def named(heads: pd.DataFrame) -> list[HeadId]:
    """Return the head of each row of a table, in the order of the rows."""
    return [HeadId(str(site), int(layer), int(head)) for site, layer, head in heads[HEAD].itertuples(index=False)]


def blocks_in(heads: pd.DataFrame) -> list[tuple[str, int]]:
    """Return the blocks that a table names, each once, in the order of the rows."""
    return list(heads[BLOCK].drop_duplicates().itertuples(index=False, name=None))


def candidates(frame: pd.DataFrame) -> list[str]:
    """Return the scorers with a single draw, thus one order of the heads. They are in the order of the table."""
    repeated = repeated_draws(frame)
    return [name for name in frame["scorer"].unique() if name not in repeated]


def repeated_draws(frame: pd.DataFrame) -> list[str]:
    """Return the scorers with several draws, each a random order of the heads."""
    draws = frame.groupby("scorer", sort=False)["draw"].nunique()
    return list(draws.index[draws > 1])


def varying(frame: pd.DataFrame) -> list[str]:
    """Return the columns in which rows differ. A missing value counts as a value; lists and the like are compared as
    text."""
    return [name for name in frame if _distinct(frame[name]) > 1]


def _distinct(column: pd.Series) -> int:
    try:
        return int(column.nunique(dropna=False))
    except TypeError:  # values without a hash
        return int(column.map(str).nunique())
