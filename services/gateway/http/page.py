"""The page at `/ui`: what `ui/` is built to, and what a browser lets it do."""

import hashlib
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.protocol import SAFE_METHODS

PAGE_PATH = "/ui"
_BUILT = Path(__file__).parent / "built"
_START = "index.html"
_MEDIA_TYPES = MappingProxyType(
    {
        _START: "text/html; charset=utf-8",
        "ui.css": "text/css; charset=utf-8",
        "ui.js": "text/javascript; charset=utf-8",
        "licences.txt": "text/plain; charset=utf-8",
    }
)
# Scripts, styles and calls are this gateway's own, and no other site has the page in a frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = MappingProxyType(
    {
        "content-security-policy": _POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
)


def is_of_page(path: str) -> bool:
    """Say whether `path` leads to the page, which tells nothing of this gateway: a browser gets it
    without a key, and asks its reader for one.
    """
    return path == PAGE_PATH or path.startswith(f"{PAGE_PATH}/")


def add_page(app: FastAPI) -> None:
    """Serve the page from memory. Raises OSError if it was not built."""
    files = {name: (_BUILT / name).read_bytes() for name in _MEDIA_TYPES}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()}"' for name, content in files.items()}

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", _START)
        if name not in files:
            raise HTTPException(404)
        headers = {**_HEADERS, "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], media_type=_MEDIA_TYPES[name], headers=headers)

    for path in (PAGE_PATH, f"{PAGE_PATH}/{{name}}"):
        app.add_api_route(path, page, methods=[*SAFE_METHODS], include_in_schema=False)
