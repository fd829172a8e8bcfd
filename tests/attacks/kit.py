"""Clients that mean harm, in a process of their own: what each sends, how fast, and when it leaves."""

import json
import os
import random
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

ATTACK_S = 15.0  # the longest that attackers stay
QUIET_S = 5.0  # of nobody who attacks
CHUNK = 1 << 18
PAUSE_S = 0.1  # between a raw head and what follows it
NICE = 10  # attackers share the server's processors, and it is not their work that is measured
ANSWER = 2000  # bytes of an answer that are kept

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Shot:
    """One client, which sends the same thing again and again, each over a connection of its own.

    Attributes:
        body: of the request; None: a request without one.
        raw: what is sent instead of a head of ours; the body follows a moment later, when it was read.
        times: how often.
        leave_s: seconds after which it leaves, drawn from this range; None: it waits for the answer's end.
        hold: sends all of the body but its last byte, and waits.
        read: whether it ever reads what is answered.
    """

    path: str = "/v1/chat/completions"
    body: bytes | None = None
    kind: str = "application/json"
    method: str = "POST"
    headers: Sequence[str] = ()
    raw: bytes | None = None
    times: int = 1
    leave_s: tuple[float, float] | None = None
    hold: bool = False
    read: bool = True

    def head(self) -> bytes:
        """Everything before the body."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *self.headers]
        if self.body is not None:
            lines += [f"Content-Type: {self.kind}", f"Content-Length: {len(self.body)}"]
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(slots=True)
class Outcome:
    """What came of one request: times are those of `time.monotonic()`.

    Attributes:
        status: of the answer; "left" without one, "reset" where the server broke the connection off.
    """

    status: str
    sent: float
    answered: float | None = None
    ended: float = 0.0
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Attack:
    """Attackers who all begin at once.

    Attributes:
        finding: the number of the finding in issue 14, or "own".
        shots: makes the clients, before the attack begins.
        serve: options of the server beside those that all have.
        answered_s: seconds within which every request must have an answer of some kind; None: any time.
    """

    name: str
    finding: str
    what: str
    shots: Callable[[], list[Shot]] = field(repr=False)
    serve: tuple[str, ...] = ()
    answered_s: float | None = None


def act(attack: Attack, address: Address, pipe: Connection) -> None:
    """The attackers' process: prepares, says so, begins when told, and tells what came of it."""
    os.nice(NICE)
    shots = attack.shots()
    pipe.send("ready")
    pipe.recv()
    end = time.monotonic() + ATTACK_S
    if not shots:
        time.sleep(QUIET_S)
    with ThreadPoolExecutor(max(len(shots), 1)) as pool:
        found = [
            outcome for some in pool.map(lambda shot: _fire(shot, address, end), shots) for outcome in some
        ]
    pipe.send((time.monotonic(), _summary(found)))


def _summary(found: Sequence[Outcome]) -> dict[str, Any]:
    """Statuses with an example of each, how many 200s lived at once, and the slowest answer."""
    examples = {}
    for outcome in found:
        if outcome.status.isdigit() and outcome.status not in examples:
            examples[outcome.status] = outcome.text.partition(b"\r\n\r\n")[2][:300].decode("utf-8", "replace")
    live = [o for o in found if o.status == "200" and o.answered is not None]
    moments = sorted([(o.answered or 0.0, 1) for o in live] + [(o.ended, -1) for o in live])
    count = most = 0
    for _, step in moments:
        count += step
        most = max(most, count)
    waits = [(o.answered or o.ended) - o.sent for o in found if o.status != "left" or o.answered is None]
    return {
        "requests": len(found),
        "statuses": dict(Counter(outcome.status for outcome in found)),
        "answers": examples,
        "live_200": most,
        "slowest_answer_s": round(max(waits, default=0.0), 2),
    }


def _fire(shot: Shot, address: Address, end: float) -> list[Outcome]:
    found = []
    for _ in range(shot.times):
        if time.monotonic() >= end:
            break
        try:
            found.append(_once(shot, address, end))
        except OSError as error:
            found.append(Outcome(type(error).__name__, time.monotonic(), None, time.monotonic()))
            time.sleep(0.02)
    return found


def _once(shot: Shot, address: Address, end: float) -> Outcome:
    outcome = Outcome("left", time.monotonic())
    if shot.leave_s is not None:
        end = min(end, outcome.sent + random.uniform(*shot.leave_s))
    with socket.create_connection(address, timeout=max(end - time.monotonic(), 0.01)) as connection:
        connection.setblocking(False)
        parts = [shot.head() if shot.raw is None else shot.raw, shot.body or b""]
        views = [memoryview(part) for part in parts]
        if shot.hold:
            views[-1] = views[-1][:-1]
        for view in views:
            _send(connection, view, shot, outcome, end)
            if shot.raw is not None:
                time.sleep(PAUSE_S)
        while shot.read and outcome.status != "reset" and _receive(connection, outcome, end):
            pass
        if not shot.read or shot.hold:
            while (left := end - time.monotonic()) > 0 and outcome.status == "left":
                time.sleep(min(left, 0.1))
    outcome.ended = time.monotonic()
    return outcome


def _send(connection: socket.socket, data: memoryview, shot: Shot, outcome: Outcome, end: float) -> None:
    """All of it, unless the answer or the end comes first."""
    while data and outcome.answered is None and (left := end - time.monotonic()) > 0:
        reads, writes, _ = select.select([connection] if shot.read else [], [connection], [], min(left, 0.2))
        if writes:
            try:
                data = data[connection.send(data[:CHUNK]) :]
            except (BrokenPipeError, ConnectionResetError):
                _receive(connection, outcome, end)
                if outcome.answered is None:
                    outcome.status = "reset"
                return
        if reads and not _receive(connection, outcome, end):
            return


def _receive(connection: socket.socket, outcome: Outcome, end: float) -> bool:
    """The next piece of the answer. False: there is no more, or it is time to leave."""
    left = end - time.monotonic()
    if left <= 0 or not select.select([connection], [], [], left)[0]:
        return False
    try:
        data = connection.recv(CHUNK)
    except ConnectionResetError:
        data = b""
    if not data:
        outcome.status = "reset" if outcome.answered is None else outcome.status
        return False
    if outcome.answered is None:
        outcome.answered = time.monotonic()
        outcome.status = data[9:12].decode("latin-1")
    outcome.text += data[: ANSWER - len(outcome.text)]
    return True


def chat(content: Any = "hi", **fields: Any) -> bytes:
    """The body of a chat completion."""
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def schema(value: Any, **fields: Any) -> bytes:
    """The same with an answer in the form of a JSON schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
    return chat(response_format=wanted, **({"max_tokens": 200} | fields))


def form(*parts: tuple[str, bytes], boundary: str = "b0und") -> tuple[bytes, str]:
    """A multipart form and its media type; each part has its head's end ('name="image"') and its data."""
    pieces = [
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    ]
    return b"".join(pieces) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"
