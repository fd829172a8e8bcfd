"""Decoder processes for a test."""

from collections.abc import Iterator

import pytest

from snugvl.server.media.decoders import Decoders, memory_for_pictures
from tests.server.media.pool import LIMITS


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    """One process for pictures."""
    pool = Decoders("pictures", 1, memory_for_pictures(LIMITS))
    yield pool
    pool.close()
