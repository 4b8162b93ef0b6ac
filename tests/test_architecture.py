"""The house: what may import what, and that every plug-in is one file and one YAML of one name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ROOT
from mhaprune.config import _construct
from mhaprune.store import option_name

HOUSE = """
    heads budgets gates attention surgery data decoding layers prefixes relevance subject network transformer tasks
    store cache statistics agreement measure training speed memory parts workloads contest gate_training scorers
    schedules scoring recoveries costs pruning recovering evaluation patterns showing closing walkthrough scaling
    calls gate_starts saved oracle regret verdict plots run_plots head_plots attention_plots method_plots prune_plots
    speed_plots sweep_plots anatomy_plots figures prune_words speed_words explain_words report collect experiments run
    config command_line
    """.split()  # noqa: SIM905 (a list of words is easier to read and to move about)
PACKAGE = ROOT / "mhaprune"
FOLDERS = ("tasks", "scorers", "schedules", "recoveries", "experiments")
PLUG_INS = sorted(path for folder in FOLDERS for path in (PACKAGE / folder).glob("[!_]*.py") if path.stem != "base")
OPTIONS = sorted(path for path in (ROOT / "conf").glob("*/*.yaml"))


def imports(path: Path) -> set[str]:
    """The modules that a file imports, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def place(module: str) -> int:
    return HOUSE.index(module.split(".")[1])


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("[!_]*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upwards_only(path: Path) -> None:
    relative = path.relative_to(PACKAGE).with_suffix("")
    mine = HOUSE.index(relative.parts[0])
    for module in imports(path):
        if module.startswith("mhaprune."):
            base_of_mine = module == f"mhaprune.{relative.parts[0]}.base"
            assert place(module) < mine or base_of_mine, f"{relative} imports {module}"


def test_the_house_has_no_other_rooms() -> None:
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert names - {"__init__"} == set(HOUSE)


def test_only_the_command_line_knows_hydra_and_below_it_nobody_sees_a_cfg() -> None:
    for path in PACKAGE.rglob("*.py"):
        knows = {module.split(".")[0] for module in imports(path)} & {"hydra", "omegaconf"}
        assert not knows or path.stem == "command_line", path


def test_scorers_and_schedules_see_a_model_through_the_protocol_only() -> None:
    """Not even by way of what they import."""
    seen = {f"mhaprune.{folder}.{path.stem}" for folder in ("scorers", "schedules") for path in files(folder)}
    new = seen
    while new:
        paths = [PACKAGE.parent / f"{module.replace('.', '/')}.py" for module in new]
        new = {m for path in paths if path.exists() for m in imports(path) if m.startswith("mhaprune.")} - seen
        seen |= new
    assert "mhaprune.subject" in seen
    assert not seen & {"mhaprune.model.transformer", "mhaprune.training"}


def files(folder: str) -> list[Path]:
    return list((PACKAGE / folder).glob("*.py"))


@pytest.mark.parametrize("path", PLUG_INS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_plug_in_is_one_file_and_one_yaml_of_one_name(path: Path) -> None:
    group = {"recoveries": "recovery"}.get(path.parent.name, path.parent.name.removesuffix("s"))
    settings = yaml.safe_load((ROOT / "conf" / group / f"{path.stem}.yaml").read_text())
    target = settings.get(group, settings)["_target_"]
    module, _, name = target.rpartition(".")
    assert module == f"mhaprune.{path.parent.name}.{path.stem}"
    cls = getattr(importlib.import_module(module), name)
    assert dataclasses.is_dataclass(cls)
    assert option_name(default_of(cls, settings.get(group, settings))) == path.stem


def required(cls: Any) -> set[str]:
    """The fields that have no default: for a plug-in that holds another one."""
    return {f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING}


def default_of(cls: Any, settings: Mapping[str, Any]) -> Any:
    """The plug-in with its defaults, and what its YAML says where there are none."""
    return _construct(cls, {name: settings[name] for name in required(cls)}, "")


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_yaml_shows_every_field_and_agrees_with_the_defaults(path: Path) -> None:
    """So that `--cfg job` shows all there is, and the package in a notebook does what the command line does.

    A variant, of the scorer `taylor` for example `taylor_batch`, says only what it changes.
    """
    settings = yaml.safe_load(path.read_text())
    settings = (settings or {}).get(path.parent.name, settings) or {}
    if "defaults" in settings and path.parent.name in ("scorer", "recovery"):
        parent, itself = settings.pop("defaults")
        assert itself == "_self_"
        assert path.stem.startswith(parent.removesuffix("@_here_") + "_")
        base = yaml.safe_load((path.parent / f"{parent.removesuffix('@_here_')}.yaml").read_text())
        assert all(key in base and base[key] != value for key, value in settings.items())
        return
    if "_target_" not in settings:
        assert path.stem in ("none", "inflection", "default") or path.parent.name == "launch", path
        return
    module, _, name = settings.pop("_target_").rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    fields = {field.name for field in dataclasses.fields(cls)}
    assert set(settings) == fields
    default = default_of(cls, settings)
    for key, value in settings.items():
        if key in required(cls):
            continue
        expected = getattr(default, key)
        assert value == (list(expected) if isinstance(expected, tuple) else expected), key
