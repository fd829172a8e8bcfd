"""Every hostile input of the corpus gets its exact answer, and what is harmless works."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from ipaddress import ip_address

import pytest

from snugvl.inputs.image import ImageLimits
from snugvl.server.media.fetch import Address, Fetcher, FetchLimits, is_foreign
from snugvl.server.media.loading import MediaSettings
from tests.patience import PATIENCE_S
from tests.server.media import corpus
from tests.server.media.corpus import Case
from tests.server.media.single import Loader
from tests.server.media.standin import StandIn, standing_in

try:
    import uvloop
except ImportError:  # Windows
    uvloop = None

STAND_IN = ip_address("127.0.0.1")


def lookup(host: str, _: int) -> Sequence[str]:
    """What the names of the corpus resolve to; `pictures.test` is the stand-in."""
    if host == "pictures.test":
        return [str(STAND_IN)]
    if host not in corpus.NAMES:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return corpus.NAMES[host]


def stand_in_or_foreign(address: Address) -> bool:
    return address == STAND_IN or is_foreign(address)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """With the server's own event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as loop:
        yield loop


@pytest.fixture(scope="module")
def intake(runner: asyncio.Runner) -> Iterator[Loader]:
    """With default settings and policy; only names are the tests' own."""
    made = Loader(fetcher=Fetcher(resolver=lookup))
    yield made
    runner.run(made.close())


@pytest.fixture(scope="module")
def fetching(runner: asyncio.Runner) -> Iterator[Loader]:
    """With small limits, and allowed to reach the stand-in."""
    yield from fetches(FetchLimits(PATIENCE_S, PATIENCE_S, PATIENCE_S), runner)


# For servers that are slow on purpose, one limit each; any other may be slow on a busy machine.
@pytest.fixture(scope="module")
def in_a_second(runner: asyncio.Runner) -> Iterator[Loader]:
    """As `fetching`, in a second altogether."""
    yield from fetches(FetchLimits(1.0, PATIENCE_S, PATIENCE_S), runner)


@pytest.fixture(scope="module")
def never_silent(runner: asyncio.Runner) -> Iterator[Loader]:
    """As `fetching`, with half a second between two pieces."""
    yield from fetches(FetchLimits(PATIENCE_S, PATIENCE_S, read_s=0.5), runner)


def fetches(limits: FetchLimits, runner: asyncio.Runner) -> Iterator[Loader]:
    fetcher = Fetcher(limits, resolver=lookup, allowed=stand_in_or_foreign)
    settings = replace(MediaSettings(), image=ImageLimits(200_000, 1_000_000))
    made = Loader(settings, fetcher=fetcher)
    runner.run(made.warm())
    yield made
    runner.run(made.close())


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with standing_in() as made:
        yield made


def cases(table: Sequence[Case]) -> Sequence[object]:
    return [pytest.param(case, id=case.id) for case in table]


@asynccontextmanager
async def answer_of(case: Case) -> AsyncIterator[None]:
    """Passes when the block ends as the corpus says."""
    if case.error is None:
        yield
        return
    with pytest.raises(case.error) as caught:
        yield
    assert type(caught.value) is case.error
    if case.sentence.startswith("*"):  # Pillow's own words follow
        assert case.sentence[1:] in str(caught.value)
    else:
        assert str(caught.value) == case.sentence
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("case", cases((*corpus.URLS, *corpus.HARMLESS_URLS)))
def test_urls(case: Case, intake: Loader, runner: asyncio.Runner) -> None:
    async def run() -> None:
        assert isinstance(case.value, str)
        async with answer_of(case):
            assert (await intake.picture(case.value, field="url")).image.size == (8, 6)

    runner.run(run())


@pytest.mark.parametrize("case", cases((*corpus.FILES, *corpus.HARMLESS_FILES)))
def test_files(case: Case, intake: Loader, runner: asyncio.Runner) -> None:
    async def run() -> None:
        data = case.value() if callable(case.value) else case.value  # type: ignore[call-arg]
        assert isinstance(data, bytes)
        async with answer_of(case):
            assert (await intake.picture_bytes(data, field="url")).image.size == (8, 6)

    runner.run(run())


@pytest.mark.parametrize("case", cases((*corpus.SERVERS, *corpus.HARMLESS_SERVERS)))
def test_servers(
    case: Case,
    fetching: Loader,
    in_a_second: Loader,
    never_silent: Loader,
    server: StandIn,
    runner: asyncio.Runner,
) -> None:
    assert not isinstance(case.value, str)
    server.replies["/case"] = case.value  # type: ignore[assignment]

    async def run() -> None:
        async with answer_of(case):
            url = f"http://pictures.test:{server.port}/case"
            slow = {"took longer": in_a_second, "doesn't answer": never_silent}
            through = next((slow[words] for words in slow if words in case.sentence), fetching)
            assert (await through.picture(url, field="url")).image.size == (8, 6)

    runner.run(run())


def test_the_corpus_is_large_and_has_no_doubles() -> None:
    hostile = (*corpus.URLS, *corpus.FILES, *corpus.SERVERS)
    assert len(hostile) >= 60
    for table in (corpus.URLS, corpus.FILES, corpus.SERVERS):
        assert len({case.id for case in table}) == len(table)


def test_one_text_for_all_that_is_not_public(intake: Loader, runner: asyncio.Runner) -> None:
    """Whether a name exists inside, and what listens there, can't be told from the answer."""

    async def message(host: str) -> str:
        with pytest.raises(Exception) as caught:
            await intake.picture(f"http://{host}/", field="url")
        return str(caught.value).replace(host, "HOST")

    async def run() -> set[str]:
        return {await message(host) for host in ("intranet", "unknown.test", "10.0.0.1", "localhost")}

    assert len(runner.run(run())) == 1
