"""Pages in a browser without a window."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def needs_browser(test: Any) -> Any:
    """Marks a test as slow, too."""
    reason = "needs a browser: apt-get install chromium"
    return pytest.mark.slow(pytest.mark.skipif(BROWSER is None, reason=reason)(test))


def run_browser(page: Path, tmp_path: Path, *options: str) -> str:
    """The page as the browser has it in the end."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def after(page: str, script: str, tmp_path: Path, *options: str, width: int | None = None) -> str:
    """The title that a script gives to the page. With a `width` in pixels the page is that wide: it lies in a frame,
    because a window without a screen is never narrower than 500."""
    path = tmp_path / "index.html"
    say = f"(() => {{ {script} }})()"
    if width is None:
        path.write_text(page.replace("</body>", f"<script>document.title = {say};</script></body>"))
        dom = run_browser(path, tmp_path, *options)
    else:
        told = f"<script>onload = () => {{ parent.document.title = {say}; }}</script></body>"
        path.write_text(page.replace("</body>", told))
        frame = f'<iframe src="index.html" style="border:0;width:{width}px;height:900px"></iframe>'
        (tmp_path / "frame.html").write_text(f"<html><head><title></title></head>{frame}</html>")
        dom = run_browser(tmp_path / "frame.html", tmp_path, *options)
    [title] = re.findall("<title>(.*)</title>", dom.split("</head>")[0])
    return str(title)
