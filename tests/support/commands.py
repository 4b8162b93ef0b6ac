"""Commands, in this process and as processes of their own."""

import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from support import ROOT


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_here(main: Callable[[Sequence[str]], int], *arguments: str) -> Done:
    """Call the `main` of a command in this process, which has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def run_script(name: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of `scripts/` or of `research/` as a user would."""
    folder = next(folder for folder in ("scripts", "research") if (ROOT / folder / name).exists())
    return subprocess.run(
        [sys.executable, str(ROOT / folder / name), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | environment,
        timeout=280,
    )
