"""Warnings about inputs that a model never learned, as its checkpoint says: for pocket, the built-in one,
those are photographs, videos and conversations without a picture.

The command line refuses to show it such a picture; a server answers, as an API does, and warns.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from PIL import ImageFilter
from PIL.Image import Image, Resampling, frombuffer

from snugvl.core.messages import Message, Picture, Text, Video
from snugvl.core.training import UNLEARNED, Training

PHOTOGRAPH: Final = (
    f"A picture looks like a photograph. The model learned drawings alone, {UNLEARNED} "
    "be wrong: serve a model for photographs, such as the one that `snugvl plan` recommends."
)
VIDEO: Final = f"The model never learned videos, {UNLEARNED} be wrong: serve a model that reads them."
FEW: Final = (
    "The model learned to answer only about pictures. It needs {least} or more of them, and this "
    f"conversation has {{count}}, {UNLEARNED} make no sense: send a picture, or serve one that needs none."
)
# Measured on 400 drawn scenes of training/pocket: as PNG they have at most 4.0 bits and 16 levels; as JPEG of
# quality 60, 99.5 % have at most 5.6 bits, and none has more than 18 levels. Of ten colour photographs of
# scikit-image and scikit-learn eight have more than 5.9. What is missed (a rocket in the night, an eye, a
# grey texture) gets the note alone.
COLOURS_BITS: Final = 5.7
GREY_LEVELS: Final = 20
SIDE: Final = 256  # pixels: noise of a sensor, and of JPEG, is averaged out first


def looks_like_a_photograph(image: Image) -> bool:
    """Whether the pixels of `image` have as many colours, or shades, as photographs have and drawings don't.

    The colours (16 steps a channel) of a small copy without its edges have an entropy, in bits: that of a
    drawing is small, as large areas of it have few colours. A grey photograph has many shades instead.

    Args:
        image: RGB.
    """
    small = image.copy()
    small.thumbnail((SIDE, SIDE), Resampling.BOX)
    small = small.filter(ImageFilter.MedianFilter(3))
    steps = np.asarray(small).astype(np.int32) >> 4
    counts = np.bincount((steps[..., 0] << 8 | steps[..., 1] << 4 | steps[..., 2]).ravel())
    shares = counts[counts > 0] / counts.sum()
    bits = float(-(shares * np.log2(shares)).sum())
    shades = np.bincount(np.asarray(small.convert("L")).ravel() >> 3)
    return bits > COLOURS_BITS or int((shades >= 0.01 * shades.sum()).sum()) >= GREY_LEVELS


def warnings(training: Training, messages: Sequence[Message]) -> tuple[str, ...]:
    """Warnings about the answer to a conversation that is beyond a model's training, each once.

    It looks at pixels; pictures that are too many are refused instead (`core.service.check_pictures`).
    """
    seen = [part for message in messages for part in message.content if not isinstance(part, Text)]
    found = []
    pictures = (part for part in seen if isinstance(part, Picture)) if training.drawings else ()
    if any(looks_like_a_photograph(_apart(picture)) for picture in pictures):
        found.append(PHOTOGRAPH)
    if not training.videos and any(isinstance(part, Video) for part in seen):
        found.append(VIDEO)
    if messages and len(seen) < training.min_images:
        found.append(FEW.format(count=len(seen) or "none", least=training.min_images))
    return tuple(found)


def _apart(picture: Picture) -> Image:
    """A copy that shares pixels where it can: looking at an image adds 4 bytes a pixel to it for good."""
    if picture.pixels is None:
        return picture.image
    pixels: Any = picture.pixels  # Pillow's types know no memoryview
    return frombuffer("RGB", picture.image.size, pixels, "raw", "RGB", 0, 1)
