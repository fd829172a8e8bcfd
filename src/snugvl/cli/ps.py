"""`snugvl ps`: the servers of ours that run on this machine."""

from __future__ import annotations

import json as encoder
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from snugvl.cli import options, running
from snugvl.cli.stderr import printable, say
from snugvl.cli.stdout import write
from snugvl.core.sizes import format_size


def ps(
    api_key: options.ApiKey = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects, with sizes in bytes.")
    ] = False,
) -> None:
    """Show which servers of yours run here: process, address, model, memory, and since when."""
    rows = [_row(server, api_key) for server in running.running()]
    if json:
        write(encoder.dumps(rows, ensure_ascii=False, indent=2) + "\n")
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
        write(printable("\n".join(lines)) + "\n")


def _row(server: running.LocalServer, api_key: str | None) -> dict[str, Any]:
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
    answer = running.ask(server, "/memory", api_key)
    if (why := running.trouble(answer, api_key)) is not None:
        return row | {"state": why}
    with suppress(TypeError, KeyError):
        row["state"] = str(answer.body["health"]["state"])
        row |= {
            "device": str(answer.body["ledger"]["device"]),
            "memory_bytes": int(answer.body["ledger"]["process_bytes"]),
        }
    return row


def _resident(pid: int) -> int | None:
    """Main memory of a process and what it started, where the server itself doesn't tell."""
    import psutil

    try:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    except psutil.Error:
        return None
