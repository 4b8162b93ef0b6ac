"""The old names of modules and names that were moved, for plug-ins and saved files that use these names."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

ROOMS = {
    "front": "api",
    **{room: f"lab.{room}" for room in ("model", "tasks", "sources", "experiments", "reporting", "runs")},
}
FILES = {
    "api": "front.heads=wrap front.given=parsing",
    "hooks": """wrapping.tensors=pytree wrapping.at_rest=eval_mode wrapping.interception=attention_calls
        wrapping.blocks wrapping.gating wrapping.replay wrapping.weights_in_use=functional_linear wrapping.windows
        wrapping.softmaxes""",
    "discovery": """wrapping.discovery=attention wrapping.layouts wrapping.numbers=per_head_tensors wrapping.neurons
        wrapping.hints""",
    "surgery": """wrapping.removal wrapping.cuts=record wrapping.reshaping wrapping.streaming
        wrapping.torch_nn=torch_attention""",
    "saving": """wrapping.saving=folders wrapping.removal_file wrapping.transformers_folder=hf_folder
        wrapping.model_card""",
    "subjects": """wrapping.batches wrapping.pairs wrapping.units=unit_sets wrapping.gated=gated_model
        wrapping.workers=ray_workers""",
    "proofs": "wrapping.proofs=whole_model wrapping.block_proof=block_by_block wrapping.closing",
    "wrapping": "wrapping.wrapped=wrapped_model wrapping.understand=build",
    "training": "wrapping.descent=loop wrapping.training=fine_tuning",
    "measure": "measure.columns=accuracy",
    "lab.experiments": "schedules.budgets tasks.answers=answers lab.tasks.answers=answers",
    "lab.cli": "front.command_line front.explained front.pages front.python front.refusals=arguments",
    "lab.model": "model.network=layers model.transformer=seq2seq",
    "lab.reporting": "reporting.training=training_curves settings.figures=figure_settings scorers.agreement",
    "lab.runs": """runs.found=run_reader settings.sweep=sweep_settings experiments.results=results
        lab.experiments.results=results""",
}
MOVED = {f"mhaprune.{old}": f"mhaprune.{new}" for old, new in {**ROOMS, "wrapping.losses": "losses"}.items()}
"""New names by old ones."""
for _room, _files in FILES.items():
    for _old, _, _new in (each.partition("=") for each in _files.split()):
        MOVED[f"mhaprune.{_old}"] = f"mhaprune.{_room}.{_new or _old.partition('.')[2]}"


class Moved(MetaPathFinder, Loader):
    """A finder that gives a module by its old name, the same object as by the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if _now(fullname) is None else ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(str(_now(module.__name__)))

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for `python -m OLD.NAME`."""
        name = str(_now(fullname))
        loader = getattr(find_spec(name), "loader", None)
        return loader.get_code(name) if loader is not None else None


def _now(name: str) -> str | None:
    """Return the new name of a module; None if it has not moved."""
    room = ".".join(name.split(".")[:2])
    return MOVED.get(name) or (MOVED[room] + name.removeprefix(room) if room in MOVED else None)


def parts_of(package: str) -> Callable[[str], ModuleType]:
    """Return the `__getattr__` of a package that has lost modules: these are still its attributes."""

    def part(name: str) -> ModuleType:
        if _now(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return part


def names_in(new: str, *names: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose `names` are now in the module `new`."""

    def moved(name: str) -> Any:
        if name not in names or find_spec(new.rpartition(".")[0]) is None:
            raise AttributeError(f"no {name!r} is in this module")
        return getattr(import_module(new), name)

    return moved
