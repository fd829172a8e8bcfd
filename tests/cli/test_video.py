# ruff: noqa: F811 (fixtures)
"""A video where a picture may stand: on a model here, on a server, and where none may."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from snugvl.cli import session
from snugvl.core.messages import Picture, Text, Video
from snugvl.inputs import frames
from snugvl.server.settings import ServerSettings
from tests.client.conftest import ScriptedEngine, engine  # noqa: F401
from tests.command import Ran
from tests.server.live import live
from tests.server.media.films import film
from tests.tasks.fake import FakeBackend, prompt_of, videos_of

Run = Callable[..., Ran]
NO_MODEL = session.load_model  # before a fixture replaces it: the real one, which connects to servers
SEEN = 10  # of 5 seconds, two frames a second
OTHER = ("-m", "another/model", "--quiet")


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """5 seconds of 64 × 48 pixels."""
    path = tmp_path / "clip.mp4"
    path.write_bytes(film())
    return path


def test_a_video_is_captioned_asked_about_and_analysed(snugvl: Run, backend: FakeBackend, clip: Path) -> None:
    assert snugvl("caption", clip, *OTHER).code == 0
    assert snugvl("ask", clip, "What", "happens?", *OTHER).code == 0
    assert snugvl("scene", clip, *OTHER).code == 0
    for request in backend.requests:
        (video,) = videos_of(request)
        assert [frame.size for frame in video.frames] == [(64, 48)] * SEEN
        assert video.timestamps[-1] == pytest.approx(4.9)
    caption, ask, scene = map(prompt_of, backend.requests)
    assert caption == "Describe this video in one sentence."
    assert ask == "What happens?"
    assert scene.startswith("Analyse this video.")


def test_its_content_tells_it(
    snugvl: Run, backend: FakeBackend, clip: Path, piped: Callable[[bytes], None]
) -> None:
    renamed = clip.rename(clip.with_name("clip.jpg"))
    assert snugvl("caption", renamed, *OTHER).code == 0
    piped(renamed.read_bytes())
    assert snugvl("caption", "-", *OTHER).code == 0
    assert [len(videos_of(request)[0].frames) for request in backend.requests] == [SEEN] * 2


def test_together_with_pictures_in_their_order(
    snugvl: Run, backend: FakeBackend, clip: Path, pictures: Path
) -> None:
    assert snugvl("ask", pictures / "a.png", clip, "Which is later?", "--together", *OTHER).code == 0
    parts = backend.requests[0].messages[-1].content
    assert [type(part) for part in parts] == [Picture, Video, Text]


def test_max_pixels_counts_two_frames_as_one_picture(snugvl: Run, backend: FakeBackend, clip: Path) -> None:
    backend.described = replace(backend.described, min_pixels=64)
    assert snugvl("caption", clip, "--max-pixels", 5 * 32 * 24, *OTHER).code == 0
    assert [frame.size for frame in videos_of(backend.requests[0])[0].frames] == [(32, 24)] * SEEN


def test_a_folder_gives_pictures_alone(snugvl: Run, backend: FakeBackend, clip: Path) -> None:
    Image.new("RGB", (30, 30), "red").save(clip.with_name("a.png"))
    ran = snugvl("caption", clip.parent, "--json", *OTHER)
    assert [json.loads(line)["image"] for line in ran.out.splitlines()] == [str(clip.with_name("a.png"))]


def test_detect_looks_at_pictures(snugvl: Run, backend: FakeBackend, clip: Path) -> None:
    for model in (OTHER, ()):  # pocket too
        ran = snugvl("detect", clip, *model)
        assert (ran.code, ran.out) == (3, "")
        assert ran.err == (
            f"snugvl: {clip} is not a picture that can be read: it looks like a video (MP4 or QuickTime); "
            "extract a frame first\n"
        )
    assert backend.requests == []


def test_pocket_says_that_it_never_learned_videos(snugvl: Run, backend: FakeBackend, clip: Path) -> None:
    for command in (("caption", clip), ("ask", clip, "What happens?"), ("scene", clip), ("chat", clip)):
        ran = snugvl(*command)
        assert (ran.code, ran.out) == (3, "")
        assert f"{clip} is a video. Pocket, the built-in model, learned single pictures" in ran.err
        assert "snugvl pull " in ran.err or "snugvl plan" in ran.err
    assert backend.requests == []


def test_what_is_no_video_and_what_is_too_long(
    snugvl: Run, backend: FakeBackend, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip.write_bytes(film()[:900])
    assert "clip.mp4 is damaged or incomplete" in snugvl("caption", clip, *OTHER).err
    clip.write_bytes(film(fps=1, frames=700))
    assert "clip.mp4 is 699 s long, the limit is 600 s; cut it first" in snugvl("caption", clip, *OTHER).err
    monkeypatch.setattr(frames, "av", None)
    monkeypatch.setattr(frames, "preload", lambda: None)
    ran = snugvl("caption", clip, *OTHER)
    assert ran.code == 3
    assert "pip install 'snugvl[video]'" in ran.err


def test_a_video_in_a_conversation(
    snugvl: Run, backend: FakeBackend, clip: Path, piped: Callable[[bytes], None]
) -> None:
    piped(f"/image {clip}\nWhat happens?\n".encode())
    assert snugvl("chat", *OTHER).code == 0
    (video,) = videos_of(backend.requests[0])
    assert len(video.frames) == SEEN


def test_a_server_is_sent_the_file(
    snugvl: Run,
    engine: ScriptedEngine,
    clip: Path,
    monkeypatch: pytest.MonkeyPatch,
    piped: Callable[[bytes], None],
) -> None:
    monkeypatch.setattr(session, "load_model", NO_MODEL)
    engine.capabilities = replace(engine.backend.described, video=True)
    with live(engine, ServerSettings(names=("eyes",))) as base:
        at = ("--server", base, "-m", "eyes", "--quiet")
        assert snugvl("caption", clip, *at).code == 0
        assert snugvl("ask", clip, "What happens?", *at).code == 0
        assert snugvl("scene", clip, *at).code == 0
        piped(f"/image {clip}\nWhat happens?\n".encode())
        assert snugvl("chat", *at).code == 0
        assert [len(videos_of(request)[0].frames) for request in engine.backend.requests] == [SEEN] * 4
        assert "it looks like a video (MP4 or QuickTime)" in snugvl("detect", clip, *at).err
        engine.capabilities = replace(engine.backend.described, video=False)
        ran = snugvl("caption", clip, *at)
        assert ran.code == 3
        assert "it looks like a video (MP4 or QuickTime); extract a frame first" in ran.err
