"""The ledger, live: as a picture, in figures, and what the page says of the engine's state."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.service import Health, Load, Snapshot
from tests.server.fake import CAPABILITIES, FakeService
from tests.server.live import live
from tests.server.page.conftest import OpenPage, Serve, answers, ask, choose, until_the_speed_rose

MIB = 1024 * 1024
GIB = 1024 * MIB
LEDGER = Ledger(
    "NVIDIA GeForce RTX 5060",
    (
        LedgerRow("text weights", 4 * GIB, 4 * GIB, kind=Kind.TEXT),
        LedgerRow("KV cache", 1 * GIB, 1 * GIB, 256 * MIB, kind=Kind.CACHE),
        LedgerRow("vision workspace", 512 * MIB, 384 * MIB, kind=Kind.WORKSPACE),
        LedgerRow("CUDA graphs", 64 * MIB, None, kind=Kind.GRAPHS),
    ),
    total_bytes=8 * GIB,
    free_bytes=1 * GIB,
    process_bytes=6 * GIB,
    cap_bytes=6 * GIB + 512 * MIB,
)
LOAD = Load(running=2, waiting=3, free_blocks=96, num_blocks=128, block_size=16, generated_tokens=1000)


@dataclass
class Measured(FakeService):
    """Says what the test wants about memory; `rate`: tokens per second."""

    ledger: Ledger = LEDGER
    load: Load = LOAD
    rate: float = 0.0
    known: bool = True
    started: float = field(default_factory=time.time)

    @property
    def snapshot(self) -> Snapshot | None:
        now = time.time()
        tokens = self.load.generated_tokens + int(self.rate * (now - self.started))
        return Snapshot(now, self.ledger, replace(self.load, generated_tokens=tokens)) if self.known else None


def shares(page: Page, bar: str) -> dict[str, float]:
    """What part of a bar each kind of segment takes; in one look, since the page draws it anew."""
    found: dict[str, float] = page.locator(f"#{bar}").evaluate(
        """bar => Object.fromEntries([...bar.querySelectorAll(".segment")].map(each => [
            each.className.replace("segment ", ""),
            each.getBoundingClientRect().width / bar.getBoundingClientRect().width,
        ]))"""
    )
    return found


def table(page: Page) -> list[list[str]]:
    rows = page.locator("#ledger tr, #ledger-foot tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


@pytest.fixture(scope="module")
def measured(open_once: OpenPage) -> Iterator[Page]:
    """A page for tests that only look at it."""
    with live(Measured(rate=5000)) as url:
        page = open_once(url)
        yield page
        page.close()  # before its server ends, which it would ask in vain


def test_planned_beside_measured(measured: Page) -> None:
    expect(measured.locator("#ledger")).to_contain_text("KV cache")
    assert table(measured) == [
        ["text weights", "4.00 GiB", "4.00 GiB", "–"],
        ["KV cache", "1.00 GiB", "1.00 GiB", "256 MiB"],
        ["vision workspace", "512 MiB", "384 MiB", "–"],
        ["CUDA graphs", "64.0 MiB", "–", "–"],
        ["everything else", "–", "640 MiB", "–"],
        ["All in the plan", "5.56 GiB", "5.38 GiB", "–"],
        ["Whole process", "–", "6.00 GiB", "–"],
    ]


def test_what_takes_more_than_planned_is_explained(serve: Serve, open_page: OpenPage) -> None:
    service = Measured()
    page = open_page(serve(service))
    expect(page.locator("#ledger")).to_contain_text("KV cache")
    expect(page.locator("#beyond")).to_be_hidden()
    service.ledger = replace(
        LEDGER, rows=(*LEDGER.rows[:2], LedgerRow("workspace", 38 * MIB, 180 * MIB, kind=Kind.WORKSPACE))
    )
    expect(page.locator("#beyond")).to_contain_text("More than planned (workspace: 142 MiB).")


def test_the_bars_are_to_scale(measured: Page) -> None:
    page = measured
    expect(page.locator("#device")).to_have_text("NVIDIA GeForce RTX 5060")
    device = {"own": 6 / 8, "others": 1 / 8, "free": 1 / 8}
    assert shares(page, "device-bar") == pytest.approx(device, abs=0.01)
    process = {
        "weights": 4 / 6,
        "kv": 0.25 / 6,
        "kv unused": 0.75 / 6,
        "workspace": 0.375 / 6,
        "rest": 0.625 / 6,
    }
    assert shares(page, "process-bar") == pytest.approx(process, abs=0.01)
    expect(page.locator("#device-legend")).to_contain_text("Never more than 6.50 GiB")
    label = page.locator("#process-bar").get_attribute("aria-label")
    assert label is not None
    assert "KV cache 1.00 GiB with 256 MiB in use" in label


def test_load_and_speed(measured: Page) -> None:
    page = measured
    expect(page.locator("#running")).to_have_text("2")
    expect(page.locator("#waiting")).to_have_text("3")
    expect(page.locator("#kv-use")).to_have_text("25 %")
    expect(page.locator("#speed")).to_have_text(re.compile(r"^(4,9|5,0)\d\d$"))


def test_the_ledger_moves(serve: Serve, open_page: OpenPage) -> None:
    service = Measured()
    page = open_page(serve(service))
    expect(page.locator("#ledger")).to_contain_text("256 MiB")
    before = shares(page, "process-bar")
    kv = replace(LEDGER.rows[1], used_bytes=768 * MIB)
    service.ledger = replace(LEDGER, rows=(LEDGER.rows[0], kv, *LEDGER.rows[2:]), free_bytes=512 * MIB)
    expect(page.locator("#drafts")).to_be_hidden()
    drafts = {"draft_method": "ngram", "drafted_tokens": 8, "accepted_tokens": 6}
    service.load = replace(LOAD, free_blocks=32, running=5, **drafts)
    expect(page.locator("#ledger")).to_contain_text("768 MiB")
    expect(page.locator("#kv-use")).to_have_text("75 %")
    expect(page.locator("#running")).to_have_text("5")
    expect(page.locator("#drafts-accepted")).to_have_text("75 % (ngram)")
    assert shares(page, "process-bar")["kv"] == pytest.approx(3 * before["kv"], abs=0.01)
    assert shares(page, "device-bar")["others"] == pytest.approx(1.5 / 8, abs=0.01)


@pytest.mark.extended
def test_pockets_own_ledger_moves_with_a_question(url: str, open_page: OpenPage, shapes: Path) -> None:
    page = open_page(url)
    choose(page, shapes)
    before = httpx.get(f"{url}/memory").json()["load"]["generated_tokens"]
    expect(page.locator("#ledger")).to_contain_text("weights")
    ask(page, "What color is the circle?")
    expect(answers(page)).to_have_count(1)
    until_the_speed_rose(page)
    assert httpx.get(f"{url}/memory").json()["load"]["generated_tokens"] > before


def test_an_engine_that_starts(serve: Serve, open_page: OpenPage) -> None:
    service = Measured(known=False, capabilities=None)
    service.health = Health("starting", "loading the weights: 3 of 8 GiB", progress=0.4, retry_after_s=5)
    page = open_page(serve(service))
    expect(page.locator("#state")).to_have_text("starting")
    expect(page.locator("#banner-text")).to_have_text("loading the weights: 3 of 8 GiB")
    assert page.get_by_role("progressbar").get_attribute("value") == "0.4"
    expect(page.locator("#speed")).to_have_text("–")
    expect(page.locator("#model-facts")).to_be_empty()
    service.known, service.health = True, Health("ready", "ready")
    service.capabilities = CAPABILITIES
    expect(page.locator("#model-facts")).to_have_text("512 tokens of context")
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#running")).to_have_text("2")


def test_an_engine_that_came_back_or_gave_up(serve: Serve, open_page: OpenPage) -> None:
    service = Measured()
    page = open_page(serve(service))
    expect(page.locator("#running")).to_have_text("2")
    service.health = Health("restarting", "the engine crashed; loading it again")
    expect(page.locator("#banner-text")).to_have_text("the engine crashed; loading it again")
    service.known = False  # its memory went with it
    expect(page.locator("#running")).to_have_text("–")
    expect(page.locator("#memory-title")).to_have_text("Memory, as last known")
    service.known, service.health = True, Health("ready", "ready", restarts=1)
    expect(page.locator("#memory-title")).to_have_text("Memory")
    expect(page.locator("#engine-detail")).to_contain_text("came back 1 time since")
    service.health = Health("failed", "three crashes in a row: out of memory")
    expect(page.locator("#state")).to_have_text("failed")
    expect(page.locator("#banner-text")).to_have_text("three crashes in a row: out of memory")
