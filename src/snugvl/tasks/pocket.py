"""What pocket, the built-in model, never learned: photographs and videos.

The command line refuses to show it such a picture; a server answers, as an API does, and warns.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from PIL import ImageFilter
from PIL.Image import Image, Resampling

from snugvl.core.messages import Message, Picture, Video

PHOTOGRAPH: Final = (
    "A picture looks like a photograph. pocket, the built-in model, learned drawings alone, so its answer is "
    "likely to be wrong: serve a model for photographs, such as the one that `snugvl plan` recommends."
)
VIDEO: Final = (
    "pocket, the built-in model, never learned videos, so its answer is likely to be wrong: serve a model "
    "that reads them."
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


def warnings(messages: Iterable[Message]) -> tuple[str, ...]:
    """What is to be said of pocket's answer to a conversation, each thing once. It looks at pixels."""
    parts = [part for message in messages for part in message.content]
    found = []
    if any(isinstance(part, Picture) and looks_like_a_photograph(part.image) for part in parts):
        found.append(PHOTOGRAPH)
    if any(isinstance(part, Video) for part in parts):
        found.append(VIDEO)
    return tuple(found)
