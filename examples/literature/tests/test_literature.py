"""The package as a plug-in: its options have names, explanations and rows in the docs."""

import subprocess
import sys

from mhaprune import losses
from mhaprune.api.wrap import wrap
from mhaprune.lab.cli.command_line import described, main
from mhaprune.lab.cli.explained import about, about_fields
from mhaprune.schedules.base import Schedule
from mhaprune.schedules.greedy import Greedy
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.base import Scorer
from mhaprune.settings.options import option
from mhaprune_literature.all_but_one import AllButOne
from mhaprune_literature.shapley import Shapley
from mhaprune_literature.swap import Swap
from settings.test_ranges import uncommented
from support import ROOT
from support.classifier import batches, classifier
from support.commands import run_here
from support.composing import EXAMPLES, every, known
from support.sizes import options


def test_every_option_has_its_row_in_the_docs() -> None:
    text = (ROOT / "docs" / "scores.md").read_text()
    for group, kind in (("scorer", "score"), ("schedule", "schedule")):
        rows = text.partition(f"| {kind} of the package |")[2].partition("\n\n")[0].splitlines()
        named = {row.split("`")[1] for row in rows if row.startswith("| `")}
        assert named == set(known(group)) - set(options(group)), group


def test_a_run_and_python_find_the_options_by_name() -> None:
    run = described(EXAMPLES, "experiment=prune", "scorer=[ablation,shapley]", "schedule=[swap,swap_after_greedy]")
    assert run.scorer["shapley"] == Shapley() == option("shapley", {"scorer": Scorer})
    assert run.schedule["swap"] == Swap(OneShot()) == option("swap", {"schedule": Schedule})
    assert run.schedule["swap_after_greedy"] == Swap(Greedy()) == option("swap_after_greedy", {"schedule": Schedule})
    keep = ["schedule.swap_after_greedy.start.keep_at_least=1", "experiment.budgets=[0.5]"]
    careful = described(EXAMPLES, "schedule=[swap_after_greedy]", *keep)
    assert careful.schedule["swap_after_greedy"] == Swap(Greedy(keep_at_least=1))


def test_every_field_of_the_options_is_explained() -> None:
    groups = [f"{group}=[{','.join(known(group))}]" for group in ("scorer", "schedule", "recovery")]
    shown = run_here(main, EXAMPLES, "experiment=prune", *groups, "--cfg", "job").stdout
    assert "swap_after_greedy:" in shown
    assert not uncommented(shown)
    assert "refit_by_head:" in shown
    for made in (*every("scorer").values(), *every("schedule").values(), *every("recovery").values()):
        target = f"{type(made).__module__}.{type(made).__name__}"
        assert about(target)
        assert all(text and not text.startswith("Allowed:") for text in about_fields(target).values())


def test_heads_of_any_model_are_scored_and_chosen_by_name() -> None:
    heads = wrap(classifier(), losses.classification, score=batches(2), choose=batches(2, 1), report=batches(2, 2))
    assert set(heads.score("shapley", "integrated_gradients_all")["scorer"]) == {"shapley", "integrated_gradients_all"}
    assert [len(mask.kept) for mask in heads.masks(keep=[6, 5], by="swap_after_greedy")] == [6, 5]
    assert heads.mask(keep=5, by="all_but_one") == heads.mask(keep=5, by=AllButOne())


def test_mhaprune_does_not_load_the_package() -> None:
    loads = "import sys, mhaprune; assert 'mhaprune_literature' not in sys.modules"
    subprocess.run([sys.executable, "-c", loads], check=True)
