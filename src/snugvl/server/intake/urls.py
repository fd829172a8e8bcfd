"""URLs, read strictly: what two parsers could understand differently is refused.

Nothing here touches the network or the disk.
"""

import binascii
import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import quote, unquote_to_bytes, urlsplit

import idna

from snugvl.errors import ImageTooLarge, RequestError
from snugvl.server.intake.addresses import Address

MAX_URL = 8192
MAX_PERCENT_ENCODED = 1 << 20  # characters of a data URL that isn't base64, as nobody makes large ones
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)
_UNSAFE = re.compile(r"[\x00-\x20\x7f-\x9f\\\ud800-\udfff]")
_SAFE_IN_TARGET = "/:?#[]@!$&'()*+,;=%-._~"
_BLANKS = b" \t\r\n\f"
# What of base64 is percent-encoded in a URL by those who do.
_ESCAPES = tuple(
    (case(f"%{ord(character):02x}"), character)
    for character in "+/=-_ \t\r\n\f"
    for case in (str.upper, str.lower)
)
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """An http(s) URL in the one form in which it is used.

    Attributes:
        host: in ASCII, lower case, without brackets.
        literal: the address that `host` is, in whatever notation it was written; None for a name.
        path: with the query, percent-encoded.
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


def parse_target(url: str, field: str) -> Target:
    """Read an http(s) URL.

    Raises:
        RequestError: it is no such URL, or one that could be read in two ways.
    """
    if len(url) > MAX_URL:
        raise RequestError(f"the URL has {len(url):,} characters, the limit is {MAX_URL:,}", field=field)
    if _UNSAFE.search(url):
        raise RequestError(
            "the URL contains a space, a backslash, a control or a broken character; percent-encode it",
            field=field,
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise RequestError("the URL is malformed: its host or port can't be read", field=field) from None
    scheme = parts.scheme.lower()
    if scheme not in _PORTS:
        raise RequestError(
            "the URL must start with https://, http:// or data:; other schemes are not fetched", field=field
        )
    if "@" in parts.netloc:
        raise RequestError("the URL contains a user name or password; remove it", field=field)
    if port == 0:
        raise RequestError("the URL has port 0; leave the port out or give a real one", field=field)
    host, literal = _host(parts.netloc, parts.hostname or "", field)
    path = quote(parts.path or "/", safe=_SAFE_IN_TARGET)
    query = f"?{quote(parts.query, safe=_SAFE_IN_TARGET)}" if parts.query else ""
    return Target(scheme, host, port or _PORTS[scheme], path + query, literal)


def _host(netloc: str, host: str, field: str) -> tuple[str, Address | None]:
    """The host in ASCII, and the address if it is one: also octal, hexadecimal, short or one number."""
    bad = RequestError("the URL's host is not a valid name or address; check it", field=field)
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
    header, comma, body = url.partition(",")
    if not comma:
        raise RequestError(
            "the data URL has no comma; write data:image/png;base64,… with the encoded file after it",
            field=field,
        )
    is_base64 = header.rpartition(";")[2].strip().lower() == "base64"
    size = len(body) * 3 // 4 if is_base64 else len(body) // 3
    if size > max_bytes + max_bytes // 20:  # some room for line breaks, which don't count
        raise ImageTooLarge(f"{name} has about {size:,} bytes, the limit is {max_bytes:,}; save it smaller")
    if not is_base64 and len(body) > MAX_PERCENT_ENCODED:
        raise RequestError(
            f"the data URL has {len(body):,} characters without ;base64; at most {MAX_PERCENT_ENCODED:,} are "
            "decoded: use base64",
            field=field,
        )
    data = _base64(body, field) if is_base64 else _percent(body, field)
    if len(data) > max_bytes:
        raise ImageTooLarge(f"{name} has {len(data):,} bytes, the limit is {max_bytes:,}; save it smaller")
    return data


def _base64(body: str, field: str) -> bytes:
    if "%" in body:
        for escape, character in _ESCAPES:  # each at the speed of C, however many there are
            body = body.replace(escape, character)
    try:
        # Most encoders put no line breaks in: only look for them when the strict reading fails.
        return binascii.a2b_base64(body, strict_mode=True) if body else b""
    except ValueError:
        pass
    try:
        compact = body.encode("ascii").translate(None, _BLANKS)
        compact += b"=" * (-len(compact) % 4)
        return binascii.a2b_base64(compact, strict_mode=True)
    except ValueError:  # binascii.Error, or a character outside ASCII
        raise RequestError(
            "the data URL is not valid base64; send the file's bytes, base64-encoded, after the comma",
            field=field,
        ) from None


def _percent(body: str, field: str) -> bytes:
    if re.search(r"%(?![0-9a-fA-F]{2})", body) or not body.isascii():
        raise RequestError(
            "the data URL is not percent-encoded properly; encode it, or use ;base64", field=field
        )
    return unquote_to_bytes(body)
