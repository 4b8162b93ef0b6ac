"""Models on several devices."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install 'mhaprune[hf]'")

from tiny_families import FAMILIES, batch_of, make

import mhaprune
from mhaprune import losses
from mhaprune.hooks.blocks import Unsupported


def test_models_on_two_devices() -> None:
    tests = Path(__file__).with_name("two_devices.py")
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tests.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_model_that_is_partly_offloaded_is_refused(place: str) -> None:
    model: Any = make(FAMILIES["llama"])
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": place}
    with pytest.raises(Unsupported, match=rf"model.layers.1 is offloaded \({place}\)"):
        mhaprune.wrap(model, losses.language_model, score=[batch_of(FAMILIES["llama"])])
