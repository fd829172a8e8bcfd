import os
import subprocess
import sys

import pytest

from snugvl.core import resources

ROUNDS = """
import resource, sys
if "keep" in sys.argv:
    from snugvl.core.resources import keep_freed_memory
    keep_freed_memory()

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def pictures():
    blocks = [bytearray(3 << 20) for _ in range(10)]
    for block in blocks:
        block[::4096] = bytes(len(block[::4096]))

pictures()
before = pages()
for _ in range(3):
    pictures()
print(pages() - before)
"""
A_ROUND = 10 * (3 << 20) // 4096  # pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")


def touched(*arguments: str, environment: dict[str, str] | None = None) -> int:
    """Pages that three rounds of pictures got from the system, once they had been there."""
    command = [sys.executable, "-c", ROUNDS, *arguments]
    result = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=True
    )
    return int(result.stdout)


def test_freed_memory_is_used_again() -> None:
    assert touched("keep") < A_ROUND / 10
    assert touched(environment=resources.ENVIRONMENT) < A_ROUND / 10


def test_without_it_the_system_is_asked_each_time() -> None:
    """What the figure of the module is about; a C library that does better needs no `heap`."""
    assert touched() > A_ROUND


def test_a_c_library_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.ctypes, "CDLL", lambda _: object())
    resources.keep_freed_memory()
