"""The command line (`scripts/run.py`, `mhaprune`, `python -m mhaprune`). Only it and `runs/from_hydra.py` know Hydra.

Torch and pandas are imported only when a run begins: help and error messages must be quick.
"""

from __future__ import annotations

import functools
import gc
import io
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mhaprune.interrupts import interruptible
from mhaprune.lab.cli.arguments import check_arguments, check_once, composition_error, unreadable
from mhaprune.progress import doing, shown
from mhaprune.settings.plugins import conf_folder, results_folder
from mhaprune.settings.refusals import BROUGHT, RunFailed, one_line, show_all, visible

if TYPE_CHECKING:
    from mhaprune.lab.runs.run import Run

log = logging.getLogger(__name__)

OmegaConf.register_new_resolver("pid", os.getpid, use_cache=True, replace=True)
OmegaConf.register_new_resolver("results", lambda name: str(results_folder() / name), replace=True)

HELP = ("-h", "--help")
MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")
"""The arguments that ask for a sweep: the flags, and the setting that Hydra has for it."""
COMPLETION = ("-sc", "--shell-completion")
SHOW = ("--cfg", "-c")


def job(config: DictConfig, start: int = 0) -> None:
    """Do one run or one job of a sweep, in the folder made by Hydra. `start` counts the starts of the sweep."""
    from mhaprune.lab.runs.processes import do_alone, do_in_sweep
    from mhaprune.lab.runs.run import sweep_settings

    hydra_config = HydraConfig.get()
    overrides: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)  # may refer to no setting
    output = Path(hydra_config.runtime.output_dir)
    do = do_alone if hydra_config.mode == RunMode.RUN else functools.partial(do_in_sweep, start=start)
    do(lambda: _build(config, overrides), output, overrides, lambda: sweep_settings(plain(config)))


execute = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(job)


def plain(config: DictConfig) -> dict[str, Any]:
    """Convert a config of Hydra into dicts, lists and plain values."""
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def described(*overrides: str) -> Run:
    """Return the run that the command line would do with these arguments.

    Raises ValueError, one line, for arguments that the command line would refuse.
    """
    from mhaprune.lab.runs.sweep_settings import SWEEP_SETTINGS

    check_once(overrides)
    for override in overrides:
        if override.startswith("-") or re.split(r"[./=@]", override.lstrip("+~"))[0] in (
            "hydra",
            "launch",
            *SWEEP_SETTINGS,
        ):
            raise ValueError(f"{override}: is for the command line alone, leave this out")
    register(overrides)
    try:
        with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
            return _build(hydra.compose("config", overrides=list(overrides)), overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_error_text(error, overrides)) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    An error is one line, or with HYDRA_FULL_ERROR=1 a traceback. The log of the run always has the traceback.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_all()
    traceback_wanted = os.environ.get("HYDRA_FULL_ERROR") == "1"
    failure: BaseException | None = None
    if "--version" in arguments:
        print(f"mhaprune {version('mhaprune')}")
        return 0
    if any(each in HELP for each in arguments):  # help is the same for all settings; Hydra would refuse some
        arguments = [each for each in arguments if each in HELP or each.startswith("plugins=")]
    try:
        check_arguments(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        if any(argument.partition("=")[0] in SHOW for argument in arguments):
            _show_settings(arguments)
        else:
            with _as_hydra_needs_it(arguments):
                (_sweep(arguments) if any(each in MULTIRUN for each in arguments) else execute())
    except BrokenPipeError:  # `--help | head`: nobody reads on, so there is nothing to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RunFailed as error:
        failure = error.__cause__
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    if failure is None or any(
        each in COMPLETION for each in arguments
    ):  # an error would disturb the completion of a command line
        return 0
    if traceback_wanted:
        raise failure
    print(f"error: {_error_text(failure, arguments)}", file=sys.stderr)
    return 130 if isinstance(failure, KeyboardInterrupt) else 1


def _show_settings(arguments: list[str]) -> None:
    """Print the settings as --cfg does, with a comment above each."""
    from mhaprune.lab.cli.explained import explained

    shown = io.StringIO()
    with _as_hydra_needs_it(arguments), redirect_stdout(shown):
        execute()
    print(explained(shown.getvalue()), end="")


def _sweep(arguments: Sequence[str]) -> None:
    """Do a multirun. Hydra's own would not check all jobs first, nor go on with a sweep that was killed."""
    with shown(), doing("load torch"):
        from mhaprune.lab.runs.from_hydra import composed_sweep, launch
    from mhaprune.lab.runs.run import sweep_settings
    from mhaprune.lab.runs.sweep_settings import SWEEP_SETTINGS

    if flags := [argument for argument in arguments if argument.startswith("-") and argument not in MULTIRUN]:
        raise ValueError(f"{flags[0]}: cannot stand beside -m, leave one of them out")
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = composed_sweep([argument for argument in arguments if argument not in MULTIRUN])
        how = sweep_settings(plain(OmegaConf.masked_copy(config, list(SWEEP_SETTINGS))))
        launch(config, GlobalHydra.instance().config_loader(), job, how, _values)


class Refusing(Callback):
    """The callback of Hydra that refuses a bad folder before Hydra writes there."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with shown(), doing("load torch"):  # for seconds, before anything else can be said
            from mhaprune.lab.runs.from_hydra import files_of_hydra
        from mhaprune.lab.runs.run_folder import refuse_busy
        from mhaprune.storage.store import refuse_links

        typed = any(text.startswith("hydra.run.dir=") for text in config.hydra.overrides.hydra)  # else a new folder
        try:
            if typed and not config.hydra.run.dir:
                raise ValueError("hydra.run.dir='': must name a folder")
            folder = Path(config.hydra.run.dir if typed else "new")
            refuse_busy(folder)
            refuse_links("hydra.run.dir", folder, files_of_hydra(config))
        except ValueError as error:
            raise RunFailed(error) from error


def _build(config: DictConfig, overrides: Sequence[str]) -> Run:
    values = _values(config, overrides)
    from mhaprune.lab.runs.run import build

    gc.freeze()  # imported objects stay: the garbage collector need not look through them again
    return build(values)


def _values(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
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


@contextmanager
def _as_hydra_needs_it(arguments: list[str]) -> Iterator[None]:
    """Set `sys.argv` and the environment for Hydra; at the end restore both and the handlers of the log."""
    before, variables, handlers = sys.argv, dict(os.environ), list(logging.getLogger().handlers)
    flags = [argument for argument in arguments if argument in MULTIRUN]  # argparse wants them first
    rest = [argument for argument in arguments if argument not in flags]
    register(arguments)
    sys.argv = [before[0], *flags, *rest]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its exceptions instead of printing them
    try:
        with interruptible():
            yield
    finally:
        sys.argv = before
        os.environ.clear()
        os.environ.update(variables)
        for handler in logging.getLogger().handlers:
            if handler not in handlers:
                handler.close()
        logging.getLogger().handlers[:] = handlers


def register(arguments: Iterable[str]) -> None:
    """Tell Hydra the options of plug-ins. Fields that a YAML file leaves out have the defaults of the class."""
    from mhaprune.settings.plugins import from_folder

    packages = from_folder(each.partition("=")[2] for each in arguments if each.startswith("plugins="))
    if not packages:
        return
    from mhaprune.lab.runs.run import GROUPS, SEVERAL
    from mhaprune.settings.options import options_of

    for package in packages:
        for group, name, place, settings in options_of(package, GROUPS, SEVERAL):
            ConfigStore.instance().store(name, settings, group, place, provider=package)


def _error_text(error: BaseException, arguments: Sequence[str]) -> str:
    if isinstance(error, HydraException | OmegaConfBaseException | ValueError):
        chain = [error, *filter(None, [error.__cause__, error.__context__])]
        text = "\n".join(str(part) for part in chain)
        for before, argument in zip(["", *arguments], arguments, strict=False):
            value_of_option = before.startswith("-") and before not in MULTIRUN
            if not (argument.startswith("-") or value_of_option or _parses(argument)):
                return unreadable(argument, before)
        said = composition_error(text, arguments, lambda: _composed(arguments))
        if said is not None:
            return said
    return visible(" ".join(str(error).split())) if isinstance(error, HydraException) else one_line(error)


def _parses(argument: str) -> bool:
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return True


def _composed(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return the config with only the options chosen by `arguments`; the default config if Hydra fails."""
    chosen = [argument for argument in arguments if (conf_folder() / argument.partition("=")[0]).is_dir()]
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        try:
            config = hydra.compose("config", overrides=chosen)
        except HydraException:
            config = hydra.compose("config")
    return plain(config)
