"""Proxies and certificates of the environment, as desktops and people write them."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from snugvl import AsyncClient, Client
from snugvl.checkpoint.hub import HubUnreachable
from snugvl.checkpoint.read import facts_of
from snugvl.client import connection
from snugvl.core.network import settle_network
from snugvl.errors import InputError
from snugvl.server.settings import ServerSettings
from tests.server.fake import FakeService
from tests.server.live import live
from tests.socks import socks

FAR = "http://192.0.2.1:8000"  # of a net that is for documents alone
FAR_TOO = ServerSettings(host="0.0.0.0", api_keys=("right",))
NAMES = ("all_proxy", "http_proxy", "https_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def none_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("scheme", ["socks", "socks5", "socks5h", "SOCKS5"])
def test_a_server_is_reached_through_a_socks_proxy(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    with live(FakeService(), FAR_TOO) as url, socks(urlsplit(url).port or 0) as (proxy, asked):
        monkeypatch.setenv("ALL_PROXY", f"{scheme}://{proxy}/")  # as desktops end it
        with Client(FAR, api_key="right") as client:
            assert client.models()
        assert asked == ["192.0.2.1"]


@pytest.mark.parametrize("name", ["ALL_PROXY", "https_proxy"])
@pytest.mark.parametrize(
    "value", ["socks4://me:secret@h:1", "ftp://h:1", "http://", "http://[::1", "http://h:99999", ":::"]
)
@pytest.mark.sample("socks4://me:secret@h:1-ALL_PROXY", "http://[::1-https_proxy", ":::-ALL_PROXY")
def test_a_proxy_that_can_not_be_used_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    async def ask() -> None:
        async with AsyncClient(FAR):
            pass

    for attempt in (lambda: Client(FAR), lambda: asyncio.run(ask())):
        with pytest.raises(
            InputError, match=rf"{name} \(.*…\) names no proxy .*socks5://HOST:PORT"
        ) as caught:
            attempt()
        assert "secret" not in str(caught.value)
    with pytest.raises(HubUnreachable, match=f"org/small: the Hub can't be reached: .* {name} "):
        facts_of("org/small")
    Client("http://127.0.0.1:1").close()  # is reached without


def test_exceptions_that_can_not_be_understood_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://h:1")
    monkeypatch.setenv("NO_PROXY", "[::1]:80")
    monkeypatch.setattr(connection, "httpx", httpx)  # openai 2's; httpx2 takes anything
    with pytest.raises(InputError, match="NO_PROXY can't be understood"):
        Client(FAR)


def test_what_is_usual_stays_as_it_is() -> None:
    given = {
        "HTTP_PROXY": "http://me:x@h:1",
        "https_proxy": "h:3128",
        "ALL_PROXY": "",
        "no_proxy": "socks://x",
    }
    settled = dict(given)
    settle_network(settled)
    assert settled == given


@pytest.mark.parametrize("content", [None, "no certificates"])
def test_certificates_that_can_not_be_read_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "corporate.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(InputError, match=r"SSL_CERT_FILE \(.*corporate\.pem\) names no certificates: \S"):
        Client(FAR)
    with pytest.raises(HubUnreachable, match="SSL_CERT_FILE"):
        facts_of("org/small")
    assert facts_of("Qwen/Qwen3-VL-4B-Instruct-FP8").source == "catalogue"
    Client("http://127.0.0.1:1").close()
