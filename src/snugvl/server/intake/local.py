"""`file:` URLs, from one folder that the operator opened.

The path is resolved first and then opened step by step from the folder's own descriptor, refusing links: a
folder that is swapped for a link in between leads nowhere.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from snugvl.errors import ImageError, ImageTooLarge, InputError, RequestError


def check_folder(folder: Path) -> Path:
    """`folder`, resolved.

    Raises:
        InputError: it is no folder.
    """
    if not folder.is_dir():
        raise InputError(f"--allow-local-media {folder} is not a folder; give one that exists")
    return folder.resolve()


def read_file_url(url: str, folder: Path | None, max_bytes: int, name: str, field: str) -> bytes:
    """The bytes of a regular file inside `folder` (resolved).

    Raises:
        RequestError: such URLs are not read here, or malformed.
        ImageError, ImageTooLarge: not a file inside the folder, or too large. One text for all that is
            outside, missing, unreadable or no regular file, so that nothing can be found out by asking.
    """
    if folder is None:
        raise RequestError(
            "file: URLs are not read by this server; send a data URL, "
            "or start it with --allow-local-media FOLDER",
            field=field,
        )
    path = _path(url, field)
    try:
        with _opened(folder, path) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > max_bytes:
                raise ImageTooLarge(
                    f"{name} has {size:,} bytes, the limit is {max_bytes:,}; use a smaller one"
                )
            with open(descriptor, "rb", closefd=False) as stream:
                return stream.read(max_bytes)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        raise ImageError(
            f"{name} is not a readable file inside the folder that --allow-local-media names"
        ) from None


def _path(url: str, field: str) -> Path:
    bad = RequestError("the file: URL must look like file:///folder/picture.png", field=field)
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise bad from None
    if parts.netloc not in ("", "localhost") or parts.query or not path.startswith("/") or "\0" in path:
        raise bad
    if os.name == "nt":
        path = path.removeprefix("/")  # file:///C:/folder
    return Path(path)


@contextmanager
def _opened(folder: Path, path: Path) -> Iterator[int]:
    """A descriptor of the regular file `path`, which lies inside `folder` at the moment it is opened.

    Raises:
        OSError, ValueError: it doesn't.
    """
    parts = path.resolve(strict=True).relative_to(folder).parts
    descriptor = _open_steps(folder, parts) if os.open in os.supports_dir_fd else _open_once(folder, path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _open_steps(folder: Path, parts: tuple[str, ...]) -> int:
    current = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for position, part in enumerate(parts, 1):
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        if position < len(parts):
            flags |= os.O_DIRECTORY
        try:
            following = os.open(part, flags, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current


def _open_once(folder: Path, path: Path) -> int:
    """For systems without openat (Windows): opened, then compared with what the path resolves to now."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    resolved = path.resolve(strict=True)
    if resolved.is_relative_to(folder) and os.path.samestat(os.fstat(descriptor), resolved.stat()):
        return descriptor
    os.close(descriptor)
    raise OSError("outside the folder")
