"""URLs, read strictly: what two parsers could understand differently is refused. Nothing touches the network.

`file:` URLs are read from one folder that the operator opened. The path is resolved first and then opened
step by step from the folder's own descriptor, refusing links: a folder that is swapped for a link in between
leads nowhere.
"""

import binascii
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from urllib.parse import quote, unquote, unquote_to_bytes, urlsplit

import idna

from snugvl.errors import ImageError, ImageTooLarge, InputError, RequestError, blamed
from snugvl.inputs.looks_like import in_base64

Address = IPv4Address | IPv6Address
MAX_URL = 8192
MAX_PERCENT_ENCODED = 1 << 20  # characters of a data URL that isn't base64, as nobody makes large ones
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)
_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\")  # of Windows, or of a share; "/9j/" may be a JPEG in bare base64
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\x9f\\\ud800-\udfff]")
_SAFE_IN_TARGET = "/:?#[]@!$&'()*+,;=%-._~"
_BLANKS = b" \t\r\n\f"
_FROM_URL = bytes.maketrans(b"-_", b"+/")  # base64url's two letters of its own: nothing else can be meant
_PIECE = 1 << 20  # characters of base64 that are read at a time
# What of base64 is percent-encoded in a URL by those who do.
_ESCAPES = tuple(
    (case(f"%{ord(character):02x}"), character)
    for character in "+/=-_ \t\r\n\f"
    for case in (str.upper, str.lower)
)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """An http(s) URL in the one form in which it is used.

    Attributes:
        host: the host in ASCII, lower case, without brackets.
        literal: the address that `host` is, in whatever notation it was written; None for a name.
        path: path and query, percent-encoded.
    """

    scheme: str
    host: str
    port: int
    path: str
    literal: Address | None

    @property
    def url(self) -> str:
        """The whole URL, for resolving relative redirects."""
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_target(url: str, field: str) -> FetchTarget:
    """Read an http(s) URL.

    Raises:
        RequestError: it is no such URL, or one that could be read in two ways.
    """
    with blamed(field):
        if not url.strip():
            raise RequestError("the URL is empty; send a data URL, or an address of the web")
        if in_base64(url):
            raise RequestError(
                "the URL is a picture in bare base64; put data:image/png;base64, before it (or image/jpeg, …)"
            )
        if len(url) > MAX_URL:
            raise RequestError(f"the URL has {len(url):,} characters, the limit is {MAX_URL:,}")
        if _PATH.match(url):
            raise RequestError(
                "the URL looks like the path of a file, which this server can't see; send the file's bytes "
                "as a data URL (data:image/png;base64,…)"
            )
        if _UNSAFE.search(url):
            raise RequestError(
                "the URL contains a space, a backslash, a control or a broken character; percent-encode it"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise RequestError("the URL is malformed: its host or port can't be read") from None
        scheme = parts.scheme.lower()
        if scheme not in _PORTS:
            raise RequestError(
                "the URL must start with https://, http:// or data:; other schemes are not fetched"
            )
        if "@" in parts.netloc:
            raise RequestError("the URL contains a user name or password; remove it")
        if port == 0:
            raise RequestError("the URL has port 0; leave the port out or give a real one")
        host, literal = _host(parts.netloc, parts.hostname or "")
        path = quote(parts.path or "/", safe=_SAFE_IN_TARGET)
        query = f"?{quote(parts.query, safe=_SAFE_IN_TARGET)}" if parts.query else ""
        return FetchTarget(scheme, host, port or _PORTS[scheme], path + query, literal)


def _host(netloc: str, host: str) -> tuple[str, Address | None]:
    """The host in ASCII, and the address if it is one: also octal, hexadecimal, short or one number."""
    bad = RequestError("the URL's host is not a valid name or address; check it")
    if netloc.startswith("["):
        try:
            address = IPv6Address(host)
        except ValueError:
            raise bad from None
        if address.scope_id:
            raise bad
        return address.compressed, address
    try:
        ascii_host = host if host.isascii() else idna.encode(host, uts46=True).decode()
    except idna.IDNAError:
        raise bad from None
    ascii_host = ascii_host.lower().removesuffix(".")
    if len(ascii_host) > 253 or not _HOST.fullmatch(ascii_host):
        raise bad
    try:
        # What the C library's resolver would make of 127.1, 0x7f000001 or 2130706433.
        literal = IPv4Address(socket.inet_aton(ascii_host))
    except OSError:
        return ascii_host, None
    return str(literal), literal


def scheme_of(url: str) -> str:
    """The scheme in lower case, or "" without one."""
    head, colon, _ = url[:16].partition(":")
    return head.strip().lower() if colon else ""


def read_data_url(url: str, max_bytes: int, name: str, field: str) -> bytes:
    """The bytes of a data URL, base64 or percent-encoded. Its media type is not believed, so not read.

    Raises:
        RequestError: malformed.
        ImageTooLarge: more than `max_bytes`.
    """
    with blamed(field):
        header, comma, body = url.partition(",")
        if not comma:
            raise RequestError(
                "the data URL has no comma; write data:image/png;base64,… with the encoded file after it"
            )
        is_base64 = header.rpartition(";")[2].strip().lower() == "base64"
        size = len(body) * 3 // 4 if is_base64 else len(body) // 3
        if size > max_bytes + max_bytes // 20:  # some room for line breaks, which don't count
            raise ImageTooLarge(
                f"{name} has about {size:,} bytes, the limit is {max_bytes:,}; save it smaller"
            )
        if not is_base64 and len(body) > MAX_PERCENT_ENCODED:
            raise RequestError(
                f"the data URL has {len(body):,} characters without ;base64; at most {MAX_PERCENT_ENCODED:,} "
                "are decoded: use base64"
            )
        data = _base64(body, name) if is_base64 else _percent(body)
        if len(data) > max_bytes:
            raise ImageTooLarge(
                f"{name} has {len(data):,} bytes, the limit is {max_bytes:,}; save it smaller"
            )
        return data


def _base64(body: str, name: str) -> bytes:
    if "%" in body:
        for escape, character in _ESCAPES:  # each at the speed of C, however many there are
            body = body.replace(escape, character)
    try:
        return b"".join(_base64_pieces(body))
    except ValueError:  # binascii.Error, or a character outside ASCII
        raise RequestError(
            f"{name} is not valid base64; send the bytes of its file, encoded in base64 (in a data URL they "
            "follow the comma)"
        ) from None


def _base64_pieces(body: str) -> Iterator[bytes]:
    """Decoded bytes of base64 or base64url, without line breaks. Between two pieces other threads may have
    Python's lock.

    Raises:
        ValueError: it isn't base64.
    """
    rest = b""
    for start in range(0, len(body), _PIECE):
        piece = rest + body[start : start + _PIECE].encode("ascii").translate(_FROM_URL, _BLANKS)
        cut = max(len(piece) // 4 - 1, 0) * 4  # the last group waits for its padding
        head, rest = piece[:cut], piece[cut:]
        if head.endswith(b"="):
            raise ValueError("padding before the end")
        if head:
            yield binascii.a2b_base64(head, strict_mode=True)
    if rest:
        data = rest.rstrip(b"=")  # as much padding as it needs: from Python 3.13 on more is an error
        if not data:
            raise ValueError("padding alone")
        yield binascii.a2b_base64(data + b"=" * (-len(data) % 4), strict_mode=True)


def _percent(body: str) -> bytes:
    if re.search(r"%(?![0-9a-fA-F]{2})", body) or not body.isascii():
        raise RequestError("the data URL is not percent-encoded properly; encode it, or use ;base64")
    return unquote_to_bytes(body)


def check_folder(folder: Path) -> Path:
    """`folder`, resolved.

    Raises:
        InputError: it is not a folder.
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
        with _open_inside(folder, path) as descriptor:
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
def _open_inside(folder: Path, path: Path) -> Iterator[int]:
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
    """Open a file on systems without openat (Windows), then check that its path still leads to it."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    resolved = path.resolve(strict=True)
    if resolved.is_relative_to(folder) and os.path.samestat(os.fstat(descriptor), resolved.stat()):
        return descriptor
    os.close(descriptor)
    raise OSError("outside the folder")
