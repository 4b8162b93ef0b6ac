"""Combine many run folders into one set of tables, figures and a report; damaged runs are left out and reported."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from math import isinf
from pathlib import Path
from typing import Any

import pandas as pd

from mhaprune.lab.experiments.base import Experiment
from mhaprune.lab.reporting.figure_settings import FigureSettings
from mhaprune.lab.reporting.headline import Number, against_settings, means_in_latex, means_in_words, means_table
from mhaprune.lab.reporting.page import render
from mhaprune.lab.reporting.plots import MOST_RUNS, Plot, draw, elided
from mhaprune.lab.reporting.sentences import POOR_MODEL, Aside
from mhaprune.lab.reporting.settings import Setting, for_figures, setting
from mhaprune.lab.runs.index import index_of
from mhaprune.lab.runs.run_folder import RunFolder, read_status, reason
from mhaprune.lab.runs.run_reader import COLLECTION, FoundRun, find_runs, read_run
from mhaprune.lab.runs.sweep_settings import SWEEP_SETTINGS
from mhaprune.settings.plugins import results_folder
from mhaprune.settings.refusals import visible
from mhaprune.storage.store import write_bytes
from mhaprune.tables import LABEL, SETTING, Tables, varying

RESERVED = ("cache", "hydra", "launch", LABEL, SETTING, *SWEEP_SETTINGS)
"""Settings that do not appear in the label of a run."""
NOT_SET = "not set"
MOST_NAMED = 8
"""Largest number of jobs that an error message names."""
MOST_LISTED = 200
"""Largest number of runs in the index of all runs, which every run writes."""


def collect(
    folders: Iterable[Path], out: Path, figure: FigureSettings | None = None, command: str | None = None
) -> list[str]:
    """Combine the runs found in `folders` into the folder `out`, with figures in the form `figure`. Return the findings
    as sentences; the last sentences name the runs that were left out. `command` made the runs, if a single one did.

    The sentences and figures for the runs of an experiment come from its class. Raises ValueError if no run is found,
    or if `out` is itself a run, whose files would be replaced.
    """
    folders = list(folders)
    if read_status(out).get("kind", COLLECTION) != COLLECTION:
        raise ValueError(f"out={out}: is the folder of a run, name one of its own for what is collected")
    found = find_runs(folders)
    if not found:
        raise ValueError(f"folder={', '.join(map(str, folders))}: holds no run, a run folder has a status.json")
    to = RunFolder(out, figure)
    with to.locked(wait=command is not None), to.recorded() as folder:  # the same sweep may end in two processes
        folder.note(kind=COLLECTION)
        runs, differ = named(found)
        runs = [run.read() for run in runs]
        compared = [run for run in runs if run.why_not is None]
        left_out = [run for run in runs if run.why_not is not None]
        tables: dict[str, pd.DataFrame] = {"runs": table_of(runs, differ)}
        plots: list[Plot] = []
        lines: list[str] = []
        kinds = [kind for kind in dict.fromkeys(run.experiment for run in compared) if kind is not None]
        for kind in kinds:
            # Tables and figures of several experiments may have the same names.
            prefix = f"{kind.__name__.lower()}-" if len(kinds) > 1 else ""
            of_kind = [run for run in compared if run.experiment is kind]
            combined = in_common(of_kind)
            sentences, drawn, means = compare(kind, of_kind, combined)
            several = len(kinds) > 1 and not all(isinstance(each, Aside) for each in sentences)
            lines += [*[f"{kind.__name__.lower()}, {len(of_kind)} runs:"] * several, *sentences]
            plots += [plot.named(prefix + plot.name) for plot in drawn]
            if len(means):
                folder.write(f"{prefix}means.tex", means_in_latex(means).encode())
                combined = {"means": means} | combined
            tables |= {prefix + name: frame for name, frame in combined.items()}
        if len(kinds) > 1:
            lines.insert(
                0, f"{len(compared)} runs of {len(kinds)} experiments; each is compared with those of its kind."
            )
        lines += [f"{run.label} is not in here, {run.why_not} ({run.place})." for run in left_out]
        held = {place for run in runs for place in (run.folder, *run.folder.parents)}
        lines += [f"{top} holds no run." for top in folders if top not in held]
        lines = [type(line)(visible(line)) for line in lines]
        for name, frame in tables.items():
            folder.write_table(name, frame)
        folder.write_figures(plots)
        collecting = ["python", "scripts/collect.py", *map(str, folders), "--out", str(out)]
        how = {"collected by": shlex.join(collecting)} if command is None else {"command": command}
        facts = how | {"runs": str(len(runs))}
        title = title_of(runs, differ)
        folder.write("report.html", render(title, lines, plots, tables, facts).encode())
        folder.write("index.html", index_of(title, runs, differ, facts, folder.path).encode())
        folder.note(runs=len(runs), failed=[run.place for run in left_out])
    return lines


def end_sweep(root: Path, figure: FigureSettings) -> str:
    """Combine the jobs of a sweep into its folder, and print what they say together. Return a line that names the jobs
    that are not done; empty if all are."""
    if not root.is_dir() or not find_runs([root]):  # Hydra began no job
        return ""
    link_latest(root)
    for line in collect([root], root, figure, shlex.join(["python", *sys.argv])):
        print(line)
    print(f"Report: {visible(str(root / 'report.html'))}")
    runs, _ = named(find_runs([root]))
    states = [f"{run.label} ({run.why_not})" for run in runs if run.why_not is not None]
    if not states:
        return ""
    more = f" and {len(states) - MOST_NAMED} more" if len(states) > MOST_NAMED else ""
    return f"{len(states)} of {len(runs)} jobs not done: {'; '.join(states[:MOST_NAMED])}{more}"


def link_latest(folder: Path) -> None:
    """Make `results/latest` a link to the folder of a run or a sweep, and write the index of all runs. Elsewhere than
    in the folder of results, and where links or files cannot be written, this does nothing."""
    results, place = results_folder().resolve(), folder.resolve()
    if results not in place.parents:
        return
    link = results / f".latest.{os.getpid()}"
    with suppress(OSError):
        try:
            link.symlink_to(place.relative_to(results))
            os.replace(link, results / "latest")
        finally:
            link.unlink(missing_ok=True)
    if results / "runs" in place.parents:
        with suppress(OSError):
            write_index_of_all(results / "runs")


def write_index_of_all(root: Path) -> None:
    """Write `index.html` into the folder of all runs that were started one by one: the newest `MOST_LISTED` of them,
    each with its experiment, its date and its first sentence, newest first."""
    ended = sorted(root.glob("*/*/*/status.json"), key=lambda path: path.parts[-3:-1], reverse=True)
    newest = ended[:MOST_LISTED]
    runs = [_dated(read_run(path.parent)) for path in newest]
    title = "All runs" if len(ended) == len(newest) else f"The newest {len(newest)} of {len(ended)} runs"
    write_bytes(root / "index.html", index_of(title, runs, ["started", "settings", "folder"], {}, root).encode())


def _dated(run: FoundRun) -> FoundRun:
    """Return the run named by its experiment and task, with what its row in the index of all runs shows."""
    started = str(run.status.get("started", ""))
    typed = [text for text in run.status.get("overrides", ()) if not text.startswith("experiment=")]
    place = Path(run.place).parts  # a name that is not UTF-8 cannot be written into a page
    with suppress(ValueError, OverflowError):
        started = f"{datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
    row = {"started": started, "settings": elided(" ".join(typed), 60), "folder": "/".join(place[-2:])}
    task = run.status.get("identity", {}).get("task")
    return replace(run, label=f"{place[-3]} on {task}" if task else place[-3], settings=row)


def named(runs: Sequence[FoundRun]) -> tuple[list[FoundRun], list[str]]:
    """Return the runs with labels, and the settings that differ between them, the seed last.

    A label lists the settings in which runs differ. If a label is empty or not unique, the folder is added to it.
    """
    settings = [_settings(run.status) for run in runs]
    if len({of_run.get("experiment") for of_run in settings}) == 1:
        for of_run in settings:
            of_run.pop("experiment", None)
    values: dict[str, set[str | None]] = {name: set() for of_run in settings for name in of_run}
    for of_run, run in zip(settings, runs, strict=True):
        for name in values if "identity" in run.status else of_run:  # otherwise only the typed settings are known
            values[name].add(of_run.get(name))
    differ = sorted((name for name in values if len(values[name]) > 1), key=lambda name: name == "seed")
    labels = [_joined(of_run, differ) for of_run in settings]
    places, depth, often = [Path(run.place).parts for run in runs], 1, Counter(labels)
    while len({place[-depth:] for place in places}) < len(places):
        depth += 1
    result = []
    for run, of_run, label, place in zip(runs, settings, labels, places, strict=True):
        if not label or often[label] > 1:
            label = ", ".join(filter(None, [label, "/".join(place[-depth:])]))
        seedless = _joined(of_run, [name for name in differ if name != "seed"])
        result.append(replace(run, label=label, setting=seedless, settings=of_run))
    return result, differ


def _joined(settings: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={settings[name]}" for name in names if name in settings)


def _settings(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a run by name: the settings in its identity, and all others of its command line."""
    identity = status.get("identity", {})
    settings = {"experiment": status["experiment"].rpartition(".")[2].lower()} if "experiment" in status else {}
    settings |= {name: str(value) for name, value in identity.items() if name not in ("run", LABEL, SETTING)}
    for override in status.get("overrides", []):
        key, _, value = override.partition("=")
        short = key.removeprefix("model.")  # the name in the identity
        if short not in identity and key != "experiment" and key.split(".")[0] not in RESERVED:
            settings[key if identity else short] = value
    return settings


def compare(
    kind: type[Experiment], runs: Sequence[FoundRun], tables: Tables
) -> tuple[list[str], list[Plot], pd.DataFrame]:
    """Return sentences and figures that compare these runs, the most important numbers first, and their means."""
    settings, models = settings_of(runs), independent(runs)
    numbers = numbers_of(models, settings)
    once = {run.label for run in models}
    tables = {name: frame[frame[LABEL].isin(once)] for name, frame in tables.items()}
    plots, means, none = list[Plot](), pd.DataFrame(), list[str]()
    try:
        common = [*means_in_words(numbers, settings), *kind.say_in_common(tables), *_beware(runs, models)]
        means = means_table(numbers, settings)
        plots = list(draw((lambda _: against_settings(numbers, settings), *kind.figures_over_runs), tables))
        why = "there is one" if len(models) < 2 else "no number is in all of them" if means.empty else ""
        none = [f"No figure compares runs of {kind.__name__.lower()}: {why}."] if why and not plots else []
    except Exception as error:  # tables may hold anything
        common = [f"Runs of {kind.__name__.lower()} cannot be compared, {reason(error)}."]
    many = [f"What each of {len(runs)} runs found is in index.html."]
    each = [Aside(f"{run.label}: {run.sentence}") for run in runs if run.sentence]
    return [*common, *none, *(many if len(runs) > MOST_RUNS else each)], plots, means


def independent(runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return one run for each model: of runs with equal settings, seed included, the last one. Its headline has the
    mean of all their times; all else would be the same number again, as if it came from another model."""
    by_model: dict[tuple[tuple[str, str], ...], list[FoundRun]] = {}
    for run in runs:
        by_model.setdefault(tuple(sorted(run.settings.items())), []).append(run)
    return [_with_mean_times(same) if len(same) > 1 else same[0] for same in by_model.values()]


def _with_mean_times(runs: Sequence[FoundRun]) -> FoundRun:
    """Return the last of these runs, with the mean of each number that has no largest value, as times have none."""
    times = pd.DataFrame([(each.name, each.value) for run in runs for each in run.headline], columns=["name", "value"])
    mean = times.groupby("name")["value"].mean()
    headline = [each._replace(value=mean[each.name]) if isinf(each.most) else each for each in runs[-1].headline]
    return replace(runs[-1], headline=headline)


def _beware(runs: Sequence[FoundRun], models: Sequence[FoundRun]) -> Iterator[str]:
    """Yield what a reader of these numbers must know: runs of one model count once, and models may be poor."""
    if len(models) < len(runs):
        count = f"{len(models)} model{'s' * (len(models) > 1)}"
        yield f"The {len(runs)} runs have {count}: runs with equal settings and seed count as one."
    if poor := sum(run.poor for run in models):
        yield f"{POOR_MODEL} in {poor} of {len(models)} runs. What is said of its heads means little there."


def settings_of(runs: Sequence[FoundRun]) -> list[Setting]:
    """Return the settings that differ between runs, without the seed. They are in the order in which figures use them.

    If several settings always change together, only the first is returned.
    """
    by_groups: dict[tuple[int, ...], Setting] = {}
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [run.settings.get(name, NOT_SET) for run in runs]
        groups = tuple(pd.factorize(pd.Series(values))[0])
        if name != "seed" and max(groups) > 0 and groups not in by_groups:
            by_groups[groups] = setting(name, values)
    return for_figures(by_groups.values())


def numbers_of(runs: Sequence[FoundRun], settings: Sequence[Setting]) -> pd.DataFrame:
    """Return a table with one row per run and headline number, and a column for each setting in `settings`."""
    rows = [
        number._asdict() | {LABEL: run.label} | {each.name: run.settings.get(each.name, NOT_SET) for each in settings}
        for run in runs
        for number in run.headline
    ]
    return pd.DataFrame(rows, columns=[*Number._fields, LABEL, *(each.name for each in settings)])


def title_of(runs: Sequence[FoundRun], differ: Sequence[str]) -> str:
    """Return a title with experiments, tasks and differing settings: `ablate on sort, by num_heads, 3 seeds`."""
    compared = [run for run in runs if run.why_not is None]
    kinds = [kind.__name__.lower() for kind in dict.fromkeys(run.experiment for run in compared) if kind]
    done = ", ".join(kinds) if len(kinds) < 3 else f"{len(compared)} runs of {len(kinds)} experiments"
    tasks = dict.fromkeys(run.settings.get("task", "no task") for run in compared)
    title = f"{done or 'Runs'} on {_listed(list(tasks) or ['no task'])}"
    settings = [name for name in differ if name not in ("experiment", "task", "seed")]
    if settings:
        title += f", by {_listed(settings) if len(settings) < 4 else f'{len(settings)} settings'}"
    seeds = {run.settings["seed"] for run in runs if "seed" in run.settings}
    return title + (f", {len(seeds)} seeds" if len(seeds) > 1 else "")


def _listed(names: Sequence[str]) -> str:
    """Return the names as text: `a, b and c`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def table_of(runs: Sequence[FoundRun], differ: Sequence[str]) -> pd.DataFrame:
    """Return a row per run: its settings, its headline numbers, how it ended, what trained its model, and its folder.

    Runs that started far apart were not timed side by side.
    """
    rows = []
    for run in runs:
        settings = {name: run.settings.get(name) for name in (*differ, *run.settings)}
        numbers = {number.name: number.value for number in run.headline}
        ended = {"state": run.why_not or "done", **{name: run.status.get(name) for name in ("started", "seconds")}}
        rows.append({LABEL: run.label, **settings, **numbers, **ended, **run.trained_with, "folder": run.place})
    return varying_first(pd.DataFrame(rows))


def in_common(runs: Sequence[FoundRun]) -> dict[str, pd.DataFrame]:
    """Return the tables of all runs by name. A table has the rows of all runs, one run below the other. Columns that do
    not vary come last."""
    combined = {}
    for name in dict.fromkeys(name for run in runs for name in run.tables):
        having = [run for run in runs if name in run.tables]
        parts = [run.tables[name].assign(**{LABEL: run.label, SETTING: run.setting}) for run in having]
        frame = pd.concat(parts, ignore_index=True)
        combined[name] = varying_first(frame[[*dict.fromkeys([LABEL, SETTING, *frame])]])
    return combined


def varying_first(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns in order: the label, then the columns that vary, then the others."""
    varies = [name for name in varying(frame) if name != LABEL]
    return frame[[LABEL, *varies, *(name for name in frame if name not in (LABEL, *varies))]]
