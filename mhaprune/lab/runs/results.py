"""The results of a run as tables, figures and sentences, for its folder and for a notebook."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from mhaprune.inputs import Study
from mhaprune.lab.experiments.base import Experiment, Findings, figures_of, functions_of
from mhaprune.lab.reporting.attention_view import view_of
from mhaprune.lab.reporting.head_map import SmallMap, in_small, thumbnail
from mhaprune.lab.reporting.page import NOTHING_ASKED, FirstScreen, fill, proof_sentences, render
from mhaprune.lab.reporting.plots import Figures, Plot, draw, in_place_of, plots_of
from mhaprune.lab.reporting.sentences import Aside, if_poor


@dataclass(frozen=True, repr=False)
class Results:
    """The results of a run for a notebook: all that its run folder would contain."""

    title: str
    tables: dict[str, pd.DataFrame]
    """Tidy tables by name. Their first columns identify the run."""
    figures: dict[str, Plot]
    """Figures by name; a notebook shows them."""
    sentences: list[str]
    """The findings in words, the most important one first."""
    checks: dict[str, float]
    """The numbers that the proofs of the run measured, by name."""
    files: dict[str, bytes]
    """Contents of the other files of the run folder by path, for example saved models."""
    found: dict[str, pd.DataFrame]
    """The tables without the columns that identify the run."""
    small_map: SmallMap | None = None
    """A small map of the heads that stay and that can be removed; None for an experiment that does not decide this."""
    first: FirstScreen = NOTHING_ASKED
    """The question and the most important numbers."""
    functions: Figures = ()  # that draw the figures from the tables
    trained_with: Mapping[str, Any] = field(default_factory=dict)
    """The threads, device and version of torch that trained the model; empty if they are not known."""

    def plot(self, name: str, ax: Axes) -> None:
        """Draw a figure again, in the place of axes of yours and in your style: `results.plot("accuracy", ax=ax)`."""
        if name not in self.figures:
            raise ValueError(f"name={name}: is no figure, there are {', '.join(self.figures)}")
        for figure in self.functions:
            names = [plot.name for plot in draw((figure,), self.found)]
            if name in names:
                with in_place_of(ax, names.index(name)):
                    list(plots_of(figure(self.found)))

    def page(self, facts: Mapping[str, Any] | None = None) -> str:
        """Return the report as one self-contained HTML page."""
        proofs = proof_sentences(self.checks)
        return render(self.title, self.sentences, self.figures.values(), self.found, facts or {}, proofs, self.first)

    @property
    def brief(self) -> list[str]:
        """The findings for a terminal, without what only readers of the report need."""
        return [line for line in self.sentences if not isinstance(line, Aside)]

    def __repr__(self) -> str:
        return "\n".join([self.title, *self.brief])

    def _repr_html_(self) -> str:
        """Return the first screen of the report, for a notebook: the answer, its numbers and the map of heads."""
        return fill(
            "notebook",
            first=self.first,
            lines=self.sentences,
            title=self.title,
            map=thumbnail(self.small_map, 14),
            figures=list(self.figures),
            tables={name: len(frame) for name, frame in self.tables.items()},
        )


def present(
    experiment: Experiment, study: Study, findings: Findings, title: str, identity: Mapping[str, Any] | None = None
) -> Results:
    """Return the findings with their figures and sentences. The columns `identity` are added in front of every
    table."""
    tables = {name: frame.assign(**study.words) for name, frame in findings.tables.items()}
    verdict, first = experiment.head_map(tables), dict(identity or {})
    others = {name: frame.drop(columns=list(first), errors="ignore") for name, frame in tables.items()}
    return Results(
        title=title,
        tables={
            name: pd.concat([pd.DataFrame(first, index=frame.index), frame], axis=1) for name, frame in others.items()
        },
        figures={plot.name: plot for plot in figures_of(type(experiment), tables)},
        functions=functions_of(type(experiment)),
        sentences=[*if_poor(tables), *experiment.say(tables)],
        checks=findings.checks,
        files=findings.files,
        found=tables,
        small_map=None if verdict is None else in_small(verdict),
        first=FirstScreen(experiment.question, experiment.headline(tables), experiment.then, view_of(tables, verdict)),
        trained_with=study.trained_with,
    )
