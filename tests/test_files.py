"""Files of phones, cameras, browsers and scanners × every door: right, or one and the same refusal.

doors   the command line, here and on a server · Python · the client · our own protocol, OpenAI's two,
        Anthropic's and Ollama's
"""

import base64
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import snugvl
from snugvl.cli.app import run
from snugvl.core.messages import Picture, Video
from snugvl.model import Model
from snugvl.server.settings import ServerSettings
from tests.client.conftest import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.phone_files import FILMS, PICTURES, QUARTERS, REFUSED, SEVERAL, quarters_of
from tests.server.live import live
from tests.tasks.fake import FakeBackend

UPRIGHT = tuple(range(len(QUARTERS)))
GREY = "scan.png"
WARNING = "snugvl-warning"


@dataclass
class Outcome:
    """What came of a file: what the model saw, what was noted, or why it was refused."""

    seen: Picture | Video | None = None
    notes: str = ""
    refused: str = ""


def fresh() -> FakeBackend:
    backend = FakeBackend()
    backend.described = replace(backend.described, video=True)
    return backend


@dataclass
class House:
    """A model here, and a server over another."""

    here: FakeBackend
    there: FakeBackend
    url: str


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    there = fresh()
    with live(ScriptedEngine(there), ServerSettings(names=("eyes",))) as url:
        yield House(fresh(), there, url)


def seen_by(backend: FakeBackend) -> Picture | Video:
    (shown,) = (
        part for part in backend.requests[-1].messages[-1].content if isinstance(part, Picture | Video)
    )
    return shown


def caught(call: Callable[[], object], backend: FakeBackend) -> Outcome:
    """What a call in Python leaves."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            call()
        except snugvl.SnugvlError as error:
            return Outcome(refused=str(error))
    return Outcome(seen_by(backend), " ".join(str(one.message) for one in found))


def python(path: Path, house: House) -> Outcome:
    return caught(lambda: Model(house.here).caption(path), house.here)


def client(path: Path, house: House) -> Outcome:
    with snugvl.Client(house.url) as at:
        return caught(lambda: at.caption(path), house.there)


def command(path: Path, house: House, *more: str) -> Outcome:
    import contextlib
    import io

    backend = house.there if more else house.here
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["caption", str(path), "-m", "eyes", "--quiet", "--json", *more])
    if code:
        return Outcome(refused=json.loads(out.getvalue())["error"]["message"])
    return Outcome(seen_by(backend), err.getvalue())


def posted(house: House, path: str, body: dict[str, Any], **options: Any) -> Outcome:
    answer = httpx.post(house.url + path, json=body or None, timeout=PATIENCE_S, **options)
    if answer.is_success:
        return Outcome(seen_by(house.there), answer.headers.get(WARNING, ""))
    error = answer.json()["error"]
    return Outcome(refused=error if isinstance(error, str) else error["message"])


def url_of(path: Path) -> str:
    return "data:application/octet-stream;base64," + base64.b64encode(path.read_bytes()).decode()


def vision(path: Path, house: House) -> Outcome:
    return posted(house, "/v1/vision/caption", {}, files={"image": path.read_bytes()})


def openai(path: Path, house: House) -> Outcome:
    part = {"type": "image_url", "image_url": {"url": url_of(path)}}
    return posted(house, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})


def responses(path: Path, house: House) -> Outcome:
    part = {"type": "input_image", "image_url": url_of(path)}
    return posted(house, "/v1/responses", {"model": "eyes", "input": [{"role": "user", "content": [part]}]})


def anthropic(path: Path, house: House) -> Outcome:
    data = base64.b64encode(path.read_bytes()).decode()
    part = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    body = {"model": "eyes", "max_tokens": 9, "messages": [{"role": "user", "content": [part]}]}
    return posted(house, "/v1/messages", body)


def ollama(path: Path, house: House) -> Outcome:
    data = base64.b64encode(path.read_bytes()).decode()
    turn = {"role": "user", "content": "What is it?", "images": [data]}
    return posted(house, "/api/chat", {"model": "eyes", "stream": False, "messages": [turn]})


Door = Callable[[Path, House], Outcome]
DOORS: dict[str, Door] = {
    "command": command,
    "command on a server": lambda path, house: command(path, house, "--server", house.url),
    "python": python,
    "client": client,
    "vision": vision,
    "openai": openai,
    "responses": responses,
    "anthropic": anthropic,
    "ollama": ollama,
}
READ_PATHS = ("command", "command on a server", "python", "client")
TAKE_FILMS = ("command", "command on a server", "python", "client", "vision")  # in a picture's place


@pytest.fixture
def door(request: pytest.FixtureRequest, house: House, monkeypatch: pytest.MonkeyPatch) -> Door:
    """A door; behind the command line's there is the model that is here."""
    from snugvl.cli import session

    real = session.load_model
    monkeypatch.setattr(
        session, "load_model", lambda choice: real(choice) if choice.server else Model(house.here)
    )
    house.here.reopen()
    return DOORS[request.param]


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, Callable[[], bytes]], Path]:
    def write(name: str, make: Callable[[], bytes]) -> Path:
        path = tmp_path / name
        path.write_bytes(make())
        return path

    return write


every_door = pytest.mark.parametrize("door", DOORS, indirect=True)
Written = Callable[[str, Callable[[], bytes]], Path]


# All of them here and on a server; at the other doors, which share what reads files, one of each kind.
UPRIGHT_AT = [
    (door, name)
    for name in PICTURES
    for door in (DOORS if name in ("phone.jpg", "turned.heic", GREY) else ("python", "openai"))
]


@pytest.mark.parametrize(("door", "name"), UPRIGHT_AT, indirect=["door"])
def test_a_picture_is_seen_upright(name: str, door: Door, house: House, written: Written) -> None:
    outcome = door(written(name, PICTURES[name]), house)
    assert isinstance(outcome.seen, Picture), outcome
    image = outcome.seen.image
    turned = name in ("phone.jpg", "turned.heic")
    assert image.width / image.height == (48 / 64 if turned else 64 / 48)
    if name != GREY:
        assert quarters_of(image) == UPRIGHT
    else:  # not clipped at 255, as Pillow does
        assert len(np.unique(np.asarray(image)[..., 0])) == len(QUARTERS)
    assert outcome.notes == ""


@every_door
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.sample(
    "moves.webp-python",
    "moves.gif-vision",
    "moves.png-client",
    "burst.heic-openai",
    "moves.avif-command on a server",
    "moves.webp-anthropic",
    "moves.webp-responses",
    "moves.webp-ollama",
    "moves.png-command",
)
def test_of_several_one_is_seen_and_it_is_said(name: str, door: Door, house: House, written: Written) -> None:
    outcome = door(written(name, SEVERAL[name]), house)
    assert isinstance(outcome.seen, Picture), outcome
    assert quarters_of(outcome.seen.image) == UPRIGHT
    expected = (
        "holds 3 pictures: only its main picture was looked at. For another, save it as a file of its own"
        if name == "burst.heic"
        else (
            "is animated (4 frames): only its first frame was looked at. For another, save it as a file "
            "of its own, or show all as a video to a model that reads videos"
        )
    )
    assert outcome.notes.count(expected) == 1


@every_door
@pytest.mark.parametrize("name", FILMS)
@pytest.mark.sample(
    "phone.mov-responses",
    "msf1.heics-python",
    "hevc.heics-anthropic",
    "phone.mp4-ollama",
    "hevc.heics-openai",
    "phone.mov-vision",
    "msf1.heics-client",
    "phone.mp4-command",
    "phone.mov-command on a server",
)
def test_a_film_is_a_video_or_refused(name: str, door: Door, house: House, written: Written) -> None:
    outcome = door(written(name, FILMS[name]), house)
    if door in [DOORS[taker] for taker in TAKE_FILMS]:
        assert isinstance(outcome.seen, Video), outcome
        assert len(outcome.seen.frames) == 4
        assert quarters_of(outcome.seen.frames[0]) == UPRIGHT
        return
    what = (
        "a HEIF sequence without a still picture; send it as a video, or extract a frame first"
        if name.endswith(".heics")
        else "a video (MP4 or QuickTime); extract a frame first"
    )
    assert outcome.refused.endswith(f"is not a picture that can be read: it looks like {what}")


@every_door
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sample(
    "scan.pdf-python",
    "pages.tif-openai",
    "scan.pdf-openai",
    "pages.tif-responses",
    "pages.tif-anthropic",
    "pages.tif-client",
    "pages.tif-ollama",
    "pages.tif-vision",
    "pages.tif-command",
    "pages.tif-command on a server",
)
def test_what_is_refused_is_refused_alike(name: str, door: Door, house: House, written: Written) -> None:
    make, message = REFUSED[name]
    path = written(name, make)
    if name == "scan.pdf" and door in [DOORS[taker] for taker in READ_PATHS]:
        outcome = door(path, house)
        assert isinstance(outcome.seen, Picture)  # its page is drawn
        assert quarters_of(outcome.seen.image) == UPRIGHT
        return
    assert door(path, house).refused.endswith(message)


MOVING = [name for name in SEVERAL if name != "burst.heic"] + ["live.heic"]


@pytest.mark.parametrize("name", MOVING)
def test_where_a_video_is_asked_for_all_frames_are_seen(name: str, house: House, written: Written) -> None:
    """`snugvl.video`, `#video` and the protocols that have videos; the same frames everywhere."""
    path = written(name, (SEVERAL | PICTURES)[name])
    counts = {}
    with snugvl.Client(house.url) as at:
        ways: dict[str, tuple[Callable[[], object], FakeBackend]] = {
            "python": (lambda: Model(house.here).caption(snugvl.video(path)), house.here),
            "python, in a message": (
                lambda: Model(house.here).chat(snugvl.user(snugvl.video(path), "What?")),
                house.here,
            ),
            "client": (lambda: at.caption(snugvl.video(path)), house.there),
            "client, asked": (lambda: at.ask(snugvl.video(path), "What happens?"), house.there),
            "client, scene": (lambda: at.scene(snugvl.video(path)), house.there),
            "client, chat": (lambda: at.chat(snugvl.user(snugvl.video(path), "What?")), house.there),
        }
        for way, (call, backend) in ways.items():
            house.here.reopen()
            outcome = caught(call, backend)
            assert isinstance(outcome.seen, Video), (way, outcome)
            assert outcome.notes == "", way
            counts[way] = len(outcome.seen.frames)
    assert set(counts.values()) == {4}, counts


@pytest.mark.parametrize("door", ["command", "command on a server"], indirect=True)
def test_the_command_line_shows_all_of_an_animation(door: Door, house: House, written: Written) -> None:
    path = written("moves.gif", SEVERAL["moves.gif"])
    outcome = door(path.with_name("moves.gif#video"), house)
    assert isinstance(outcome.seen, Video), outcome
    assert (len(outcome.seen.frames), outcome.notes) == (4, "")


@pytest.mark.parametrize("door", ["command", "command on a server"], indirect=True)
@pytest.mark.parametrize("words", [["caption"], ["detect"], ["ask", "--together", "What?"]])
def test_the_command_line_names_the_files(
    words: list[str],
    door: Door,
    house: House,
    written: Written,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server knows none of their names; two with the same fault are two lines."""
    first, second = (written(name, SEVERAL["moves.gif"]) for name in ("first.gif", "second.gif"))
    pages = written("pages.tif", REFUSED["pages.tif"][0])
    place = ["--server", house.url] if door is DOORS["command on a server"] else []
    common = ["-m", "eyes", "--quiet", *place]
    task, *rest = words
    assert run([task, str(first), str(second), *rest, *common]) == 0
    told = capsys.readouterr().err.splitlines()
    note = (
        "is animated (4 frames): only its first frame was looked at. For another, save it as a file "
        "of its own, or show all as a video to a model that reads videos"
    )
    assert sorted(told) == [f"snugvl: {path} {note}" for path in (first, second)]
    code = run([task, str(first), str(pages), *rest, *common])
    assert code == (3 if "--together" in words else 7)
    assert f"snugvl: {pages} has 2 pages; extract one page as PNG first" in capsys.readouterr().err


@pytest.mark.parametrize("door", ["command"], indirect=True)
def test_a_question_may_follow_an_animation(door: Door, house: House, written: Written) -> None:
    path = written("moves.gif", SEVERAL["moves.gif"])
    assert run(["ask", f"{path}#video", "What", "happens?", "-m", "eyes", "--quiet"]) == 0
    assert isinstance(seen_by(house.here), Video)
    assert run(["detect", f"{path}#video", "-m", "eyes", "--quiet"]) == 3
