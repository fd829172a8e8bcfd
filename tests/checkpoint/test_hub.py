"""Asking the Hub: headers only, cached by commit, and every way to fail is one line."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
import pytest

from snugvl.checkpoint.hub import Hub, HubRefused, HubUnreachable
from snugvl.checkpoint.read import facts_of
from snugvl.core.folders import cache_folder
from snugvl.errors import CheckpointError, CheckpointNotFound, SnugvlError, UnsupportedModel
from tests.checkpoint.hub_server import COMMIT, FakeHub, Handler
from tests.socks import socks

REPO = "org/small"
IMAGES = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65536}}


@pytest.fixture
def small(hub: FakeHub, tiny: Path) -> FakeHub:
    """The stand-in with one checkpoint, whose weights are larger than what is asked of them at once."""
    hub.add(REPO, tiny)
    hub.repos[REPO]["preprocessor_config.json"] = json.dumps(IMAGES).encode()
    hub.repos[REPO]["pytorch_model.bin"] = bytes(100)
    return hub


def test_headers_are_read_by_ranges_and_equal_those_of_the_folder(small: FakeHub, tiny: Path) -> None:
    facts = facts_of(REPO)
    (folder := Path(tiny.parent / "whole")).mkdir(exist_ok=True)
    for name, data in small.repos[REPO].items():
        (folder / name).write_bytes(data)
    local = facts_of(str(folder))
    assert facts.tensors == local.tensors
    assert (facts.text, facts.vision, facts.tied) == (local.text, local.vision, local.tied)
    assert facts.source == "hub"
    assert facts.revision == COMMIT
    weights = len(small.repos[REPO]["model.safetensors"])
    assert small.bytes_of(".safetensors") <= 100_000 < weights
    assert not any(seen.path.endswith(".bin") for seen in small.seen)
    assert facts.download_bytes == sum(
        len(data) for name, data in small.repos[REPO].items() if not name.endswith(".bin")
    )


def test_what_was_asked_once_works_offline_and_is_not_asked_again(
    small: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = facts_of(REPO)
    asked = len(small.seen)
    assert facts_of(REPO) == first
    assert facts_of(REPO, offline=True) == first
    assert len(small.seen) == asked
    monkeypatch.setattr("snugvl.checkpoint.read.FRESH_SECONDS", 0)  # a day later
    assert facts_of(REPO) == first
    assert len(small.seen) > asked
    small.fault = lambda handler: handler.reply(503, b"") or True  # a day later, and the Hub is down
    assert facts_of(REPO) == first


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"tensors": [[1]], "config": {}}'])
def test_a_broken_cache_counts_as_none(small: FakeHub, broken: bytes) -> None:
    first = facts_of(REPO)
    (kept,) = (cache_folder() / "headers").iterdir()
    kept.write_bytes(broken)
    assert facts_of(REPO) == first


def test_a_long_header_takes_a_second_range(small: FakeHub) -> None:
    raw = small.repos[REPO]["model.safetensors"]
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length] + b" " * 250_000
    small.repos[REPO]["model.safetensors"] = struct.pack("<Q", len(header)) + header + raw[8 + length :]
    assert facts_of(REPO).elements > 0
    ranges = [seen.headers["Range"] for seen in small.seen if seen.path.startswith("/cdn")]
    assert ranges == ["bytes=0-99999", f"bytes=100000-{7 + len(header)}"]


def test_the_token_goes_to_the_hub_and_not_to_the_host_it_redirects_to(
    small: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.private.add(REPO)
    with pytest.raises(
        CheckpointNotFound, match=r"no model org/small on the Hub, or it is private.*HF_TOKEN"
    ):
        facts_of(REPO)
    monkeypatch.setenv("HF_TOKEN", small.token)
    assert facts_of(REPO).source == "hub"
    cdn = [seen for seen in small.seen if seen.path.startswith("/cdn")]
    assert cdn
    assert all("Authorization" not in seen.headers for seen in cdn)


def test_a_gated_model_says_what_to_do_and_one_of_the_catalogue_is_planned_all_the_same(
    small: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.gated.add(REPO)
    with pytest.raises(HubRefused, match=r"gated: accept its licence.*HF_TOKEN"):
        facts_of(REPO)
    known = "google/gemma-3-4b-it"
    small.repos[known] = small.repos[REPO]
    small.gated.add(known)
    assert facts_of(known).source == "catalogue"
    monkeypatch.setenv("HF_TOKEN", small.token)
    assert facts_of(REPO).source == "hub"


def test_a_revision_is_found_or_named(small: FakeHub) -> None:
    assert Hub().listing(REPO, COMMIT).commit == COMMIT
    with pytest.raises(CheckpointNotFound, match="org/small has no such revision"):
        Hub().listing(REPO, "no-such-branch")


def test_no_such_model(hub: FakeHub) -> None:
    with pytest.raises(CheckpointNotFound, match="no model org/none on the Hub"):
        facts_of("org/none")


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (403, HubRefused, r"refuses \(403\).*HF_TOKEN"),
        (429, HubUnreachable, r"too many requests.*try again in 7 s"),
        (500, HubUnreachable, r"has a problem \(500\)"),
        (503, HubUnreachable, r"has a problem \(503\)"),
        (418, CheckpointError, "status 418"),
    ],
)
def test_every_status_is_one_line(small: FakeHub, status: int, kind: type[SnugvlError], message: str) -> None:
    small.fault = lambda handler: handler.reply(status, b"{}", {"Retry-After": "7"}) or True
    with pytest.raises(kind, match=message) as caught:
        facts_of(REPO)
    assert "\n" not in str(caught.value)


def test_without_a_network_the_catalogue_answers_and_says_so(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert facts_of("Qwen/Qwen3-VL-4B-Instruct-FP8").source == "catalogue"
    with pytest.raises(HubUnreachable, match=r"org/small: the Hub can't be reached .*; check the network"):
        facts_of(REPO)
    with pytest.raises(CheckpointNotFound, match="neither on this machine nor in the catalogue"):
        facts_of(REPO, offline=True)


@pytest.mark.parametrize("address", ["mirror.example", "http://", "ftp://mirror.example", "https://[::1"])
@pytest.mark.sample("mirror.example", "https://[::1")
def test_an_endpoint_that_is_no_address_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(
        HubUnreachable, match=r"HF_ENDPOINT \(.*\) is not the address of a Hub; write https://"
    ):
        facts_of(REPO)
    assert facts_of("Qwen/Qwen3-VL-4B-Instruct-FP8").source == "catalogue"


def test_a_token_that_can_not_be_sent_is_named(small: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_\u00fc")
    with pytest.raises(HubRefused, match="HF_TOKEN"):
        facts_of(REPO)


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_ETAG_TIMEOUT", "soon"), ("HF_ENDPOINT", "")])
def test_variables_of_the_library_that_it_can_not_read(name: str, value: str) -> None:
    """They are read when it is imported, so a process of its own asks."""
    code = "from snugvl.checkpoint.hub import library; print(library().constants.ENDPOINT)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, name: value}, capture_output=True, text=True
    )
    if value:
        assert f"the environment variable {name} can't be read" in done.stderr.splitlines()[-1]
    else:
        assert done.stdout.startswith("https://")


def test_the_hub_is_reached_through_a_socks_proxy(small: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socks(urlsplit(small.url).port or 0) as (proxy, asked):
        monkeypatch.setenv("ALL_PROXY", f"socks://{proxy}/")  # as desktops write it
        for name in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY"):
            monkeypatch.delenv(name, raising=False)
        huggingface_hub.close_session()  # which knows the proxies of when it was made
        try:
            assert facts_of(REPO).source == "hub"
        finally:
            huggingface_hub.close_session()
    assert asked


def test_a_server_that_ignores_ranges_is_left_at_once(small: FakeHub) -> None:
    small.ignore_ranges = True
    name = "model.safetensors"
    small.repos[REPO][name] += bytes(50_000_000)
    with pytest.raises(CheckpointError, match="ignores range requests"):
        facts_of(REPO)
    assert small.bytes_of(name) < 20_000_000  # what the sockets' buffers took before it was left


def _answer(content: bytes, ending: str) -> "object":
    def fault(handler: Handler) -> bool:
        if not handler.path.partition("?")[0].endswith(ending):
            return False
        handler.reply(200, content)
        return True

    return fault


@pytest.mark.parametrize(
    ("ending", "content", "message"),
    [
        ("small", b"<!DOCTYPE html><html>log in", "is not the Hub's; is a proxy or a login page"),
        ("small", b"[]", "is not the Hub's"),
        ("small", b'{"id": "org/small"}', "is empty on the Hub|is not the Hub's"),
        ("config.json", b"<html>log in", "is not a JSON object.*is a proxy"),
        ("config.json", b"[" * 100_000, "is not a JSON object"),
        ("config.json", b"{}", "names no architecture"),
    ],
)
def test_nonsense_instead_of_an_answer(small: FakeHub, ending: str, content: bytes, message: str) -> None:
    small.fault = _answer(content, ending)  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=message):
        facts_of(REPO)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"status 416|only 0 bytes"),
        (b"\x08\x00", "is only 2 bytes"),
        (struct.pack("<Q", 2**60) + b"{}" * 100, "announces a header of 1,152,921,504,606,846,976 bytes"),
        (b"version https://git-lfs", "announces a header"),
        (struct.pack("<Q", 4) + b"nope", "corrupt header"),
    ],
)
def test_a_header_that_lies_is_refused(small: FakeHub, content: bytes, message: str) -> None:
    small.repos[REPO]["model.safetensors"] = content
    with pytest.raises(CheckpointError, match=message) as caught:
        facts_of(REPO)
    assert "model.safetensors" in str(caught.value)


def test_a_connection_that_ends_early_is_named(small: FakeHub) -> None:
    small.cut["model.safetensors"] = 1000
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: the (connection ended|Hub can't be reached)"
    ):
        facts_of(REPO)


def test_a_slow_server_is_given_up(small: FakeHub) -> None:
    listing = Hub().listing(REPO)
    small.fault = lambda handler: handler.trickle(5.0) or True
    with pytest.raises(HubUnreachable, match=r"the Hub sent .* bytes in 0 s"):
        Hub(deadline=0.1).material(listing)
    small.fault = lambda handler: __import__("time").sleep(0.5) or handler.reply(500, b"") or True
    with pytest.raises(HubUnreachable, match="didn't answer in time"):
        Hub(timeout=0.1).listing(REPO)


def test_a_repository_without_safetensors_or_config_says_so(small: FakeHub) -> None:
    files = small.repos[REPO]
    weights = files.pop("model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"no model\.safetensors; only safetensors"):
        facts_of(REPO)
    files["model.safetensors"] = weights
    del files["config.json"]
    with pytest.raises(CheckpointError, match=r"no config\.json on the Hub"):
        facts_of(REPO)


def test_shards_are_read_together_and_a_missing_one_is_named(hub: FakeHub, tiny_untied: Path) -> None:
    hub.add(REPO, tiny_untied)
    hub.repos[REPO]["preprocessor_config.json"] = json.dumps(IMAGES).encode()
    assert not facts_of(REPO).tied
    hub.repos["org/other"] = dict(hub.repos[REPO])
    del hub.repos["org/other"]["model-00002-of-00003.safetensors"]
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors"):
        facts_of("org/other")
