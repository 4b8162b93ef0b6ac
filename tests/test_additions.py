"""What a stranger adds: one module and one YAML for each addition, and nothing in this package changes."""

import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from mhaprune import losses
from mhaprune.api.wrap import wrap
from mhaprune.lab.cli.command_line import described
from mhaprune.lab.experiments.base import Experiment
from mhaprune.lab.runs.run import build
from mhaprune.lab.runs.run_folder import RunFolder, read_status
from mhaprune.lab.sources.trained import TrainedSource
from mhaprune.recoveries.base import Recovery
from mhaprune.schedules.base import Schedule
from mhaprune.scorers.ablation import Ablation
from mhaprune.scorers.base import Scorer
from mhaprune.settings import plugins
from mhaprune.settings.options import ConfigError, option
from support import ROOT
from support.classifier import batches, classifier
from support.composing import compose
from support.sizes import TINY, small

INSTALLED: Any = plugins.installed.__wrapped__
"""Found anew at each call."""
SHOWN = (ROOT / "docs" / "extend.md").read_text().replace("peak", "crest").replace("Peak", "Crest")
SCORE, SCORE_YAML, *_ = re.findall(r"^```\n(.*?)^```", SHOWN, flags=re.M | re.S)
"""The addition that the page about additions shows, with a name that is free also if somebody has just written it."""
MODULES = {
    "crest": SCORE,
    "double": '''
from dataclasses import dataclass

from mhaprune.lab.tasks.base import SequenceTask


@dataclass(frozen=True)
class Double(SequenceTask):
    """3 1 -> 3 3 1 1."""

    def transform(self, source):
        return [symbol for symbol in source for _ in range(2)]
''',
    "deepest": """
from dataclasses import dataclass

from mhaprune.heads import HeadMask
from mhaprune.schedules.base import Stepwise


@dataclass(frozen=True)
class Deepest(Stepwise):
    @property
    def scoring(self):
        return "none"

    def path(self, judge):
        mask = HeadMask(judge.subject.grid)
        yield mask
        while candidates := self.removable(judge, mask):
            mask = mask.without(candidates[0])
            yield mask
""",
    "noise": """
import copy
from dataclasses import dataclass

import pandas as pd
import torch

from mhaprune.recoveries.base import Recovery, pruned_digest


@dataclass(frozen=True)
class Noise(Recovery):
    size: float = 0.1

    def starts_from(self, study, pruned):
        return pruned_digest(pruned)

    def __call__(self, study, pruned, draw, state, save):
        model = copy.deepcopy(pruned)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += self.size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(draw))
        return model, pd.DataFrame({"step": [0], "loss": [0.0]})
""",
    "census": '''
"""How many heads each block has: study, figure and sentence in one module."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure

from mhaprune.lab.experiments.base import Experiment, Findings
from mhaprune.lab.reporting.plots import Figures, Plot
from mhaprune.scorers.scoring import Scoring, heads_table
from mhaprune.tables import Tables


def bars(tables: Tables) -> Plot:
    census, figure = tables["census"], Figure()
    figure.subplots().bar(census["block"], census["heads"])
    return Plot("blocks", "The heads of every block.", figure)


@dataclass(frozen=True)
class Census(Experiment):
    figures: ClassVar[Figures] = (bars,)

    least: int = 1

    def __call__(self, study):
        grid = study.subject.grid
        scores = heads_table(Scoring(study.subject, study.splits.score, study.seed), study.scorers)
        census = pd.DataFrame({"block": list(map(str, grid.blocks)), "heads": grid.sizes})
        return Findings({"census": census, "heads": scores}, checks={"blocks": float(len(grid.blocks))})

    @classmethod
    def say(cls, tables: Tables) -> Iterator[str]:
        yield f"{tables['census']['heads'].sum()} heads in {len(tables['census'])} blocks."
''',
}


GATE = """
from dataclasses import dataclass

from mhaprune.attention.gates import Softmax


@dataclass(frozen=True)
class Lids(Softmax):
    pass
"""
SIZES = {"num_symbols": 6, "max_length": 4, "train": 200, "valid": 16, "score": 16, "choose": 16, "report": 16}
YAMLS = {
    "scorer/mine": SCORE_YAML.replace("mhaprune.scorers.", "stranger.").replace("scorer.crest\n", "scorer.mine\n"),
    "task/double": yaml.safe_dump({"_target_": "stranger.double.Double"} | SIZES),
    "schedule/deepest": "# @package schedule.deepest\n_target_: stranger.deepest.Deepest\nkeep_at_least: 0\n",
    "recovery/noise": "# @package recovery.noise\n_target_: stranger.noise.Noise\nsize: 0.1\n",
    "experiment/census": "_target_: stranger.census.Census\nleast: 1\n",
}


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The YAMLs of a package `stranger` that can be imported, and that no config may name yet."""
    package = tmp_path / "site" / "stranger"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in MODULES.items():
        (package / f"{name}.py").write_text(text.lstrip())
    for name, text in YAMLS.items():
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(plugins, "_allowed", set(plugins._allowed))
    yield tmp_path / "conf"
    for name in [name for name in sys.modules if name.split(".")[0] == "stranger"]:
        del sys.modules[name]


def run(conf: Path, *overrides: str) -> tuple[Path, list[str]]:
    """What `scripts/run.py` does with the stranger's folder of YAMLs beside conf/."""
    path = conf.parent / "run"
    config = compose(f"hydra.searchpath=[file://{conf}]", *TINY, f"cache={conf.parent / 'cache'}", *overrides)
    with RunFolder(path).recorded() as folder:
        lines = build(config)(folder).sentences
    return path, lines


@pytest.mark.figures
def test_an_experiment_a_scorer_and_a_task_end_in_a_table_a_figure_and_a_sentence(conf: Path) -> None:
    plugins.allow(["stranger"])
    path, lines = run(conf, "experiment=census", "task=double", "scorer=[mine,ablation]", "scorer.mine.power=2.0")
    assert lines == ["6 heads in 3 blocks."]
    assert read_status(path)["findings"] == lines
    assert read_status(path)["checks"] == {"blocks": 3.0}
    assert read_status(path)["identity"]["task"] == "double"
    census, heads = (pd.read_csv(path / f"{name}.csv") for name in ("census", "heads"))
    assert list(census["heads"]) == [2, 2, 2]
    assert set(heads["scorer"]) == {"mine", "ablation"}
    assert set(heads.loc[heads["scorer"] == "mine", "settings"]) == {"power=2.0"}
    for name in ("blocks.png", "blocks.svg"):
        assert (path / "figures" / name).stat().st_size > 0
    page = (path / "report.html").read_text()
    assert lines[0] in re.sub("</?abbr[^>]*>", "", page)
    assert "The heads of every block." in page
    assert "census on double" in page


@pytest.mark.slow
def test_a_schedule_and_a_recovery_compete_with_those_of_the_package(conf: Path) -> None:
    plugins.allow(["stranger"])
    settings = [*small("task", "sort"), *small("experiment", "prune"), "experiment.budgets=[2,4]"]
    ways = ["schedule=[deepest,one_shot]", "recovery=[noise]", "scorer=[mine]"]
    path, lines = run(conf, "experiment=prune", *settings, *ways)
    assert lines
    table = pd.read_csv(path / "recovery.csv")
    assert set(table["schedule"]) == {"deepest", "one_shot"}
    assert set(table["recovery"]) == {"nothing", "noise"}
    mine = table[(table["schedule"] == "deepest") & (table["heads_removed"] == 2)]
    assert set(mine["removed"]) == {"encoder_self.0.0 encoder_self.0.1"}
    before, after = (mine.loc[mine["recovery"] == name, "loss"].item() for name in ("nothing", "noise"))
    assert before != after


def test_the_code_of_a_gate_decides_which_model_is_trained(conf: Path) -> None:
    """Else an edited gate would get the model that the gate trained before its edit."""
    plugins.allow(["stranger"])
    (conf.parent / "site" / "stranger" / "lids.py").write_text(GATE.lstrip())
    lids = importlib.import_module("stranger.lids").Lids()
    source = build(compose(*TINY)).source
    assert isinstance(source, TrainedSource)
    splits = source.task.splits()
    plain, own = (replace(source, gate=gate)._key(splits)["sources"] for gate in (source.gate, lids))
    assert own.keys() - plain.keys() == {"stranger"}


def test_a_task_from_outside_gets_the_recipe_of_the_toys_with_a_warning_only(
    conf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plugins.allow(["stranger"])
    own, source = importlib.import_module("stranger.double").Double(), build(compose()).source
    assert isinstance(source, TrainedSource)
    other = replace(source.training, steps=700)
    monkeypatch.setattr(TrainedSource, "trained", lambda *_: 1 / 0)
    for its, training, warned in ((own, source.training, 1), (own, other, 0), (source.task, source.training, 0)):
        caplog.clear()
        with pytest.raises(ZeroDivisionError):
            replace(source, task=its, training=training).study({})
        assert sum("recipe of the toy tasks" in record.message for record in caplog.records) == warned


def test_what_is_not_listed_is_refused_and_not_imported(conf: Path) -> None:
    with pytest.raises(ConfigError, match="^scorer.mine._target_=stranger.crest.Crest: must name .*plugins="):
        run(conf, "scorer=[mine]")
    assert "stranger" not in sys.modules
    plugins.allow(["stranger"])
    with pytest.raises(ConfigError, match="scorer.mine.power='much': must be a finite number"):
        run(conf, "scorer=[mine]", "scorer.mine.power=much")
    with pytest.raises(ConfigError, match="scorer.mine.extent=1: no such setting, allowed are power"):
        run(conf, "scorer=[mine]", "+scorer.mine.extent=1")


STUDY = '''
from dataclasses import dataclass
from mhaprune.lab.experiments.ablate import Ablate

@dataclass(frozen=True)
class More(Ablate):
    """More of it."""
    extra: int = 3
    """How much more."""
'''
VARIANT = "# @package scorer.crest_square\ndefaults: [crest@_here_, _self_]\npower: 2.0\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package in the working folder, of another name for each test: Hydra keeps what it has seen."""
    name = f"heads_of_{request.node.name.partition('[')[0]}"
    files = {"crest.py": SCORE, "more.py": STUDY, "conf/experiment/more.yaml": f"_target_: {name}.more.More\n"}
    for path, text in (files | {"conf/scorer/crest_square.yaml": VARIANT}).items():
        (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr(plugins, "_allowed", {"mhaprune"})
    return f"plugins=[{name}]"


def test_a_class_needs_no_yaml_and_a_yaml_may_start_from_it(package: str) -> None:
    run = described(package, "scorer=[crest,crest_square]")
    assert [each.power for each in run.scorer.values()] == [1.0, 2.0]  # type: ignore[attr-defined]
    run = described(package, "scorer=[crest,ablation]", "scorer.crest.power=3.0")
    assert (type(run.scorer["crest"]).__name__, run.scorer["crest"].power) == ("Crest", 3.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("base", [Scorer, Schedule, Recovery, Experiment])
def test_the_example_of_a_base_class_is_a_whole_plug_in(base: type) -> None:
    [example] = [each for each in doctest.DocTestFinder(recurse=False).find(base) if each.examples]
    heads = wrap(classifier(), losses.classification, score=batches(2), choose=batches(2), report=batches(2))
    example.globs |= {"heads": heads, "__name__": "__main__"}  # what it defines is no part of mhaprune
    told: list[str] = []
    assert doctest.DocTestRunner(verbose=False).run(example, out=told.append).failed == 0, "".join(told)


def test_options_of_allowed_and_installed_plug_ins_are_found_by_name(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Python too. A package is installed if it has an entry point."""
    groups, name = {"scorer": Scorer, "schedule": Schedule}, package[len("plugins=[") : -1]
    monkeypatch.setattr(plugins, "installed", INSTALLED)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="scorer/schedule=crest_square: no such scorer or schedule, allowed are"):
        option("crest_square", groups)
    with monkeypatch.context() as patch:
        patch.setattr(plugins, "_allowed", {"mhaprune"})
        plugins.allow([name])
        assert [option(each, groups).power for each in ("crest", "crest_square")] == [1.0, 2.0]
        with pytest.raises(ValueError, match=r"=crest_sqare: no such scorer or schedule, did you mean crest_square\?"):
            option("crest_sqare", groups)
    (tmp_path / f"{name}-1.dist-info").mkdir()
    (tmp_path / f"{name}-1.dist-info" / "entry_points.txt").write_text(f"[mhaprune.plugins]\ncrests = {name}\n")
    assert [option(each, groups).power for each in ("crest", "crest_square")] == [1.0, 2.0]


def test_a_variant_stands_beside_a_yaml_of_its_class_and_starts_from_what_there_is(package: str) -> None:
    name = package[len("plugins=[") : -1]
    folder = Path.cwd() / name / "conf" / "scorer"
    (folder / "cube.yaml").write_text(f"# @package scorer.cube\n_target_: {name}.crest.Crest\npower: 3.0\n")
    (folder / "mean.yaml").write_text("# @package scorer.mean\ndefaults: [ablation@_here_]\nreplace: mean\n")
    run = described(package, "scorer=[crest,crest_square,cube,mean]")
    assert [each.power for each in list(run.scorer.values())[:3]] == [1.0, 2.0, 3.0]  # type: ignore[attr-defined]
    assert run.scorer["mean"] == Ablation(replace="mean")
    (folder / "mean.yaml").write_text("# @package scorer.mean\ndefaults: [nothing@_here_]\n")
    with pytest.raises(ValueError, match="^scorer=nothing: no such option to start from"):
        described(package, "scorer=[crest]")


def test_a_yaml_may_leave_out_fields_which_can_be_set_all_the_same(package: str) -> None:
    name = package[len("plugins=[") : -1]
    most = f"defaults:\n  - override /scorer: [ablation]\nexperiment:\n  _target_: {name}.more.More\n  extra: 9\n"
    (Path.cwd() / name / "conf" / "experiment" / "most.yaml").write_text(f"# @package _global_\n{most}")
    run = described(package, "experiment=most")
    assert (run.experiment, list(run.scorer)) == (option("most", {"experiment": Experiment}), ["ablation"])
    assert run.experiment.extra == 9  # type: ignore[attr-defined]
    run = described(package, "experiment=more", "experiment.budgets=[2]", "experiment.extra=5")
    assert (run.experiment.budgets, run.experiment.extra) == ((2,), 5)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^experiment.budget=3: no such key, did you mean budgets\?.*extra$"):
        described(package, "experiment=more", "experiment.budget=3")


def test_a_yaml_without_its_place_is_refused(package: str) -> None:
    name = package[len("plugins=[") : -1]
    (Path.cwd() / name / "conf" / "scorer" / "crest_square.yaml").write_text(f"_target_: {name}.crest.Crest\n")
    with pytest.raises(ValueError, match=r"scorer._target_=.*: stands one level too high, its YAML must begin with"):
        described(package, "scorer=[crest_square]")


def test_a_module_that_cannot_be_imported_is_named_in_one_line(package: str) -> None:
    name = package[len("plugins=[") : -1]
    (Path.cwd() / name / "broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ValueError, match=rf"^plugins={name}: {name}.broken cannot be imported \(ModuleNotFoundError"):
        described(package)
