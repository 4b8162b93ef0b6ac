"""What a sweep that is started again finds of a job: done, changed since, or still to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mhaprune.collecting.runs import read_run
from mhaprune.settings.plugins import allowed
from mhaprune.storage.cache import code_of
from mhaprune.storage.seals import Damaged

DONE, CHANGED, OPEN = "done", "changed", "open"


def standing(folder: Path, identity: Callable[[], str] | None) -> str:
    """DONE for a job that is done, whole, and would be the same if it were done now; CHANGED for one that would not.

    `identity` returns the fingerprint that the run would have now. It takes long, and is None where nothing that
    decides it has changed.
    """
    run = read_run(folder)
    if run.why_not is not None:
        return OPEN
    try:
        run.check()
    except Damaged:
        return OPEN
    same = _same_code(run.status.get("code")) and (identity is None or identity() == run.status["identity"].get("run"))
    return DONE if same else CHANGED


def _same_code(noted: Any) -> bool:
    if not isinstance(noted, dict) or not isinstance(noted.get("modules"), list):
        return False
    modules = noted["modules"]
    ours = all(isinstance(module, str) and module.split(".")[0] in allowed() for module in modules)
    try:
        return ours and code_of(modules) == noted
    except ImportError:
        return False
