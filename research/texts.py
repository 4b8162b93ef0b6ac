"""Texts of six kinds, from a Debian machine and five of its packages: `python research/texts.py FOLDER`.

Prints how many there are of each kind, and two of each. The packages are fetched with `apt-get download` and unpacked
in FOLDER, nothing is installed. Texts are sentences of 40 to 160 characters, each once, in an order that never changes.

- `packages`: descriptions of Debian packages
- `manuals`: manual pages of manpages, manpages-dev and git-man
- `python`: docstrings of the Python packages that are installed
- `quotations`: quotations and jokes of fortunes
- `licences`: the licences in /usr/share/common-licenses
- `essays`: political essays of the package anarchism
"""

from __future__ import annotations

import ast
import gzip
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from html import unescape
from pathlib import Path
from random import Random

DEBIAN = ("manpages", "manpages-dev", "git-man", "fortunes", "anarchism")
LICENCES = Path("/usr/share/common-licenses")
SHORTEST, LONGEST = 40, 160
FILES = 10
"""Of the files of Python packages, every tenth is read: they are ten thousands."""


def kinds_of_text(folder: Path) -> dict[str, list[str]]:
    """Return the texts of each kind, fetching Debian packages into the folder where it lacks them."""
    fetch(folder)
    found: dict[str, Callable[[], Iterable[str]]] = {
        "packages": lambda: package_descriptions(),
        "manuals": lambda: manual_pages(folder),
        "python": lambda: docstrings(Path(sysconfig.get_path("purelib"))),
        "quotations": lambda: quotations(folder),
        "licences": lambda: (plain(path.read_text(errors="replace")) for path in sorted(LICENCES.iterdir())),
        "essays": lambda: essays(folder),
    }
    return {
        kind: shuffled(sentence for part in parts() for sentence in sentences(part)) for kind, parts in found.items()
    }


def fetch(folder: Path) -> None:
    """Unpack the Debian packages that the folder lacks."""
    if missing := [name for name in DEBIAN if not (folder / name).is_dir()]:
        subprocess.run(["apt-get", "download", "-q", *missing], cwd=folder, check=True, capture_output=True)
        for name in missing:
            (file,) = folder.glob(f"{name}_*.deb")
            subprocess.run(["dpkg", "-x", file, folder / name], check=True)


def plain(text: str) -> str:
    """Return a text without the ends of its lines."""
    return re.sub(r"\n\s*\n", ". ", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of usual length that are mostly words."""
    for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
        words = sum(character.isalpha() or character == " " for character in part)
        if SHORTEST < len(part) < LONGEST and words > 0.85 * len(part):
            yield part


def shuffled(texts: Iterable[str]) -> list[str]:
    once = sorted(set(texts))
    Random(0).shuffle(once)
    return once


def package_descriptions() -> Iterator[str]:
    said = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    for found in re.findall(r"^Description(?:-en)?: (.*(?:\n .*)*)", said, re.M):
        yield found.replace("\n .\n", ". ").replace("\n", ". ", 1)


def manual_pages(folder: Path) -> Iterator[str]:
    for path in sorted(path for name in DEBIAN[:3] for path in (folder / name / "usr/share/man").rglob("*.gz")):
        text = re.sub(r"\\f(\(..|\[.*?\]|.)", "", gzip.decompress(path.read_bytes()).decode(errors="replace"))
        text = re.sub(r"^\.\s*(?:B|I|BR|IR|RB|RI|BI|IB)\s+(.*)", r"\1", text, flags=re.M)  # words in bold stay
        text = re.sub(r"^[.'].*", "\n\n", text, flags=re.M).replace(r"\-", "-")
        yield plain(re.sub(r"\\&|\\e|\\\(..|\\s[-+]?\d", "", text))


def docstrings(packages: Path) -> Iterator[str]:
    for path in sorted(packages.rglob("*.py"))[::FILES]:
        try:
            nodes = ast.walk(ast.parse(path.read_text()))
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
            continue
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield plain(ast.get_docstring(node) or "")


def quotations(folder: Path) -> Iterator[str]:
    for path in sorted((folder / "fortunes/usr/share/games/fortunes").rglob("*")):
        if path.is_file() and path.suffix not in (".dat", ".u8"):
            yield from re.split(r"^%$", path.read_text(errors="replace"), flags=re.M)


def essays(folder: Path) -> Iterator[str]:
    for path in sorted((folder / "anarchism/usr/share/doc/anarchism").rglob("*.html*")):
        page = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        body = re.sub(r"<(script|style).*?</\1>", "", page.decode(errors="replace"), flags=re.S | re.I)
        yield unescape(re.sub(r"</?(p|h\d|li|br|div|blockquote)\b.*?>", "\n\n", body, flags=re.I | re.S)).replace(
            "\n\n", ". "
        )


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    for kind, texts in kinds_of_text(Path(sys.argv[1])).items():
        print(f"{kind}: {len(texts)}, for example: {texts[:2]}")
