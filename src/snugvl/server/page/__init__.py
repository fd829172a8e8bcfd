"""The page at /: static files under a strict content-security policy.

The files hold no secret, so they need no API key; whatever the page asks of the server does.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response

from snugvl.inputs.image import FORMATS
from snugvl.server.body import MAX_FORM_FILES
from snugvl.server.context import context_of
from snugvl.server.media.loading import MediaSettings

FOLDER: Final = Path(__file__).parent / "static"
VENDOR: Final = FOLDER / "vendor"  # others' code, as they published it, with its licence
INDEX: Final = "index.html"
ICON: Final = "icon.svg"

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
# Trusted types make the browser refuse innerHTML and its kin: what a model wrote can only ever be text.
CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask again each time; the ETag makes that cheap
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page, ready to send."""

    body: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """Every file of the page by name. Requests pick from these and never reach the disk."""
    paths = [*sorted(FOLDER.iterdir()), *sorted(VENDOR.iterdir())]
    return {path.name: _asset(path) for path in paths if path.suffix in _TYPES}


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')


def _send(request: Request, name: str) -> Response:
    asset = assets().get(name)
    if asset is None:
        raise HTTPException(404, f"the page has no file {name!r}")
    headers = HEADERS | {"ETag": asset.etag}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    """The page."""
    return _send(request, INDEX)


@router.api_route("/favicon.ico", methods=["GET", "HEAD"])
async def icon(request: Request) -> Response:
    """The icon, as SVG whatever its name says."""
    return _send(request, ICON)


@router.get("/page/limits.json")
async def limits(request: Request) -> dict[str, int | bool | list[str]]:
    """Limits that the page holds before it sends anything: bytes, pixels and seconds that this server takes.

    `body_bytes` and `files` are of one request; `formats` are those of pictures, as Pillow names them;
    `video_files` says whether the package that reads video files is installed.
    """
    media = MediaSettings()
    return {
        "body_bytes": context_of(request).settings.max_body_bytes,
        "files": MAX_FORM_FILES - 1,  # the request itself is one of the form's files
        "picture_bytes": media.image.max_bytes,
        "picture_pixels": media.image.max_pixels,
        "formats": list(FORMATS),
        "video_bytes": media.video.max_bytes,
        "video_files": find_spec("av") is not None,
    }


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
async def asset(request: Request, name: str) -> Response:
    """A script, style sheet or sample picture of the page."""
    return _send(request, name)
