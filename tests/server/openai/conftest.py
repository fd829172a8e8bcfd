"""A server over a scripted engine, and clients of it."""

import base64
from collections.abc import Iterator
from io import BytesIO

import httpx
import pytest
from openai import OpenAI
from PIL import Image

from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S
from tests.server.live import live
from tests.server.openai.scripted import Scripted


@pytest.fixture(scope="session")
def _served() -> Iterator[tuple[Scripted, str]]:
    service = Scripted()
    with live(service, ServerSettings(names=("pocket", "also"))) as base:
        yield service, base


@pytest.fixture
def scripted(_served: tuple[Scripted, str]) -> Iterator[Scripted]:
    """The engine behind `http` and `sdk`; says "Hello there" until told otherwise."""
    service = _served[0]
    yield service
    service.answer = Scripted().answer
    service.requests.clear()


@pytest.fixture
def http(_served: tuple[Scripted, str], scripted: Scripted) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_served[1] + "/v1", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def sdk(_served: tuple[Scripted, str], scripted: Scripted) -> Iterator[OpenAI]:
    with OpenAI(base_url=_served[1] + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    """The SDK on a server over pocket."""
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def data_urls() -> list[str]:
    """Three pictures of 64×32, 32×64 and 48×48 pixels."""
    return [_data_url(size) for size in ((64, 32), (32, 64), (48, 48))]


def _data_url(size: tuple[int, int]) -> str:
    file = BytesIO()
    Image.new("RGB", size, "green").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
