"""The page at `/`, and the modules that it consists of: files of this package, the picture's modules and plotly.

They are the same for everybody, so they need no key. What they show comes from the API, with the reader's key.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from optpipe.show import page as picture
from optpipe_server.http.replies import ReplyError

router = APIRouter(tags=["page"])

WEB = Path(__file__).parent.parent / "web"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# Plotly writes styles into what it draws; everything else comes from this service, and nobody may frame the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {kind: {} for kind in TYPES.values()}},
    304: {"description": "Not changed"},
}


@cache
def files() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and ETag of every file, by its name below `/page/`. Raises InputError without plotly."""
    contents = {path.name: path.read_bytes() for path in WEB.iterdir() if path.suffix in TYPES}
    shown = (path for path in picture.WEB.iterdir() if path.suffix in TYPES)
    contents |= {f"picture/{path.name}": path.read_bytes() for path in shown}
    contents["plotly.js"] = picture.plotly().encode()
    return {
        name: (content, TYPES[Path(name).suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
        for name, content in contents.items()
    }


@router.get("/", response_class=HTMLResponse)
async def index(request: Request) -> Response:
    """The page: jobs, their schedules as they come in, and a workbench."""
    return _file(request, "index.html")


@router.get("/page/{name:path}", response_class=Response, responses=FILE)
async def page_file(name: str, request: Request) -> Response:
    """A file of the page."""
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    if name not in files():
        raise ReplyError(404, "The page has no such file.")
    content, kind, etag = files()[name]
    headers = {
        "ETag": etag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    if_none_match = request.headers.get("if-none-match")
    if if_none_match is not None and etag in if_none_match:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)
