"""The pages of the site: commands that can be composed, links that lead somewhere, options that are named, the site."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

import mhaprune
from mhaprune.lab.runs.run import Run, build
from support import ROOT
from support.composing import EXAMPLES, compose, known, registered
from support.sizes import options, slow

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FINDINGS = sorted((DOCS / "findings").glob("*.md"))
DOCUMENTS = [
    *PAGES,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md", "notebooks/README.md")),
]
"""The pages of the site, and the documents that people read beside it."""


def module(name: str) -> ModuleType:
    """A file of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def each(path: Path) -> str:
    """The name of a document in the list of tests."""
    return str(path.relative_to(ROOT))


def commands(text: str) -> Iterator[str]:
    """The commands of scripts/run.py in a text: lines of code blocks, and code within sentences."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, flags=re.M | re.S)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    yield from (line for line in lines if re.match(r"(python (scripts/run\.py|-m mhaprune)|mhaprune) ", line))


PLACEHOLDERS = re.compile(r"=(NAME|FOLDER)|-sc |--help|--cfg|\.\.\.")
"""What shows that a line is not meant as it stands, or does not run anything."""
NOT_HERE = re.compile(
    r"(model=(hf|minilm|annalog|by_hand|smollm2|rxnmapper|whisper)|data|objective|model_file|launch|hydra[./][\w./]+)(=|$)|model\.(path|save|hub|\w*code)="
    r"|shift=\[\S+\.csv"
)
"""Overrides that need a model, a file or a launcher which a test does not have."""


def overrides(command: str) -> Iterator[list[str]]:
    """The overrides of a command; of a sweep those of the first job and, if it is another one, of the last."""
    words = [word for word in shlex.split(command, comments=True) if "=" in word]
    parsed = OverridesParser.create().parse_overrides([word for word in words if not NOT_HERE.match(word)])
    swept = any(override.is_choice_sweep() for override in parsed)
    for end in (0, -1) if swept else (0,):
        yield [
            f"{override.get_key_element()}={list(override.sweep_string_iterator())[end]}"
            if override.is_choice_sweep()
            else str(override.input_line)
            for override in parsed
            if not (override.is_sweep_override() and not override.is_choice_sweep())
        ]


def built(job: Sequence[str]) -> Run:
    """The run of these overrides, with the packages of examples/ installed."""
    with registered([EXAMPLES]):
        return build(compose(EXAMPLES, *(each for each in job if not each.startswith("plugins="))))


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page not in FINDINGS] + slow(*FINDINGS), ids=each)
def test_every_command_can_be_composed(page: Path) -> None:
    for command in commands(page.read_text()):
        if PLACEHOLDERS.search(command):
            continue
        foreign = re.search(r"model=(hf|minilm|annalog|smollm2)", command)
        for job in overrides(command):
            if foreign:
                compose("model=hf", *(each for each in job if each.startswith("model.")))
                job = [each for each in job if not each.startswith("model.")]
            built(job)


@pytest.mark.parametrize("page", DOCUMENTS, ids=each)
def test_every_script_that_is_named_is_there(page: Path) -> None:
    """But for lines that first go back to an older commit."""
    text = re.sub(r"^.*git switch --detach.*$", "", page.read_text(), flags=re.M)
    for name in re.findall(r"(?<![\w/])((?:scripts|research|docs|tests)/[\w/]+\.(?:py|sh))", text):
        assert (ROOT / name).is_file(), name


def anchors(page: Path) -> set[str]:
    """The places in a page that a link may lead to: its headings and its labels."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, flags=re.M))


@pytest.mark.parametrize("page", DOCUMENTS, ids=each)
def test_every_link_and_every_picture_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {DOCS / "index.md"}
    for page in PAGES:
        for tree in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), flags=re.M | re.S):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert listed - {DOCS / "course/README.md"} == set(PAGES)


LONGEST_FINDING, ALL_PAGES = 700, 22_000
"""In words, as `wc -w` counts them."""


@pytest.mark.parametrize("page", FINDINGS, ids=each)
def test_a_finding_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= LONGEST_FINDING


def test_the_pages_together_are_short() -> None:
    pages = [*DOCS.glob("*.md"), *FINDINGS]
    assert sum(len(page.read_text().split()) for page in pages) <= ALL_PAGES


@pytest.mark.parametrize("page", FINDINGS, ids=each)
def test_every_table_of_a_finding_is_that_of_its_csv(page: Path) -> None:
    tables, text = module("tables"), page.read_text()
    assert tables.filled(text) == text, "change the CSV and run: python docs/tables.py"
    typed = re.sub(r"<!-- table.*?<!-- end -->", "", text, flags=re.S)
    assert not re.search(r"^\|", typed, flags=re.M), "a table that no CSV holds"


def test_a_table_is_written_between_its_marks_and_a_row_of_another_length_is_refused(tmp_path: Path) -> None:
    tables = module("tables")
    (tmp_path / "tables").mkdir()
    file = tmp_path / "tables/a.csv"
    file.write_text('task,mean\nsort,"1, worst 0"\n')
    text = "before\n<!-- table: tables/a.csv -->\n| old |\n<!-- end -->\nafter"
    table = "\n| task | mean |\n|---|---|\n| sort | 1, worst 0 |\n\n"
    assert tables.filled(text, tmp_path) == text.replace("| old |\n", table)
    file.write_text("task,mean\nsort\n")
    with pytest.raises(ValueError, match=r"a.csv: \['sort'\]: has 1 cells, the header has 2"):
        tables.filled(text, tmp_path)


def test_every_table_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in FINDINGS)
    for table in (DOCS / "findings/tables").glob("*.csv"):
        assert f"tables/{table.name}" in pages, table.name


@pytest.mark.parametrize(
    ("page", "groups"),
    [
        ("scores", ["scorer", "schedule", "recovery"]),
        ("experiments", ["experiment"]),
        ("start", ["task"]),
        ("clusters", ["launch"]),
    ],
)
def test_every_option_is_on_the_page_of_its_kind(page: str, groups: list[str]) -> None:
    text, listed = (DOCS / f"{page}.md").read_text(), known if page == "start" else options
    for group in groups:
        section = text.split(f"| `{group}=`", 1)[1].split("\n\n", 1)[0]
        rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
        assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(listed(group)), group


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "reference.md").read_text()
    named = set(re.findall(r":: mhaprune\.(\w+)$", text, flags=re.M))
    assert named == set(mhaprune.__all__)
    for path in re.findall(r"auto\w+:: (mhaprune[\w.]*)\.(\w+)$", text, flags=re.M):
        assert hasattr(importlib.import_module(path[0]), path[1]), path


def test_experiments_ask_on_the_page_what_they_ask_in_their_reports() -> None:
    text = (DOCS / "experiments.md").read_text()
    for name in set(options("experiment")) - {"evaluate"}:
        experiment = build(compose(f"experiment={name}")).experiment
        assert f"| `{name}` | {experiment.question} |" in text


def test_words_and_tables_become_pages() -> None:
    words = module("words")
    known = yaml.safe_load(words.WORDS.read_text())
    glossary = words.glossary().splitlines()
    assert [line for line in glossary if line and not line.startswith((" ", "```"))] == sorted(
        known["words"], key=str.casefold
    )
    rows = words.tables().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == sorted(known["tables"])
    assert "| `*_low` | lower end of the 95 % interval |" in words.columns().splitlines()
    for name, about in known["tables"].items():
        assert about["experiments"], name
        assert set(about["experiments"]) <= set(options("experiment")), name


def test_every_term_that_a_page_links_to_is_in_the_glossary() -> None:
    known = set(yaml.safe_load((ROOT / "mhaprune/lab/reporting/words.yaml").read_text())["words"])
    for page in PAGES:
        assert set(re.findall(r"{term}`([^`<]+)`", page.read_text())) <= known, page


def test_the_pictures_of_the_gallery_are_small_and_their_commands_parse() -> None:
    gallery = module("gallery")
    notes = json.loads(gallery.NOTES.read_text())
    names = [picture.name for picture in gallery.LIST]
    assert len(set(names)) == len(names)
    assert set(notes) <= set(names)
    for note in notes.values():
        assert (gallery.PICTURES / note["file"]).stat().st_size <= gallery.LARGEST_SVG
    said = {(picture.command, notes[picture.name]["sentence"]) for picture in gallery.LIST}
    assert len({command for command, _ in said}) == len(said), "all pictures of a command are of one run"
    for command in {gallery.line(picture) for picture in gallery.LIST}:
        for job in overrides(command):
            built([each for each in job if not each.startswith("model.")])


def test_the_numbers_of_the_first_command_are_those_that_were_kept() -> None:
    """Over kinds of processor instructions; the picture is of one of them."""
    readme, kept = (ROOT / "README.md").read_text(), pd.read_csv(ROOT / "results" / "first-command.csv")
    dense, without = (kept[name] for name in ("dense_percent", "without_twelve_percent"))
    assert kept["removed"].unique().tolist() == [12]
    assert f"{without.min()} to {without.max()} % of the answers are right" in readme
    assert f"With all\nheads it is {dense.min()} to {dense.max()} %." in readme
    assert re.search(rf"none\sleaves more than {kept['random_most_percent'].max()} % right", readme)
    assert " or ".join(map(str, sorted(kept["by_ablation"].unique()))) in readme
    pictured = json.loads(module("gallery").NOTES.read_text())["heads"]["sentence"]
    one, whole = map(float, re.findall(r"([\d.]+) %", pictured))
    assert pictured.startswith("12 of 24 heads")
    assert without.min() <= one <= without.max()
    assert dense.min() <= whole <= dense.max()


def test_a_picture_is_kept_as_svg_or_if_it_is_large_as_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = module("gallery")
    monkeypatch.setattr(gallery, "PICTURES", tmp_path)
    monkeypatch.setattr(gallery, "NOTES", tmp_path / "gallery.json")
    picture = gallery.LIST[0]
    small = SimpleNamespace(svg=b"<svg/>", png=b"png", caption="What it shows.")
    large = SimpleNamespace(svg=bytes(gallery.LARGEST_SVG + 1), png=b"png", caption="What it shows.")
    gallery.keep(picture, small, "A sentence.")
    assert f"](pictures/{picture.name}.svg)" in gallery.page()
    gallery.keep(picture, large, "Another sentence.")
    assert [path.name for path in tmp_path.glob(f"{picture.name}.*")] == [f"{picture.name}.png"]
    page = gallery.page()
    assert f"](pictures/{picture.name}.png)" in page
    assert gallery.line(picture) in page
    assert "> Another sentence." in page
    assert "*What it shows.*" in page
    assert page.count("grid-item-card") == 1


def test_without_the_extra_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = module("build")
    monkeypatch.setattr(site, "NEEDS", ("sphinx_that_is_not_there",))
    assert site.main([]) == 1
    assert capsys.readouterr().err == "error: sphinx_that_is_not_there is not installed: pip install -e '.[docs]'\n"


@pytest.mark.docs
@pytest.mark.skipif(bool(module("build").missing()), reason="pip install -e '.[docs]'")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(DOCS / "build.py"), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "html/findings/index.html").read_text()
    assert found.count("<li><p><strong>") == 10
    assert "Every tensor that the formula names" in (tmp_path / "html/course/1_the_layer.html").read_text()
    assert "72 heads" in (tmp_path / "html/your-own-model.html").read_text()
    assert 'id="term-refit"' in (tmp_path / "html/words.html").read_text()
