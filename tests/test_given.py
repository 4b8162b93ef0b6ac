"""Masks that a user gives, as a text or in a file."""

import json
import os
from pathlib import Path

import pytest

from mhaprune.api.parsing import MOST_BYTES, mask_of
from mhaprune.heads import BlockId, HeadGrid


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
