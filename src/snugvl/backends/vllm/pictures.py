"""Pictures on their way to vLLM: scaled to what the model reads, as PNG, as data URLs."""

from base64 import b64encode
from io import BytesIO
from math import sqrt
from typing import Final

from PIL import Image

from snugvl.backends.protocol import Picture
from snugvl.backends.vllm.settings import Facts
from snugvl.checkpoint.resize import smart_resize
from snugvl.errors import RequestError
from snugvl.inputs.image import to_rgb

FAST: Final = 1  # of zlib's levels; the bytes go to this very machine


def data_url(picture: Picture, facts: Facts) -> str:
    """The picture as vLLM gets it. Takes time: call it in a thread.

    Raises:
        RequestError, ImageError: it can't be scaled as asked.
    """
    image = to_rgb(picture.image)
    size = target_size(image.size, picture.max_pixels, facts)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    buffer = BytesIO()
    image.save(buffer, "PNG", compress_level=FAST)
    return f"data:image/png;base64,{b64encode(buffer.getbuffer()).decode()}"


def target_size(size: tuple[int, int], wished: int | None, facts: Facts) -> tuple[int, int]:
    """Width and height to send.

    Where the model's rule is known (sides are multiples of `pixel_factor`, the area within two limits) it is
    applied here, as the model's own processor would: what vLLM gets it need not scale again. Otherwise only
    what is larger than the limits is scaled down, with its aspect ratio.

    Args:
        wished: most pixels of this picture, or None.

    Raises:
        RequestError: fewer pixels than one token has.
        ImageError: one side is more than 200 times the other.
    """
    limits = [limit for limit in (wished, facts.max_pixels) if limit]
    if not limits:
        return size
    most = min(limits)
    width, height = size
    factor = facts.pixel_factor
    if factor:
        if most < factor**2:
            raise RequestError(
                f"max_pixels is {most}; at least {factor**2} are needed ({factor}×{factor}, one token)",
                field="max_pixels",
            )
        least = min(facts.min_pixels, most)
        new_height, new_width = smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)
        return new_width, new_height
    if width * height <= most:
        return size
    shrink = sqrt(most / (width * height))
    return max(1, int(width * shrink)), max(1, int(height * shrink))
