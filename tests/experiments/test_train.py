from __future__ import annotations

from typing import Any

import pandas as pd

from mhaprune.experiments.train import Train


def test_what_is_said(snapshot: Any) -> None:
    row = {"quality": 0.9, "quality_low": 0.85, "quality_high": 0.94, "token_accuracy": 0.99}
    snapshot("train", {"a model": Train.say({"accuracy": pd.DataFrame([row])})})
