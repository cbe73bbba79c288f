"""A headless browser for tests: Chromium, where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
# Inside the page, which is shown in a frame as wide as the device: what went wrong, what was drawn, whether it fits.
_PROBE = f"<script>{(Path(__file__).parent / 'probe.js').read_text(encoding='utf-8')}</script>"
_LISTENER = "<script>addEventListener('message', e => document.getElementById('seen').textContent = e.data)</script>"


def chromium() -> str:
    """The browser; the test is skipped, saying so, where there is none."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed: the report was not looked at in a browser")
    return found


def look_at(page: str, folder: Path, width: int) -> dict[str, Any]:
    """What a browser of this width sees of a page."""
    framed = page.replace("<head>", "<head>" + _PROBE, 1)
    file = folder / f"look_{width}.html"
    frame = f'<iframe style="border:0;width:{width}px;height:4000px" srcdoc="{escape(framed)}"></iframe>'
    content = f'<!doctype html><meta charset="utf-8"><body><pre id="seen"></pre>{_LISTENER}{frame}'
    file.write_text(content, encoding="utf-8")
    seen = _run(folder, "--dump-dom", "--virtual-time-budget=4000", file.as_uri())
    found = re.search(r'<pre id="seen">(\{.*?\})</pre>', seen, re.DOTALL)
    assert found, f"the page did not answer: {seen[-500:]}"
    answer: dict[str, Any] = json.loads(unescape(found.group(1)))
    return answer


def print_pdf(page: Path, pdf: Path) -> None:
    """On paper."""
    _run(pdf.parent, f"--print-to-pdf={pdf}", page.as_uri())


def screenshot(page: Path, image: Path, width: int = 900, height: int = 2400) -> None:
    """As it looks."""
    _run(image.parent, f"--screenshot={image}", f"--window-size={width},{height}", page.as_uri())


def _run(folder: Path, *arguments: str) -> str:
    profile = folder / "profile"
    command = [chromium(), *_QUIET, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
