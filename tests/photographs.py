"""Pictures with the colours of photographs, drawn at random."""

import numpy as np
from PIL import Image


def photograph(width: int = 400, height: int = 300) -> Image.Image:
    """Colours at all scales, as leaves and walls have them; random, but always the same."""
    random = np.random.default_rng(0)
    total = np.zeros((height, width, 3))
    for side in (4, 8, 16, 32, 64, 128):
        grain = random.uniform(0, 255, (side, side, 3)).astype(np.uint8)
        total += (
            np.asarray(Image.fromarray(grain).resize((width, height), Image.Resampling.BICUBIC)) / side**0.5
        )
    total -= total.min()
    return Image.fromarray((total * (255 / total.max())).astype(np.uint8))
