"""Servers of ours that run on this machine: each writes down where it is, for `snugvl ps` and for tasks.

    $XDG_CACHE_HOME/snugvl/servers/PID.json    {"pid": …, "created": …, "host": …, "url": …, "model": …, …}

Only this user can write there, so nobody else's program is taken for a server of ours, and sent pictures.
A record counts while its process runs: the same number, begun at the same time, on this host.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

AT_ONCE_S: Final = 1.0  # a server that takes longer for a small answer is not waited for
SAME_TIME_S: Final = 2.0  # clocks of processes are read with less than this between them
MAX_ANSWER_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class Running:
    """A server.

    Attributes:
        created: when its process began, in seconds since 1970, by the system.
        host: the machine, as the home folder may be shared by several.
        url: where programs of this machine reach it.
        model: what it was told to load; empty where another server has chosen.
        names: under which requests know the model.
        since: when it began to listen, in seconds since 1970.
    """

    pid: int
    created: float
    host: str
    url: str
    model: str
    names: tuple[str, ...]
    since: float


def folder() -> Path:
    """Where servers write down that they run."""
    from snugvl.core.folders import cache_folder

    return cache_folder(os.environ) / "servers"


@contextmanager
def announced(url: str, model: str, names: tuple[str, ...]) -> Iterator[None]:
    """Write down that this process serves, for as long as it does, where it may write."""
    import psutil

    me = psutil.Process()
    record = Running(me.pid, me.create_time(), socket.gethostname(), url, model, names, time.time())
    path = folder() / f"{me.pid}.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(record)), encoding="utf-8")
        draft.replace(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def running() -> list[Running]:
    """The servers of this user that run now on this machine, the latest first. Stale records go."""
    found = []
    with suppress(OSError):
        for path in sorted(folder().glob("*.json")):
            record = _read(path)
            if record is None or (record.host == socket.gethostname() and not _alive(record)):
                path.unlink(missing_ok=True)
            elif record.host == socket.gethostname():
                found.append(record)
    return sorted(found, key=lambda server: -server.since)


def ask(server: Running, path: str, api_key: str | None = None) -> Any | None:
    """The JSON that a server answers to GET `path`, or None where it doesn't at once, or wants a key."""
    from http.client import HTTPConnection, HTTPException  # with ssl and email, which --help needs not

    address = urlsplit(server.url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = HTTPConnection(address.hostname or "", address.port, timeout=AT_ONCE_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return json.loads(answer.read(MAX_ANSWER_BYTES)) if answer.status == 200 else None
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _read(path: Path) -> Running | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {each.name: values[each.name] for each in fields(Running)}
        return Running(**{**known, "pid": int(known["pid"]), "names": tuple(map(str, known["names"]))})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _alive(server: Running) -> bool:
    import psutil

    try:
        return abs(psutil.Process(server.pid).create_time() - server.created) < SAME_TIME_S
    except (psutil.Error, ValueError, OverflowError):
        return os.name == "nt" and psutil.pid_exists(server.pid)  # Windows hides others' times of start
