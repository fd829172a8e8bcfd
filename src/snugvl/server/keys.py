"""API keys from options, environment and files."""

from collections.abc import Sequence
from pathlib import Path

from snugvl.errors import InputError

OTHERS_MAY_READ = 0o044


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file: one a line; empty lines and lines that begin with # are skipped.

    Raises:
        InputError: it can't be read, or there is no key in it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
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
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            # The key itself is not shown: it is a secret.
            raise InputError(f"API key {number} must be printable ASCII characters without spaces")
    return tuple(dict.fromkeys(keys))
