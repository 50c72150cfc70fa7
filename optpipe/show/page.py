"""The interactive picture, for notebooks and as one HTML file that needs no network.

The code in `web/` and plotly's are part of the page. Names and methods are text in it, never markup, and its policy
lets it run nothing else and ask nobody for anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from optpipe.files import write_file
from optpipe.schedule import Schedule
from optpipe.show.figure import figure
from optpipe.text import printable

WEB = Path(__file__).parent / "web"
# As they build on another.
MODULES = ("data", "words", "layout", "shapes", "draw", "panel", "pointer", "picture", "diagnosis", "main")
IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
FRAME_HEIGHT = 900  # of the picture in a notebook, in pixels
FURTHER_HEIGHT = 450  # for a schedule beside it


@dataclass(frozen=True)
class Picture:
    """An interactive picture. Notebooks show it; `save` writes it as a page."""

    html: str
    height: int = FRAME_HEIGHT  # in a notebook, in pixels

    def save(self, path: str | Path) -> None:
        """Writes the page, whole or not at all."""
        write_file(path, self.html)

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{escape(self.html)}" title="schedule" sandbox="allow-scripts allow-downloads" '
            f'style="width: 100%; height: {self.height}px; border: 0"></iframe>'
        )


def plot(schedule: Schedule, before: Schedule | None = None, lower_bound_ms: float | None = None) -> Picture:
    """The interactive picture of a schedule: when each op runs, why devices wait, memory within its limit.

    Raises as the schedule's timeline does.

    Parameters
    ----------
    before
        Another schedule of the same work, drawn above on the same time axis, with what changed.
    lower_bound_ms
        What no schedule of the problem can be shorter than, in ms, such as `Result.lower_bound_ms`.
    """
    height = FRAME_HEIGHT + (FURTHER_HEIGHT if before else 0)
    return page(figure(schedule, before, lower_bound_ms), height, schedule.method)


def page(document: dict[str, Any], height: int = FRAME_HEIGHT, method: str = "") -> Picture:
    """The page of a document that `web/` draws."""
    parts = ((WEB / f"{name}.js").read_text(encoding="utf-8") for name in MODULES)
    # One module: without the imports, of which all are among themselves, and without `export`.
    code = "\n".join(re.sub(r"^export ", "", IMPORT.sub("", part), flags=re.MULTILINE) for part in parts)
    return standalone(f"{document['title']} · {method}".rstrip(" ·"), document, code, height)


def standalone(title: str, document: dict[str, Any], code: str, height: int) -> Picture:
    """The page of a document that some code draws with plotly in `#picture`."""
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style = (WEB / "page.css").read_text(encoding="utf-8")
    scripts = [plotly().replace("</script", "<\\/script"), code]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return Picture(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(printable(title))}</title><style>{style}</style></head><body><main id="picture"></main>'
        f'<script type="application/json" id="document">{data}</script>'
        f'<script>{scripts[0]}</script><script type="module">{scripts[1]}</script></body></html>\n',
        height,
    )


@cache
def plotly() -> str:
    """Plotly's code."""
    return files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
