"""What a decoder process may not do."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from snugvl.errors import ImageError, SnugvlError
from snugvl.server.intake.decoders import Decoders
from tests.server.intake.pictures import encoded
from tests.server.intake.pool import decoded, only_process


def in_a_worker(code: str) -> str:
    """What `code` prints in a process whose doors are shut, through a pipe that was open before."""
    script = f"""
import os, socket, sys
from snugvl.server.intake import worker
worker.preload()
worker.shut_doors(64 << 20)
try:
    {code}
    print("done")
except (OSError, MemoryError) as error:
    print(type(error).__name__)
"""
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("open('/etc/hostname')", "OSError"),
        ("socket.socket()", "OSError"),
        ("os.pipe()", "OSError"),
        ("bytearray(1 << 30)", "MemoryError"),
        ("bytearray(1 << 20)", "done"),
    ],
)
def test_a_worker_can_open_nothing(code: str, printed: str) -> None:
    assert in_a_worker(code) == printed


def test_a_worker_has_no_secrets(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNUGVL_TEST_SECRET", "hush")

    async def run() -> None:
        await decoders.warm()
        if sys.platform == "linux":
            environment = Path(f"/proc/{only_process(decoders).pid}/environ").read_bytes()
            assert b"PATH" in environment
            assert b"SECRET" not in environment

    asyncio.run(run())


def test_a_worker_imports_no_torch() -> None:
    script = "import sys, snugvl.server.intake.worker as w; w.preload(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "fastapi", "pydantic", "httpcore2"} & set(run.stdout.split())


def test_a_worker_that_does_not_start_is_no_fault_of_the_picture(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def run() -> None:
        with pytest.raises(SnugvlError, match="the picture decoder did not start") as caught:
            await decoded(decoders, encoded("PNG"))
        assert not isinstance(caught.value, ImageError)

    asyncio.run(run())
