"""Pictures to ask about: no two alike, the same for the same seed, and of a size like that of photographs."""

import base64
import random
from io import BytesIO

from PIL import Image, ImageDraw

SHAPES = 48
GRAIN = 16  # pixels of the picture to one of the noise below it
QUALITY = 90


def picture(width: int, height: int, seed: int) -> bytes:
    """A JPEG: smooth coloured noise with shapes on it."""
    dice = random.Random(seed)
    coarse = (max(2, width // GRAIN), max(2, height // GRAIN))
    noise = Image.frombytes("RGB", coarse, dice.randbytes(coarse[0] * coarse[1] * 3))
    image = noise.resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(SHAPES):
        left, top = dice.randrange(width), dice.randrange(height)
        size = dice.randrange(2, max(3, min(width, height) // 4))
        shape = dice.choice((draw.rectangle, draw.ellipse))
        shape((left, top, left + size, top + size), fill=(*dice.randbytes(3),))
    file = BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def picture_url(width: int, height: int, seed: int) -> str:
    """The same as a data URL."""
    return "data:image/jpeg;base64," + base64.b64encode(picture(width, height, seed)).decode()
