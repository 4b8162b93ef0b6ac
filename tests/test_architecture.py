"""The house: what may import what, and that every plug-in is one file and one YAML of one name."""

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from mhaprune.lab.experiments.base import Experiment
from mhaprune.lab.tasks.base import Task
from mhaprune.recoveries.base import Recovery
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.base import Scorer
from mhaprune.settings import options
from mhaprune.settings.options import option_name
from support import ROOT

CORE = """
    moved settings progress interrupts heads data tables statistics storage subject measure attention hooks surgery
    saving discovery subjects losses proofs wrapping training scorers schedules inputs recoveries pruning api
    """.split()  # noqa: SIM905 (a list of words is easier to read and to move about)
LAB = [f"lab.{name}" for name in ("tasks", "model", "reporting", "sources", "experiments", "runs", "cli")]
HOUSE = [*CORE, "lab", *LAB, "__main__"]
"""The rooms. Each imports only from those before it, so that the core never imports the lab."""
PACKAGE = ROOT / "mhaprune"
BASES = {"task": Task, "scorer": Scorer, "schedule": Schedule, "recovery": Recovery, "experiment": Experiment}
"""What the options of a group are."""
OPTIONS = sorted(path for path in (ROOT / "conf").glob("*/*.yaml"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path: Path) -> set[str]:
    """The modules that a file imports, by their full names."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by dots"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys()
            if names - MODULES.keys():
                found.add(node.module or "")
    return found


def own_imports(module: str) -> set[str]:
    """Those of the package."""
    return {name for name in imports(MODULES[module]) if name.split(".")[0] == "mhaprune"}


def room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[1:3]) if parts[1] == "lab" else parts[1]


def settings_of(path: Path) -> dict[str, Any]:
    """What the YAML of an option says about the option itself."""
    found = yaml.safe_load(path.read_text()) or {}
    return found.get(path.parent.name, found) or {}


def plug_ins() -> dict[Path, str]:
    """The YAMLs of tasks, scorers, schedules, recoveries and experiments that name a class, with its module."""
    targets = {path: settings_of(path).get("_target_") for path in OPTIONS if path.parent.name in BASES}
    return {path: target.rpartition(".")[0] for path, target in targets.items() if target}


PLUG_INS = plug_ins()
TOGETHER = {"evaluate": "train"}
"""The files of options that share one."""


def test_imports_point_upwards_only() -> None:
    for module in MODULES.keys() - {"mhaprune"}:
        for other in own_imports(module):
            assert other != "mhaprune", f"{module} imports the front door"
            upwards = HOUSE.index(room(other)) < HOUSE.index(room(module))
            assert upwards or room(other) == room(module), f"{module} imports {other}"


def test_imports_never_go_round() -> None:
    """Not inside a room either."""
    order = list(TopologicalSorter({module: own_imports(module) for module in MODULES}).static_order())  # or CycleError
    assert set(order) >= set(MODULES)


def test_the_house_has_no_other_rooms() -> None:
    assert {room(module) for module in MODULES if module != "mhaprune"} == set(HOUSE)
    assert len(HOUSE) == len(set(HOUSE))


def test_the_readme_has_a_line_for_each_room() -> None:
    rows = [line for line in (PACKAGE / "README.md").read_text().splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row.split("|")[1])]
    assert [name.removesuffix(".py").strip("/").replace("/", ".") for name in names] == [*CORE[1:], *LAB]


def test_only_the_command_line_knows_hydra_and_below_it_nobody_sees_a_cfg() -> None:
    for path in MODULES.values():
        knows = {module.split(".")[0] for module in imports(path)} & {"hydra", "omegaconf"}
        assert not knows or path.stem in ("command_line", "callbacks", "values"), path


def test_scorers_and_schedules_see_a_model_through_the_protocol_only() -> None:
    """Not even by way of what they import."""
    seen = {module for module in MODULES if module.startswith(("mhaprune.scorers", "mhaprune.schedules"))}
    new = seen
    while new:
        new = {other for module in new for other in own_imports(module)} - seen
        seen |= new
    assert "mhaprune.subject" in seen
    assert not seen & {"mhaprune.lab.model.seq2seq", "mhaprune.lab.model.training"}


@pytest.mark.parametrize("path", PLUG_INS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_plug_in_is_one_file_and_one_yaml_of_one_name(path: Path) -> None:
    """The file of a long experiment stands in a folder of the same name, beside its report."""
    module, settings, file = PLUG_INS[path], settings_of(path), TOGETHER.get(path.stem, path.stem)
    folder = module.removesuffix(f".{file}").removesuffix(f".{file}")
    assert folder == BASES[path.parent.name].__module__.removesuffix(".base")
    cls = getattr(importlib.import_module(module), settings["_target_"].rpartition(".")[2])
    assert dataclasses.is_dataclass(cls)
    assert issubclass(cls, BASES[path.parent.name])
    assert option_name(cls()) == path.stem


def kinds(base: type) -> Iterator[type]:
    """The classes of the package that can be made into an object of this kind."""
    for cls in base.__subclasses__():
        yield from kinds(cls)
        if not inspect.isabstract(cls) and cls.__module__ in MODULES:
            yield cls


@pytest.mark.parametrize("group", BASES)
def test_whatever_can_be_chosen_has_a_yaml(group: str) -> None:
    for module in MODULES:
        importlib.import_module(module)
    targets = {settings_of(path).get("_target_") for path in OPTIONS if path.parent.name == group}
    home = room(BASES[group].__module__)
    found = {f"{cls.__module__}.{cls.__name__}" for cls in kinds(BASES[group]) if room(cls.__module__) == home}
    assert found == targets - {None}


def home(module: str) -> str:
    """The folder of an experiment that has one, and the module of any other plug-in."""
    folder, _, name = module.rpartition(".")
    return folder if folder.endswith(f".{name}") else module


def test_plug_ins_import_neither_each_other_nor_what_belongs_to_another() -> None:
    """`base` and the other modules that a room shares are for all of its plug-ins."""
    homes = set(map(home, PLUG_INS.values()))

    def belongs_to(module: str) -> str | None:
        return next((name for name in homes if module == name or module.startswith(f"{name}.")), None)

    found = {
        (module, other)
        for module in MODULES
        for other in own_imports(module)
        if belongs_to(other) not in (None, belongs_to(module)) and room(other) == room(module)
    }
    assert not found


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_yaml_shows_every_field_and_agrees_with_the_defaults(path: Path) -> None:
    """So that `--cfg job` shows all there is, and the package in a notebook does what the command line does.

    A variant, of the scorer `taylor` for example `taylor_batch`, says only what it changes.
    """
    settings = settings_of(path)
    if "_target_" not in settings:
        check_variant(path, settings)
        return
    module, _, name = settings.pop("_target_").rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    fields = {field.name for field in dataclasses.fields(cls)}
    assert set(settings) == fields
    default = cls()
    for key, value in settings.items():
        assert value == options.describe(getattr(default, key)), key


def check_variant(path: Path, settings: dict[str, Any]) -> None:
    """One that has no class of its own changes another option of its group, or chooses nothing."""
    parents = [entry for entry in settings.pop("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    if not parents:
        assert not settings or path.parent.name == "launch", path
        return
    [parent] = (entry.partition("@")[0] for entry in parents)
    base = options.settings_of(path.parent.name, parent)
    assert (
        parent == "default"
        or parent.startswith(path.stem)
        or path.stem.startswith(f"{parent}_")
        or path.stem == "refit_error"
    )  # old
    assert settings, "else it is the same option"
    assert all(key in base and base[key] != value for key, value in settings.items())


NOUN_CLAUSE = re.compile(r"(What|How|Where|Which|Whether|That of|Those|The same)\b")


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    """ "Return ..." or "The budget ...", not "What ..." or "Whether ..."; a flag alone may say whether."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.Module
    documented = [(path, node) for path in MODULES.values() for node in nodes(path) if isinstance(node, kinds)]
    docs = [(f"{path.name}: {getattr(node, 'name', '')}", ast.get_docstring(node) or "") for path, node in documented]
    assert not {name: doc.split("\n")[0] for name, doc in docs if NOUN_CLAUSE.match(doc)}


BUDGET = {"core": 20_150, "lab": 10_750, "tests": 29_250}
"""The most lines of Python in each part, with 2 % of air, so that an addition is possible. Raising a number needs a
reason: what comes in pays with what goes out."""
LONGEST_FILE = 500
"""The most lines of a file."""


@pytest.mark.parametrize("part", BUDGET)
def test_the_house_stays_small(part: str) -> None:
    lab, tests = set((PACKAGE / "lab").rglob("*.py")), set((ROOT / "tests").rglob("*.py"))
    paths = {"core": {*PACKAGE.rglob("*.py")} - lab, "lab": lab, "tests": tests}[part]
    sizes = {path: len(path.read_text().splitlines()) for path in paths}
    assert not {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > LONGEST_FILE}
    assert sum(sizes.values()) <= BUDGET[part]
