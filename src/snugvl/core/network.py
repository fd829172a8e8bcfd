"""Proxies and certificates that the environment names, looked at before an HTTP library reads them."""

import os
from collections.abc import MutableMapping
from typing import Final
from urllib.parse import urlsplit

from snugvl.errors import InputError

PROXIES: Final = ("all_proxy", "http_proxy", "https_proxy")
SCHEMES: Final = ("http", "https", "socks5", "socks5h")


def settle_network(environ: MutableMapping[str, str] = os.environ) -> None:
    """Write proxies `socks://`, as desktops set them, as `socks5://`, the name that HTTP libraries know.

    Raises:
        InputError: a variable names no proxy that can be used, or no certificates; the message has the
            variable's name, and no password.
    """
    for name in [each for each in environ if each.lower() in PROXIES and environ[each].strip()]:
        scheme, _, rest = environ[name].strip().rpartition("://")
        if scheme.lower() not in ("", "socks", *SCHEMES) or not is_host(rest):
            what = f"{scheme}://…" if scheme else "…"
            raise InputError(
                f"the environment variable {name} ({what}) names no proxy that can be used here; write it as "
                "http://HOST:PORT or socks5://HOST:PORT, or unset it"
            )
        if scheme.lower() == "socks":
            environ[name] = f"socks5://{rest}"
    if path := environ.get("SSL_CERT_FILE"):
        import ssl  # at most where a network is used

        try:
            ssl.create_default_context(cafile=path)
        except OSError as error:
            why = f"the environment variable SSL_CERT_FILE ({path}) names no certificates: {error.strerror}"
            raise InputError(f"{why}; correct or unset it") from None


def is_host(address: str) -> bool:
    """Whether this is a host, perhaps with a user before it, a port and a path after it."""
    try:
        parts = urlsplit(f"//{address}")
        return bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # no such port, or a bracket that isn't closed
        return False
