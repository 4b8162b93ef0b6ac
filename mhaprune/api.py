"""The command line from Python: run an experiment, or take what it is given."""

from __future__ import annotations

from pathlib import Path

from mhaprune.command_line import described
from mhaprune.experiments.results import Results
from mhaprune.progress import shown
from mhaprune.settings.ranges import checked
from mhaprune.storage.store import RunFolder
from mhaprune.studies.study import Study


@checked
def run(*overrides: str, folder: str | Path | None = None) -> Results:
    """Do what `scripts/run.py` does with these arguments, for example `run("experiment=ablate", "task=sort")`.

    Without a `folder` nothing is written but the cache. Raises ValueError, one line, for settings that cannot be.
    """
    described_run = described(*overrides)
    with shown():
        if folder is None:
            return described_run.results()
        with RunFolder(folder).recorded() as recorded:
            recorded.note(kind="run", overrides=list(overrides))
            return described_run(recorded)


@checked
@shown()
def study(*overrides: str) -> Study:
    """Return the input of the experiment of such a run: the trained model as `subject`, its `splits`, `scorers`
    by name, and more. The model comes from the cache where it was trained before. Raises ValueError as `run` does."""
    return described(*overrides).study()
