"""Tests that need what a machine may lack: a package registry, Chromium, another Python."""

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip the test on a developer's machine; fail it in CI, where everything has to be there."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
