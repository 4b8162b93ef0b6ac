"""Masks that a user gives, as a text or in a file."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import mhaprune
from mhaprune import losses
from mhaprune.api.parsing import MOST_BYTES, least_of, mask_of
from mhaprune.heads import BlockId, HeadGrid
from mhaprune.recoveries.refit import Refit
from mhaprune.settings.options import describe
from support.classifier import batches, classifier


@pytest.fixture
def grid() -> HeadGrid:
    return HeadGrid.full([BlockId("encoder_self", 0)], 2)


def test_a_mask_is_read_from_a_file_of_a_megabyte_at_most(grid: HeadGrid, tmp_path: Path) -> None:
    path, names = tmp_path / "mask.json", json.dumps(["encoder_self.0.1"])
    path.write_text(names + " " * (MOST_BYTES - len(names)))
    assert [str(head) for head in mask_of(path, grid).removed] == ["encoder_self.0.1"]
    with open(path, "a") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(ValueError, match=rf"^mask='.*': must be JSON, or a file.*has more than {MOST_BYTES} bytes"):
        mask_of(path, grid)


def test_a_mask_is_read_from_no_device_and_no_pipe(grid: HeadGrid, tmp_path: Path) -> None:
    """They have no end, or block."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in ("/dev/zero", tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(ValueError, match="^mask='.*': must be JSON, or a file with JSON, .*is no regular file"):
            mask_of(path, grid)


def test_numbers_of_numpy_and_torch_name_heads_and_are_settings(grid: HeadGrid) -> None:
    layer, size = grid.blocks[0].layer, grid.sizes[0]
    plain = mask_of({layer: [0, size - 1]}, grid)
    for given in (np.array([0, size - 1]), torch.tensor([0, size - 1]), [np.int64(0), np.int32(size - 1)]):
        assert mask_of({np.int64(layer): given}, grid) == plain
    assert least_of({layer: np.int64(1)}, grid) == least_of({layer: 1}, grid)
    with pytest.raises(ValueError, match="must be a list of numbers of heads"):
        mask_of({layer: np.array([0.0, 1.0])}, grid)
    refit = Refit(examples=np.int64(8), ridge=np.float32(0.5))  # type: ignore[arg-type]
    assert json.loads(json.dumps(describe(refit))) == describe(Refit(examples=8, ridge=0.5))
    assert type(refit.examples) is int
    with pytest.raises(ValueError, match=r"examples=0: must be 1 or more"):
        Refit(examples=np.int64(0))  # type: ignore[arg-type]


def test_one_size_may_be_a_number_of_numpy() -> None:
    data = batches(4)
    heads = mhaprune.wrap(classifier().eval(), losses.classification, score=data[:2], report=data[2:])
    table = heads.speed(keep=np.float32(0.5), by="magnitude", batch_sizes=np.int64(1), rounds=2)  # type: ignore[arg-type]
    assert table["model"].tolist() == ["removed", "dense", "dense again"]
