"""Names of earlier versions still lead to the same classes, in imports and in files."""

import importlib

import pytest

from mhaprune.lab.model.config import Transformer
from mhaprune.lab.sources.loaded import Loaded
from mhaprune.lab.tasks.base import Task
from mhaprune.lab.tasks.sort import Sort
from mhaprune.settings.plugins import find_class

BEFORE = {
    "front": """budget command_line explained exporting given heads pages promise python refusals saved timing""",
    "wrapping": """at_rest batches block_proof blocks closing cuts descent discovery gated gating hints interception
        layouts losses model_card neurons numbers pairs proofs removal removal_file replay reshaping saving
        softmaxes streaming tensors torch_nn training transformers_folder understand units weights_in_use
        windows workers wrapped""",
    "experiments": """ablate base compare compare.compare compare.compare_report examples explain explain.alignment
        explain.explain explain.explain_report explain.patterns prune prune.prune prune.prune_report
        prune.trials results shift speed speed.matchup speed.speed speed.speed_report tolerance train truth
        truth.truth truth.truth_report""",
    "model": """checkpoint decoding network training transformer""",
    "reporting": """attention_view head_map headline heat_map page plots sentences settings shared_figures training
        words""",
    "settings": """figures sweep""",
    "runs": """collecting found index jobs run""",
    "sources": """hf pretrained source texts trained""",
    "tasks": """answers base copy mirror_difference reverse running_sum sort""",
    "measure": """columns""",
    "schedules": """budgets""",
    "lab.tasks": """answers""",
    "lab.experiments": """results""",
}
"""The modules, by room, that had another name before there was a lab."""
OLD = [f"mhaprune.{room}.{name}" for room, names in BEFORE.items() for name in names.split()]


@pytest.mark.parametrize("old", OLD)
def test_a_module_is_the_same_by_its_old_name(old: str) -> None:
    module = importlib.import_module(old)
    assert module is importlib.import_module(module.__name__)
    assert old != module.__name__
    assert importlib.import_module(old) is module


def test_a_file_that_names_a_class_of_an_earlier_version_means_the_same_one() -> None:
    assert find_class(Task, "mhaprune.tasks.sort.Sort") is Sort
    assert find_class(Transformer, "mhaprune.model.network.Transformer") is Transformer
    assert find_class(Task, "mhaprune.tasks.sort.Nothing") is None
    assert importlib.import_module("mhaprune.front.saved").Loaded is Loaded


@pytest.mark.parametrize("name", ["mhaprune.front.nothing", "mhaprune.tasks.nothing", "mhaprune.nothing"])
def test_other_names_are_missed_as_ever(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("module", "now", "names"),
    [
        ("heads", "lab.model.sites", "Site NeuronSite SITES block_label"),
        ("data", "lab.tasks.sequences", "Examples Vocabulary pad shift_right PAD BOS EOS SPECIAL"),
        ("subject", "lab.tasks.sequences", "AnswerOutcome"),
        (
            "tables",
            "lab.reporting.names",
            "quality_name in_percent timed_name unit_name loss_unit loss_suffix in_brackets",
        ),
    ],
)
def test_a_name_is_the_same_in_the_module_that_it_left(module: str, now: str, names: str) -> None:
    before, after = (importlib.import_module(f"mhaprune.{each}") for each in (module, now))
    assert all(getattr(before, name) is getattr(after, name) for name in names.split())
    with pytest.raises(AttributeError, match="nothing"):
        _ = before.nothing
