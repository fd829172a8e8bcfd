"""Pocket, loaded once, and a server over it."""

import base64
from collections.abc import Iterator
from io import BytesIO

import pytest
from PIL import Image, ImageDraw

import snugvl
from snugvl.backends.native.backend import NativeBackend
from tests.backends.inprocess import InProcessEngine
from tests.server.live import live


class Shared(InProcessEngine):
    """Outlives the servers of the tests that share it."""

    async def close(self) -> None:
        """The session closes it."""


@pytest.fixture(scope="session")
def pocket() -> Iterator[NativeBackend]:
    model = snugvl.load("pocket", device="cpu")
    assert isinstance(model.backend, NativeBackend)
    yield model.backend
    model.close()


@pytest.fixture(scope="session")
def url(pocket: NativeBackend) -> Iterator[str]:
    """The base URL of a server with default settings; tests must leave it idle."""
    with live(Shared(pocket)) as base:
        yield base


@pytest.fixture(scope="session")
def picture() -> bytes:
    """A PNG of 128×96: a red circle on white, upper left; a blue square, lower right."""
    image = Image.new("RGB", (128, 96), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((10, 8, 50, 48), fill="red")
    draw.rectangle((80, 52, 118, 90), fill="blue")
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="session")
def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()
