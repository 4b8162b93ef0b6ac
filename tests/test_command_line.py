"""What a user types: refused in one line that names the key, the value and what is allowed, or done."""

import errno
import io
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

import mhaprune
from mhaprune.lab.cli.command_line import described, main
from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import read_status
from mhaprune.settings.options import ConfigError
from mhaprune.settings.plugins import conf_folder
from mhaprune.settings.refusals import one_line
from mhaprune.storage.locks import locked
from support import ROOT
from support.commands import run_here
from support.composing import compose
from support.sizes import TINY, TINY_SEQUENCES

PLAIN = "d_model=64, num_heads=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128"
RECOVERIES = ", ".join(sorted(path.stem for path in Path("conf/recovery").glob("*.yaml")))
REFUSED = [
    (["example=3,1"], "example=3,1: commas ask for a sweep, which needs -m; a list stands in brackets, example=[3,1]"),
    (["sped=1"], "sped=1: no such key, did you mean seed? allowed are seed, device, num_threads, cache"),
    (["experiment=ablat"], "experiment=ablat: no such option, did you mean ablate? allowed are ablate, compare"),
    (["scorer=[gate,magic]"], "scorer=magic: no such option, allowed are ablation, ablation_mean,"),
    (["scorer=[shapley]"], "scorer=shapley: is not installed: pip install -e examples/literature"),
    (["model=minilm"], "model=minilm: is not installed: pip install -e examples/minilm"),
    (["recovery=[mine]"], f"recovery=mine: no such option, allowed are {RECOVERIES}; one of your own needs plugins="),
    (["gate=null"], "gate=null: must name one of none, softmax"),
    (["experiment.budgets={a:1}"], "experiment.budgets={a:1}: must be a list in brackets"),
    (["hydra.run.dir=null"], "hydra.run.dir=null: must not be null"),
    (["-m", "launch=joblib", "hydra.launcher.n_jobs=abc", "seed=0,1"], "hydra.launcher.n_jobs=abc: must be a whole"),
    (["-m", "launch=joblib", "hydra.launcher.n_jobs=0", "seed=0,1"], "hydra.launcher.n_jobs=0: must be 1 or more"),
    (["=1"], "=1: names no setting, must read KEY=VALUE"),
    (["seed=${nosuch:1}"], "seed=${nosuch:1}: there is no setting nosuch, allowed are"),
    (["seed==1"], "seed==1: has one = too many, must read KEY=VALUE, for example seed=1"),
    (["seed=[1"], "seed=[1: cannot be read; brackets and quotes must close"),
    (["example=3", "1", "2"], '1: is no setting, blanks stand in quotes, example="3 1 ..."; it must read KEY=VALUE'),
    (["ablate"], "ablate: is no setting, did you mean experiment=ablate? it must read KEY=VALUE"),
    (["--experiment=ablate"], "--experiment=ablate: settings have no dashes, write experiment=ablate"),
    (["--experimental-rerun=x"], "--experimental-rerun=x: not allowed, a run is repeated by its command"),
    (["--config-dir=/x"], "--config-dir=/x: not allowed, settings come from conf/ and from plugins, write plugins="),
    (["hydra.searchpath=[/x]"], "hydra.searchpath=[/x]: not allowed, settings come from conf/ and from plugins"),
    (["+hydra.callbacks.x._target_=os.system"], "+hydra.callbacks.x._target_=os.system: not allowed, names code to"),
    (["plugins=[nowhere]", "scorer=[my_own]"], "plugins=nowhere: cannot be imported (No module named 'nowhere'), must"),
    (["plugins=[../../evil]"], "plugins=../../evil: cannot be imported (no name of a package), must name a package"),
    (["plugins=[.json]"], "plugins=.json: cannot be imported (no name of a package), must name a package"),
    (
        ["experiment=train", "experiment=ablate"],
        "experiment=train experiment=ablate: experiment is given 2 times, must",
    ),
    (["seed=1", "+seed=1", "seed=2"], "seed=1 +seed=1 seed=2: seed is given 3 times, must be given once"),
    (["task.train=0", "task.train=0"], "task.train=0 task.train=0: task.train is given 2 times, must be given once"),
    (["-m", "seed=range(0,10,0)"], "seed=range(0,10,0): has a step of 0, must be range(START,STOP,STEP)"),
    (["-m", "seed=range(0,3),choice(1,abc)"], "seed=range(0,3),choice(1,abc): a range stands alone, further"),
    (["-m", "seed=1,range(0,3)"], "seed=1,range(0,3): a range stands alone, further values are written out"),
    (["cache=' '"], "cache=' ': must name a folder"),
    (["cache=a,b", "-m", "sweep=s"], "cache=a,b: no job depends on cache, must have one value"),
    (["-m", "sweep=s", "figure.dpi=80,90"], "figure.dpi=80,90: no job depends on figure, must have one value"),
    (["-m", "launch=basic,joblib", "seed=0,1"], "launch=basic,joblib: no job depends on launch, must have one value"),
    (["example='3 1"], "example='3 1: cannot be read; brackets and quotes must close"),
    (["hydra.launcher.partitions=x"], "hydra.launcher.partitions=x: no such key, --cfg hydra shows those that there"),
    (["hydra/sweeper=unknown"], "hydra/sweeper=unknown: no such option, allowed is basic"),
    (["sweep=heads"], "sweep=heads: names a sweep, which needs -m"),
    (["model.max_length=5"], "model.max_length=5: task sort has sequences of 11 tokens, so 11 or more"),
    (["hydra.run.dir=/dev/null/x"], "/dev/null/x: Not a directory; hydra.run.dir and cache must name folders that can"),
    (["cache=/dev/null/x"], "cache=/dev/null/x: cannot be written (Not a directory), name a folder that can"),
    (["experiment=prune", "experiment.budgets=[1.5]"], "experiment.budgets=1.5: a fraction must be from 0.0 to 1.0"),
]
"""By the command line."""
MISSPELT = [
    (["-m", "seed=0,1"], "-m: is for the command line alone, leave this out"),
    (["--cfg"], "--cfg: is for the command line alone, leave this out"),
    (["seed=0", "seed=1"], "seed=0 seed=1: seed is given 2 times, must be given once"),
    (["training.step=1"], "training.step=1: no such key, did you mean steps? allowed are steps, batch_size"),
    (["gate=none", "gate.scale=one"], "gate.scale=one: gate is not among the options chosen here, --help lists"),
    (["experiment=train", "experiment.tolerance=0"], "experiment.tolerance=0: no such key, allowed are examples"),
    (["exp=ablate"], "exp=ablate: no such key, did you mean experiment? allowed are"),
    (["+experiment=ablate"], "+experiment: is set already, write experiment=NAME, without the +"),
    (["mdoel.num_heads=3"], "mdoel.num_heads=3: mdoel is not among the options chosen here, did you mean model?"),
    (["seed=${nope}"], "seed=${nope}: there is no setting nope, allowed are seed, device"),
]
"""Settings that are not there."""
UNFIT = [
    (["model.max_length=1000000000"], f"model with {PLAIN}, max_length=1000000000: takes about"),
    (["training.weight_decay=1e10"], "training.weight_decay=10000000000.0: a step multiplies the weights by 1 -"),
    (["task.train=1000000000"], "task with max_length=10, train=1000000000: takes about"),
    (["experiment.budgets=[0.5,30]"], "experiment.budgets=30: the model has 24 heads, allowed are 0 to 24"),
    (["experiment=explain", "experiment.examples=[9999]"], "experiment.examples=9999: the report split has examples 0"),
    (["recovery=[refit_between]"], "recovery=[refit_between]: experiment=ablate recovers models that"),
    (["experiment=speed", "experiment.d_models=[1e9]"], "experiment.d_models[0]=1000000000.0: must be a whole"),
    (["experiment=prune", "experiment.budgets=['10 flops']"], "experiment.budgets[0]='10 flops': must be a whole"),
]
"""Values that do not fit their setting, or do not fit each other."""


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained for what is refused."""

    def no_training(*arguments: object, **named: object) -> None:
        raise AssertionError("a model was trained")

    monkeypatch.setattr("mhaprune.lab.model.training.Training.__call__", no_training)


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_what_cannot_be_is_refused_in_one_line_and_leaves_no_folder(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    output = [] if arguments[0].startswith("hydra.run.dir") else [f"hydra.run.dir={tmp_path / 'run'}"]
    cache = [] if arguments[0].startswith("cache") else [f"cache={tmp_path / 'cache'}"]
    done = run_here(main, *output, *cache, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_terminal_shows_the_number_of_a_character_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """No error of an encoding takes the place of what was found; and the log has the character."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["sped=…"]) == 1
    print("…", flush=True)
    sys.stderr.flush()
    assert sys.stderr.buffer.getvalue().startswith(b"error: sped=\\u2026: cannot be read")  # type: ignore[attr-defined]
    assert sys.stdout.buffer.getvalue() == b"\\u2026\n"  # type: ignore[attr-defined]
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        log = hydra.compose("config", return_hydra_config=True).hydra.job_logging
    assert log.handlers.file.encoding == "utf-8"


def test_a_full_disk_is_said_in_one_line_without_a_path_too() -> None:
    for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        assert (
            one_line(OSError(number, "no room"))
            == "no room; hydra.run.dir and cache must name folders that can be written"
        )


SWEEPS = [
    (["experiment=train", "seed=0,abc"], "seed='abc': must be a whole number"),
    (["training.steps=5", "model.num_heads=4,5"], "model.num_heads=5: must divide d_model=64"),
    (["model=hf", "model.path=nowhere", "data=x.txt", "seed=0,1"], "model.path=nowhere: "),
    (["training.learning_rate=interval(0.1,0.2)"], "training.learning_rate=interval(0.1,0.2): names no values, write"),
    (["seed=glob(*)"], "no job: a list of values is empty; glob chooses options of a group"),
]
"""Sweeps that no job of can be begun."""


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(("arguments", "message"), SWEEPS)
def test_a_sweep_is_refused_before_its_first_job(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run_here(main, "-m", *arguments, f"hydra.sweep.dir={tmp_path / 'sweep'}", f"cache={tmp_path / 'cache'}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_may_be_asked_for_anywhere_and_takes_no_other_flag(tmp_path: Path) -> None:
    place = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    for asked in ("hydra.mode=MULTIRUN", "-m", "--multirun"):
        done = run_here(main, "experiment=train", "seed=0,abc", place, asked)
        assert done.stderr.splitlines()[-1].startswith("error: seed='abc': must be a whole number")
    for flag in ("--info", "--resolve"):
        done = run_here(main, "-m", flag, "seed=0,1", place)
        assert done.stderr == f"error: {flag}: cannot stand beside -m, leave one of them out\n"


def test_a_training_that_diverges_says_what_to_change(tmp_path: Path) -> None:
    """It is no fault of the program, so no line of it is named."""
    settings = [*TINY, *TINY_SEQUENCES, "training.learning_rate=1e30", f"cache={tmp_path}"]
    done = run_here(main, "experiment=train", *settings, f"hydra.run.dir={tmp_path / 'run'}")
    assert done.stderr.splitlines()[-1].startswith("error: training.learning_rate=1e+30: the loss is nan")
    assert "HYDRA_FULL_ERROR" not in done.stderr


@pytest.mark.parametrize("given", ["time_limit=0.0001", "sweep=x", "launch=joblib", "hydra.run.dir=x"])
def test_what_only_the_command_line_does_is_refused_in_python(given: str) -> None:
    with pytest.raises(ValueError, match=f"^{given}: is for the command line alone"):
        mhaprune.run("experiment=train", given)


@pytest.mark.parametrize(("arguments", "message"), MISSPELT, ids=[" ".join(arguments) for arguments, _ in MISSPELT])
def test_what_python_asks_for_is_refused_in_the_same_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
        described(*arguments)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(("arguments", "message"), UNFIT, ids=[" ".join(arguments) for arguments, _ in UNFIT])
def test_a_value_that_does_not_fit_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as error:
        build(compose(*arguments))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_refused_run_leaves_an_earlier_one_and_an_empty_folder_of_the_user_alone(tmp_path: Path) -> None:
    """Not even that of the shell, in which the next command would find no folder to work in."""
    (tmp_path / "mine").mkdir()
    refused = run_here(main, "experiment=train", f"hydra.run.dir={tmp_path / 'mine' / 'run'}", "model.num_heads=5")
    assert refused.returncode == 1
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    small = [*TINY, *TINY_SEQUENCES, f"hydra.run.dir={tmp_path / 'run'}", f"cache={tmp_path / 'cache'}"]
    assert run_here(main, "experiment=train", *small).returncode == 0
    other = [setting for setting in small if not setting.startswith("model.num_heads=")]
    refused = run_here(main, "experiment=train", *other, "model.num_heads=5")
    assert "model.num_heads=5: must divide d_model=16" in refused.stderr
    assert read_status(tmp_path / "run")["status"] == "done"
    assert (tmp_path / "run" / "report.html").exists()


def test_a_folder_that_another_run_is_in_is_refused_and_left_alone(tmp_path: Path) -> None:
    """What Hydra would write there too."""
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run" / ".lock"):
        refused = run_here(main, "experiment=train", f"hydra.run.dir={tmp_path / 'run'}", "seed=5")
        assert refused.stderr.splitlines()[-1].startswith(
            f"error: hydra.run.dir={tmp_path / 'run'}: in use by process "
        )
        assert refused.stderr.endswith(", name another folder\n")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_traceback_is_given_to_those_who_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="must divide d_model=64") as error:
        run_here(main, f"hydra.run.dir={tmp_path}", "model.num_heads=5")
    assert len(error.traceback) > 5


def test_help_and_typing_errors_need_no_torch(tmp_path: Path) -> None:
    """They answer at once: torch, pandas and matplotlib take seconds to import."""
    code = (
        "import sys\nfor name in ('torch', 'pandas', 'matplotlib'): sys.modules[name] = None\n"
        "from mhaprune.lab.cli.command_line import main\nsys.exit(main())"
    )
    sweep = ["-m", "model.num_heads=1,2", "--help"]
    asked = ((sweep, "experiment=ablate  "), (["sped=1"], "did you mean seed?"), (["--version"], "mhaprune 0."))
    for arguments, said in asked:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_a_reader_who_has_seen_enough_of_the_help_gets_no_error() -> None:
    command = [sys.executable, "-m", "mhaprune", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_scorers_that_need_gates_are_left_out_for_a_pruned_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = [*TINY, *TINY_SEQUENCES]
    study = described("experiment=train", *small, f"cache={tmp_path / 'cache'}").study()
    from mhaprune.heads import HeadMask

    pruned = study.subject.without(HeadMask(study.subject.grid).without(study.subject.grid.heads[0]))
    path = tmp_path / "pruned.pt"
    path.write_bytes(study.saved("model", pruned)["model.pt"])
    run = described("experiment=ablate", f"model_file={path}", f"cache={tmp_path / 'cache'}")
    assert list(run.scorer) == ["gate_output", "ablation", "random"]
    assert "model_file has no learned gates, so scorer=[gate] is left out" in caplog.text
    with pytest.raises(ValueError, match="scorer=gate: needs learned gates"):
        described("experiment=ablate", f"model_file={path}", "scorer=[gate]", f"cache={tmp_path / 'cache'}")
