"""English sentences that every Python has: the documentation of its standard library."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    *("argparse", "asyncio", "collections", "concurrent.futures", "csv", "datetime", "decimal", "difflib", "email"),
    *("fractions", "functools", "heapq", "html", "http.client", "inspect", "io", "json", "logging", "mailbox", "os"),
    *("pathlib", "random", "shutil", "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile"),
    *("tempfile", "textwrap", "threading", "typing", "unittest", "urllib.request", "uuid", "zipfile"),
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sentences() -> list[str]:
    """In an order that is always the same. The sources are read, because other packages change what is imported."""
    found: dict[str, None] = {}
    for text in documentation():
        for sentence in re.split(r"(?<=[.])\s+", text):
            words = " ".join(sentence.split())
            if 40 < len(words) < 160 and re.fullmatch(r"[A-Z][a-z][^`>_|=]*\.", words):
                found[words] = None
    shuffled = sorted(found)
    random.Random(0).shuffle(shuffled)
    return shuffled


def documentation() -> Iterator[str]:
    """What every module, class and function says of itself."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        path = library.joinpath(*name.split("."))
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, DOCUMENTED):
                    yield ast.get_docstring(node) or ""
