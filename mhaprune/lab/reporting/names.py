"""The names that tables give to their numbers: quality, timed call, units that are removed, unit of the loss."""

from mhaprune.tables import LOSS_UNIT, QUALITY_NAME, TIMED_NAME, UNITS, Tables


def quality_name(tables: Tables) -> str:
    """Return the name of the quality in figures and sentences."""
    return _named_by(QUALITY_NAME, tables) or "exact match"


def in_percent(quality: str) -> bool:
    """Return whether a quality of this name is a share of answers, to be written in percent. A cosine is none, and of
    an unknown name it is not known."""
    return bool({"accuracy", "match", "agreement", "right"} & {*quality.split()})


def timed_name(tables: Tables) -> str:
    """Return the name of the timed call in figures and sentences."""
    return _named_by(TIMED_NAME, tables) or "greedy decoding"


def unit_name(tables: Tables) -> str:
    """Return the name of what is scored and removed: `heads`, or a name of sets of heads."""
    return _named_by(UNITS, tables) or "heads"


def loss_unit(tables: Tables) -> str:
    """The unit of the loss; empty for a loss that has none."""
    unit = _named_by(LOSS_UNIT, tables)
    return "nats" if unit is None else unit


def loss_suffix(tables: Tables) -> str:
    """Return a blank and the unit of the loss, to stand after a number in a sentence; an empty text for a loss without
    unit."""
    unit = loss_unit(tables)
    return f" {unit}" if unit else ""


def in_brackets(tables: Tables) -> str:
    """Return ` (nats)`, the unit of the loss in brackets, for an axis; an empty text without unit."""
    unit = loss_unit(tables)
    return f" ({unit})" if unit else ""


def _named_by(column: str, tables: Tables) -> str | None:
    """Return the text in this column, from the first row of the first table that has it; None if no table has it. NaN
    is returned as an empty text, because an empty text in a file is read as NaN."""
    text = next((frame[column].iloc[0] for frame in tables.values() if column in frame and len(frame)), None)
    return text if text is None or isinstance(text, str) else ""
