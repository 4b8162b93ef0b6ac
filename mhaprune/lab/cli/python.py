"""The command line from Python: run an experiment, or return the input of an experiment."""

from pathlib import Path

from mhaprune.inputs import Study
from mhaprune.lab.cli.command_line import described
from mhaprune.lab.runs.results import Results
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.progress import shown
from mhaprune.settings.ranges import checked


@checked
def run(*overrides: str, folder: str | Path | None = None) -> Results:
    """Do what `scripts/run.py` does with these arguments, for example `run("experiment=ablate", "task=sort")`.

    Without a `folder` only the cache is written. Raises ValueError, one line, for settings that are not allowed.

    >>> found = mhaprune.run("experiment=train", "task=copy", "training.steps=20", "cache=my_cache")
    >>> sorted(found.tables)
    ['accuracy', 'examples', 'groups', 'training']
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
    """Return what `run` would pass to the experiment: the trained model as `subject`, its `splits`, `scorers` by name,
    and more. A model that was trained before comes from the cache. Raises ValueError as `run` does.

    >>> study = mhaprune.study("task=copy", "training.steps=20", "scorer=[ablation]", "cache=my_cache")
    >>> study.scorers["ablation"](study.subject, study.splits.score[:32], 0).values.shape  # (draws, heads)
    torch.Size([1, 24])
    """
    return described(*overrides).study()
