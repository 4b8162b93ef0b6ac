"""Training as TensorBoard shows it: one curve for each column of the table `training`, over the steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

GATE = "gate_"
"""What a column begins with that says how open a head is."""


def check_tensorboard() -> None:
    """Raise ValueError where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("tensorboard=true: is not installed: pip install -e '.[tensorboard]'")


def event_files(history: pd.DataFrame) -> dict[str, bytes]:
    """The table `training` as files of TensorBoard, by their names. Gates stand together, as `gate/encoder_self.0.0`.

    Numbers that are missing, such as the loss before the first step, are left out.
    """
    from torch.utils.tensorboard import SummaryWriter  # takes seconds

    curves = history.set_index("step").select_dtypes("number")
    with TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            for name, curve in curves.items():
                tag = str(name).replace(GATE, "gate/", 1) if str(name).startswith(GATE) else f"training/{name}"
                for step, value in curve.dropna().items():
                    writer.add_scalar(tag, value, step)
        return {f"tensorboard/{path.name}": path.read_bytes() for path in Path(folder).iterdir()}
