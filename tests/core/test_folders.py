"""What findings in the cache folder hold for."""

from pathlib import Path

import pytest

from snugvl.core.folders import sources_digest


def test_sources_are_read_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start asks twice, and waits for it."""
    first = sources_digest("core", "tasks")
    assert first == sources_digest.__wrapped__("core", "tasks")
    assert first != sources_digest("layers")
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("they are read again"))
    assert sources_digest("core", "tasks") == first
