"""The Unix socket to vLLM: what httpx does over it, and a reader that is cancelled as a piece comes."""

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from snugvl.backends.child.http import NobodyThere, Unreachable
from snugvl.backends.vllm.service import VllmApi
from tests.patience import PATIENCE_S
from tests.patience import until_async as until

pytestmark = pytest.mark.anyio
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Peer:
    """The other side of the socket, which answers by hand."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "door"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(1)

    def close(self) -> None:
        self._listener.close()

    async def taken(self) -> socket.socket:
        """The next connection, its request read."""
        self._listener.setblocking(False)
        loop = asyncio.get_running_loop()
        link, _ = await loop.sock_accept(self._listener)
        link.setblocking(False)
        await loop.sock_recv(link, 1 << 16)
        return link


async def test_a_reader_that_is_cancelled_as_a_piece_comes_leaves_no_error(tmp_path: Path) -> None:
    """In one pass of the loop: its task is cancelled, then its socket is seen to be readable."""
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    peer, lines = Peer(tmp_path), []
    api = VllmApi(f"unix:{peer.path}")

    async def read() -> None:
        async with AsyncExitStack() as stack:
            async for line in (await api.open("/", b"{}", stack)).aiter_lines():
                lines.append(line)  # noqa: PERF401 - as they come

    try:
        for count in range(1, 6):
            reader = asyncio.create_task(read())
            link = await peer.taken()
            link.send(HEAD + b"first\n")
            await until(lambda count=count: len(lines) == count)  # type: ignore[misc]
            await asyncio.sleep(0)  # it waits for the second
            link.send(b"second\n")
            loop.call_soon(reader.cancel)
            with pytest.raises(asyncio.CancelledError):
                await reader
            link.close()
    finally:
        loop.set_exception_handler(None)
        await api.close()
        peer.close()
    assert not complaints


async def test_more_connect_than_may_wait(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    api = VllmApi(f"unix:{peer.path}")
    try:
        asking = [asyncio.create_task(api.healthy(PATIENCE_S)) for _ in range(8)]
        await asyncio.sleep(0.05)
        for _ in asking:
            link = await peer.taken()
            link.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            link.close()
        assert await asyncio.gather(*asking) == [True] * 8
    finally:
        await api.close()
        peer.close()


async def test_nobody_silence_and_an_early_end(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    api = VllmApi(f"unix:{peer.path}")
    nobody = VllmApi(f"unix:{tmp_path / 'none'}")
    try:
        with pytest.raises(NobodyThere):
            await nobody.healthy(PATIENCE_S)
        with pytest.raises(Unreachable, match="ReadTimeout"):
            await api.healthy(0.05)  # the kernel takes the connection, nobody answers
        (await peer.taken()).close()
        asking = asyncio.create_task(api.healthy(PATIENCE_S))
        (await peer.taken()).close()
        with pytest.raises(Unreachable, match="RemoteProtocolError"):
            await asking
    finally:
        await api.close()
        await nobody.close()
        peer.close()
