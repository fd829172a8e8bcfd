"""What the tests of the vLLM backend share."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

from snugvl.backends.child.settings import Facts
from snugvl.backends.process.supervised import Supervision
from snugvl.backends.vllm.service import VllmEngine
from snugvl.backends.vllm.settings import VllmChoice
from snugvl.core.messages import Delta, Request, Stream, user
from snugvl.core.sampling import SamplingParams
from tests.backends.children import QUICK, started

HERE = Path(__file__).parent
FAKE = (sys.executable, "-S", str(HERE / "fake_vllm.py"))
GARBAGE = (sys.executable, "-S", str(HERE / "garbage.py"))


def fake(behaviour: str = "echo", model: str = "echo", **changes: Any) -> VllmChoice:
    """A choice that launches the fake, which behaves in one of its ways."""
    return VllmChoice(model, **({"command": (*FAKE, behaviour), "facts": Facts()} | changes))


def engine(choice: VllmChoice, supervision: Supervision = QUICK) -> AbstractAsyncContextManager[VllmEngine]:
    """See `started`."""
    return started(VllmEngine(choice, supervision))


def say(text: str, **sampling: Any) -> Request:
    """A request that the fake answers with its own words."""
    return Request((user(text),), SamplingParams(**sampling))


async def read(stream: Stream) -> list[Delta]:
    """All of it."""
    return [delta async for delta in stream]


async def answer(service: VllmEngine, text: str) -> str:
    """The text of an answer."""
    return "".join(delta.text for delta in await read(await service.submit(say(text))))


@contextmanager
def listening(command: Sequence[str], *words: str, port: int = 0, key: str = "") -> Iterator[str]:
    """The address of a server that somebody else started; ended at the end."""
    from snugvl.bench.measure import free_port  # which imports the SDK of OpenAI

    port = port or free_port()
    flags = ["serve", "echo", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "echo"]
    environment = {**os.environ, "VLLM_API_KEY": key}
    with subprocess.Popen(
        [*command, *words, *flags], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert server.poll() is None, "it has ended"
                    time.sleep(0.01)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()
