from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

from conftest import TINY, TINY_SEQUENCES, compose
from mhaprune.config import build
from mhaprune.reporting.training import event_files
from mhaprune.settings.options import ConfigError
from mhaprune.storage.store import RunFolder

needs_tensorboard = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="is not installed")


@needs_tensorboard
@pytest.mark.slow  # the import takes seconds
@pytest.mark.filterwarnings("ignore")
def test_every_number_of_the_history_is_in_the_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = pd.DataFrame({"step": [0, 50], "loss": [None, 0.5], "gate_cross.0.1": [1.0, 0.25], "task": "sort"})
    for name, content in event_files(history).items():
        assert Path(name).parent.name == "tensorboard"
        (tmp_path / Path(name).name).write_bytes(content)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    values = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert values == {"training/loss": [(50, 0.5)], "gate/cross.0.1": [(0, 1.0), (50, 0.25)]}


@needs_tensorboard
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_leaves_them_only_where_wanted_and_is_the_same_run(tmp_path: Path) -> None:
    settings = [*TINY, *TINY_SEQUENCES, "experiment=train", f"cache={tmp_path}/cache"]
    plain, drawn = build(compose(*settings)), build(compose(*settings, "tensorboard=true"))
    assert plain.identity == drawn.identity
    for run, expected in ((plain, 0), (drawn, 1)):
        with RunFolder(tmp_path / f"run{expected}").recorded() as folder:
            run(folder)
        assert len([name for name in folder.files if name.startswith("tensorboard/")]) == expected


def test_what_cannot_be_shown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="^tensorboard=true: shows training, and a pretrained model"):
        build(compose("model=minilm", "tensorboard=true"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tensorboard=true: is not installed: pip install -e '\.\[tensorboard\]'$"):
        build(compose("tensorboard=true"))
