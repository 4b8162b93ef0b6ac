"""Settings: every range that a field names is kept, every field is explained, and errors are one line."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import torch
import yaml

import mhaprune
import mhaprune_literature
from mhaprune.lab.cli.command_line import main
from mhaprune.lab.cli.explained import about, about_fields, explained
from mhaprune.lab.runs.run import Run, build
from mhaprune.lab.tasks.sequences import Vocabulary
from mhaprune.settings.ranges import Checked, Distinct, Ge, Gt, Lt, Within
from mhaprune.settings.refusals import one_line
from support import ROOT
from support.commands import run_here
from support.composing import compose


@dataclass(frozen=True)
class Base(Checked):
    count: Annotated[int, Ge(1)] = 1
    rate: Annotated[float, Gt(0)] = 1.0
    decay: Annotated[float, Ge(0)] = 0.0
    share: Annotated[float, Ge(0), Lt(1)] = 0.0
    anything: float = 0.0
    optional: Annotated[float | None, Within(0, 1)] = None


@dataclass(frozen=True)
class Derived(Base):
    count: Annotated[int, Within(2, 4)] = 2
    places: tuple[Annotated[int, Ge(0)], ...] = ()
    sizes: Annotated[tuple[Annotated[int, Ge(1)], ...], Distinct()] = (1,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 1}, "count=1: must be from 2 to 4"),
        ({"count": 5}, "count=5: must be from 2 to 4"),
        ({"rate": 0.0}, "rate=0.0: must be above 0 and finite"),
        ({"rate": math.inf}, "rate=inf: must be above 0 and finite"),
        ({"rate": math.nan}, "rate=nan: must be above 0 and finite"),
        ({"decay": math.inf}, "decay=inf: must be 0 or more and finite"),
        ({"share": 1.0}, "share=1.0: must be 0 or more and below 1"),
        ({"share": math.nan}, "share=nan: must be 0 or more and below 1"),
        ({"optional": 1.5}, "optional=1.5: must be from 0 to 1"),
        ({"optional": math.nan}, "optional=nan: must be from 0 to 1"),
        ({"places": (3, -1)}, "places[1]=-1: must be 0 or more"),
        ({"sizes": (0,)}, "sizes[0]=0: must be 1 or more"),
        ({"sizes": ()}, "sizes=[]: must be one or more values, all different"),
        ({"sizes": (2, 2)}, "sizes=[2, 2]: must be one or more values, all different"),
    ],
)
def test_a_value_outside_its_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is compared)
        Derived(**settings)
    assert str(error.value) == message


def test_a_value_inside_its_range_is_not() -> None:
    Base(count=1, rate=1e-300, decay=0.0, share=0.999, anything=math.nan)
    Derived(count=4, places=(0, 0), sizes=(2, 1), optional=1.0)
    with pytest.raises(ValueError, match="^count=0: must be 1 or more$"):
        Base(count=0)


PACKAGES = (mhaprune, mhaprune_literature)


def checked() -> Iterator[type]:
    """The classes of the package and of examples/literature that are checked and can be made."""
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    return below(Checked)


def below(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield from below(cls)
        if cls.__module__.startswith(tuple(f"{each.__name__}." for each in PACKAGES)) and not inspect.isabstract(cls):
            yield cls


def outside(hint: Any) -> Iterator[Any]:
    """Values that the ranges in a type hint exclude, each as close to its bound as its type allows."""
    kind, *ranges = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    if ranges and isinstance(kind, types.UnionType):  # a number or None
        kind = get_args(kind)[0]
    if ranges and kind is float:
        yield from (math.nan, math.inf)
    for one in ranges:
        match one:
            case Ge(bound):
                yield bound - 1 if kind is int else math.nextafter(bound, -math.inf)
            case Gt(bound) | Lt(bound):
                yield kind(bound)
            case Within(least, most):
                yield least - 1 if kind is int else math.nextafter(least, -math.inf)
                yield most + 1 if kind is int else math.nextafter(most, math.inf)
            case Distinct():
                yield from ((), (1, 1))
            case _:
                pytest.fail(f"{one} is no range that this test knows")
    for inner in get_args(kind):
        yield from ((bad,) if kind.__origin__ is tuple else bad for bad in outside(inner))


def annotated_fields() -> list[Any]:
    found = []
    for cls in checked():
        hints = get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            bad = list(outside(hints[field.name]))
            assert bool(bad) == ("Annotated" in str(hints[field.name]))
            found += [pytest.param(cls, field.name, value, id=f"{cls.__name__}.{field.name}={value}") for value in bad]
    return found


@pytest.mark.parametrize(("cls", "name", "bad"), annotated_fields())
def test_every_annotated_field_of_the_package_is_checked(cls: Any, name: str, bad: Any) -> None:
    make = partial(dataclasses.replace, build(compose())) if cls is Run else cls
    with pytest.raises(ValueError, match=rf"^{name}(\[0\])?=.*: must be "):
        make(**{name: bad})


@pytest.mark.parametrize("cls", list(checked()), ids=lambda cls: cls.__name__)
def test_a_field_that_is_given_another_default_keeps_its_range(cls: type) -> None:
    hints = get_type_hints(cls, include_extras=True)
    for base in cls.__mro__[1:]:
        for name in inspect.get_annotations(base):
            old = get_type_hints(base, include_extras=True)[name]
            assert hints[name] == old or "Annotated" not in str(old), name


def raised_by(*arguments: object) -> str:
    with pytest.raises((TypeError, RuntimeError)) as error:
        torch.ones(*arguments)  # type: ignore[call-overload]
    return one_line(error.value)


def test_an_unexpected_error_says_where_it_is_and_not_in_which_library() -> None:
    """A refused value needs no place."""
    line = raised_by.__code__.co_firstlineno + 2
    assert raised_by("two").endswith(f", in settings/test_ranges.py line {line} (HYDRA_FULL_ERROR=1 shows all)")
    with pytest.raises(TypeError) as inside:
        Vocabulary(("1",)).decode(3)  # type: ignore[arg-type]
    assert ", in tasks/sequences.py line " in one_line(inside.value)
    with pytest.raises(ValueError, match="symbol") as refused:
        Vocabulary(("1",)).encode(["2"])
    assert "line" not in one_line(refused.value)


YAMLS = "".join(path.read_text() for path in (ROOT / "conf").glob("*/*.yaml"))
TARGETS = sorted(
    {"lab.runs.run.Run", "lab.runs.sweep_settings.SweepSettings", *re.findall(r"_target_: mhaprune\.(\S+)", YAMLS)}
)


def uncommented(text: str) -> list[str]:
    """The keys above which no comment stands."""
    lines = text.splitlines()
    keys = [(i, line.strip()) for i, line in enumerate(lines) if re.match(r"\s*\w+:", line)]
    return [key for i, key in keys if not key.startswith("_target_") and not lines[i - 1].lstrip().startswith("#")]


@pytest.mark.parametrize("target", TARGETS)
def test_every_field_has_a_docstring(target: str) -> None:
    assert about(f"mhaprune.{target}")
    assert all(text and not text.startswith("Allowed:") for text in about_fields(f"mhaprune.{target}").values())


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=prune", "schedule=[greedy_refit,iterative]", "recovery=[from_scratch,refit]"],
        ["experiment=compare", "scorer=[taylor_batch]", "gate=none"],
        ["model=hf", "experiment=speed"],
    ],
    ids=" ".join,
)
def test_every_key_has_a_comment_and_the_yaml_loads_to_the_same_values(overrides: list[str]) -> None:
    shown = run_here(main, *overrides, "--cfg", "job").stdout
    assert not uncommented(shown)
    bare = "".join(line for line in shown.splitlines(keepends=True) if not line.lstrip().startswith("#"))
    assert yaml.safe_load(shown) == yaml.safe_load(bare)
    assert max(map(len, shown.splitlines())) <= 120


def test_a_part_of_the_settings_of_one_run_is_shown_too() -> None:
    shown = run_here(main, "--cfg", "job", "-p", "training").stdout
    assert shown.startswith("# @package training\n")
    assert "# Number of optimiser steps. Allowed: a whole number, 1 or more.\nsteps: 600\n" in shown
    assert not uncommented(shown)
    assert run_here(main, "--cfg", "job", "-p", "seed").stdout == "0\n"
    assert "--multirun, --cfg" in run_here(main, "-m", "seed=1,2", "--cfg", "job").stderr
    assert "did you mean seed?" in run_here(main, "sped=1", "--cfg", "job").stderr


def test_a_plug_in_of_the_user_is_explained_with_what_it_inherits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_tasks").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_tasks" / "sort.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Annotated\nfrom mhaprune.settings.ranges import Ge\n"
        "from mhaprune.lab.tasks.sort import Sort\n"
        '@dataclass(frozen=True)\nclass Sort(Sort):\n    """Every symbol twice."""\n'
        '    times: Annotated[int, Ge(2)] = 2\n    """How often."""\n'
    )
    text = "task:\n  _target_: my_tasks.sort.Sort\n  times: 2\n  train: 5\n"
    assert "Every symbol twice" not in explained(text), "a package that was not named is not looked up"
    monkeypatch.setattr("mhaprune.settings.plugins._allowed", {"mhaprune", "my_tasks"})
    shown = explained(text)
    assert "Every symbol twice.\ntask:" in shown
    assert "  # How often. Allowed: a whole number, 2 or more.\n  times: 2\n" in shown
    assert re.search(r"  # .*examples.*\n  train: 5\n", shown), "it inherits this from a class of ours"


@pytest.mark.parametrize("text", ["", "0\n", "a: 1\n", "a:\n  _target_: nowhere.Thing\n  b: 1\n", "a: [1, {b: 2}]\n"])
def test_what_is_not_known_stays_as_it_is(text: str) -> None:
    assert explained(text) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"), [("training.", "training.steps="), ("seed=1 gate=no", "gate=none"), ("'", "")]
)
def test_a_line_is_completed_at_once_and_without_torch(line: str, offered: str) -> None:
    code = (
        "import sys, time\nfor name in ('torch', 'pandas', 'matplotlib'): sys.modules[name] = None\n"
        "from mhaprune.lab.cli.command_line import main\nend = main()\n"
        "print(time.process_time(), file=sys.stderr)\nsys.exit(end)"
    )
    env = {"COMP_LINE": f"python scripts/run.py {line}"}
    command = [sys.executable, "-c", code, "-sc", "query=bash"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert offered in done.stdout.split() if offered else not done.stdout.strip()
    assert float(done.stderr) < 2, "seconds, or an error, which a shell wants not"
