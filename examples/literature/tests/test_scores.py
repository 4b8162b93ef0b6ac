"""Scores against loops that a reader can check by eye."""

import subprocess
import sys

import torch
from torch import Tensor

from mhaprune import losses
from mhaprune.data import Splits
from mhaprune.front.command_line import described, main
from mhaprune.front.explained import about, about_fields
from mhaprune.front.heads import wrap
from mhaprune.heads import HeadMask
from mhaprune.measure.outcomes import measure
from mhaprune.model.transformer import Seq2Seq
from mhaprune.schedules.base import Schedule
from mhaprune.schedules.greedy import Greedy
from mhaprune.schedules.one_shot import OneShot
from mhaprune.scorers.base import Scorer
from mhaprune.scorers.fisher import Fisher
from mhaprune.settings.options import option
from mhaprune_literature.all_but_one import AllButOne
from mhaprune_literature.knowledge import Knowledge
from mhaprune_literature.movement import Movement
from mhaprune_literature.swap import Swap
from scorers.test_scorers import written_norms
from scorers.test_trained import WORTHS, worth_game
from settings.test_ranges import uncommented
from support import ROOT
from support.classifier import batches, classifier
from support.commands import run_here
from support.composing import LITERATURE, every, known
from support.games import numbered
from support.sizes import options


def test_knowledge_is_half_of_fisher_and_the_mean_square_of_what_a_head_writes(model: Seq2Seq, splits: Splits) -> None:
    sizes = torch.stack([each.square().mean() for each in written_norms(model, splits.score)]) / 12
    fisher = Fisher()(model, splits.score, seed=0).values[0]
    for factor in (0.0, 3.0):
        scores = Knowledge(representation=factor)(model, splits.score, seed=0)
        torch.testing.assert_close(scores.values[0], fisher / 2 + factor * sizes)
        assert (scores.forward_passes, scores.backward_passes) == (2, 1)
    usual = Knowledge()(model, splits.score, seed=0).values[0]
    torch.testing.assert_close(usual, fisher / 2 + 0.00025 * sizes, msg="the λ of the published script")


@torch.no_grad()
def test_all_but_one_keeps_one_head_of_a_block(model: Seq2Seq, splits: Splits) -> None:
    scores = AllButOne()(model, splits.score, seed=0).values[0]
    for n, head in enumerate(model.grid):
        others = [other for other in model.grid if other.block == head.block and other != head]
        gates = HeadMask(model.grid, frozenset(others)).gates()
        torch.testing.assert_close(scores[n], -measure(model, splits.score, gates).loss.mean())


def test_movement_opens_exactly_so_many_heads_and_moves_the_closed_ones_too() -> None:
    """k falls along a cubic curve to what is kept after half of the steps."""
    seen: list[Tensor] = []
    scorer, signs = Movement(keep=3, steps=9, batch_size=16), torch.tensor([1.0, -1.0]).double().repeat(9)
    values = scorer(worth_game(signs * WORTHS, seen), numbered(range(1, 129)), seed=0).values[0]
    wanted = [round(3 + 15 * max(0.0, 1 - 2 * step / 8) ** 3) for step in range(9)]
    assert wanted[0] == 18
    assert wanted[4:] == [3] * 5
    assert (signs[seen[-1][0] == 1] == 1).all(), "those that moved up are open"
    for gates, count in zip(seen, wanted, strict=True):
        assert set(gates.unique().tolist()) <= {0.0, 1.0}
        assert gates.sum(dim=1).tolist() == [count] * 16
    torch.testing.assert_close(values, 0.9 * signs, rtol=0, atol=1e-4)  # nine steps of 0.1, towards what helps


def test_every_option_has_its_row_in_the_docs() -> None:
    text = (ROOT / "docs" / "scores.md").read_text()
    for group, kind in (("scorer", "score"), ("schedule", "schedule")):
        rows = text.partition(f"| {kind} of the package |")[2].partition("\n\n")[0].splitlines()
        named = {row.split("`")[1] for row in rows if row.startswith("| `")}
        assert named == set(known(group)) - set(options(group)), group


def test_a_run_and_python_find_the_options_by_name() -> None:
    run = described(LITERATURE, "experiment=prune", "scorer=[ablation,movement]", "schedule=[swap,swap_after_greedy]")
    assert run.scorer["movement"] == Movement() == option("movement", {"scorer": Scorer})
    assert run.schedule["swap"] == Swap(OneShot()) == option("swap", {"schedule": Schedule})
    assert run.schedule["swap_after_greedy"] == Swap(Greedy()) == option("swap_after_greedy", {"schedule": Schedule})
    keep = ["schedule.swap_after_greedy.start.keep_at_least=1", "experiment.budgets=[0.5]"]
    careful = described(LITERATURE, "schedule=[swap_after_greedy]", *keep)
    assert careful.schedule["swap_after_greedy"] == Swap(Greedy(keep_at_least=1))


def test_every_field_of_the_options_is_explained() -> None:
    options = ["experiment=prune", f"scorer=[{','.join(known('scorer'))}]", f"schedule=[{','.join(known('schedule'))}]"]
    shown = run_here(main, LITERATURE, *options, "--cfg", "job").stdout
    assert "swap_after_greedy:" in shown
    assert not uncommented(shown)
    for made in (*every("scorer").values(), *every("schedule").values()):
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
