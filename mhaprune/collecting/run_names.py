"""What runs are called beside each other: by the settings in which they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mhaprune.storage.sweeps import ORDERS
from mhaprune.tables import LABEL, SETTING

RESERVED = ("cache", "hydra", LABEL, SETTING, *ORDERS)
"""Settings that are no names of runs."""


class Names(NamedTuple):
    """What several runs are called, in their order."""

    labels: list[str]
    """What tells the runs apart: the settings that differ between them and, where that is not enough, the folder."""
    settings: list[str]
    """The same without seed and folder."""
    varying: list[str]
    """The settings that differ."""
    details: list[dict[str, str]]
    """All that is known of each run, by setting."""


def names(places: Sequence[Path], statuses: Sequence[Mapping[str, Any]]) -> Names:
    """The names of runs by their folders and statuses."""
    settings = [_settings(status) for status in statuses]
    if len({mine.get("experiment") for mine in settings}) == 1:
        for mine in settings:
            mine.pop("experiment", None)
    varying = _varying(settings, ["identity" in status for status in statuses])
    labels = [_joined(mine, varying) for mine in settings]
    depth = 1
    while len({place.parts[-depth:] for place in places}) < len(places):
        depth += 1
    often = Counter(labels)
    unique = [
        label if label and often[label] == 1 else _listed([label, "/".join(place.parts[-depth:])])
        for label, place in zip(labels, places, strict=True)
    ]
    seedless = [name for name in varying if name != "seed"]
    return Names(unique, [_joined(mine, seedless) for mine in settings], varying, settings)


def _varying(settings: Sequence[Mapping[str, str]], whole: Sequence[bool]) -> list[str]:
    """The settings that differ between runs. Of a run that is not `whole` only what was typed is known. The seed comes
    last."""
    values: dict[str, set[str | None]] = {name: set() for mine in settings for name in mine}
    for mine, known in zip(settings, whole, strict=True):
        for name in values if known else mine:
            values[name].add(mine.get(name))
    return sorted((name for name, different in values.items() if len(different) > 1), key=lambda name: name == "seed")


def _joined(settings: Mapping[str, str], names: Iterable[str]) -> str:
    return _listed(f"{name}={settings[name]}" for name in names if name in settings)


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(filter(None, texts))


def _settings(status: Mapping[str, Any]) -> dict[str, str]:
    """What a run was: its identity, and whatever else its command line set."""
    identity = status.get("identity", {})
    settings = {"experiment": status["experiment"].rpartition(".")[2].lower()} if "experiment" in status else {}
    settings |= {name: str(value) for name, value in identity.items() if name not in ("run", LABEL, SETTING)}
    for override in status.get("overrides", []):
        key, _, value = override.partition("=")
        short = key.removeprefix("model.")  # as the identity calls it
        if short not in identity and key != "experiment" and key.split(".")[0] not in RESERVED:
            settings[key if identity else short] = value
    return settings
