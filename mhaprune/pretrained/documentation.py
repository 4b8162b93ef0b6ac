"""English sentences that every Python has: the documentation of its standard library."""

from __future__ import annotations

import importlib
import inspect
import random
import re
import warnings
from contextlib import suppress

MODULES = (
    *("argparse", "asyncio", "collections", "concurrent.futures", "csv", "datetime", "decimal", "difflib", "email"),
    *("fractions", "functools", "heapq", "html", "http.client", "inspect", "io", "json", "logging", "mailbox", "os"),
    *("pathlib", "random", "shutil", "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile"),
    *("tempfile", "textwrap", "threading", "typing", "unittest", "urllib.request", "uuid", "zipfile"),
)


def sentences() -> list[str]:
    """English sentences from the documentation of Python's standard library, in an order that is always the same."""
    found: dict[str, None] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        things = [module, *(getattr(module, attribute) for attribute in sorted(vars(module)))]
        classes = [thing for thing in things if inspect.isclass(thing)]
        things += [vars(each)[attribute] for each in classes for attribute in sorted(vars(each))]
        for thing in things:
            for sentence in re.split(r"(?<=[.])\s+", documentation(thing)):
                text = " ".join(sentence.split())
                if 40 < len(text) < 160 and re.fullmatch(r"[A-Z][a-z][^`>_|=]*\.", text):
                    found[text] = None
    shuffled = sorted(found)
    random.Random(0).shuffle(shuffled)
    return shuffled


def documentation(thing: object) -> str:
    """Some things have none, and some raise or warn when they are asked for it."""
    with suppress(AttributeError), warnings.catch_warnings(action="ignore"):
        return inspect.getdoc(thing) or ""
    return ""
