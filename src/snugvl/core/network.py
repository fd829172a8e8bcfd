"""Addresses as people type them; proxies and certificates that the environment names, looked at before an
HTTP library reads them."""

import os
import re
from collections.abc import MutableMapping
from functools import cache
from typing import Final
from urllib.parse import urlsplit

from snugvl.errors import InputError

_BARE: Final = re.compile(r"(?P<host>[\w.-]*|\[[0-9a-fA-F:.]+\]):(?P<rest>\d{1,5}(?:/\S*)?)", re.ASCII)
PROXIES: Final = ("all_proxy", "http_proxy", "https_proxy")
SCHEMES: Final = ("http", "https", "socks5", "socks5h")


def http_address(text: str) -> str | None:
    """A server's address as a URL; None for other text.

    `127.0.0.1:8123`, `box:8123/v1` and `:8123`, which is this machine's, get their http://.
    """
    found = _BARE.fullmatch(text.strip())
    url = f"http://{found['host'] or '127.0.0.1'}:{found['rest']}" if found else text.strip()
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port beyond 65535, or half an IPv6 address
        return None
    return None if not named or parts.query or parts.fragment or len(url.split()) != 1 else parts.geturl()


def settle_network(environ: MutableMapping[str, str] = os.environ) -> None:
    """Write proxies `socks://`, as desktops set them, as `socks5://`, the name that HTTP libraries know.

    Raises:
        InputError: a variable names no proxy that can be used, or no certificates; the message has the
            variable's name, and no password.
    """
    for name in [each for each in environ if each.lower() in PROXIES and environ[each].strip()]:
        scheme, _, rest = environ[name].strip().rpartition("://")
        if scheme.lower() not in ("", "socks", *SCHEMES) or not http_address(f"http://{rest}"):
            what = f"{scheme}://…" if scheme else "…"
            raise InputError(
                f"the environment variable {name} ({what}) names no proxy that can be used here; write it as "
                "http://HOST:PORT or socks5://HOST:PORT, or unset it"
            )
        if scheme.lower() == "socks":
            environ[name] = f"socks5://{rest}"
    if path := environ.get("SSL_CERT_FILE"):
        _read_certificates(path)


@cache  # a plan asks the Hub many times
def _read_certificates(path: str) -> None:
    import ssl  # at most where a network is used

    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        why = f"the environment variable SSL_CERT_FILE ({path}) names no certificates: {error.strerror}"
        raise InputError(f"{why}; correct or unset it") from None
