"""Settings of Sphinx for the site. `python docs/build.py` builds it."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import gallery  # noqa: E402 (found by the line above, as are words and mhaprune)
import words  # noqa: E402

project = html_title = "mhaprune"
author = project_copyright = "The mhaprune authors"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_design", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = html_copy_source = False

nb_execution_mode = "off"  # a notebook is shown with the outputs that are stored in it
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

default_role = "code"  # docstrings put names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

MADE = {
    "words": words.glossary,
    "tables": words.tables,
    "columns": words.columns,
    "gallery": gallery.page,
}
"""What takes the place of the comment `<!-- NAME -->` in a page."""
NOTEBOOKS = ("1_the_layer", "2_importance", "3_pruning", "your_own_model")


def filled(app: Any, page: str, source: list[str]) -> None:
    """Fill a page with what is made from data, and turn its links to notebooks/, which the site has as course/."""
    for name, make in MADE.items():
        if (mark := f"<!-- {name} -->") in source[0]:
            source[0] = source[0].replace(mark, make())
    source[0] = source[0].replace("../notebooks/", "course/")
    if page.startswith("course/"):
        source[0] = source[0].replace("](../docs/", "](../")
    if page == "course/README":
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", "", *NOTEBOOKS, "```\n"])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", filled)
