"""Hydra in, `Run` out: what `scripts/run.py` does. The only module that knows Hydra."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from mhaprune.collect import RUN, collect
from mhaprune.config import ConfigError, build
from mhaprune.model.checkpoint import BROUGHT
from mhaprune.run import Run
from mhaprune.store import RunFolder

log = logging.getLogger(__name__)

OmegaConf.register_new_resolver("pid", os.getpid, use_cache=True, replace=True)


def execute(config: DictConfig) -> None:
    """What `scripts/run.py` does in its output folder; the folder's status and log say how it ended."""
    folder = RunFolder(HydraConfig.get().runtime.output_dir)
    try:
        with folder.recorded():
            folder.note(kind=RUN, overrides=list(HydraConfig.get().overrides.task))
            lines = _build(config, list(HydraConfig.get().overrides.task))(folder)
    except BaseException as error:
        # Hydra's launchers lose a job's traceback, so its own log must have it; the terminal gets a line from `main`.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "failed", (), sys.exc_info()))
        if HydraConfig.get().mode == RunMode.RUN:
            raise RunFailed(error) from error
        raise
    for line in lines:
        log.info("%s", line)
    log.info("all of it is in %s, start with report.html", folder.path)


def plain(config: DictConfig) -> dict[str, Any]:
    """What Hydra has composed, as dicts, lists and values."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _build(config: DictConfig, overrides: Sequence[str]) -> Run:
    """Raises ConfigError where a setting is given that `model_file` brings with it: it would not be used."""
    for override in overrides if config.get("model_file") is not None else ():
        if re.split(r"[.=@]", override.lstrip("+~"))[0] in BROUGHT:
            raise ConfigError(f"{override}: model_file brings its own {', '.join(BROUGHT)}, leave this out")
    return build(plain(config))


def described(*overrides: str) -> Run:
    """The run that `scripts/run.py` would do with these arguments, for scripts that study it in their own way.

    Raises ValueError, one line, for arguments that it would refuse.
    """
    try:
        with hydra.initialize_config_dir(str(_conf()), version_base="1.3"):
            return _build(hydra.compose("config", overrides=list(overrides)), overrides)
    except HydraException as error:
        raise ValueError(one_line(error)) from None


class RunFailed(BaseException):
    """Carries the failure of a single run past Hydra, which reports every `Exception` in its own words."""


class SweepFolder(Callback):
    """Remembers where a multirun puts its jobs: if one fails, Hydra does not call back at the end."""

    root: Path | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        SweepFolder.root = Path(config.hydra.sweep.dir)


def main(script: Callable[[], None]) -> int:
    """Call a `hydra.main` function; gives the exit code.

    An error is one line on the terminal, with HYDRA_FULL_ERROR=1 a traceback; the log of the run always has it. After
    a multirun the tables of its jobs are combined in its folder, also when jobs failed or it was interrupted.
    """
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra hand its exceptions on instead of printing them
    gc.freeze()  # what the imports have made stays: no collection need look through it again
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failure: BaseException | None = None
    try:
        script()
    except RunFailed as error:
        failure = error.__cause__
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    if SweepFolder.root is not None:
        try:
            for line in collect([SweepFolder.root], SweepFolder.root, "Sweep"):
                print(line)
            print(f"all of it is in {SweepFolder.root}, start with report.html")
        except ValueError as error:
            failure = failure or error
    if failure is None:
        return 0
    if traceback_wanted:
        raise failure
    print(f"error: {one_line(failure)}", file=sys.stderr)
    return 130 if isinstance(failure, KeyboardInterrupt) else 1


def one_line(error: BaseException) -> str:
    """An error as a user should read it: key, value and what is allowed."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the same command goes on from what was cached"
    if isinstance(error, HydraException) and (composition := _composition_error(str(error))):
        return composition
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; hydra.run.dir and cache must name folders that can be written"
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text} (HYDRA_FULL_ERROR=1 shows where)"


def _composition_error(text: str) -> str | None:
    """What Hydra says in several lines of a key or option that is not there, in one; None if it speaks of others."""
    if found := re.search(r"Could not (?:load|find) 'hydra/launcher/(.+?)'", text):
        return f"launch={found[1]}: this launcher is not installed, joblib comes with: pip install -e '.[parallel]'"
    if found := re.search(r"Could not (?:load|find) '(.+)/(.+?)'", text):
        options = sorted(path.stem for path in (_conf() / found[1]).glob("*.yaml"))
        return f"{found[1]}={found[2]}: no such option, allowed are {', '.join(options)}"
    if found := re.search(r"Ambiguous value for argument '(.+?)'", text):
        return f"{found[1]}: commas ask for a sweep, which needs -m; a list stands in brackets, a text in quotes"
    if "LexerNoViableAlt" in text or "mismatched input" in text or "token recognition" in text:
        given = " ".join(text.splitlines()[0].removeprefix("LexerNoViableAltException: ").split())
        return f"{given}: cannot be read; a text with blanks or signs stands in quotes, KEY='...'"
    if found := re.search(r"Could not override '(.+?)'", text):
        parents = found[1].split(".")[:-1]
        given = next((argument for argument in sys.argv if argument.startswith(f"{found[1]}=")), found[1])
        node: Any = _composed()
        for parent in parents:
            if not isinstance(node, DictConfig) or node.get(parent) is None:
                return f"{given}: {parent} is not among what is chosen, see --help for the options"
            node = node[parent]
        allowed = [str(name) for name in node if name != "_target_"] if isinstance(node, DictConfig) else []
        return f"{given}: no such key, allowed are {', '.join(allowed) or 'none'}"
    return None


def _composed() -> DictConfig:
    """The config with the options of the command line chosen, but none of its settings; of a sweep the default."""
    chosen = [argument for argument in sys.argv[1:] if (_conf() / argument.partition("=")[0]).is_dir()]
    with hydra.initialize_config_dir(str(_conf()), version_base="1.3"):
        try:
            return hydra.compose("config", overrides=chosen)
        except HydraException:
            return hydra.compose("config")


def _conf() -> Path:
    return Path(sys.argv[0]).resolve().parents[1] / "conf"
