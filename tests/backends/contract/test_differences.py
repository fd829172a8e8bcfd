"""Each backend differs where the table says, and the documentation has the table."""

from pathlib import Path

import pytest
from PIL import Image

from snugvl.core.messages import Picture, Request, Video, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from tests.backends.contract import differences
from tests.backends.contract.engines import Running, until
from tests.backends.contract.requests import asked, picture, texts

PAGE = Path(__file__).parents[3] / "docs" / "backends.md"
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def test_the_documentation_has_the_table() -> None:
    assert differences.table() in PAGE.read_text(encoding="utf-8")


def test_a_seed_means_the_same_where_the_sampler_is_the_same(running: Running, reference: Running) -> None:
    request = asked(n=2, temperature=1.0, seed=5)
    equal = texts(running.ask(request)) == texts(reference.ask(request))
    assert equal == (running.name in differences.SAME_SAMPLER)


def test_prompts_that_begin_alike(running: Running) -> None:
    def hits() -> int:
        snapshot = running.service.snapshot
        assert snapshot is not None
        return snapshot.load.prefix_hit_tokens

    request = asked("A red circle, two blue squares. " * 24, max_tokens=3)
    running.ask(request)
    running.idle()
    before = hits()
    running.ask(request)
    running.idle()
    if running.name in differences.PREFIX_CACHE:
        running.run(until(lambda: hits() > before))  # a snapshot may be half a second old
    assert (hits() > before) == (running.name in differences.PREFIX_CACHE)


def test_memory_of_conversations(running: Running) -> None:
    running.idle()
    snapshot = running.service.snapshot
    assert snapshot is not None
    row = snapshot.ledger.row("KV cache")
    assert row is not None
    assert bool(row.measured_bytes) == (running.name in differences.FIXED_MEMORY)


def test_pictures_with_limits_of_their_own(running: Running, reference: Running) -> None:
    two = Request((user(Picture(picture((256, 256))), Picture(picture((256, 256)), 64 * 64), "?"),), SHORT)
    large, small = (
        asked(Picture(picture((256, 256)), limit), "?", max_tokens=3) for limit in (None, 64 * 64)
    )

    def image_tokens(request: Request) -> int:
        usage = running.ask(request)[-1].usage
        assert usage is not None
        return usage.image_tokens

    each = image_tokens(large) + image_tokens(small)
    expected = each if running.name in differences.OWN_LIMITS else 2 * image_tokens(small)
    assert image_tokens(two) == expected


def test_videos(running: Running) -> None:
    frames = tuple(Image.new("RGB", (64, 64), color) for color in ("red", "blue"))
    request = Request((user(Video(frames, (0.0, 0.5)), "What happens?"),), SHORT)
    assert running.capabilities.video or running.name != "native"
    if running.capabilities.video:
        assert texts(running.ask(request))
        return
    with pytest.raises(RequestError, match="video"):
        running.ask(request)
