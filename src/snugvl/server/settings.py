"""Frozen settings of a server."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be reached from this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What `snugvl serve` was told.

    Attributes:
        host, port: where it listens.
        names: names that requests may use for the model, the first one is the one it answers with.
        api_keys: any of them opens the door; empty: no key is needed.
        max_body_bytes: of one request.
        max_header_bytes: of all its header lines together.
        max_concurrent: requests in the building at once, queued ones included; beyond it 429.
        deadline_s: seconds a request may take in all, its wait included; None for no limit.
        drain_s: seconds that running requests get when the server is told to stop.
        read_timeout_s: seconds a client has for its head, and for its body before a least pace is asked for.
        write_timeout_s: seconds a client may leave its stream unread before it is dropped.
        key_requests_per_minute: per API key; None for no limit.
        key_concurrent: requests at once per API key; None for no limit.
        allow_local_media: folder from which `file:` URLs may be read; None for none.
        allow_private_media: whether picture URLs may point to private addresses.
        log_prompts: whether prompts and answers may be logged.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ("pocket",)
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 64 * MIB
    max_header_bytes: int = 64 * 1024
    max_concurrent: int = 256
    deadline_s: float | None = 600.0
    drain_s: float = 30.0
    read_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    key_requests_per_minute: int | None = None
    key_concurrent: int | None = None
    allow_local_media: Path | None = None
    allow_private_media: bool = False
    log_prompts: bool = False
