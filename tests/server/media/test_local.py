"""`file:` URLs: from one folder, whatever links and races there are."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snugvl.errors import ImageError, ImageTooLarge, InputError, RequestError
from snugvl.server.media import urls
from snugvl.server.media.urls import check_folder, read_file_url
from snugvl.server.settings import ServerSettings
from tests.patience import PATIENCE_S
from tests.server.media.pictures import encoded
from tests.server.media.single import Loader

PICTURE = encoded("PNG")
OUTSIDE = "the image is not a readable file inside the folder that --allow-local-media names"
FORM = "the file: URL must look like file:///folder/picture.png"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "media"
    (inside / "sub").mkdir(parents=True)
    (inside / "ä picture.png").write_bytes(PICTURE)
    (inside / "sub" / "picture.png").write_bytes(PICTURE)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "media-next-door").mkdir()
    (tmp_path / "media-next-door" / "secret.png").write_bytes(b"secret")
    (inside / "link-out.png").symlink_to(tmp_path / "secret.png")
    (inside / "link-in.png").symlink_to(inside / "sub" / "picture.png")
    (inside / "folder-out").symlink_to(tmp_path)
    (inside / "loop").symlink_to(inside / "loop")
    if hasattr(os, "mkfifo"):
        os.mkfifo(inside / "pipe")
    return check_folder(inside)


def read(url: str, folder: Path, max_bytes: int = 10_000) -> bytes:
    return read_file_url(url, folder, max_bytes, "the image", "url")


@pytest.mark.parametrize(
    "tail",
    [
        "/sub/picture.png",
        "/%C3%A4%20picture.png",
        "/ä picture.png",
        "/link-in.png",
        "/sub/../sub/picture.png",
    ],
)
def test_files_inside_are_read(folder: Path, tail: str) -> None:
    assert read(f"file://{folder}{tail}", folder) == PICTURE
    assert read(f"file://localhost{folder}{tail}", folder) == PICTURE


@pytest.mark.parametrize(
    "tail",
    [
        "/../secret.png",
        "/%2e%2e/secret.png",
        "/sub/../../secret.png",
        "-next-door/secret.png",
        "/link-out.png",
        "/folder-out/secret.png",
        "/loop",
        "/missing.png",
        "/sub",
        "/pipe",
        "",
        "/sub/picture.png/more",
        "/" + "a" * 5000,
        "/\ud800",
    ],
)
def test_one_answer_for_all_that_is_not_a_file_inside(folder: Path, tail: str) -> None:
    with pytest.raises(ImageError) as caught:
        read(f"file://{folder}{tail}", folder)
    assert str(caught.value) == OUTSIDE


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///dev/zero", "file:///proc/self/environ"])
def test_the_rest_of_the_machine_is_outside(folder: Path, url: str) -> None:
    with pytest.raises(ImageError) as caught:
        read(url, folder)
    assert str(caught.value) == OUTSIDE


@pytest.mark.parametrize(
    "url",
    [
        "file://host/a.png",
        "file:a.png",
        "file:",
        "file:///a%00b",
        "file:///a?b",
        "file:///%ff",
        "file://[::1",
    ],
)
def test_odd_urls_are_refused(folder: Path, url: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(url, folder)
    assert str(caught.value) == FORM
    assert caught.value.field == "url"


def test_size_is_checked_before_reading(folder: Path) -> None:
    assert read(f"file://{folder}/sub/picture.png", folder, max_bytes=len(PICTURE)) == PICTURE
    with pytest.raises(ImageTooLarge, match=r"the image has \d+ bytes, the limit is 5; use a smaller one"):
        read(f"file://{folder}/sub/picture.png", folder, max_bytes=5)


@pytest.mark.skipif(os.open not in os.supports_dir_fd, reason="this system has no openat")
def test_a_folder_swapped_for_a_link_after_the_check_leads_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is resolved; then the attacker swaps; then it is opened."""
    open_steps = urls._open_steps

    def swap_then_open(root: Path, parts: tuple[str, ...]) -> int:
        (folder / "sub").rename(folder / "old")
        (folder / "sub").symlink_to(folder.parent)
        return open_steps(root, parts)

    (folder.parent / "picture.png").write_bytes(b"secret")
    monkeypatch.setattr(urls, "_open_steps", swap_then_open)
    with pytest.raises(ImageError) as caught:
        read(f"file://{folder}/sub/picture.png", folder)
    assert str(caught.value) == OUTSIDE


def test_without_openat_the_file_is_compared_after_it_was_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", set())
    assert read(f"file://{folder}/sub/picture.png", folder) == PICTURE
    with pytest.raises(ImageError):
        read(f"file://{folder}/link-out.png", folder)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_no_descriptor_is_left_open(folder: Path) -> None:
    before = open_descriptors()
    for tail in ("/sub/picture.png", "/pipe", "/sub", "/link-out.png", "/missing.png"):
        try:
            read(f"file://{folder}{tail}", folder)
        except ImageError:
            continue
    assert open_descriptors() == before


@pytest.fixture
def intake(folder: Path) -> Iterator[Loader]:
    made = Loader.from_settings(ServerSettings(allow_local_media=folder))
    yield made
    asyncio.run(made.close())


def test_a_server_reads_the_folder_it_was_told(intake: Loader, folder: Path) -> None:
    picture = asyncio.run(intake.picture(f"file://{folder}/sub/picture.png", field="url"))
    assert picture.image.size == (8, 6)
    with pytest.raises(ImageError, match="not a readable file inside"):
        asyncio.run(intake.picture("file:///etc/passwd", field="url"))


def test_what_is_no_folder_is_refused_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(InputError, match=f"--allow-local-media {missing} is not a folder"):
        Loader.from_settings(ServerSettings(allow_local_media=missing))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_does_not_hold_up_the_server(folder: Path) -> None:
    def attempt() -> None:
        with pytest.raises(ImageError):
            read(f"file://{folder}/pipe", folder)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
