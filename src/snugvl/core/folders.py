"""Where downloads are kept, as huggingface_hub's documented variables say, without importing it: that import
takes longer than a plan. And where we keep what we have found out, by which of our sources, and how.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from snugvl.errors import InputError


def check_current_folder() -> None:
    """Refuse to work in a folder that has been removed: the linear algebra of torch ends the process there.

    Raises:
        InputError: with the way out.
    """
    try:
        Path.cwd()
    except OSError as error:
        why = f"the current folder can't be found ({error.strerror}); cd to one that is there"
        raise InputError(why) from None


def leave_removed_folder() -> None:
    """Go to the root of the file system if the current folder has been removed while a server runs."""
    try:
        Path.cwd()
    except OSError:
        os.chdir("/")


def give_home() -> None:
    """Set HOME, where libraries keep files, to `/` for a user without a home folder, as containers do."""
    if os.path.expanduser("~") == "~":  # noqa: PTH111 (which raises then)
        os.environ["HOME"] = "/"


def expanded(path: str | Path) -> Path:
    """The path with a leading `~` or `~user` replaced by that home folder.

    Without such a user, `~user` stays; a user without a home folder has `/`.
    """
    found = Path(os.path.expanduser(path))  # noqa: PTH111 (which raises where there is no such user)
    return Path("/", *found.parts[1:]) if found.parts[:1] == ("~",) else found


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the Hub's downloads, in huggingface_hub's own order of variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return expanded(os.path.expandvars(environ[name]))
    home = environ.get("HF_HOME")
    if not home:
        home = str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return expanded(os.path.expandvars(home)) / "hub"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CACHE_HOME/snugvl`, `%LOCALAPPDATA%\\snugvl` on Windows, else `~/.cache/snugvl`."""
    return _ours(environ, "XDG_CACHE_HOME", "LOCALAPPDATA", "~/.cache")


def config_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CONFIG_HOME/snugvl`, `%APPDATA%\\snugvl` on Windows, else `~/.config/snugvl`."""
    return _ours(environ, "XDG_CONFIG_HOME", "APPDATA", "~/.config")


def _ours(environ: Mapping[str, str], xdg: str, windows: str, default: str) -> Path:
    """Our folder in the first of these that is an absolute path: XDG's specification ignores any other."""
    named = (environ.get(xdg), environ.get(windows) if os.name == "nt" else None)
    absolute = [folder for name in named if (folder := expanded(name or "")).is_absolute()]
    return (absolute or [expanded(default)])[0] / "snugvl"


def moved(error: OSError) -> str:
    """End of an error about a file in a folder that an environment variable moves: what to do; or "" for
    any other file."""
    if not error.filename or not isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
        return ""
    path = Path(os.fsdecode(error.filename)).absolute()
    homes = {
        "HF_HOME": hub_cache().parent,
        "XDG_CACHE_HOME": cache_folder(),
        "XDG_CONFIG_HOME": config_folder(),
    }
    for variable, home in homes.items():
        if path.is_relative_to(home) or path == home.parent:
            return f"; make {home} a folder that you may read and write, or set {variable} to another one"
    return ""


def read_small(path: Path, most: int) -> bytes:
    """The bytes of a file that another wrote, and that has few.

    Raises:
        OSError: it can't be read; or it has more than `most` bytes, as its `strerror` says then.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object in a text that another program, a model or an older version wrote; None where it is
    none, however it is broken."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@cache  # a start asks twice, and waits for it
def sources_digest(*rooms: str) -> str:
    """Digest of the package's sources in these folders: a cached finding holds for the same sources alone."""
    from hashlib import sha256  # with OpenSSL, which --help needs not

    package, digest = Path(__file__).parent.parent, sha256()
    for room in rooms:
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all; a link at `path` is replaced, not followed.

    Raises:
        OSError: with that name.
    """
    copy = path.with_name(f".{path.name}.{os.urandom(4).hex()}.new")
    with named(path):
        try:
            write(copy)
            copy.replace(path)
        except BaseException:
            copy.unlink(missing_ok=True)
            raise


def write_named(path: Path, text: str) -> None:
    """Write a file that a user named, whole or not at all.

    What is there and no plain file (`/dev/stdout`), or in a folder where none can be made, is written to.

    Raises:
        OSError: with that name.
    """
    with named(path):
        if (path.is_file() or not path.exists()) and os.access(path.parent, os.W_OK):
            write_whole(path.resolve(), lambda draft: _write_as(draft, text, path))
        else:
            path.write_text(text, encoding="utf-8")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give the errors of writing to an open file its name, such as that the disk is full."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _write_as(draft: Path, text: str, path: Path) -> None:
    """Write to `draft`, with the mode of the file that it will replace."""
    draft.write_text(text, encoding="utf-8")
    if path.exists():
        draft.chmod(path.stat().st_mode)
