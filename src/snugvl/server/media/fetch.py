"""Fetching over http(s) from strangers' URLs, without being led into our own network.

    URL ─► parsed strictly ─► name resolved once ─► every address checked ─► connected to a checked address
             ▲                                                                          │
             └───────────────── redirect: everything checked again ◄────────────────────┘

No proxy, no cookies, no credentials, no compression; bytes and seconds are limited. Errors never quote what
a server answered, and they are the same for an address that is forbidden and a name that doesn't exist.

Which addresses are public says our own table instead of `ipaddress.is_global`: what that means changed
between Python versions, and it calls some addresses global through which IPv4 ones can be reached (6to4,
NAT64). IPv6 is an allow list: only global unicast space, less the parts of it that are special.
"""

import asyncio
import socket
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address, ip_network
from urllib.parse import urljoin
from weakref import WeakValueDictionary

import httpcore2
import psutil

from snugvl.errors import ImageError, ImageTooLarge, QueueFull, RequestError
from snugvl.server.media.urls import Address, FetchTarget, parse_target

_SPECIAL_V4 = tuple(
    ip_network(network)
    for network in (
        "0.0.0.0/8",  # this network, unspecified
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host services: public space, answered by the machine's own host
        "169.254.0.0/16",  # link-local, where clouds keep their metadata
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
_GLOBAL_V6 = ip_network("2000::/3")  # not in it: mapped IPv4, NAT64, unique local, link-local, multicast, …
_SPECIAL_V6 = tuple(
    ip_network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address inside
        "2620:4f:8000::/48",
        "3fff::/20",  # documentation
    )
)


def is_public(address: Address) -> bool:
    """Whether `address` is an ordinary one on the public internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return address in _GLOBAL_V6 and not any(address in network for network in _SPECIAL_V6)


def is_foreign(address: Address) -> bool:
    """Whether `address` is public and none of this machine's own, where services listen unprotected."""
    return is_public(address) and address not in _own_addresses()


def _own_addresses() -> set[Address]:
    found: set[Address] = set()
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            try:
                found.add(ip_address(entry.address.partition("%")[0]))
            except ValueError:  # a hardware address
                continue
    return found


Resolver = Callable[[str, int], Sequence[str]]  # host, port → addresses as text; may block
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_ADDRESSES = 4  # tried one after the other


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, as the system resolves it. Blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch over http(s), redirects included.

    Attributes:
        total_s: seconds from the first look-up to the last byte, waiting for a free slot included.
        connect_s, read_s: for one connection; for the first byte, and between two pieces of data.
        max_redirects: followed before giving up.
        concurrent, per_address: fetches at once in all, and from one address.
    """

    total_s: float = 20.0
    connect_s: float = 5.0
    read_s: float = 10.0
    max_redirects: int = 3
    concurrent: int = 16
    per_address: int = 4


class FetchTurns:
    """Turns of one request's fetches, which are no more at once than leave others their share.

    The time of a fetch begins with its turn: a request with many pictures doesn't time itself out.
    """

    def __init__(self, limits: FetchLimits) -> None:
        self._all = asyncio.Semaphore(max(limits.concurrent // 2, 1))
        self._hosts: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(limits.per_address)
        )

    @asynccontextmanager
    async def of(self, host: str) -> AsyncIterator[None]:
        """A turn to fetch from `host`."""
        async with self._hosts[host], self._all:
            yield


class Fetcher:
    """Fetches media. One a server, used from one event loop."""

    def __init__(
        self,
        limits: FetchLimits | None = None,
        *,
        allowed: Callable[[Address], bool] = is_foreign,
        resolver: Resolver = resolve,
        tls: ssl.SSLContext | None = None,
        domains: tuple[str, ...] | None = None,
    ) -> None:
        """`domains`: whose hosts are fetched from, and those below them; None: all."""
        self._limits = limits or FetchLimits()
        self._allowed = allowed
        self._resolver = resolver
        self._tls = tls
        self._domains = domains
        self._slots = asyncio.Semaphore(self._limits.concurrent)
        self._per_address: WeakValueDictionary[Address, asyncio.Semaphore] = WeakValueDictionary()
        # Of our own: look-ups that hang must not take the threads that others need.
        self._threads = ThreadPoolExecutor(self._limits.concurrent, thread_name_prefix="snugvl-resolve")

    def turns(self) -> FetchTurns:
        """Turns for the fetches of one request."""
        return FetchTurns(self._limits)

    async def fetch(
        self, url: str, *, accept: str, max_bytes: int, name: str, field: str, turns: FetchTurns | None = None
    ) -> bytes:
        """The bytes behind an http(s) URL.

        Args:
            turns: those of its request; None where it is the only one.
            accept: media types for the Accept header.
            name: how errors call it.

        Raises:
            RequestError: not a URL we fetch.
            ImageError, ImageTooLarge: it could not be fetched.
            QueueFull: others kept it waiting for all its time.
        """
        target = parse_target(url, field)
        async with (turns or self.turns()).of(target.host):
            return await self._timed(target, accept, max_bytes, name)

    async def _timed(self, target: FetchTarget, accept: str, max_bytes: int, name: str) -> bytes:
        started = False
        try:
            async with asyncio.timeout(self._limits.total_s), self._slots:
                started = True
                return await self._follow(target, accept, max_bytes, name)
        except TimeoutError:
            if not started:
                raise QueueFull("too many pictures are being fetched; try again shortly") from None
            raise ImageError(
                f"{name} could not be fetched: {target.host} took longer than {self._limits.total_s:g} s; "
                "send it as a data URL"
            ) from None

    def close(self) -> None:
        """Stop the threads for look-ups."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _follow(self, target: FetchTarget, accept: str, max_bytes: int, name: str) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            self._check_domain(target, name)
            addresses = await self._addresses(target, name)
            slot = self._per_address.setdefault(addresses[0], asyncio.Semaphore(self._limits.per_address))
            async with slot, self._request(target, addresses, accept, name) as response:
                if response.status not in _REDIRECTS:
                    _check(response, target, name)
                    return await _read(response, max_bytes, name)
                location = _header(response, b"location")
            target = _redirect_target(target, location, name)
        raise ImageError(
            f"{name} could not be fetched: more than {self._limits.max_redirects} redirects; "
            "give the address where they end"
        )

    def _check_domain(self, target: FetchTarget, name: str) -> None:
        """Raise ImageError for a host that the operator didn't list, before anything is looked up."""
        if self._domains is None or f".{target.host}".endswith(tuple(f".{each}" for each in self._domains)):
            return
        listed = ", ".join(self._domains)
        where = f"fetches from {listed} alone" if listed else "fetches nothing from URLs"
        raise ImageError(
            f"{name} could not be fetched: this server {where} (--allowed-media-domains), not from "
            f"{target.host}; send the picture as a data URL"
        )

    async def _addresses(self, target: FetchTarget, name: str) -> list[Address]:
        """The addresses to connect to; all those of the name were checked."""
        hidden = ImageError(
            f"{name} could not be fetched: {target.host} is not the name or address of a public host; "
            "send the picture as a data URL, or start the server with --allow-private-media"
        )
        if target.literal is not None:
            found: Sequence[Address] = [target.literal]
        else:
            loop = asyncio.get_running_loop()
            try:
                texts = await loop.run_in_executor(self._threads, self._resolver, target.host, target.port)
                found = [ip_address(text) for text in texts]
            except (OSError, ValueError):  # unknown name; an address with a scope is never public
                raise hidden from None
        if not found or not all(self._allowed(address) for address in found):
            raise hidden
        return list(found[:_MAX_ADDRESSES])

    @asynccontextmanager
    async def _request(
        self, target: FetchTarget, addresses: Iterable[Address], accept: str, name: str
    ) -> AsyncIterator[httpcore2.Response]:
        if self._tls is None and target.scheme == "https":
            self._tls = await asyncio.to_thread(httpcore2.default_ssl_context)
        limits = self._limits
        timeout = {"connect": limits.connect_s, "read": limits.read_s, "write": limits.read_s}
        url = httpcore2.URL(
            scheme=target.scheme.encode(),
            host=target.host.encode(),
            port=target.port,
            target=target.path.encode(),
        )
        headers = [
            ("Host", target.authority),
            ("User-Agent", "snugvl"),
            ("Accept", accept),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._tls, max_connections=1, network_backend=_Pinned(addresses)
        )
        try:
            async with (
                pool,
                pool.stream("GET", url, headers=headers, extensions={"timeout": timeout}) as response,
            ):
                yield response
        except httpcore2.TimeoutException:
            raise ImageError(
                f"{name} could not be fetched: {target.host} doesn't answer; send it as a data URL"
            ) from None
        except httpcore2.ConnectError:
            raise ImageError(
                f"{name} could not be fetched: no {target.scheme} connection to {target.host} "
                "(refused, unreachable, or an invalid certificate); check the address"
            ) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError):
            raise ImageError(
                f"{name} could not be fetched: {target.host} broke off or doesn't speak HTTP; "
                "send it as a data URL"
            ) from None


class _Pinned(httpcore2.AsyncNetworkBackend):
    """Connects to the addresses that were checked, whatever name it is given: no second look-up."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._addresses = tuple(addresses)
        self._backend = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: httpcore2.ConnectError | httpcore2.ConnectTimeout | None = None
        for address in self._addresses:
            try:
                return await self._backend.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure


def _header(response: httpcore2.Response, name: bytes) -> str | None:
    values = [value for key, value in response.headers if key.lower() == name]
    return values[0].decode("latin-1").strip() if values else None


def _check(response: httpcore2.Response, target: FetchTarget, name: str) -> None:
    if response.status != 200:
        raise ImageError(
            f"{name} could not be fetched: {target.host} answered {response.status}; "
            "check that the URL opens without signing in"
        )
    encoding = (_header(response, b"content-encoding") or "identity").lower()
    if encoding != "identity":
        raise ImageError(
            f"{name} could not be fetched: {target.host} sent it compressed, though asked not to; "
            "send it as a data URL"
        )


async def _read(response: httpcore2.Response, max_bytes: int, name: str) -> bytes:
    length = _header(response, b"content-length") or ""
    announced = int(length[:18]) if length.isdecimal() else 0
    if announced > max_bytes:
        raise ImageTooLarge(f"{name} has {announced:,} bytes, the limit is {max_bytes:,}; use a smaller one")
    data = bytearray()
    async for chunk in response.aiter_stream():
        data += chunk
        if len(data) > max_bytes:
            raise ImageTooLarge(f"{name} has more than {max_bytes:,} bytes, the limit; use a smaller one")
    return bytes(data)


def _redirect_target(target: FetchTarget, location: str | None, name: str) -> FetchTarget:
    """Where a redirect leads. Its Location is another's text: not quoted."""
    bad = ImageError(
        f"{name} could not be fetched: {target.host} redirects to something that is not a proper "
        "http(s) URL; give the address of the picture itself"
    )
    if not location:
        raise bad
    try:
        new = parse_target(urljoin(target.url, location), "")
    except (RequestError, ValueError):
        raise bad from None
    if target.scheme == "https" and new.scheme == "http":
        raise ImageError(
            f"{name} could not be fetched: {target.host} redirects from https to http; give an https address"
        )
    return new
