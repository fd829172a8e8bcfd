"""Pictures and videos of one request: URLs, or files uploaded beside it ("attachment:NAME")."""

import base64
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, TypeVar

from snugvl.backends.protocol import Picture, Video
from snugvl.errors import RequestError
from snugvl.server.intake.intake import Intake
from snugvl.server.together import together

Detail = Literal["auto", "low", "high", "original"]
PREFIX = "attachment:"
MAX_MEDIA = 256  # pictures and videos of one request

T = TypeVar("T")
M = TypeVar("M", bound=Picture | Video)


class MediaSource:
    """Fetches what a request refers to. `attachments`: files of a multipart upload by name."""

    def __init__(self, intake: Intake, attachments: Mapping[str, bytes]) -> None:
        self._intake = intake
        self._attachments = attachments
        self._used: set[str] = set()

    async def picture(self, url: str, detail: Detail, field: str) -> Picture:
        """The picture behind a URL; `field` names the URL in errors."""
        wanted = "high" if detail == "original" else detail
        if url.startswith(PREFIX):
            return await self._intake.picture_bytes(self._file(url, field), detail=wanted, field=field)
        return await self._intake.picture(url, detail=wanted, field=field)

    async def video(self, url: str | list[str], fps: float | None, field: str) -> Video:
        """The video behind a URL, or made of the frames behind several."""
        if isinstance(url, str) and url.startswith(PREFIX):
            return await self._intake.video_bytes(self._file(url, field), fps=fps, field=field)
        if isinstance(url, str):
            return await self._intake.video(url, fps=fps, field=field)
        frames = [self._embedded(frame, f"{field}[{index}]") for index, frame in enumerate(url)]
        return await self._intake.video(frames, fps=fps, field=field)

    def check_all_used(self) -> None:
        """Refuse files that were uploaded but that nothing refers to.

        Raises:
            RequestError: names one of them.
        """
        for name in self._attachments:
            if name not in self._used:
                raise RequestError(
                    f"the file {name!r} was uploaded, but nothing refers to it as {PREFIX + name!r}",
                    field=name,
                )

    def _embedded(self, url: str, field: str) -> str:
        """The URL itself, or a data URL of the attachment that it names."""
        if not url.startswith(PREFIX):
            return url
        return "data:application/octet-stream;base64," + base64.b64encode(self._file(url, field)).decode()

    def _file(self, url: str, field: str) -> bytes:
        name = url.removeprefix(PREFIX)
        if name not in self._attachments:
            known = ", ".join(map(repr, self._attachments)) or "none; send multipart/form-data"
            raise RequestError(f"there is no attachment {name!r} (uploaded: {known})", field=field)
        self._used.add(name)
        return self._attachments[name]


async def fetched(wanted: Mapping[str, T], fetch: Callable[[T, str], Coroutine[Any, Any, M]]) -> dict[str, M]:
    """What all parts of one request refer to, fetched at once.

    Args:
        wanted: parts by their path in the request.
        fetch: fetches one part, given its path.

    Raises:
        RequestError, ImageError: too many of them, or the first that could not be fetched.
    """
    if len(wanted) > MAX_MEDIA:
        raise RequestError(
            f"the request has {len(wanted):,} pictures and videos; at most {MAX_MEDIA} are taken at once",
            field=list(wanted)[MAX_MEDIA],
        )
    found = await together(fetch(part, path) for path, part in wanted.items())
    return dict(zip(wanted, found, strict=True))
