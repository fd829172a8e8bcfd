"""Frozen settings of a server, and API keys from options, environment and files."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snugvl.core.folders import read_small
from snugvl.core.sizes import MIB
from snugvl.errors import InputError


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
    """The settings of `snugvl serve`.

    Attributes:
        host, port: address at which it listens.
        names: names that requests may use for the model, the first one is the one it answers with.
        api_keys: keys of which a request needs one; empty: none is needed.
        allow_origins: pages that may use the server from a browser, as https://example.org; "*" for all.
        max_body_bytes: most bytes of a request's body.
        max_header_bytes: most bytes of all its header lines together.
        max_concurrent: requests at once, queued ones included; beyond it 429.
        deadline_s: seconds a request may take in all, its wait included; None for no limit.
        drain_s: seconds that running requests get when the server has to stop.
        read_timeout_s: seconds a client has for its head, and for its body before a least pace is asked for.
        write_timeout_s: seconds a client may leave its stream unread before it is dropped.
        key_requests_per_minute: most requests a minute of one API key; None for no limit.
        key_concurrent: most requests at once of one API key; None for no limit.
        allow_local_media: folder from which `file:` URLs may be read; None for none.
        allow_private_media: whether picture URLs may point to private addresses.
        allowed_media_domains: hosts, with all below them, that picture URLs may name; None for any.
        log_prompts: whether prompts and answers may be logged.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ("pocket",)
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
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
    allowed_media_domains: tuple[str, ...] | None = None
    log_prompts: bool = False


OTHERS_MAY_READ = 0o044
MAX_KEYS_BYTES = 1 << 20  # of a file of keys: each request is compared with all of them


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file: one a line; empty lines and lines that begin with # are skipped.

    Raises:
        InputError: it can't be read, or there is no key in it.
    """
    try:
        lines = read_small(path, MAX_KEYS_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"--api-key-file {path}: {reason}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
    if not keys:
        raise InputError(f"--api-key-file {path} has no key; write one a line")
    return keys


def others_may_read(path: Path) -> bool:
    """Whether other users of this machine may read the file."""
    return bool(path.stat().st_mode & OTHERS_MAY_READ)


def checked(keys: Sequence[str]) -> tuple[str, ...]:
    """Every key once.

    Raises:
        InputError: one is empty, or can't be sent in a header.
    """
    for number, key in enumerate(keys, 1):
        if not key:
            raise InputError(f"API key {number} is empty; give one, or none at all for no key")
        if not key.isascii() or not key.isprintable() or " " in key:
            # The key itself is not shown: it is a secret.
            raise InputError(f"API key {number} must be printable ASCII characters without spaces")
    return tuple(dict.fromkeys(keys))
