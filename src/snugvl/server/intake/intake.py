"""From what a request calls a picture to a decoded picture."""

import asyncio
import base64
import binascii

from snugvl.backends.protocol import Picture, Video
from snugvl.errors import RequestError
from snugvl.inputs.image import ImageLimits, open_image

LOW_DETAIL_PIXELS = 512 * 512


class Intake:
    """Fetches, checks and decodes. One instance a server; `close` stops its workers."""

    def __init__(self, limits: ImageLimits | None = None) -> None:
        self._limits = limits or ImageLimits()

    async def picture(self, url: str, *, detail: str = "auto", field: str) -> Picture:
        """The picture behind a data URL or a public http(s) URL.

        Args:
            detail: "low" scales it down to 512×512 pixels' worth; "auto" and "high" leave it to the model.
            field: of the request, for errors ("messages[0].content[1].image_url.url").

        Raises:
            RequestError: not a URL we fetch; `detail` unknown.
            ImageError, ImageTooLarge: it could not be fetched, or isn't a picture we decode.
        """
        if not url.startswith("data:"):
            raise RequestError("only data URLs are supported", field=field)
        try:
            data = base64.b64decode(url.partition(",")[2], validate=True)
        except binascii.Error:
            raise RequestError("the data URL is not valid base64", field=field) from None
        return await self.picture_bytes(data, detail=detail, field=field)

    async def picture_bytes(self, data: bytes, *, detail: str = "auto", field: str) -> Picture:
        """The same for a file's bytes (a multipart upload)."""
        image = await asyncio.to_thread(open_image, data, limits=self._limits)
        return Picture(image, LOW_DETAIL_PIXELS if detail == "low" else None)

    async def video(self, url: str | list[str], *, fps: float | None = None, field: str) -> Video:
        """A video: a URL of a video file or of an animation, or a list of URLs of its frames."""
        raise RequestError("videos are not supported yet", field=field)

    async def close(self) -> None:
        """Stop the workers."""
