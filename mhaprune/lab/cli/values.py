"""Configs of Hydra as plain values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf

from mhaprune.settings.refusals import BROUGHT

if TYPE_CHECKING:
    from mhaprune.lab.runs.sweep_settings import SweepSettings


def plain(config: DictConfig) -> dict[str, Any]:
    """Convert a config of Hydra into dicts, lists and plain values, without the settings of Hydra itself."""
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    values = OmegaConf.to_container(own, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def settings_of_sweep(config: DictConfig) -> SweepSettings:
    """Return the settings of a sweep. Others are not read: they may refer to an option that only a job has."""
    from mhaprune.lab.runs.run import sweep_settings
    from mhaprune.lab.runs.sweep_settings import SWEEP_SETTINGS

    return sweep_settings(plain(OmegaConf.masked_copy(config, list(SWEEP_SETTINGS))))


def typed(overrides: Sequence[str]) -> list[str]:
    """Return overrides as they were typed: unresolved, because they may refer to a setting that does not exist."""
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def values_of(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the config as plain values. Raises ConfigError for a setting that the chosen model does not allow."""
    values = plain(config)
    from mhaprune.lab.runs.run import ONLY_TRAINED_HERE, is_pretrained
    from mhaprune.settings.options import ConfigError

    brought: dict[str, Sequence[str]] = {}
    if config.get("model_file") is not None:
        brought["model_file brings its own"] = BROUGHT
    elif is_pretrained(values):
        brought["a pretrained model has no"] = ONLY_TRAINED_HERE
    for why, names in brought.items():
        for override in overrides:
            if re.split(r"[.=@]", override.lstrip("+~"))[0] in names:
                raise ConfigError(f"{override}: {why} {', '.join(names)}, leave this out")
    return values
