"""The options of the package, small, as a run builds them."""

from collections.abc import Mapping
from typing import Any

from mhaprune.runs.run import GROUPS, SEVERAL
from mhaprune.settings import plugins
from mhaprune.settings.options import build, options_of

SMALL: Mapping[str, dict[str, Any]] = {"movement": {"steps": 5}}

before = set(plugins._allowed)
plugins.allow(["mhaprune_literature"])
OPTIONS: dict[str, dict[str, Any]] = {"scorer": {}, "schedule": {}}
for group, name, place, settings in options_of("mhaprune_literature", GROUPS, SEVERAL):
    assert place == f"{group}.{name}"
    OPTIONS[group][name] = build(GROUPS[group], settings | SMALL.get(name, {}), place)
plugins._allowed = before
