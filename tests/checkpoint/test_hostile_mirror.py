"""A mirror that lies, over a real connection: refused in one line, and outside the cache nothing changes.

Absolute paths in here are of a folder that no machine has: should a check ever break, such a test must not
delete a file of whoever runs it. What may be deleted is made by `outside`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.download import pull
from snugvl.checkpoint.hub import Hub, HubUnreachable
from snugvl.checkpoint.read import facts_of
from snugvl.core.folders import hub_cache
from snugvl.errors import CheckpointError
from tests.checkpoint.hub_server import COMMIT, FakeHub, Handler

REPO = "org/small"
WEIGHTS = "model.safetensors"
CLIMB = "../../../victim.txt"  # from models--org--small/blobs to beside the cache
OTHER = "f" * 40


@pytest.fixture
def small(hub: FakeHub, tiny: Path) -> FakeHub:
    hub.add(REPO, tiny)
    hub.repos[REPO]["preprocessor_config.json"] = json.dumps(
        {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65536}}
    ).encode()
    return hub


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[None]:
    """A user's files beside the Hub cache, which must all be as they were at the end of the test."""
    for name in ("victim.txt", "victim.txt.part", "victim.json", "a/victim.txt", "a/b/victim.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"the user's own " + name.encode())
    before = _around(tmp_path)
    yield
    assert _around(tmp_path) == before


def _around(root: Path) -> dict[str, object]:
    """Every file, folder and link below `root` but those of the Hub cache, with contents and times."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(root):
        if Path(folder) == root and "hub" in folders:
            folders.remove("hub")
        for name in (*folders, *files):
            path = Path(folder, name)
            content = path.read_bytes() if path.is_file() else None
            found[str(path)] = (path.is_symlink(), content, path.stat().st_mtime_ns if content else 0)
    return found


def blobs() -> Path:
    return hub_cache() / "models--org--small" / "blobs"


def lie(small: FakeHub, change: Callable[[dict[str, Any]], object], *, after: int = 0) -> None:
    """Change the listing; `after` so many true ones."""
    files = small.repos[REPO]
    asked = [0]

    def fault(handler: Handler) -> bool:
        if "/api/models/" not in handler.path or "/tree/" in handler.path:
            return False
        asked[0] += 1
        if asked[0] <= after:
            return False
        siblings = [_sibling(name, data) for name, data in files.items()]
        info = {"id": REPO, "sha": COMMIT, "siblings": siblings}
        change(info)
        handler.reply(200, json.dumps(info).encode())
        return True

    small.fault = fault


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    blob_id = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    known: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob_id}
    if name.endswith(".safetensors"):
        known["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return known


def weights_of(info: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(file for file in info["siblings"] if file["rfilename"] == WEIGHTS)
    return found


def config_of(info: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(file for file in info["siblings"] if file["rfilename"] == "config.json")
    return found


def refused(message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        pull(REPO)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    "sha256",
    [
        CLIMB, f"{CLIMB}\0", "/no-such-folder/victim.txt", "", "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n",
        "٣" * 64, 7, None, ["a" * 64], {"a": 1}, "a" * 1_000_000,
    ],
)  # fmt: skip
def test_a_hash_that_is_none_is_refused_and_deletes_nothing(small: FakeHub, sha256: object) -> None:
    lie(small, lambda info: weights_of(info)["lfs"].update(sha256=sha256))
    refused("has the sha256")
    assert not hub_cache().exists()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    "commit", [CLIMB, "../../..", "main", "", "A" * 40, COMMIT + "\n", 1, None, [COMMIT]]
)
def test_a_commit_that_is_none_is_refused(small: FakeHub, commit: object) -> None:
    lie(small, lambda info: info.update(sha=commit))
    refused("has the commit")
    assert not hub_cache().exists()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    "name",
    [
        CLIMB, "/no-such-folder/a.txt", "..", "a/../../victim.txt", "a//b.json", "..\\victim.txt", "C:a.txt",
        "a\0.json", "a\n.json", "\x1b[2J.json", "*.json", "[abc].json", "?.txt", "~/x.json/", "", 7, None,
        "a" * 300 + ".json",
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_refused(small: FakeHub, name: object) -> None:
    lie(small, lambda info: config_of(info).update(rfilename=name))
    refused("names the file")
    assert not hub_cache().exists()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("blob_id", [CLIMB, "", 7, "g" * 40, COMMIT + "\n"])
def test_a_blob_id_that_is_none_is_refused(small: FakeHub, blob_id: object) -> None:
    lie(small, lambda info: config_of(info).update(blobId=blob_id))
    refused("has the blob id")


@pytest.mark.parametrize("size", [-1, 2**60, 10**400, 1.5, "8", True, None, [1]])
def test_a_size_that_is_none_is_refused(small: FakeHub, size: object) -> None:
    lie(small, lambda info: weights_of(info).update(size=size))
    refused("has the size|is not the Hub's")


@pytest.mark.parametrize(
    "change",
    [
        lambda info: info.update(siblings={"a": 1}),
        lambda info: info.update(siblings=[7]),
        lambda info: info["siblings"].append({"rfilename": "x.json", "size": 1, "lfs": "yes"}),
        lambda info: info["siblings"].append(dict(info["siblings"][0])),
        lambda info: config_of(info).update(size=10**9),
        lambda info: info.update(siblings=[{"rfilename": f"{n}.json", "size": 1} for n in range(10_000)]),
    ],
)
def test_a_listing_that_is_none_is_refused(
    small: FakeHub, change: Callable[[dict[str, Any]], object]
) -> None:
    lie(small, change)
    refused("is not the Hub's|lists a file twice|no sha256|are fetched at most")


@pytest.mark.usefixtures("outside")
def test_odd_names_that_nobody_fetches_do_no_harm(small: FakeHub) -> None:
    small.repos[REPO] |= {"assets/figure [1].png": b"png", "samples/*.txt": b"a", "Übersicht (neu).pdf": b"b"}
    assert pull(REPO).folder.is_dir()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit", "X-Linked-Size"])
@pytest.mark.parametrize("value", [f'"{CLIMB}"', CLIMB, "../../../a", "/no-such-folder/x", "-1"])
def test_what_answers_say_of_files_becomes_no_path(small: FakeHub, header: str, value: str) -> None:
    """huggingface_hub makes blobs/ETAG and snapshots/X-REPO-COMMIT of them."""

    def fault(handler: Handler) -> bool:
        if not handler.path.endswith("/config.json"):
            return False
        data = small.repos[REPO]["config.json"]
        headers = {"X-Repo-Commit": COMMIT, "ETag": '"1"'} | {header: value}
        handler.reply(200, data, headers)
        return True

    small.fault = fault
    folder = pull(REPO).folder
    assert (folder / "config.json").read_bytes() == small.repos[REPO]["config.json"]
    for path in folder.iterdir():
        assert path.resolve().parent == blobs().resolve()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    "change",
    [
        lambda info: info.update(sha="../../.."),
        lambda info: info.update(sha=OTHER),
        lambda info: config_of(info).update(rfilename=CLIMB),
        lambda info: weights_of(info)["lfs"].update(sha256=CLIMB),
    ],
)
def test_a_second_listing_is_not_asked_for(
    small: FakeHub, change: Callable[[dict[str, Any]], object]
) -> None:
    lie(small, change, after=1)
    assert pull(REPO).commit == COMMIT
    assert sum("/api/models/" in seen.path for seen in small.seen) == 1


@pytest.mark.usefixtures("outside")
def test_another_commit_than_the_one_asked_for_is_refused(small: FakeHub) -> None:
    lie(small, lambda info: info.update(sha=OTHER))
    with pytest.raises(CheckpointError, match=f"asked for the commit {COMMIT}, the answer is of {OTHER}"):
        pull(REPO, revision=COMMIT)


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("revision", ["../../../../victim.txt", "/no-such-folder/a", "a/../../b", "", "a\nb"])
def test_a_revision_that_climbs_is_refused(small: FakeHub, revision: str) -> None:
    with pytest.raises(CheckpointError, match="no such revision"):
        pull(REPO, revision=revision)


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("ending", ["", ".part", ".part.lock"])
@pytest.mark.parametrize("target", ["victim.txt", "a", "nowhere"])
def test_links_in_place_of_contents_are_refused(
    small: FakeHub, tmp_path: Path, ending: str, target: str
) -> None:
    name = hashlib.sha256(small.repos[REPO][WEIGHTS]).hexdigest() + ending
    blobs().mkdir(parents=True)
    (blobs() / name).symlink_to(tmp_path / target)
    refused("nothing was changed: move it away")
    assert (blobs() / name).is_symlink()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("folder", ["blobs", "snapshots", f"snapshots/{COMMIT}", "refs"])
def test_links_in_place_of_folders_are_refused(small: FakeHub, tmp_path: Path, folder: str) -> None:
    path = blobs().parent / folder
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "a")
    refused("is a link; nothing was changed")


@pytest.mark.usefixtures("outside")
def test_another_file_in_a_snapshot_stays(small: FakeHub) -> None:
    path = blobs().parent / "snapshots" / COMMIT / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text("the user's own")
    refused("is not the file that the Hub has there; nothing was changed")
    assert path.read_text() == "the user's own"
    path.write_bytes(small.repos[REPO]["config.json"])  # huggingface_hub copies where links can't be made
    assert pull(REPO).folder == path.parent


@pytest.mark.usefixtures("outside")
def test_a_damaged_content_stays_until_a_whole_one_takes_its_place(small: FakeHub) -> None:
    right = small.repos[REPO][WEIGHTS]
    blob = blobs() / hashlib.sha256(right).hexdigest()
    blobs().mkdir(parents=True)
    blob.write_bytes(b"damaged")
    small.wrong_content[WEIGHTS] = b"x" * len(right)
    refused("is corrupt")
    assert blob.read_bytes() == b"damaged"
    assert [path.name for path in blobs().iterdir() if path.name.endswith(".part")] == []
    small.wrong_content.clear()
    assert (pull(REPO).folder / WEIGHTS).read_bytes() == right
    assert blob.read_bytes() == right


def test_a_begun_download_is_never_thrown_away_for_what_a_server_says(small: FakeHub) -> None:
    """Whole answers to ranges, other ranges, sizes and errors: what came in an earlier run is still there."""
    right = small.repos[REPO][WEIGHTS]
    part = blobs() / f"{hashlib.sha256(right).hexdigest()}.part"
    blobs().mkdir(parents=True)
    part.write_bytes(right[:100_000])

    lie(small, lambda info: weights_of(info).update(size=1))
    refused("100,000 bytes of it are here")
    assert part.read_bytes() == right[:100_000]

    def elsewhere(handler: Handler) -> bool:
        if handler.path.startswith("/cdn"):
            handler.reply(206, right[5:], {"Content-Range": f"bytes 5-{len(right)}/{len(right)}"})
        return handler.path.startswith("/cdn")

    small.fault = elsewhere
    refused("asked from byte 100,000, the answer is 'bytes 5-")
    assert part.read_bytes() == right[:100_000]

    small.fault = lambda handler: handler.path.startswith("/cdn") and (handler.reply(404, b"") or True)
    refused("status 404")
    assert part.read_bytes() == right[:100_000]

    small.fault, small.ignore_ranges, small.cut[WEIGHTS] = None, True, 50_000
    assert (pull(REPO).folder / WEIGHTS).read_bytes() == right


def test_wrong_bytes_of_an_earlier_run_are_written_over(small: FakeHub) -> None:
    """As after a loss of power: a file of the right length, full of zeros."""
    right = small.repos[REPO][WEIGHTS]
    blobs().mkdir(parents=True)
    (blobs() / f"{hashlib.sha256(right).hexdigest()}.part").write_bytes(bytes(len(right) - 10))
    assert (pull(REPO).folder / WEIGHTS).read_bytes() == right


def test_a_file_is_cut_where_its_listing_ends(small: FakeHub) -> None:
    """One byte by the listing, and then no end."""
    lie(small, lambda info: weights_of(info).update(size=1))
    told = small.fault
    assert told is not None

    def fault(handler: Handler) -> bool:
        return told(handler) or (handler.path.startswith("/cdn") and endless(handler))

    small.fault = fault
    refused("is longer than its listing says")
    held = [path.stat().st_size for path in blobs().iterdir() if path.suffix == ".part"]
    assert held == [1]


def endless(handler: Handler, head: bytes = b"HTTP/1.1 200 OK\r\nConnection: close\r\n") -> bool:
    """An answer without an end, as long as somebody listens."""
    handler.close_connection = True
    try:
        handler.wfile.write(head + b"\r\n")
        while True:
            handler.wfile.write(b" " * 65536)
            handler.record.sent += 65536
    except OSError:
        return True


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("/org/small", "64,000,000 bytes came"),
        ("/config.json", "bytes came that were asked for"),
        (WEIGHTS, "is longer than its listing says"),
    ],
)
def test_an_answer_without_an_end_is_left(small: FakeHub, ending: str, message: str) -> None:
    small.fault = lambda handler: handler.path.partition("?")[0].endswith(ending) and endless(handler)
    refused(message)
    assert sum(seen.sent for seen in small.seen) < 100_000_000


@pytest.mark.parametrize("status", [302, 404, 500, 401])
def test_what_comes_with_a_redirect_or_an_error_is_not_read(small: FakeHub, status: int) -> None:
    head = f"HTTP/1.1 {status} No\r\nLocation: {small.url}/nowhere\r\nConnection: close\r\n".encode()
    small.fault = lambda handler: not handler.path.endswith("nowhere") and endless(handler, head)
    refused(r"status 404|problem \(500\)|no model org/small")
    assert sum(seen.sent for seen in small.seen) < 20_000_000


def test_redirects_end(small: FakeHub) -> None:
    small.fault = lambda handler: handler.reply(302, b"", {"Location": small.url + handler.path}) or True
    refused("over 10 redirects")
    assert len(small.seen) == 10


def test_a_compressed_answer_is_refused(small: FakeHub) -> None:
    small.fault = lambda handler: handler.reply(200, b"x", {"Content-Encoding": "gzip"}) or True
    refused("came compressed")


def test_a_small_file_must_be_what_its_listing_names(small: FakeHub) -> None:
    def fault(handler: Handler) -> bool:
        if not handler.path.endswith("/config.json"):
            return False
        handler.reply(200, small.repos[REPO]["config.json"][:-1] + b" ")
        return True

    small.fault = fault
    refused("config.json is corrupt")
    assert not (blobs().parent / "refs").exists()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    "shard",
    [
        "../../victim.txt",
        "/no-such-folder/shadow",
        "a\0.safetensors",
        "..",
        "",
        "x\\..\\y",
        "a/../../b",
        7,
        None,
        ["a"],
    ],
)
def test_a_shard_that_climbs_is_refused_here_and_at_the_hub(
    small: FakeHub, tiny: Path, tmp_path: Path, shard: object
) -> None:
    index = json.dumps({"weight_map": {"w": WEIGHTS, "v": shard}}).encode()
    small.repos[REPO]["model.safetensors.index.json"] = index
    with pytest.raises(CheckpointError, match=r"index\.json names the file .*not a path inside it"):
        facts_of(REPO)
    folder = tmp_path / "hub" / "local"  # a place that may change
    folder.mkdir(parents=True)
    for name in ("config.json", WEIGHTS):
        (folder / name).write_bytes((tiny / name).read_bytes())
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=r"index\.json names the file .*not a path inside it"):
        facts_of(str(folder))


def test_a_connection_that_brings_next_to_nothing_is_not_asked_for_ever(small: FakeHub) -> None:
    asked = [0]

    def fault(handler: Handler) -> bool:
        if not handler.path.startswith("/cdn"):
            return False
        asked[0] += 1
        span = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-")
        head = {"Content-Range": f"bytes {span}-9/9"} if span != "0" else {}
        handler.reply(206 if head else 200, b"1", head)
        return True

    small.fault = fault
    with pytest.raises(HubUnreachable, match="the part that came is kept"):
        pull(REPO)
    assert asked[0] == 5


def test_other_tools_find_what_was_pulled(small: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download, try_to_load_from_cache

    folder = pull(REPO).folder
    cache = str(hub_cache())
    small.fault = lambda handler: handler.reply(503, b"") or True
    assert snapshot_download(REPO, cache_dir=cache, local_files_only=True) == str(folder)
    assert try_to_load_from_cache(REPO, "config.json", cache_dir=cache) == str(folder / "config.json")
    info = scan_cache_dir(cache)
    assert not info.warnings
    (repo,) = info.repos
    assert {ref for revision in repo.revisions for ref in revision.refs} == {"main"}
    small.fault = None
    assert not (folder / WEIGHTS).readlink().is_absolute()
    before = {path.name for path in blobs().iterdir()}
    snapshot_download(REPO, cache_dir=cache, endpoint=small.url, allow_patterns=["*.json", WEIGHTS])
    assert {path.name for path in blobs().iterdir()} == before  # the same names, so nothing was fetched twice


def test_a_slow_listing_is_given_up(small: FakeHub) -> None:
    small.fault = lambda handler: handler.trickle(5.0) or True
    with pytest.raises(HubUnreachable, match="the Hub sent"):
        Hub(deadline=0.1).listing(REPO)
