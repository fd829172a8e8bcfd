"""Addresses of servers, as people type them."""

import re
from typing import Final

_BARE: Final = re.compile(r"(?P<host>[\w.-]*|\[[0-9a-fA-F:.]+\]):(?P<rest>\d{1,5}(?:/\S*)?)", re.ASCII)


def http_address(text: str) -> str:
    """`127.0.0.1:8123`, `box:8123/v1` and `:8123`, which is this machine's, as http:// URLs; anything else as
    it is."""
    found = _BARE.fullmatch(text.strip())
    return f"http://{found['host'] or '127.0.0.1'}:{found['rest']}" if found else text
