"""A loader of which tests ask one picture or video at a time."""

from typing import Any

from snugvl.core.messages import Picture, Video
from snugvl.server.media.loading import MediaLoader, MediaRef
from snugvl.server.metrics import RequestNotes


class Loader(MediaLoader):
    """Each picture and video is all that a request loads at once; `owner`: the request."""

    async def picture(self, source: str | bytes, *, field: str, owner: str = "") -> Picture:
        """One picture."""
        (found,) = await self.all_of(MediaRef(source, field), owner=owner)
        assert isinstance(found, Picture)
        return found

    async def video(self, source: str | bytes | list[str], *, fps: float | None = None, field: str) -> Video:
        """One video."""
        given: Any = source
        (found,) = await self.all_of(MediaRef(given, field, "video", fps=fps))
        assert isinstance(found, Video)
        return found

    async def all_of(self, *refs: MediaRef, owner: str = "") -> list[Picture | Video]:
        """Those of one request."""
        found = await self.load({str(index): ref for index, ref in enumerate(refs)}, owner, RequestNotes())
        return list(found.values())

    picture_bytes, video_bytes = picture, video
