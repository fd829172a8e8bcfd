"""Proxies that the environment names, looked at before an HTTP library reads them."""

import os
from collections.abc import MutableMapping
from typing import Final
from urllib.parse import urlsplit

from snugvl.errors import InputError

VARIABLES: Final = ("all_proxy", "http_proxy", "https_proxy")
KNOWN: Final = ("http", "https", "socks5", "socks5h")


def settle_proxies(environ: MutableMapping[str, str] = os.environ) -> None:
    """Write `socks://`, as desktops set it, as `socks5://`, the name that HTTP libraries know.

    Raises:
        InputError: a variable names no proxy that can be used; with its name, and without its password.
    """
    for name in [each for each in environ if each.lower() in VARIABLES and environ[each].strip()]:
        given = environ[name].strip()
        scheme, _, rest = given.rpartition("://")
        try:
            host = urlsplit(f"//{rest}").hostname
            urlsplit(f"//{rest}").port  # noqa: B018 (raises where it is none)
        except ValueError:
            host = None
        if not host or scheme.lower() not in ("", "socks", *KNOWN):
            what = f"{scheme}://…" if scheme else "…"
            raise InputError(
                f"the environment variable {name} ({what}) names no proxy that can be used here; write it as "
                "http://HOST:PORT or socks5://HOST:PORT, or unset it"
            )
        if scheme.lower() == "socks":
            environ[name] = f"socks5://{rest}"
