"""What must hold for every scorer of conf/scorer and of examples/literature, a new one too."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from mhaprune.data import Splits
from mhaprune.heads import BlockId, HeadMask
from mhaprune.lab.model.seq2seq import Seq2Seq
from mhaprune.lab.model.sites import Site
from mhaprune.lab.tasks.sequences import Examples
from mhaprune.lab.tasks.sort import Sort
from mhaprune.scorers.base import NEEDS_GATES, Budgeted, Scorer, Scores
from support.composing import every, known
from support.models import gated_model

Score = Callable[[Scorer], Scores]


@pytest.fixture(params=known("scorer"))
def scorer(request: pytest.FixtureRequest) -> Scorer:
    found = every("scorer")[request.param]
    assert isinstance(found, Scorer)
    return found


@pytest.fixture(scope="module")
def scores_of(task: Sort, splits: Splits) -> Score:
    """The scores of the model as it is, made once."""
    model, done = gated_model(task), dict[Scorer, Scores]()

    def scores_of(scorer: Scorer) -> Scores:
        if scorer not in done:
            done[scorer] = scorer(model, splits.score, 0)
        return done[scorer]

    return scores_of


def check_shape(scores: Scores, num_heads: int) -> None:
    draws, heads = scores.values.shape
    assert heads == num_heads
    assert draws >= 1
    assert scores.values.isfinite().all()
    if scores.stderr is not None:
        assert scores.stderr.shape == scores.values.shape
        assert (scores.stderr >= 0).all(), "and no NaN"
    if scores.skewness is not None:
        assert scores.skewness.shape == scores.values.shape
        assert scores.skewness.isfinite().all()


def test_a_score_and_its_error_are_one_finite_number_for_every_head(
    model: Seq2Seq, scorer: Scorer, scores_of: Score
) -> None:
    scores = scores_of(scorer)
    check_shape(scores, len(model.grid))
    assert scorer.family
    assert (scores.forward_passes > 0) == scorer.reads_examples, "what is read costs a pass"
    assert scores.forward_passes >= scores.backward_passes >= 0


def test_the_same_call_gives_the_same_bits_and_leaves_the_model_as_it_was(
    model: Seq2Seq, splits: Splits, scorer: Scorer, scores_of: Score
) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = scorer(model, splits.score, 0)
    assert torch.equal(again.values, scores_of(scorer).values)
    assert (again.stderr is None) == (scores_of(scorer).stderr is None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_permuting_the_heads_of_a_block_permutes_their_scores(
    model: Seq2Seq, splits: Splits, scorer: Scorer, scores_of: Score
) -> None:
    """But for a scorer that draws head by head."""
    before = scores_of(scorer).values
    block, order = BlockId(Site.CROSS, 0), torch.tensor([2, 0, 1])
    attention = model.attention_sublayers()[block].attention
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.copy_(projection.weight.unflatten(0, (3, 4))[order].flatten(0, 1))
            projection.bias.copy_(projection.bias.unflatten(0, (3, 4))[order].flatten())
        attention.out_proj.weight.copy_(attention.out_proj.weight.unflatten(1, (3, 4))[:, order].flatten(1))
        attention.gate.logits.copy_(attention.gate.logits[order])  # type: ignore[union-attr]
    after = scorer(model, splits.score, 0).values
    expected = model.grid.split(before)
    assert not torch.allclose(expected[block], expected[block][:, order]), "the fixture must tell heads apart"
    expected[block] = expected[block][:, order]
    if scorer.draws_by_head:
        assert not torch.allclose(after, torch.cat(list(expected.values()), dim=1)), "it need not say that it draws"
    else:
        torch.testing.assert_close(after, torch.cat(list(expected.values()), dim=1))


def test_a_head_that_writes_nothing_scores_zero_where_the_scorer_says_so(
    model: Seq2Seq, splits: Splits, scorer: Scorer
) -> None:
    block = BlockId(Site.DECODER_SELF, 1)
    with torch.no_grad():
        model.attention_sublayers()[block].attention.out_proj.weight[:, 4:8] = 0.0
    first, silent, _ = model.grid.split(scorer(model, splits.score, 0).values)[block].abs().amax(dim=0)
    assert first > 1e-6
    assert (silent < 1e-12) == scorer.zero_if_silent


class Padded(Examples):
    """Examples of which every part has three more columns of padding than it needs."""

    def __getitem__(self, index: slice | torch.Tensor) -> Examples:
        part = super().__getitem__(index)
        return Padded(F.pad(part.source, (0, 3)), F.pad(part.target, (0, 3)))


def test_only_what_reads_examples_depends_on_them_and_padding_changes_nothing(
    model: Seq2Seq, splits: Splits, scorer: Scorer, scores_of: Score
) -> None:
    other = scorer(model, splits.choose, 0).values
    assert torch.equal(other, scores_of(scorer).values) != scorer.reads_examples
    plain = scores_of(scorer)
    padded = scorer(model, Padded(splits.score.source, splits.score.target), 0)
    torch.testing.assert_close(padded.values, plain.values)
    if plain.stderr is not None:
        torch.testing.assert_close(padded.stderr, plain.stderr)


def test_in_float32_a_score_is_that_of_float64_but_for_rounding(
    model: Seq2Seq, splits: Splits, scorer: Scorer, scores_of: Score
) -> None:
    single = scorer(model.float(), splits.score, 0).values.double()
    torch.testing.assert_close(single, scores_of(scorer).values.double(), rtol=1e-3, atol=1e-4)


def test_a_model_with_ragged_and_emptied_blocks_can_be_scored_and_one_without_heads_has_no_scores(
    model: Seq2Seq, splits: Splits, scorer: Scorer
) -> None:
    """What is left has no learned gates."""
    block = [head for head in model.grid if head.block == BlockId(Site.CROSS, 1)]
    pruned = model.without(HeadMask(model.grid, frozenset([model.grid.heads[0], *block])))
    if scorer.needs_gates:
        with pytest.raises(ValueError, match=NEEDS_GATES[:20]):
            scorer.check(len(pruned.grid), gated=False)
        with pytest.raises(ValueError, match=NEEDS_GATES[:20]):
            scorer(pruned, splits.score, 0)
    else:
        scorer.check(len(pruned.grid), gated=False)
        check_shape(scorer(pruned, splits.score, 0), len(pruned.grid))

    bare = model.without(HeadMask(model.grid, frozenset(model.grid)))
    if scorer.needs_gates or isinstance(scorer, Budgeted):
        with pytest.raises(ValueError, match="needs learned gates|of 0 heads these are 0, allowed are 1 to 0"):
            scorer(bare, splits.score, 0)
    else:
        check_shape(scorer(bare, splits.score, 0), 0)
