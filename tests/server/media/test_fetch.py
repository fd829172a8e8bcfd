"""Fetching over real sockets: pinned to the checked address, nothing sent that nobody asked for."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from snugvl.errors import ImageError, QueueFull, SnugvlError
from snugvl.server.media.fetch import Address, Fetcher, FetchLimits, resolve
from snugvl.server.media.loading import MediaSettings
from tests.patience import PATIENCE_S
from tests.server.media.pictures import encoded
from tests.server.media.single import Loader
from tests.server.media.standin import StandIn, answer, certificate, redirect, standing_in

PICTURE = encoded("PNG")
GOOD = ip_address("127.0.0.1")
LIMITS = FetchLimits(total_s=PATIENCE_S, connect_s=PATIENCE_S, read_s=PATIENCE_S)
Resolver = Callable[[str, int], Sequence[str]]


def only_good(address: Address) -> bool:
    """In the tests 127.0.0.1 is the public internet, and the rest of 127.0.0.0/8 is inside."""
    return address == GOOD


def always(*addresses: str) -> Resolver:
    return lambda host, port: addresses


_LOOK_UP = always("127.0.0.1")


async def fetched(
    url: str,
    *,
    resolver: Resolver = _LOOK_UP,
    limits: FetchLimits = LIMITS,
    allowed: Callable[[Address], bool] = only_good,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    fetcher = Fetcher(limits, resolver=resolver, allowed=allowed, tls=tls)
    try:
        return await fetcher.fetch(url, accept="image/*", max_bytes=10_000, name="the image", field="url")
    finally:
        fetcher.close()


def refused(coroutine: Coroutine[Any, Any, bytes]) -> str:
    with pytest.raises(SnugvlError) as caught:
        asyncio.run(coroutine)
    return str(caught.value)


def test_what_is_sent() -> None:
    with standing_in() as server:
        server.replies["/a%20b?c=d"] = answer(PICTURE)
        url = f"http://pictures.test:{server.port}/a%20b?c=d#e"
        assert asyncio.run(fetched(url)) == PICTURE
    (request,) = server.requests
    assert request.splitlines()[:-1] == [
        "GET /a%20b?c=d HTTP/1.1",
        f"Host: pictures.test:{server.port}",
        "User-Agent: snugvl",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "Connection: close",
    ]


def test_rebinding_the_name_after_the_check_changes_nothing() -> None:
    """The second answer of the resolver is a private address: nobody asks for it."""
    answers = iter([["127.0.0.1"], ["127.0.0.9"]])
    with standing_in() as outside, standing_in("127.0.0.9", outside.port) as inside:
        outside.replies["/a"] = answer(PICTURE)
        inside.replies["/a"] = answer(b"internal")
        url = f"http://rebinding.test:{outside.port}/a"
        assert asyncio.run(fetched(url, resolver=lambda *_: next(answers))) == PICTURE
        assert inside.requests == []
    assert next(answers) == ["127.0.0.9"]


def test_rebinding_between_redirects_is_checked_again() -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.9"]])
    with standing_in() as outside, standing_in("127.0.0.9", outside.port) as inside:
        outside.replies["/a"] = redirect("/b")
        url = f"http://rebinding.test:{outside.port}/a"
        message = refused(fetched(url, resolver=lambda *_: next(answers)))
        assert "rebinding.test is not the name or address of a public host" in message
        assert inside.requests == []


def test_one_forbidden_address_among_several_is_enough() -> None:
    with standing_in() as server:
        url = f"http://mixed.test:{server.port}/a"
        assert "not the name or address" in refused(fetched(url, resolver=always("127.0.0.1", "10.0.0.1")))
        assert server.requests == []


def test_a_dead_address_is_passed_over_for_the_next() -> None:
    with standing_in() as server:
        server.replies["/a"] = answer(PICTURE)
        resolver = always("127.0.0.3", "127.0.0.1")
        url = f"http://two.test:{server.port}/a"
        assert asyncio.run(fetched(url, resolver=resolver, allowed=lambda _: True)) == PICTURE


def test_addresses_of_ipv6() -> None:
    try:
        server = StandIn("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    try:
        server.replies["/a"] = answer(PICTURE)
        url = f"http://[0:0::0:1]:{server.port}/a"
        assert asyncio.run(fetched(url, allowed=lambda _: True)) == PICTURE
        assert f"Host: [::1]:{server.port}" in server.requests[0]
    finally:
        server.close()


def test_redirects_are_followed_up_to_the_limit() -> None:
    with standing_in() as server:
        base = f"http://pictures.test:{server.port}"
        server.replies |= {
            "/0": redirect("/1", "301 Moved"),
            "/1": redirect(f"//pictures.test:{server.port}/2", "303 See"),
            "/2": redirect(f"{base}/3?x=y#z", "307 Temporary"),
            "/3?x=y": answer(PICTURE),
        }
        assert asyncio.run(fetched(f"{base}/0")) == PICTURE
        server.replies["/before"] = redirect("/0")
        assert "more than 3 redirects" in refused(fetched(f"{base}/before"))


def test_cookies_and_credentials_stay_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine pictures.test login me password hush\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with standing_in() as server:
        server.replies["/a"] = answer(b"", "Set-Cookie: secret=1; Path=/", "Location: /b", status="302 Found")
        server.replies["/b"] = answer(PICTURE)
        assert asyncio.run(fetched(f"http://pictures.test:{server.port}/a")) == PICTURE
    sent = "".join(server.requests).lower()
    assert "cookie" not in sent
    assert "authorization" not in sent
    assert "referer" not in sent


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_bytes_are_counted_whatever_was_announced(more: int, fits: bool) -> None:
    body = b"a" * (10_000 + more)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    with standing_in() as server:
        server.replies["/a"] = chunked % (len(body), body)
        url = f"http://pictures.test:{server.port}/a"
        if fits:
            assert asyncio.run(fetched(url)) == body
        else:
            assert "more than 10,000 bytes, the limit" in refused(fetched(url))


def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_in() as server, standing_in() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        server.replies["/a"] = answer(PICTURE)
        assert asyncio.run(fetched(f"http://pictures.test:{server.port}/a")) == PICTURE
        assert proxy.requests == []


def test_a_closed_port_says_no_more_than_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    message = refused(fetched(f"http://pictures.test:{port}/"))
    assert message == (
        "the image could not be fetched: no http connection to pictures.test "
        "(refused, unreachable, or an invalid certificate); check the address"
    )


def test_https_checks_the_certificate_for_the_name(tmp_path: Path) -> None:
    server_tls, client_tls = certificate(tmp_path, "pictures.test")
    with standing_in(tls=server_tls) as server:
        server.replies["/a"] = answer(PICTURE)
        good, bad = (f"https://{name}.test:{server.port}/a" for name in ("pictures", "other"))
        assert asyncio.run(fetched(good, tls=client_tls)) == PICTURE
        wrong_name = refused(fetched(bad, tls=client_tls))
        unknown_issuer = refused(fetched(good))
        by_address = refused(fetched(f"https://127.0.0.1:{server.port}/a", tls=client_tls))
    for message, host in (
        (wrong_name, "other.test"),
        (unknown_issuer, "pictures.test"),
        (by_address, "127."),
    ):
        assert f"no https connection to {host}" in message
        assert "invalid certificate" in message
    assert len(server.requests) == 1


def test_https_is_not_left_for_http(tmp_path: Path) -> None:
    server_tls, client_tls = certificate(tmp_path, "pictures.test")
    with standing_in(tls=server_tls) as secure, standing_in() as plain:
        secure.replies["/a"] = redirect(f"http://pictures.test:{plain.port}/a")
        plain.replies["/up"] = redirect(f"https://pictures.test:{secure.port}/b")
        secure.replies["/b"] = answer(PICTURE)
        message = refused(fetched(f"https://pictures.test:{secure.port}/a", tls=client_tls))
        assert message == (
            "the image could not be fetched: pictures.test redirects from https to http; "
            "give an https address"
        )
        assert asyncio.run(fetched(f"http://pictures.test:{plain.port}/up", tls=client_tls)) == PICTURE
    assert len(plain.requests) == 1


def test_a_resolver_that_hangs_costs_its_own_request() -> None:
    stop = threading.Event()

    def hang(host: str, port: int) -> Sequence[str]:
        stop.wait(PATIENCE_S)
        return ["127.0.0.1"]

    try:
        message = refused(fetched("http://slow.test/", resolver=hang, limits=FetchLimits(total_s=0.1)))
    finally:
        stop.set()
    assert message == (
        "the image could not be fetched: slow.test took longer than 0.1 s; send it as a data URL"
    )


class Crowd:
    """A resolver and a server's handler that count how many are inside at once."""

    def __init__(self) -> None:
        self.inside, self.most = 0, 0
        self._lock = threading.Lock()

    def reply(self, connection: socket.socket, stopped: threading.Event) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.05)
        with self._lock:
            self.inside -= 1
        connection.sendall(answer(PICTURE))


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (FetchLimits(concurrent=16, per_address=2), 2),
        (FetchLimits(concurrent=3, per_address=16), 3),
    ],
)
def test_fetches_at_once_are_limited(limits: FetchLimits, most: int) -> None:
    crowd = Crowd()

    async def run(server: StandIn) -> None:
        fetcher = Fetcher(limits, resolver=always("127.0.0.1"), allowed=only_good)
        url = f"http://pictures.test:{server.port}/a"
        each = [
            fetcher.fetch(url, accept="image/*", max_bytes=10_000, name="the image", field="url")
            for _ in range(10)
        ]
        assert await asyncio.gather(*each) == [PICTURE] * 10
        fetcher.close()

    with standing_in() as server:
        server.replies["/a"] = crowd.reply
        asyncio.run(run(server))
    assert crowd.most <= most


def test_who_never_gets_a_slot_is_told_to_come_back() -> None:
    async def run() -> None:
        fetcher = Fetcher(FetchLimits(concurrent=1, total_s=0.05), resolver=_LOOK_UP, allowed=only_good)
        async with fetcher._slots:
            with pytest.raises(QueueFull) as caught:
                await fetcher.fetch(
                    "http://pictures.test/", accept="image/*", max_bytes=10, name="the image", field="url"
                )
        fetcher.close()
        assert str(caught.value) == "too many pictures are being fetched; try again shortly"

    asyncio.run(run())


def test_private_media_only_by_choice() -> None:
    async def run(url: str, allow: bool) -> tuple[int, int]:
        intake = Loader(MediaSettings(allow_private=allow))
        try:
            return (await intake.picture(url, field="url")).image.size
        finally:
            await intake.close()

    with standing_in() as server:
        server.replies["/a"] = answer(PICTURE)
        url = f"http://127.0.0.1:{server.port}/a"
        with pytest.raises(ImageError, match="not the name or address of a public host"):
            asyncio.run(run(url, allow=False))
        assert server.requests == []
        assert asyncio.run(run(url, allow=True)) == (8, 6)


def test_the_system_resolves_names() -> None:
    assert "127.0.0.1" in resolve("localhost", 80)


@pytest.mark.parametrize(("hosts", "at_once"), [(40, 8), (1, 4)])
def test_pictures_of_one_request_wait_outside_of_their_time_and_leave_others_their_share(
    monkeypatch: pytest.MonkeyPatch, hosts: int, at_once: int
) -> None:
    """Their time ran while they waited for each other, so many of them were refused with "try again"."""
    begun: list[str] = []

    async def follow(_: Fetcher, target: Any, *rest: object) -> bytes:
        begun.append(target.host)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Fetcher, "_follow", follow)

    async def test() -> None:
        fetcher = Fetcher(LIMITS)
        turns = fetcher.turns()

        def fetch(host: str, **turn: Any) -> "asyncio.Task[bytes]":
            url = f"http://{host}/a.png"
            return asyncio.create_task(
                fetcher.fetch(url, accept="image/*", max_bytes=9, name="it", field="url", **turn)
            )

        mine = [fetch(f"h{number % hosts}.test", turns=turns) for number in range(40)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(begun) == at_once
        other = fetch("other.test")
        for _ in range(50):
            await asyncio.sleep(0)
        assert begun[-1] == "other.test"
        for task in (*mine, other):
            task.cancel()
        await asyncio.wait((*mine, other))
        assert not fetcher._slots.locked()
        fetcher.close()

    asyncio.run(test())
