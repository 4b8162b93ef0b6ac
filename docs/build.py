"""Build the site into build/docs/html: `python docs/build.py`. Every warning is an error."""

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
NEEDS = ("sphinx", "myst_nb", "furo", "sphinx_design", "sphinxcontrib.mermaid")
"""The packages of the extra `docs`."""


def missing() -> list[str]:
    """Return the packages of the extra that are not installed."""
    return [name for name in NEEDS if not (_found(name.split(".")[0]) and _found(name))]


def _found(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def main(arguments: Sequence[str]) -> int:
    """Build the site into html/ of the folder that is named, or of build/docs. Return 1 if a page has a fault."""
    if absent := missing():
        print(f"error: {absent[0]} is not installed: pip install -e '.[docs]'", file=sys.stderr)
        return 1
    from sphinx.cmd.build import main as build

    out = Path(arguments[0]) if arguments else HERE.parent / "build" / "docs"
    settings = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(HERE), "-d", str(out / "doctrees")]
    code = build([*settings, str(gathered(out / "source")), str(out / "html")])
    if code == 0:
        shutil.copytree(HERE / "reports", out / "html" / "reports", dirs_exist_ok=True)
        print(out / "html" / "index.html")
    return code


def gathered(source: Path) -> Path:
    """Copy the pages and the notebooks into one folder, because Sphinx reads one folder, and return it."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(HERE, source, ignore=shutil.ignore_patterns("*.py", "__pycache__", "static", "reports"))
    shutil.copytree(HERE.parent / "notebooks", source / "course", ignore=shutil.ignore_patterns(".*"))
    return source


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
