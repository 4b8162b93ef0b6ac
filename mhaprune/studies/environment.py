"""Where and by what a run is done: what `environment.json` holds."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mhaprune.timing import device_name

PACKAGES = ("mhaprune", "torch", "hydra-core", "pandas", "numpy", "matplotlib")


def environment(seed: int, num_threads: int, device: str, *packages: str) -> dict[str, Any]:
    """Its command, commit, machine and versions; `packages` are further ones that it uses."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "git_commit": _git_commit(),
        "seed": seed,
        "num_threads": num_threads,
        "device": device_name(device),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in (*PACKAGES, *packages)}},
    }


def trained_with(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an environment that may change a trained model, and how long training takes."""
    found = {name: environment.get(name) for name in ("num_threads", "device")}
    return found | {"torch": environment.get("versions", {}).get("torch")}


def _git_commit() -> str | None:
    """The commit of the working copy that this package is imported from, with `+` where it has changes; None outside
    git."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], stderr=subprocess.DEVNULL, text=True)
        changes = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.strip() + ("+" if changes else "")
