"""Downloads: only what is needed, continued, verified, and refused before they start."""

import json
import shutil
import time
from collections import namedtuple
from pathlib import Path

import pytest

from snugvl.checkpoint.download import pull
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.hub import HubUnreachable
from snugvl.checkpoint.locate import complete, locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.folders import hub_cache
from snugvl.errors import CheckpointError, CheckpointNotFound, DoesNotFit, UnsupportedModel
from tests.checkpoint.hub_server import COMMIT, FakeHub, Handler

REPO = "org/small"
WEIGHTS = "model.safetensors"
IMAGES = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65536}}


@pytest.fixture
def small(hub: FakeHub, tiny: Path) -> FakeHub:
    hub.add(REPO, tiny)
    hub.repos[REPO] |= {
        "preprocessor_config.json": json.dumps(IMAGES).encode(),
        "chat_template.jinja": b"{{ messages }}",
        "merges.txt": b"a b",
        "pytorch_model.bin": bytes(1000),
        "README.md": b"# small",
        "consolidated.safetensors": bytes(1000),
        "original/model.safetensors": bytes(1000),
    }
    return hub


class Count:
    """Adds up what it is told."""

    total = done = 0

    def start(self, label: str, total_bytes: int) -> None:
        self.total = total_bytes

    def advance(self, count_bytes: int) -> None:
        self.done += count_bytes


def test_only_what_is_needed_comes_and_the_model_is_found_afterwards(small: FakeHub) -> None:
    count = Count()
    done = pull(REPO, watch=count)
    names = {path.name for path in done.folder.iterdir()}
    assert names == {"config.json", WEIGHTS, "preprocessor_config.json", "chat_template.jinja", "merges.txt"}
    assert (done.folder / WEIGHTS).read_bytes() == small.repos[REPO][WEIGHTS]
    assert locate(REPO) == done.folder
    facts = facts_of(REPO, offline=True)
    assert (facts.source, facts.revision) == ("hub cache", COMMIT)
    assert done.total_bytes == facts.download_bytes
    assert count.done == count.total == len(small.repos[REPO][WEIGHTS])
    leftovers = [p.name for p in (done.folder.parents[1] / "blobs").iterdir() if "part" in p.name]
    assert leftovers == []


def test_a_second_pull_fetches_nothing(small: FakeHub) -> None:
    pull(REPO)
    sent = small.bytes_of(WEIGHTS)
    done = pull(REPO)
    assert done.fetched_bytes == 0 or done.fetched_bytes < 10_000  # small files are not counted as there
    assert small.bytes_of(WEIGHTS) == sent


def test_a_broken_connection_is_continued_by_itself(small: FakeHub) -> None:
    small.cut[WEIGHTS] = 100_000
    done = pull(REPO)
    assert (done.folder / WEIGHTS).read_bytes() == small.repos[REPO][WEIGHTS]
    assert small.bytes_of(WEIGHTS) == len(small.repos[REPO][WEIGHTS])


def test_an_interrupted_download_is_continued_by_the_next_command(small: FakeHub) -> None:
    """The connection breaks and the Hub is gone: what came is kept, and only the rest is fetched later."""
    size = len(small.repos[REPO][WEIGHTS])
    small.cut[WEIGHTS] = 100_000

    def gone(handler: Handler) -> bool:
        if small.bytes_of(WEIGHTS) < 100_000:
            return False
        handler.reply(503, b"")
        return True

    small.fault = gone
    with pytest.raises(HubUnreachable, match="the part that came is kept, run the same command to continue"):
        pull(REPO)
    with pytest.raises(CheckpointNotFound, match=r"snugvl pull org/small"):
        locate(REPO)
    small.fault = None
    before = small.bytes_of(WEIGHTS)
    assert before >= 100_000
    done = pull(REPO)
    assert (done.folder / WEIGHTS).read_bytes() == small.repos[REPO][WEIGHTS]
    assert small.bytes_of(WEIGHTS) - before == size - before
    last = [seen for seen in small.seen if seen.path.endswith(WEIGHTS) and seen.sent][-1]
    assert last.headers["Range"] == f"bytes={before}-"


def test_when_one_file_fails_the_others_stop_and_keep_what_came(hub: FakeHub, tiny_untied: Path) -> None:
    """The same way as Ctrl+C: nobody waits for gigabytes that nobody will use now."""
    hub.add(REPO, tiny_untied)
    slow, bad = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
    size = 20_000_000
    hub.repos[REPO][slow] = bytes(size)

    def fault(handler: Handler) -> bool:
        if not handler.path.startswith("/cdn"):
            return False
        if handler.path.endswith(bad):
            while hub.bytes_of(slow) < 100_000:
                time.sleep(0.01)
            handler.reply(404, b"")
            return True
        if handler.path.endswith(slow):
            handler.drip(bytes(size), seconds=300.0)
            return True
        return False

    hub.fault = fault
    with pytest.raises(CheckpointError, match=r"not on the Hub|status 404"):
        pull(REPO)
    assert hub.bytes_of(slow) < size
    kept = [path.stat().st_size for path in hub_cache().rglob("*.part")]
    assert len(kept) == 1
    assert 0 < kept[0] < size


def test_a_server_that_ignores_ranges_costs_time_and_nothing_that_came(small: FakeHub) -> None:
    small.cut[WEIGHTS] = 100_000
    small.ignore_ranges = True
    count = Count()
    done = pull(REPO, watch=count)
    assert (done.folder / WEIGHTS).read_bytes() == small.repos[REPO][WEIGHTS]
    assert count.done == count.total


def test_a_corrupted_file_is_found_thrown_away_and_fetched_again(small: FakeHub) -> None:
    right = small.repos[REPO][WEIGHTS]
    small.wrong_content[WEIGHTS] = right[:-1] + bytes([right[-1] ^ 1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt .* was thrown away; run"):
        pull(REPO)
    small.wrong_content.clear()
    done = pull(REPO)
    blob = (done.folder / WEIGHTS).resolve()
    blob.write_bytes(right[:-1])  # the disk lost a byte
    assert (pull(REPO).folder / WEIGHTS).read_bytes() == right


def test_too_long_a_file_is_refused(small: FakeHub) -> None:
    small.wrong_content[WEIGHTS] = small.repos[REPO][WEIGHTS] + b"more"
    with pytest.raises(CheckpointError, match="is longer than"):
        pull(REPO)


def test_a_full_disk_is_refused_before_a_byte_unless_forced(
    small: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 2**28))
    with pytest.raises(DoesNotFit, match=r"org/small needs .* GiB more .* has 0\.25 GiB free .*--force"):
        pull(REPO)
    assert small.bytes_of(WEIGHTS) == 0
    assert pull(REPO, force=True).folder.is_dir()


def test_a_disk_that_fills_up_meanwhile_is_one_line(small: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("snugvl.checkpoint.hub.Hub.pieces", full)
    with pytest.raises(
        DoesNotFit, match="the disk is full while downloading org/small; the part that came is kept"
    ):
        pull(REPO)


def test_what_the_plan_refuses_is_not_downloaded_unless_forced(small: FakeHub) -> None:
    asked: list[ModelFacts] = []

    def fits(facts: ModelFacts) -> str | None:
        asked.append(facts)
        return "2.1 GiB too much"

    with pytest.raises(DoesNotFit, match=r"2.1 GiB too much; --force downloads it all the same"):
        pull(REPO, fits=fits)
    assert asked[0].family == "qwen3_vl"
    assert small.bytes_of(WEIGHTS) <= 100_000  # its header
    assert pull(REPO, fits=lambda facts: None).folder.is_dir()


def test_private_offline_and_nonsense(small: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointNotFound, match="is not a Hub id"):
        pull("nonsense")
    small.private.add(REPO)
    with pytest.raises(CheckpointNotFound, match=r"or it is private.*HF_TOKEN"):
        pull(REPO)
    monkeypatch.setenv("HF_TOKEN", small.token)
    assert pull(REPO).folder.is_dir()
    del small.repos[REPO][WEIGHTS], small.repos[REPO]["consolidated.safetensors"]
    with pytest.raises(UnsupportedModel, match="no safetensors weights"):
        pull(REPO)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachable, match="can't be reached"):
        pull(REPO)


def test_a_revision_is_pulled_without_touching_main(small: FakeHub) -> None:
    done = pull(REPO, revision=COMMIT)
    assert done.commit == COMMIT
    with pytest.raises(CheckpointNotFound):
        locate(REPO)
    assert complete(done.folder)
    with pytest.raises(CheckpointNotFound, match="no such revision"):
        pull(REPO, revision="nope")
