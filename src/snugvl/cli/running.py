"""snugvl's servers that run on this machine, why one can't be used, and `snugvl ps`.

Each writes a record of itself, for every command that looks for a server:

    $XDG_CACHE_HOME/snugvl/servers/PID.json    {"pid": …, "created": …, "host": …, "url": …, "model": …, …}

Only this user can write there, so no other user's program is taken for a server of snugvl and sent pictures.
A record counts on this host while its process runs, which keeps it locked; where files can't be locked, while
a process of the same number runs that began at the same time. That time moves when the clock is set.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from typer import Option

from snugvl.cli import options
from snugvl.cli.terminal import printable, say, show, write_json
from snugvl.core.folders import cache_folder, json_object, read_small, write_whole
from snugvl.core.resources import began
from snugvl.core.sizes import format_size
from snugvl.errors import EngineUnavailable, SnugvlError, Unauthorized

AT_ONCE_S: Final = 1.0  # a server that takes longer for a small answer is not waited for
SAME_TIME_S: Final = 2.0  # clocks of processes are read with less than this between them
MAX_ANSWER_BYTES: Final = 2**20
OK, UNAUTHORIZED = 200, 401
HOW: Final = "--api-key KEY or SNUGVL_API_KEY"


@dataclass(frozen=True, slots=True)
class LocalServer:
    """The record of a running server.

    Attributes:
        created: start of its process, in seconds since 1970, by the system.
        host: name of the machine, as the home folder may be shared by several.
        url: its address for programs on this machine.
        model: the model, as people name it; empty where an attached server has chosen it.
        names: names of the model in requests.
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
    """The folder of the records of running servers."""
    return cache_folder(os.environ) / "servers"


@contextmanager
def announced(url: str, model: str, names: tuple[str, ...]) -> Iterator[None]:
    """Keep a record of this process as a server for the block, where it may write one."""
    record = LocalServer(os.getpid(), began(), socket.gethostname(), url, model, names, time.time())
    path = folder() / f"{record.pid}.json"
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(path, lambda draft: draft.write_text(json.dumps(asdict(record)), encoding="utf-8"))
            kept = held.enter_context(path.open("r+b"))
            if sys.platform != "win32":
                from fcntl import LOCK_EX, flock

                flock(kept, LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def running() -> list[LocalServer]:
    """The servers of this user that run now on this machine, the latest first. Stale records go."""
    found = []
    with suppress(OSError):
        for path in sorted(folder().glob("*.json")):
            record = _read(path)
            here = record is not None and record.host == socket.gethostname()
            if record is None or (here and not (_locked(path) or _alive(record))):
                with suppress(OSError):  # a folder, say, which hides no other's record
                    path.unlink(missing_ok=True)
            elif here:
                found.append(record)
    return sorted(found, key=lambda server: -server.since)


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """A server's answer to a GET: its status and JSON. Status None: no answer came in time."""

    status: int | None = None
    body: Any = None


def ask(server: LocalServer, path: str, api_key: str | None = None) -> ProbeAnswer:
    """The server's answer to GET `path`."""
    from http.client import HTTPConnection, HTTPException  # with ssl and email, which --help needs not

    address = urlsplit(server.url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = HTTPConnection(address.hostname or "", address.port, timeout=AT_ONCE_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return ProbeAnswer(answer.status, json.loads(answer.read(MAX_ANSWER_BYTES)))
    except (OSError, HTTPException, ValueError, RecursionError):
        return ProbeAnswer()
    finally:
        connection.close()


def trouble(answer: ProbeAnswer, api_key: str | None) -> str | None:
    """Why a server with this answer can't be used now, as what follows "it"; None if it can."""
    if answer.status is None:
        return "doesn't answer"
    if answer.status == UNAUTHORIZED:
        return f"wants an API key ({HOW})" if api_key is None else "refuses this API key"
    return None if answer.status == OK else f"answers with status {answer.status}"


def ready(server: LocalServer, task: str | None, api_key: str | None) -> tuple[dict[str, Any], str | None]:
    """The card of a server's model in `/v1/models`, where it is ready for a task; or why it isn't."""
    answer = ask(server, "/v1/models", api_key)
    if why := trouble(answer, api_key):
        return {}, why
    cards = answer.body.get("data") if isinstance(answer.body, dict) else None
    card = cards[0] if isinstance(cards, list) and cards else None
    if not isinstance(card, dict) or not card.get("root"):
        return {}, "is still loading its model"
    if task is not None and task not in (card.get("tasks") or ()):
        return {}, f"has a model that can't {task}"
    return card, None


def explained(error: SnugvlError) -> str:
    """The text of a server's error for the command line, with the option that helps."""
    if isinstance(error, Unauthorized):
        return f"{error}; say it with {HOW}"
    if not isinstance(error, EngineUnavailable) or "no server answers at" not in str(error):
        return str(error)
    text = str(error).replace("give its address", "name one with --server URL")
    urls = [server.url for server in running() if server.url not in text]
    return f"{text}; one of yours runs at {' and '.join(urls)}" if urls else text


def owner(port: int) -> LocalServer | None:
    """The server of this user that listens on a port of this machine."""
    return next((server for server in running() if urlsplit(server.url).port == port), None)


def _read(path: Path) -> LocalServer | None:
    try:
        values: Any = json_object(read_small(path, MAX_ANSWER_BYTES))
        pid, created, since = int(values["pid"]), float(values["created"]), float(values["since"])
        host, url, model = (str(values[name]) for name in ("host", "url", "model"))
        return LocalServer(pid, created, host, url, model, tuple(map(str, values["names"])), since)
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _locked(path: Path) -> bool:
    """Whether a process keeps the record locked; False where that can't be told."""
    if sys.platform == "win32":
        return False
    from fcntl import LOCK_NB, LOCK_SH, flock

    with suppress(OSError), path.open("rb") as file:
        try:
            flock(file, LOCK_SH | LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _alive(server: LocalServer) -> bool:
    import psutil

    try:
        return abs(psutil.Process(server.pid).create_time() - server.created) < SAME_TIME_S
    except (psutil.Error, OSError, ValueError, OverflowError):
        return os.name == "nt" and psutil.pid_exists(server.pid)  # Windows hides others' times of start


def ps(
    api_key: options.ApiKey = None,
    json: Annotated[bool, Option("--json", help="Print a list of objects, with sizes in bytes.")] = False,
) -> None:
    """Show which servers of yours run here: process, address, model, memory, and since when."""
    rows = [_row(server, api_key) for server in running()]
    if json:
        write_json(rows)
        return
    if not rows:
        say("no server of yours runs on this machine; start one with: snugvl serve")
        return
    for row in rows:
        since = datetime.fromisoformat(row["since"]).astimezone()
        held = f"{format_size(row['memory_bytes'])} ({row['device']})" if row["memory_bytes"] else "unknown"
        lines = [
            f"{row['url']}  {row['state']}",
            f"  process {row['pid']}, since {since:%Y-%m-%d %H:%M:%S}",
            f"  model   {', '.join(row['names'])}",
            f"  memory  {held}",
        ]
        show(printable("\n".join(lines)), 10)


def _row(server: LocalServer, api_key: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "pid": server.pid,
        "url": server.url,
        "model": server.model,
        "names": list(server.names),
        "since": datetime.fromtimestamp(server.since, UTC).isoformat(timespec="seconds"),
        "state": "doesn't answer",
        "device": "this machine",
        "memory_bytes": _resident(server.pid),
    }
    answer = ask(server, "/memory", api_key)
    if (why := trouble(answer, api_key)) is not None:
        return row | {"state": why}
    with suppress(TypeError, KeyError):
        row["state"] = str(answer.body["health"]["state"])
        row |= {
            "device": str(answer.body["ledger"]["device"]),
            "memory_bytes": int(answer.body["ledger"]["process_bytes"]),
        }
    return row


def _resident(pid: int) -> int | None:
    """Bytes of host memory of a process and its children, where the server itself doesn't report them."""
    import psutil

    try:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    except (psutil.Error, OSError):
        return None
