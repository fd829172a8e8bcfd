"""A pool of one decoder process, and pictures for it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from PIL import Image

from snugvl.inputs.image import ImageLimits
from snugvl.server.media.decoders import Decoders

MIB = 1024 * 1024
LIMITS = ImageLimits(max_pixels=64_000_000)


async def decoded(pool: Decoders, data: bytes, decode_s: float = 20.0) -> Image.Image:
    return (await pool.picture(data, LIMITS, decode_s, "the image")).image


def pixels(size: tuple[int, int] = (31, 17)) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values)


def only_process(pool: Decoders) -> Any:
    (process,) = pool._processes
    return process._popen


@asynccontextmanager
async def stopped_in_the_middle(
    pool: Decoders, data: bytes, decode_s: float
) -> AsyncIterator[tuple[Any, asyncio.Task[Image.Image]]]:
    """A decoder that was given `data` and stands still."""
    await pool.warm()
    process = only_process(pool)
    os.kill(process.pid, signal.SIGSTOP)
    yield process, asyncio.create_task(decoded(pool, data, decode_s))
