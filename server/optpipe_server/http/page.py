"""The page at `/`, and the files that it consists of: those of this package, the picture's modules and plotly.

They are the same for everybody, so they need no key. What they show comes from the API, with the reader's key.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from optpipe.show import page as picture

router = APIRouter(tags=["page"])

HEADERS = {
    "Cache-Control": "no-cache",
    # Plotly writes styles into what it draws; everything else comes from this service, and nobody may frame the page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class _Files(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(HEADERS)
        return response


OWN = _Files(directory=Path(__file__).parent.parent / "web")


@router.get("/", response_class=HTMLResponse)
async def index(request: Request) -> Response:
    """The page: jobs, their schedules as they come in, and a workbench."""
    return await OWN.get_response("index.html", request.scope)


def mount_files(app: FastAPI) -> None:
    """Add the page's files to the app."""
    spec = find_spec("plotly")
    assert spec
    assert spec.origin
    app.mount("/page/picture", _Files(directory=picture.WEB))
    app.mount("/page/plotly", _Files(directory=Path(spec.origin).parent / "package_data"))
    app.mount("/page", OWN)
