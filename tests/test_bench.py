from __future__ import annotations

import json

import pytest
import torch

import bench
from benches import answers, masks, refit
from mhaprune.model.network import Transformer
from support.commands import run_here


@pytest.mark.slow
def test_a_bench_prints_ratios_with_their_spread_and_the_control() -> None:
    done = run_here(bench.main, "training", "--pairs", "20", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == ["training", "training, A/A"]
    for row in rows:
        assert list(row) == ["name", "ours_ms", "peer_ms", "ratio", "q1", "q3"]
        assert 0 < row["q1"] <= row["ratio"] <= row["q3"]


def test_bad_names_and_too_few_pairs_are_refused() -> None:
    main = bench.main
    refused = run_here(main, "speed").stderr
    assert (
        "NAME=speed: no such bench, allowed are training, recipes, removal, decode, ablation, pairs_of_heads" in refused
    )
    assert "--pairs=3: must be 20 or more" in run_here(main, "--pairs", "3").stderr


@torch.no_grad()
def test_both_sides_of_a_pair_do_the_same() -> None:
    encoder, x_BTD = masks.Encoder(num_layers=2, num_heads=3, d_model=12), torch.randn(20, 5, 12)
    gates_MN = masks.each_closed(6)
    # A pass over many masks ends in another order, 16 examples first.
    ours = torch.cat([torch.cat(list(part.flatten(1))) for part in encoder.many(x_BTD, gates_MN)])
    plain = torch.cat([encoder(x_BTD, gates_N).flatten() for gates_N in gates_MN])
    torch.testing.assert_close(ours.sort().values, plain.sort().values)
    config = Transformer(d_model=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
    ((_, shared, one_by_one),) = masks.greedy(config, num_examples=16)
    assert shared() == one_by_one()
    for name, cached, uncached in answers.decode(length=12):
        assert (cached() == uncached()).double().mean() > 0.99, f"{name}: but for ties that rounding decides"
    ((_, at_once, pass_by_pass),) = refit.refit(config, num_examples=32)
    for one, other in zip(at_once().parameters(), pass_by_pass().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    ((_, shared, one_by_one),) = masks.pairs_of_heads(config, num_examples=4)
    torch.testing.assert_close(shared().loss, torch.stack([outcome.loss for outcome in one_by_one()]))
