"""Those who only stand by, each in a process of its own, and what the server's processes hold meanwhile."""

import json
import re
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import psutil
from benchmarks.serving import Served

from tests.attacks.kit import Address
from tests.server.client_requests import ENDLESS

MIB = 1 << 20
SAMPLE_S = 0.1
POLL_S = 0.05
NOTED_S = 0.02  # shorter gaps and waits are not kept
BUSY = 0.08  # of one processor; a server that has nothing to do takes a tenth of it
_IN_FLIGHT = re.compile(rb"^snugvl_(requests_in_flight|running|waiting) (\S+)", re.M)


def request(path: str, body: Any = None) -> bytes:
    """One whole request, after whose answer the connection ends."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def exchange(address: Address, sent: bytes, until: float) -> bytes | None:
    """The answer to a request; None where there is none until then."""
    found = b""
    try:
        with socket.create_connection(address, timeout=max(until - time.monotonic(), 0.01)) as connection:
            connection.sendall(sent)
            while True:
                connection.settimeout(max(until - time.monotonic(), 0.01))
                data = connection.recv(1 << 16)
                if not data:
                    return found or None
                found += data
    except OSError:
        return None


def stream(address: Address, stop: Event, pipe: Connection) -> None:
    """Read endless text, one stream after the other. Tells its gaps, when each ended, and its refusals."""
    body = {
        "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "max_tokens": 3900, "stream": True, "ignore_eos": True, **ENDLESS,
    }  # fmt: skip
    gaps: list[tuple[float, float]] = []
    refused: list[str] = []
    last, pieces = time.monotonic(), 0
    while not stop.is_set():
        with suppress(OSError), socket.create_connection(address, timeout=1.0) as connection:
            connection.sendall(request("/v1/chat/completions", body))
            connection.settimeout(0.1)
            status = b""
            while not stop.is_set():
                try:
                    data = connection.recv(1 << 16)
                except TimeoutError:
                    continue
                status = status or data[9:12]
                now = time.monotonic()
                if status == b"200" and (b'"content":' in data or b'"delta":' in data):
                    pieces += 1
                    if now - last > NOTED_S:
                        gaps.append((now, now - last))
                    last = now
                    if pieces == 1:
                        pipe.send("streams")
                if status == b"429":
                    last = now  # an answer, if not the wished one
                if not data:
                    break
            if status != b"200":
                refused.append(status.decode("latin-1"))
                time.sleep(POLL_S)
    gaps.append((time.monotonic(), time.monotonic() - last))
    pipe.send({"gaps": gaps, "refused": refused, "pieces": pieces})


def health(address: Address, stop: Event, pipe: Connection) -> None:
    """Ask for /health again and again. Tells how long each answer took, and how many were none."""
    waits: list[tuple[float, float]] = []
    asked, statuses = request("/health"), dict[str, int]()
    pipe.send("asks")
    while not stop.is_set():
        began = time.monotonic()
        status = "none"
        while not stop.is_set():
            answer = exchange(address, asked, began + 120)
            if answer is not None:
                status = answer[9:12].decode("latin-1")
                break
            time.sleep(POLL_S)
        took = time.monotonic() - began
        statuses[status] = statuses.get(status, 0) + 1
        if took > NOTED_S:
            waits.append((time.monotonic(), took))
        time.sleep(POLL_S)
    pipe.send({"waits": waits, "statuses": statuses})


def held(served: Served) -> dict[str, int]:
    """Bytes that the engine's process, the server's and its helpers hold now."""
    found = {"engine": 0, "server": 0}
    engine = served.engine
    with suppress(psutil.Error):
        found["server"] = served.process.memory_info().rss
        for child in served.process.children(recursive=True):
            with suppress(psutil.Error):
                if engine is not None and child.pid == engine.pid:
                    found["engine"] = child.memory_info().rss
                else:  # helpers share pages with each other
                    found["server"] += child.memory_full_info().pss
    return found


class Sampler:
    """Watches memory and /metrics from a thread, and kills a server that takes more than `guard` bytes."""

    def __init__(self, served: Served, address: Address, guard: int) -> None:
        self._served, self._address, self._guard = served, address, guard
        self.before = held(served)
        self.most = dict(self.before)
        self.load = {"requests_in_flight": 0, "running": 0, "waiting": 0, "in_engine": 0}
        self.killed = False
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._sample), threading.Thread(target=self._ask)]
        for thread in self._threads:
            thread.start()

    def beyond_mib(self, name: str) -> float:
        """The most that was held beyond what was held before."""
        return (self.most[name] - self.before[name]) / MIB

    def stop(self) -> None:
        """No more samples."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for name, count in held(self._served).items():
                self.most[name] = max(self.most[name], count)
            if any(self.most[name] - self.before[name] > self._guard for name in self.most):
                self.killed = True
                kill(self._served)
                return

    def _ask(self) -> None:
        while not self._over.wait(2 * SAMPLE_S):
            answer = exchange(self._address, request("/metrics"), time.monotonic() + 2)
            values = {name.decode(): int(float(count)) for name, count in _IN_FLIGHT.findall(answer or b"")}
            values["in_engine"] = values.get("running", 0) + values.get("waiting", 0)
            for name, count in values.items():
                self.load[name] = max(self.load[name], count)


def kill(served: Served) -> None:
    """End a server that doesn't recover, and what it started."""
    with suppress(psutil.Error):
        for process in [served.process, *served.process.children(recursive=True)]:
            with suppress(psutil.Error):
                process.kill()


def idle_after(served: Served, patience_s: float) -> float:
    """Seconds until the server and its processes have nothing more to do."""
    began = time.monotonic()
    while True:
        busy, start = _seconds(served), time.monotonic()
        time.sleep(0.5)
        worked = (_seconds(served) - busy) / (time.monotonic() - start)
        if worked < BUSY or time.monotonic() - began > patience_s:
            return start - began


def _seconds(served: Served) -> float:
    """Processor time of the server and all its processes."""
    total = 0.0
    with suppress(psutil.Error):
        for process in [served.process, *served.process.children(recursive=True)]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total
