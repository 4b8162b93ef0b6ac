"""Sweeps are Hydra's own: a job can be started again at any time, so any launcher and any sweeper may start it."""

import json
import multiprocessing
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pandas as pd
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import ListConfig

from mhaprune.lab.cli.callbacks import folder_of_job
from mhaprune.lab.cli.command_line import main
from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.model.training import Training
from mhaprune.lab.runs.jobs import do_in_sweep
from mhaprune.lab.runs.run import Results
from mhaprune.lab.runs.run_folder import LOCK, RunFolder, read_status
from mhaprune.lab.runs.sweep_settings import SweepSettings
from mhaprune.settings.options import target
from mhaprune.settings.refusals import JobFailed
from mhaprune.storage.cache import code_of
from mhaprune.storage.locks import is_held
from support.commands import Done, run_here, run_script
from support.made_tables import pruning_table, summary
from support.sizes import LEARNT, TINY, TINY_SEQUENCES, once


class Quick:
    """A run that is done at once. A test may let it do something else before."""

    packages = ("pickle",)
    """Whose code is read quickly."""

    def __init__(self) -> None:
        self.identity = {"run": "abc", "task": "sort"}
        self.begun = 0
        self.first: Callable[[], object] = lambda: None

    def __call__(self, folder: RunFolder) -> Results:
        self.begun += 1
        folder.note(experiment=target(Ablate()), identity=self.identity, code=code_of(self.packages))
        self.first()
        folder.write_table("pruning", pruning_table())
        folder.write_table("summary", summary().assign(tolerance=0.01))
        return Results("", {}, {}, ["done"], {}, {}, {})


@pytest.fixture
def run() -> Quick:
    return Quick()


def do(run: Quick, folder: Path, **settings: Any) -> float | None:
    """Do the run as a job of a sweep."""
    build: Any = lambda: run  # noqa: E731
    return do_in_sweep(build, folder, ["seed=0"], lambda: SweepSettings(**settings), "seed=0", in_parallel=False)


def test_a_job_that_is_done_returns_at_once_what_it_returned_before(run: Quick, tmp_path: Path) -> None:
    assert do(run, tmp_path) == 9, "heads that can be removed"
    status = (tmp_path / "status.json").read_bytes()
    assert do(run, tmp_path) == 9
    assert run.begun == 1
    assert (tmp_path / "status.json").read_bytes() == status


def other_settings(run: Quick, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.identity = {"run": "def", "task": "sort"}


def other_code(run: Quick, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhaprune.lab.runs.jobs.code_of", lambda packages: {"modules": packages, "digest": "other"})


def a_status_without_code(run: Quick, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = read_status(folder)
    del status["code"]
    (folder / "status.json").write_text(json.dumps(status))


def a_damaged_table(run: Quick, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pruning.csv").write_text("gone")


def a_damaged_status(run: Quick, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "status.json").write_text("{")


@pytest.mark.parametrize(
    "change", [other_settings, other_code, a_status_without_code, a_damaged_table, a_damaged_status]
)
def test_a_job_is_done_again_after(
    change: Callable[..., None], run: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(run, tmp_path)
    change(run, tmp_path, monkeypatch)
    assert do(run, tmp_path) == 9
    assert run.begun == 2


def test_a_folder_of_another_job_is_left_alone(run: Quick, tmp_path: Path) -> None:
    do(run, tmp_path)
    how = SweepSettings
    with pytest.raises(JobFailed, match="holds the job seed=0, name another folder$"):
        do_in_sweep(lambda: run, tmp_path, ["seed=1"], how, "seed=1", in_parallel=False)  # type: ignore[arg-type, return-value]
    assert read_status(tmp_path)["status"] == "done"
    assert run.begun == 1


def test_a_failed_job_says_why_also_from_another_process_and_is_tried_again(
    run: Quick, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("bad\nluck")

    run.first = fail
    with pytest.raises(JobFailed, match="^seed=0: ZeroDivisionError: bad luck$") as error:
        do(run, tmp_path)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert caplog.messages[-1] == "failed, ZeroDivisionError: bad luck"
    assert read_status(tmp_path)["reason"] == "ZeroDivisionError: bad luck"
    run.first = lambda: None
    assert do(run, tmp_path) == 9


def test_a_job_that_takes_too_long_fails(run: Quick, tmp_path: Path) -> None:
    run.first = lambda: time.sleep(60)
    with pytest.raises(JobFailed, match=r"TimeLimit: time_limit=0\.2: stopped after 0\.2 s; the same command goes on"):
        do(run, tmp_path, time_limit=0.2)


@pytest.mark.usefixtures("as_in_a_terminal")
def test_an_interrupt_is_no_failure_of_a_job(run: Quick, tmp_path: Path) -> None:
    """Else the sweep would go on with the next one."""
    run.first = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        do(run, tmp_path)
    assert read_status(tmp_path)["reason"] == "interrupted"


def test_what_another_process_does_is_waited_for_and_not_done_again(run: Quick, tmp_path: Path) -> None:
    run.first = lambda: time.sleep(0.5)
    other = multiprocessing.get_context("fork").Process(target=do, args=(run, tmp_path))
    other.start()
    while not is_held(tmp_path / LOCK):
        time.sleep(0.01)
    assert do(run, tmp_path) == 9
    assert run.begun == 0
    other.join()


def test_folders_are_named_by_what_varies_in_any_order() -> None:
    def name(varying: str, *more: str) -> str:
        return folder_of_job(varying, ListConfig([*varying.split(","), *more]), "nowhere")

    one = name("model.num_heads=2,seed=0", "a=1")
    assert re.fullmatch("model.num_heads_2_seed_0-[0-9a-f]{12}", one)
    assert folder_of_job("model.num_heads=2,seed=0", ListConfig(["a=1", "seed=0", "model.num_heads=2"]), "x") == one
    assert name("model.num_heads=2,seed=0", "a=2") != one, "what is equal in all jobs decides too"
    assert (
        name(
            "model.num_heads=2,seed=0",
            "a=1",
            "cache=x",
            "launch=joblib",
            "time_limit=3",
            "figure.dpi=9",
            "on_results=a.b",
        )
        == one
    )
    long = [name(f"x={'ä' * 10_000}1"), name(f"x={'ä' * 10_000}2"), name("x='../../a b/${c}'"), name("")]
    assert len(set(long)) == 4
    assert all(re.fullmatch(r"[\w.-]{1,100}", each, re.ASCII) for each in long)


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "x" * 101, "a\nb"])
def test_a_name_that_leaves_the_results_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="sweep=.*must be the name of a folder in results/sweeps"):
        SweepSettings(sweep=name)


SMALL = ("experiment=train", *TINY, *TINY_SEQUENCES)
"""A training of a second."""


def sweep(folder: Path, *settings: str) -> Done:
    """A sweep of small trainings."""
    places = [f"hydra.sweep.dir={folder / 'sweep'}", f"cache={folder / 'cache'}"]
    return run_here(main, "-m", *SMALL, *settings, *places)


def names(folder: Path) -> list[str]:
    """The folders of the jobs, without their fingerprints."""
    return sorted(path.parent.name[:-13] for path in folder.glob("sweep/*/status.json"))


RATES = "training.learning_rate"


@pytest.mark.collected_figures
def test_one_job_that_fails_stops_no_other_and_the_same_command_does_what_is_left(tmp_path: Path) -> None:
    done = sweep(tmp_path, f"{RATES}=0.001,1e30,0.002")
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith(f"error: 1 of 3 jobs not done: {RATES}=1e+30 (failed: Diverged: {RATES}=1e+30: the loss is")
    assert "Traceback" not in done.stderr
    folder = tmp_path / "sweep"
    assert names(tmp_path) == [f"{RATES}_{rate}" for rate in ("0.001", "0.002", "1e_30")]
    [failed] = folder.glob("*1e*")
    assert "Traceback" in (failed / "run.log").read_text()
    page = (folder / "report.html").read_text()
    assert f"{RATES}=1e+30 is not in here, failed: Diverged: {RATES}=1e+30" in page
    assert "<title>train on sort, by training.learning_rate</title>" in page
    assert {path.name for path in (folder / "figures").iterdir()} == {"headline.png", "headline.svg"}
    again = sweep(tmp_path, f"{RATES}=0.001,0.002,0.003")
    assert again.returncode == 0, "Hydra's jobs are done; what failed before is in the report"
    assert re.findall("(.*): is done and skipped", again.stdout) == [f"{RATES}=0.001", f"{RATES}=0.002"]
    assert f"{RATES}=1e+30 is not in here, failed" in again.stdout
    runs = pd.read_csv(folder / "runs.csv")
    assert list(runs["label"]) == [f"{RATES}={rate}" for rate in ("0.001", "0.002", "0.003", "1e+30")]


@pytest.mark.usefixtures("as_in_a_terminal")
def test_an_interrupted_sweep_is_combined_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, steps = Training.step, []

    def interrupted(*arguments: Any, **keywords: Any) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 6 + 4:
            signal.raise_signal(signal.SIGTERM)
        return counted(*arguments, **keywords)

    monkeypatch.setattr(Training, "step", interrupted)
    stopped = sweep(tmp_path, "seed=0,1,2")
    assert stopped.returncode == 130
    assert stopped.stderr == "error: interrupted; the same command goes on from what was saved\n"
    assert list(pd.read_csv(tmp_path / "sweep" / "runs.csv")["state"]) == ["done", "interrupted"]
    again = sweep(tmp_path, "seed=0,1,2")
    assert again.returncode == 0
    assert again.stdout.count("is done and skipped") == 1
    assert "seed=1: trained: goes on from the interrupted one" in again.stdout
    assert len(steps) == 3 * 6, "no step is trained twice"


@pytest.mark.slow
def test_a_sweep_that_varies_more_finds_the_jobs_of_one_that_varied_less(tmp_path: Path) -> None:
    assert sweep(tmp_path, "seed=0").returncode == 0
    more = sweep(tmp_path, "seed=0,1")
    assert "seed=0: is done and skipped" in more.stdout
    assert len(names(tmp_path)) == 2


def test_a_setting_may_refer_to_an_option_that_only_jobs_have(tmp_path: Path) -> None:
    refers = ["schedule=[iterative],[iterative,one_shot]", "seed='${schedule.iterative.keep_at_least}'"]
    found = run_here(main, "-m", "experiment=ablate", *refers, "device=x", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert found.stderr.splitlines()[-1].startswith("error: device=x: not to be had")


class Larger(Sweeper):
    """Tries each value of one setting, a launch for each, and keeps the value with the largest number."""

    best: tuple[float, str] | None = None

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        [swept] = [one for one in arguments if "," in one]
        key, _, values = swept.partition("=")
        others = [one for one in arguments if one != swept]
        tried = []
        for number, value in enumerate(values.split(",")):
            [job] = self.launcher.launch([[*others, f"{key}={value}"]], initial_job_idx=number)
            tried.append((job.return_value, value))
        Larger.best = max(tried)


def test_a_sweeper_finds_the_larger_of_two_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's own sweeper is not the only one: what a job returns is its first headline number."""
    package, module = (cast(Any, ModuleType(name)) for name in ("hydra_plugins", "hydra_plugins.larger"))
    package.larger, module.Larger = module, Larger
    for each in (package, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(Larger, "__module__", module.__name__)  # the only package that Hydra allows
    Plugins.instance().register(Larger)
    ConfigStore.instance().store("larger", {"_target_": "hydra_plugins.larger.Larger"}, "hydra/sweeper")
    learnt = [one for one in LEARNT if not one.startswith("training.steps")]
    places = [f"hydra.sweep.dir={tmp_path / 'sweep'}", f"cache={tmp_path / 'cache'}"]
    asked = ("-m", "hydra/sweeper=larger", "experiment=train", *once(*learnt), "training.steps=1,150", *places)
    done = run_here(main, *asked)
    assert done.returncode == 0, done.stderr
    assert Larger.best is not None
    assert Larger.best[1] == "150"
    assert max(pd.read_csv(tmp_path / "sweep" / "runs.csv")["exact match"]) == pytest.approx(Larger.best[0])


@pytest.mark.slow
def test_optuna_finds_the_larger_of_two_values(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    trials = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.direction=maximize"]
    trials += ["hydra.sweeper.sampler.seed=1", "hydra.sweeper.n_jobs=1"]
    learnt = [one for one in LEARNT if not one.startswith("training.steps")]
    places = [f"hydra.sweep.dir={tmp_path / 'sweep'}", f"cache={tmp_path / 'cache'}"]
    steps = "training.steps=choice(1,150)"
    done = run_script("run.py", "-m", *trials, "experiment=train", *once(*learnt), steps, *places)
    assert done.returncode == 0, done.stderr
    assert "training.steps: 150" in (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    assert done.stdout.count("is done and skipped") == 4, "six trials of two settings"


@pytest.mark.slow
def test_a_sweep_may_have_a_name_with_blanks_quotes_and_other_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mhaprune.lab.cli.command_line.results_folder", lambda: tmp_path)
    named = ["-m", *SMALL, "seed=0,1", r"sweep='it\'s a=b, Köpfe'", f"cache={tmp_path / 'cache'}"]
    assert run_here(main, *named).returncode == 0
    folder = tmp_path / "sweeps" / "it's a=b, Köpfe"
    assert sorted(path.name[:-13] for path in folder.glob("seed*")) == ["seed_0", "seed_1"]
    two = run_here(main, *named, f"hydra.sweep.dir={tmp_path}")
    assert two.stderr.splitlines()[-1].startswith(
        "error: sweep=it's a=b, Köpfe: names the folder of the sweep, leave hydra.sweep.dir="
    )


@pytest.mark.slow
def test_the_folders_of_jobs_are_those_that_hydra_is_told(tmp_path: Path) -> None:
    assert sweep(tmp_path, "seed=0,1", "hydra.sweep.subdir='${hydra:job.num}'").returncode == 0
    assert sorted(path.parent.name for path in tmp_path.glob("sweep/*/status.json")) == ["0", "1"]
    one = sweep(tmp_path, "seed=0,1", "hydra.sweep.subdir=x")
    assert one.stderr == "error: hydra.sweep.subdir=x: all jobs would share it, write '${hydra:job.num}'\n"
    out = sweep(tmp_path, "seed=0,1", "hydra.sweep.subdir='../${seed}'")
    assert "leads out of the folder of the sweep, name folders in it" in out.stderr
    lost = sweep(tmp_path, "seed=2,3", "hydra.sweep.subdir='${hydra:job.num}'")
    assert "hydra.sweep.subdir=0: holds the job experiment=train " in lost.stderr
    assert [read_status(tmp_path / "sweep" / name)["identity"]["seed"] for name in "01"] == [0, 1]
    several = run_here(main, "-m", *SMALL, "seed=0,1", f"hydra.sweep.dir='{tmp_path}/sweep${{seed}}'")
    assert several.stderr.splitlines()[-1].startswith(
        f"error: hydra.sweep.dir={tmp_path}/sweep1: all jobs need one, vary"
    )
    few = sweep(tmp_path, "seed=0,1", "task.seed=0,1", "hydra.sweep.subdir='${seed}'")
    assert few.stderr == "error: hydra.sweep.subdir=0: is the folder of several jobs, each must have its own\n"


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "thesis.txt").write_text("mine")
    refused = sweep(tmp_path, "seed=0,1")
    place = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    assert refused.stderr == f"error: {place}: its folder is not empty and holds no sweep, name another\n"
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["thesis.txt"]
    with RunFolder(tmp_path / "sweep" / "deep" / "run").recorded() as folder:
        folder.note(kind="run")
    assert sweep(tmp_path, "seed=0,1").stderr == refused.stderr, "a run somewhere below makes no sweep"
    with RunFolder(tmp_path / "sweep").recorded() as folder:
        folder.note(kind="run")
    assert sweep(tmp_path, "seed=0,1").stderr == refused.stderr, "a run is no sweep"
