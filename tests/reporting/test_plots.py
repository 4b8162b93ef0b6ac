"""Plots, the curves of a training, and the page that holds them."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from mhaprune.heads import HeadId
from mhaprune.lab.experiments.ablate import Ablate
from mhaprune.lab.reporting import heat_map
from mhaprune.lab.reporting.figure_settings import FigureSettings
from mhaprune.lab.reporting.heat_map import thinned
from mhaprune.lab.reporting.page import proof_sentences, render
from mhaprune.lab.reporting.plots import STYLE, Plot, amount, draw, room_for, wrapped
from mhaprune.lab.reporting.sentences import if_poor
from mhaprune.lab.reporting.training_curves import MOST_NAMED, training_curve
from mhaprune.lab.runs.run import build, sweep_settings
from mhaprune.lab.runs.run_folder import RunFolder
from mhaprune.settings.options import ConfigError
from mhaprune.tables import by_block
from support import PACKAGE, ROOT
from support.browser import after, needs_browser
from support.composing import compose
from support.figures import check_legible
from support.made_tables import all_tables, pruning_table, refitted, summary, text_of
from support.sizes import TINY, TINY_SEQUENCES


def test_figures_and_words_need_no_torch(tmp_path: Path) -> None:
    """Only tables: so that many runs can be looked at where there is no torch."""
    paths = [*(PACKAGE / "lab" / "reporting").glob("[!_]*.py"), PACKAGE / "tables.py"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert len(modules) > 11
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def lightness_of(name: str | Colormap) -> np.ndarray:
    return matplotlib.colormaps.get_cmap(name)(np.linspace(0, 1, 51))[:, :3] @ (0.2126, 0.7152, 0.0722)


def test_heat_maps_are_read_without_colour() -> None:
    """Every colour map grows darker all the way from white."""
    assert heat_map.LOST(0.0)[:3] == (1, 1, 1), "what loses nothing is not pink"
    for name in (heat_map.MATTERS, heat_map.LOST):
        assert (np.diff(lightness_of(name)) < 0).all(), name


def test_a_colour_means_the_same_in_every_figure() -> None:
    """A figure takes its colour map from the list that says what it means."""
    paths = [*PACKAGE.glob("lab/reporting/*.py"), *PACKAGE.glob("lab/experiments/**/*.py")]
    for path in paths:
        own = set(re.findall(r"""["'](Blues|Reds|RdBu\w*|PuOr\w*|cividis\w*|\w*viridis\w*)["']""", path.read_text()))
        assert not own or path.stem in ("heat_map", "settings"), (path, own)


def test_small_amounts_are_written_by_one_rule() -> None:
    """Less than 0.001 is true of a small negative amount too; only nothing is 0."""
    expected = {0.0: "0", 2.876: "2.876", 0.0014: "0.001", 4.2e-5: "<0.001", -4.2e-5: "<0.001", -0.034: "−0.034"}
    assert {value: amount(value) for value in expected} == expected
    assert (amount(0.4, 0), amount(math.nan)) == ("<1", "–")


def test_names_are_thinned_to_what_fits() -> None:
    assert thinned("abcd", 4) == list("abcd")
    assert thinned("abcde", 2) == ["a", "", "", "d", ""]
    assert thinned("abc", 0) == ["a", "", ""]


def figure_of_all_kinds() -> Figure:
    """Log axes, a twin, titles with ticks above, labels, a legend that hides least, a colour bar."""
    figure = Figure(figsize=(7, 5))
    (log, twin), (image, empty) = figure.subplots(2, 2)
    log.plot([1, 2, 3], [1e-3, 10, 1e4], label="a line")
    log.set(yscale="log", ylabel="loss", xlabel="step", title="both")
    log.legend()
    other = twin.twinx()
    other.plot([0, 1], [100000.5, 100000.9])
    other.set_ylabel("exact match")
    twin.set(xlabel="heads removed")
    drawn = image.imshow(np.arange(4).reshape(2, 2))
    image.xaxis.tick_top()
    image.set_title("above the ticks")
    figure.colorbar(drawn)
    empty.set_axis_off()
    return figure


@pytest.mark.slow
def test_all_files_are_the_same_byte_for_byte() -> None:
    with matplotlib.rc_context(STYLE):
        first, second = (Plot("all", "", figure_of_all_kinds()) for _ in range(2))
        assert first.svg == second.svg
        assert first.png == second.png
        assert first.pdf == second.pdf
        assert first.pdf.startswith(b"%PDF")
        assert b"CreationDate" not in first.pdf


@pytest.mark.slow
@pytest.mark.parametrize("width", [5.5, 14.0])
def test_a_figure_of_another_width_keeps_its_letters_and_none_is_cut_or_covered(width: float) -> None:
    tables = all_tables() | {"recovered": refitted(pruning_table())}
    usual = {plot.name: plot for plot in draw(Ablate.figures, tables)}
    for plot in draw(Ablate.figures, tables):
        plot.shape(width)
        before, after = (found.figure for found in (usual[plot.name], plot))
        assert after.get_figwidth() == width
        assert (after.get_figheight() > before.get_figheight()) == (width > before.get_figwidth())
        assert {text.get_fontsize() for text in after.findobj(Text)} == {t.get_fontsize() for t in before.findobj(Text)}
        check_legible(plot)


def test_a_narrow_figure_has_a_narrow_legend() -> None:
    """For a column of a paper."""
    tables = all_tables() | {"recovered": refitted(pruning_table())}
    (plot,) = (plot for plot in draw(Ablate.figures, tables) if plot.name == "accuracy")
    plot.shape(3.3)
    check_legible(plot)


def test_a_phone_gets_figures_of_its_own_and_the_others_stay_as_they_are() -> None:
    plots = {plot.name: plot for plot in draw(Ablate.figures, all_tables())}
    plot = plots["accuracy"]
    wide, narrow = text_of(plot), plot.narrow.decode()
    assert 'width="331.2pt"' in narrow, "4.6 inches"
    words = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", narrow))
    assert sorted(re.findall("[a-z_]+", words)) == sorted(re.findall("[a-z_]+", wide)), "only the axes have fewer ticks"
    vars(plot).pop("svg")
    assert text_of(plot) == wide
    for width, own in ((4.5, False), (4.7, True), (9.3, False)):
        figure = Figure(figsize=(width, 3))
        figure.add_subplot()
        assert bool(Plot("a", "", figure).narrow) is own
        assert not Plot("a", "", figure, appendix=True).narrow
    unnamed = Figure(figsize=(7, 3))
    unnamed.add_subplot().xaxis.set_major_formatter(lambda value, place: "")
    assert not Plot("a", "", unnamed).narrow
    foreign = Figure(figsize=(7, 3))
    foreign.legend(foreign.add_subplot().plot([1, 2]), ["a legend of its own"])
    assert not Plot("a", "", foreign).narrow


def test_the_files_of_figures_are_those_that_are_wanted(tmp_path: Path) -> None:
    settings = FigureSettings(format=("pdf", "png"), width=4, dpi=100)
    with RunFolder(tmp_path, settings).recorded() as folder, matplotlib.rc_context(STYLE):
        folder.write_figures([Plot("all", "", figure_of_all_kinds())])
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"all.pdf", "all.png"}
    with Image.open(tmp_path / "figures" / "all.png") as image:
        assert image.width == 400
    assert b"/MediaBox [ 0 0 288 " in (tmp_path / "figures" / "all.pdf").read_bytes(), "72 points an inch"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("figure.format=[gif]", "figure.format[0]='gif': must be svg or png or pdf"),
        ("figure.format=[]", "figure.format=[]: must be one or more values, all different"),
        ("figure.width=1", "figure.width=1.0: must be from 2 to 40"),
        ("figure.dpi=3", "figure.dpi=3: must be from 50 to 1200"),
    ],
)
def test_wrong_settings_of_figures_are_refused(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        build(compose(given))


def test_the_settings_of_figures_make_no_other_run() -> None:
    settings = [*TINY, *TINY_SEQUENCES, "experiment=train"]
    wanted = compose(*settings, "figure.format=[pdf]", "figure.width=3.3", "figure.dpi=300")
    assert build(compose(*settings)).identity == build(wanted).identity
    assert sweep_settings(wanted).figure == FigureSettings(("pdf",), 3.3, 300)


def test_the_heads_of_a_block_are_listed_together() -> None:
    heads = [HeadId.parse(name) for name in ("cross.1.0", "model.layer.0.3", "cross.1.11", "cross.0.2")]
    assert by_block(heads) == "cross.1: 0 11, model.layer.0: 3, cross.0: 2"


@pytest.mark.parametrize(("reached", "warned"), [(0.76, True), (0.8, False), (1.0, False)])
def test_a_poor_model_is_said_to_be_one(reached: float, warned: bool) -> None:
    assert not list(if_poor({"summary": pd.DataFrame({"quality": [0.0]})})), "one that was not trained here"
    lines = list(if_poor({"training": pd.DataFrame({"valid_quality": [0.9 - reached, reached]})}))
    assert len(lines) == warned
    hard = pd.DataFrame({"valid_quality": [reached], "learnt": 0.75})
    assert not list(if_poor({"training": hard})), "of a task that is hard to learn"
    assert all(
        line.startswith("Beware: the model itself is poor: at the end of its training 76.0 % of the answers are right.")
        for line in lines
    )


@pytest.mark.parametrize(
    ("ends", "low", "high"),
    [([], 1.0, 3.0), ([0.5, 4.0], 0.5, 4.0), ([-50.0, 60.0], -50.0, 60.0), ([math.nan], 1.0, 3.0)],
)
def test_there_is_room_for_all_values_and_all_ends(ends: list[float], low: float, high: float) -> None:
    margin = 0.06 * (high - low)
    assert room_for(pd.Series([1.0, 3.0]), ends) == pytest.approx((low - margin, high + margin))
    assert room_for(pd.Series([0.0]), []) == pytest.approx((-0.06, 0.06))


def drawn(training: pd.DataFrame) -> Plot:
    (plot,) = draw((training_curve,), {"training": training})
    return plot


def gated(heads: int) -> pd.DataFrame:
    progress = {"step": [0, 25], "loss": [np.nan, 1.0], "valid_loss": [2.1, 1.2], "valid_quality": [0.5, 0.5]}
    return pd.DataFrame(progress | {f"gate_cross.0.{i}": [1.0, 0.5] for i in range(heads)})


@pytest.mark.parametrize("heads", [0, 1, 4])
def test_no_legend_covers_a_line(heads: int) -> None:
    figure = drawn(gated(heads)).figure
    figure.draw_without_rendering()
    legends = [legend for part in (figure, *figure.subfigs) for legend in part.legends]
    legends += [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
    assert len(legends) == 1 + bool(heads), "one line needs no legend"
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_loss_accuracy_and_gates_have_a_panel_each_and_a_single_evaluation_is_a_point() -> None:
    """More gates than can be told apart have no legend."""
    loss, quality, *gates = (few := drawn(gated(MOST_NAMED))).figure.axes
    assert [line.get_marker() for line in loss.get_lines()] == ["o", ""]
    assert (len(quality.get_lines()), len(gates)) == (1, 1)
    assert f"head {MOST_NAMED - 1}" in text_of(few)
    assert "head 0" not in text_of(drawn(gated(4 * MOST_NAMED)))


def test_the_proofs_are_said() -> None:
    names = ("max_difference_masked_removed", "smallest_gate_effect", "greedy_decoding_disagreements")
    lines = proof_sentences(dict(zip(names, (2e-14, 2.5, 0), strict=True)))
    assert len(lines) == 3
    assert "2.0e-14" in lines[0]
    assert proof_sentences({}) == []


MADE = pd.DataFrame({"scorer": ["b", "a", "c"], "task": "sort", "cost": [1e-5, 30.0, 4.0], "gap": [None, 2.0, 1.0]})
MADE = MADE.assign(draws=1, none=None)


@pytest.fixture(scope="module")
def page() -> str:
    tables = all_tables() | {"summary": summary(), "made": MADE}
    plots = list(draw(Ablate.figures, tables))
    page = render("ablate on <sort>", ["9 of 24"], plots, tables, {"command": "python x"}, ["proved"])
    assert page.count('<img src="data:image/svg+xml;base64,') == len(plots)
    assert page.count("<source ") == sum(bool(plot.narrow) for plot in plots) < len(plots)
    assert 'base64,"' not in page, "none is empty"
    assert all(f'alt="{plot.alt or plot.caption}"' in page for plot in plots if "'" not in plot.caption)
    return page


def test_columns_that_never_vary_are_folded_away_with_their_value() -> None:
    """A table of a plug-in may hold lists."""
    lists = pd.DataFrame({"heads": [[1], [1, 2]], "layers": [[0], [0]]})
    page = render("t", [], [], {"made": MADE, "one": MADE[:1], "empty": MADE[:0], "lists": lists}, {})
    made, one, empty, of_lists = page.split('<div class="scroll"')[1:]
    assert re.findall("<button>(.*?)</button>", made) == ["scorer", "cost", "gap"]
    assert "3 columns are the same in all rows" in made
    assert re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", made) == [("task", "sort"), ("draws", "1"), ("none", "empty")]
    assert len(re.findall("<button>", one)) == 6, "of a single row there is nothing to compare"
    assert len(re.findall("<button>", empty)) == 6
    assert re.findall("<button>(.*?)</button>", of_lists) == ["heads"]
    assert "<dt>layers</dt><dd>[0]</dd>" in of_lists


def test_the_page_stands_alone_and_its_contents_lead_to_every_figure_and_table(page: str) -> None:
    assert "ablate on &lt;sort&gt;" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<b>pruning</b>, 15 rows" in page
    assert page.index("9 of 24") < page.index("<img") < page.index("<table")
    leads = re.findall('href="#(.*?)"', page)
    assert {f"table-{name}" for name in all_tables()} <= set(leads)
    assert sum(lead.startswith("figure-") for lead in leads) == page.count("<figure ") - 1, (
        "training is in the appendix"
    )
    assert "appendix" in leads
    assert all(page.count(f'id="{lead}"') == 1 for lead in leads)


@needs_browser
def test_tables_are_sorted_by_a_click(tmp_path: Path) -> None:
    page = render("t", [], [], {"other": MADE, "made": MADE}, {})
    rows = "[...table.rows].slice(1).map(row => row.cells[0].textContent).join('')"
    for clicks, order in ((["cost"], "bca"), (["cost", "cost"], "acb"), (["gap"], "cab"), (["scorer"], "abc")):
        script = "const table = document.querySelector('#table-made table');"
        for name in clicks:
            script += f"[...table.querySelectorAll('button')].find(b => b.textContent === '{name}').click();"
        assert after(page, f"{script} return {rows}", tmp_path) == order, clicks


@needs_browser
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_its_window_and_takes_the_colours_of_the_system(
    width: int, dark: bool, page: str, tmp_path: Path
) -> None:
    script = """
      const all = name => [...document.querySelectorAll(name)], style = name => getComputedStyle(all(name)[0]);
      const light = colour => colour.match(/[0-9.]+/g).slice(0, 3).reduce((sum, each) => sum + Number(each), 0) / 765;
      all('details').forEach(each => each.open = true);
      return JSON.stringify({
        ground: light(style('body').backgroundColor),
        ink: light(style('body').color),
        soft: light(style('figcaption').color),
        head: light(style('th').backgroundColor),
        card: light(style('figure img').backgroundColor),
        wide: document.documentElement.scrollWidth,
        images: Math.max(...all('.picture').map(each => each.getBoundingClientRect().right)),
        least: Math.min(...all('img').map(each => each.getBoundingClientRect().width / each.naturalWidth)),
        most: Math.max(...all('img').map(each => each.getBoundingClientRect().width / each.naturalWidth)),
        across: all('.picture').filter(each => each.scrollWidth > each.clientWidth).length,
        scrolls: all('.scroll').filter(each => each.scrollWidth > each.clientWidth).length,
        drawn: all('img').every(each => each.naturalWidth > 0),
      });
    """
    system = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    found = json.loads(after(page, script, tmp_path, system, width=width))
    assert found["drawn"]
    assert found["wide"] <= width, "the page itself does not scroll sideways"
    assert found["images"] <= width
    assert found["scrolls"] or width > 400, "wide tables do"
    assert bool(found["across"]) == (width == 400), "so do wide figures"
    assert 0.53 < found["least"] <= found["most"] < 1.1, "letters of a figure stay more than half as large as they are"
    assert found["card"] == 1, "figures are drawn for white"
    assert abs(found["ground"] - found["ink"]) > 0.6
    assert abs(found["ground"] - found["soft"]) > 0.4
    assert (found["ground"] < 0.5) == dark
    assert found["head"] == found["ground"]


def test_a_word_that_is_too_long_breaks_at_its_hyphen_and_no_other_word_does() -> None:
    assert wrapped("cross-attention 0", 1.1) == "cross-\nattention 0"
    assert wrapped("one-shot removal of cross-attention 0", 1.1) == "one-shot\nremoval of\ncross-\nattention 0"
    assert wrapped("−0.3 one-shot of a 5 %", 0.9) == "−0.3\none-shot\nof a 5\u00a0%"
    assert wrapped("a - b", 2) == "a - b"
