"""Coroutines are tests here (anyio's plugin runs them), in asyncio's event loop."""

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Not trio."""
    return "asyncio"
