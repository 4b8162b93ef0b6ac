"""The command line (`scripts/run.py`, `mhaprune`, `python -m mhaprune`). Only it and `callbacks.py` know Hydra.

Torch and pandas are imported only when a run begins: help and error messages must be quick.
"""

from __future__ import annotations

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
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mhaprune.interrupts import interruptible
from mhaprune.lab.cli.arguments import check_arguments, check_once, composition_error, unreadable
from mhaprune.lab.cli.callbacks import Refusals, folder_of_job, name_of
from mhaprune.lab.cli.values import plain, settings_of_sweep, typed, values_of
from mhaprune.settings.plugins import conf_folder, results_folder
from mhaprune.settings.refusals import JobFailed, RunFailed, one_line, show_all, visible

if TYPE_CHECKING:
    from mhaprune.lab.runs.run import Run

log = logging.getLogger(__name__)

OmegaConf.register_new_resolver("pid", os.getpid, use_cache=True, replace=True)
OmegaConf.register_new_resolver("or", lambda name, other: other if name is None else name, replace=True)
OmegaConf.register_new_resolver("folder_of_job", folder_of_job, replace=True)
OmegaConf.register_new_resolver("results", lambda name: str(results_folder() / name), replace=True)

HELP = ("-h", "--help")
MULTIRUN = (
    *("-m", "--multirun"),
    *(f"{plus}hydra.mode={name}MULTIRUN" for plus in ("", "+", "++") for name in ("", "RunMode.")),
)
"""The arguments that ask for a sweep: the flags, and the setting that Hydra has for it."""
COMPLETION = ("-sc", "--shell-completion")
SHOW = ("--cfg", "-c")


def job(config: DictConfig) -> float | None:
    """Do one run, or one job of a sweep, in the folder made by Hydra. A job returns its first headline number, so that
    a sweeper of Hydra can look for the settings with the best one."""
    from mhaprune.lab.runs.jobs import do_alone, do_in_sweep
    from mhaprune.lab.runs.run import sweep_settings

    own = HydraConfig.get()
    overrides, output = typed(own.overrides.task), Path(own.runtime.output_dir)
    what = (lambda: _build(config, overrides)), output, overrides, lambda: sweep_settings(plain(config))
    if own.mode == RunMode.RUN:
        do_alone(*what)
        return None
    in_parallel = own.launcher._target_ != name_of(BasicLauncher)
    return do_in_sweep(*what, label=own.job.override_dirname or "the only job", in_parallel=in_parallel)


execute = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(job)


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
    """Let Hydra do a sweep. Then combine its jobs, also if some have failed or an interrupt has ended it."""
    if flags := [argument for argument in arguments if argument.startswith("-") and argument not in MULTIRUN]:
        raise ValueError(f"{flags[0]}: cannot stand beside -m, leave one of them out")
    Refusals.sweep, failed, not_done = None, None, ""
    try:
        execute()
    except JobFailed as error:
        failed = error
    finally:
        if Refusals.sweep is not None:
            from mhaprune.lab.runs.collecting import end_sweep

            root, figure = Path(Refusals.sweep.hydra.sweep.dir), settings_of_sweep(Refusals.sweep).figure
            not_done = end_sweep(root, figure)
    if failed is not None:
        raise ValueError(not_done or str(failed)) from failed


def _build(config: DictConfig, overrides: Sequence[str]) -> Run:
    values = values_of(config, overrides)
    from mhaprune.lab.runs.run import build

    return build(values)


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
    from mhaprune.settings.plugins import allow_typed

    packages = allow_typed(each.partition("=")[2] for each in arguments if each.startswith("plugins="))
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
