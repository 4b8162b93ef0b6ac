"""Names of earlier versions still lead to the same classes, in imports and in files."""

import importlib

import pytest

from mhaprune.lab.tasks.base import Task
from mhaprune.lab.tasks.sort import Sort
from mhaprune.moved import MOVED
from mhaprune.settings.plugins import find_class

OLD = [
    "tasks.base",
    "tasks.sort",
    "experiments.base",
    "model.training",
    "runs.run",
    "sources.source",
    "reporting.plots",
]


@pytest.mark.parametrize("old", [*MOVED, *(f"mhaprune.{name}" for name in OLD)])
def test_a_module_is_the_same_by_its_old_name(old: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(module.__name__)
    assert old != module.__name__
    assert importlib.import_module(old) is module


def test_a_file_that_names_a_class_of_an_earlier_version_means_the_same_one() -> None:
    assert find_class(Task, "mhaprune.tasks.sort.Sort") is Sort
    assert find_class(Task, "mhaprune.tasks.sort.Nothing") is None


@pytest.mark.parametrize("name", ["mhaprune.front.nothing", "mhaprune.tasks.nothing", "mhaprune.nothing"])
def test_other_names_are_missed_as_ever(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
