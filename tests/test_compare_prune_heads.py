from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import run_script

VERSION = "4.57.6"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="pip install 'mhaprune[hf]'"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the last version that has `prune_heads`: that of the variable, or a new one."""
    if given := os.environ.get("PRUNE_HEADS_ENVIRONMENT"):
        return Path(given)
    folder = tmp_path_factory.mktemp("environment")
    command = [sys.executable, "-m", "pip", "install", "--target", str(folder), f"transformers=={VERSION}"]
    if subprocess.run(command, capture_output=True, timeout=240).returncode:
        pytest.skip(f"transformers {VERSION} cannot be installed here, set PRUNE_HEADS_ENVIRONMENT to a folder with it")
    return folder


def test_removal_equals_prune_heads_of_transformers(environment: Path) -> None:
    """The outputs of a BERT and a GPT-2, with half of each layer gone and with a ragged mask."""
    arguments = ["--small", "--pairs", "1", "--environment", str(environment)]
    done = run_script("compare_prune_heads.py", *arguments)
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["BERT"], ["GPT-2"])]
    assert len(table) == 6
    for family, *gone, ours_theirs, ours_whole in table:
        assert float(ours_theirs) < 1e-5, (family, gone)
        assert (float(ours_whole) > 1e-3) == (gone != ["none"]), (family, gone)
