# ruff: noqa: F811 (fixtures)
"""An error about one picture among several says which, by its file's name or its place, at every door."""

import asyncio
import base64
import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

import snugvl
from snugvl import AsyncClient, Client, user
from snugvl.backends.native.backend import NativeBackend
from snugvl.cli.app import run
from snugvl.core.messages import Picture
from snugvl.model import Model
from tests.patience import PATIENCE_S
from tests.server.conftest import pocket, url  # noqa: F401
from tests.tasks.fake import FakeBackend

LONG = "is 3000×10 pixels, one side more than 200 times as long as the other"  # found by the engine
WRONG = "is not a picture that can be read: it looks like text"  # found while it is read


@pytest.fixture(params=[LONG, WRONG], ids=["found by the engine", "found by reading"])
def fault(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.png"
    Image.new("RGB", (64, 48), "red").save(path)
    return path


@pytest.fixture
def bad(tmp_path: Path, fault: str) -> Path:
    path = tmp_path / "bad.png"
    if fault == LONG:
        Image.new("RGB", (3000, 10)).save(path)
    else:
        path.write_bytes(b"no picture, but words")
    return path


@pytest.fixture(params=["here", "client", "async client"])
def at(request: pytest.FixtureRequest, pocket: NativeBackend, url: str) -> Iterator[Any]:
    """What has a model's methods; those of an asynchronous client, waited for."""
    if request.param == "here":
        yield Model(pocket)
    elif request.param == "client":
        with Client(url) as client:
            yield client
    else:
        yield Waited(url)


class Waited:
    """An `AsyncClient` whose calls are waited for."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            async with AsyncClient(self.url) as client:
                return await getattr(client, name)(*args, **options)

        return lambda *args, **options: asyncio.run(call(*args, **options))


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(snugvl.ImageError) as caught:
        call()
    return str(caught.value)


def part(source: object) -> dict[str, object]:
    return {"type": "image", "image": source}


def encoded() -> str:
    data = io.BytesIO()
    Image.new("RGB", (3000, 10)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/chat/completions",
            lambda url: {
                "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
            },
            "messages[0].content[0].image_url.url",
        ),
        (
            "/v1/responses",
            lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
            "input[0].content[0].image_url",
        ),
        ("/v1/vision/caption", lambda url: {"image": url}, "image"),
        ("/v1/vision/detect", lambda url: {"image": url}, "image"),
        ("/v1/vision/ask", lambda url: {"images": [url], "question": "What?"}, "images[0]"),
    ],
    ids=["chat", "responses", "caption", "detect", "ask"],
)
def test_what_the_engine_finds_has_the_field_of_the_request(
    url: str, path: str, body: Callable[[str], object], field: str
) -> None:
    """It had that of the message which the prompt was made of, whatever the request was."""
    answer = httpx.post(url + path, json=body(f"data:image/png;base64,{encoded()}"), timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert "is 3000×10 pixels" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field


def test_a_file_is_named(at: Any, good: Path, bad: Path, fault: str) -> None:
    def opened() -> object:
        with bad.open("rb") as file:
            return at.ask([good, file], "What?")

    several = [{"role": "user", "content": [part(good), part(bad), {"type": "text", "text": "What?"}]}]
    ways: list[Callable[[], object]] = [
        lambda: at.caption(bad),
        lambda: at.scene(str(bad)),
        lambda: at.detect(bad, "circle"),
        lambda: at.ask([good, bad], "What?"),
        opened,
        lambda: at.chat(several),
        lambda: at.chat(user(good, bad, "What?")),
    ]
    if fault == LONG:
        image = Image.open(bad)
        image.load()  # it closes the file, and keeps its name
        ways.append(lambda: at.ask([good, image], "What?"))
        ways.append(lambda: at.ask([good, Picture(image.copy(), name=str(bad))], "What?"))
    for number, way in enumerate(ways):
        assert refused(way).startswith(f"{bad} {fault}"), number


def test_bytes_are_counted(at: Any, good: Path, bad: Path, fault: str) -> None:
    first, second = good.read_bytes(), bad.read_bytes()
    assert refused(lambda: at.caption(second)).startswith(f"the image {fault}")
    assert refused(lambda: at.ask([first, second], "?")).startswith(f"the image at images[1] {fault}")
    said = refused(lambda: at.chat([{"role": "user", "content": [part(first), part(second)]}]))
    places = "the image at messages[0].content[1]", "image 2 of 2"
    assert said.startswith(places)
    if fault == WRONG or not isinstance(at, Waited):
        said = refused(lambda: at.chat(user(first, second, "?")))
        places = "the image at parts[1]", "the image at messages[0].content[1]", "image 2 of 2"
        assert said.startswith(places)


@pytest.mark.parametrize("remote", [False, True], ids=["here", "client"])
def test_a_conversation_names_its_pictures(
    remote: bool,
    pocket: NativeBackend,
    url: str,
    good: Path,
    bad: Path,
    fault: str,
) -> None:
    with contextlib.ExitStack() as held:
        talk = (held.enter_context(Client(url)) if remote else Model(pocket)).chat()
        talk.send(good, "What is it?", max_tokens=2)
        assert refused(lambda: talk.send(good, bad, "And that?")).startswith(f"{bad} {fault}")
        said = refused(lambda: talk.send(good.read_bytes(), bad.read_bytes(), "And that?"))
        places = "the image at parts[1]", "the image at messages[2].content[1]", "image 3 of 3"
        assert said.startswith(places)

    async def asked() -> None:
        async with AsyncClient(url) as client:
            await client.chat().send(good, bad, "What?")

    assert refused(lambda: asyncio.run(asked())).startswith(f"{bad} {fault}")


@pytest.mark.parametrize("remote", [False, True], ids=["here", "server"])
@pytest.mark.parametrize("task", ["caption", "detect", "scene", "ask", "ask together", "chat"])
def test_the_command_line_names_files(
    remote: bool,
    task: str,
    pocket: NativeBackend,
    url: str,
    good: Path,
    bad: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from snugvl.cli import session

    monkeypatch.setattr("snugvl.cli.session.refuse_photograph", lambda *_: None)
    if not remote:
        monkeypatch.setattr(session, "load_model", lambda _: Model(Kept(pocket)))
    monkeypatch.setattr("sys.stdin", io.StringIO("What is it?\n"))
    words = ["ask", str(good), str(bad), "--together", "What?"] if task == "ask together" else None
    words = words or [task, str(good), str(bad), *(["What?"] if task == "ask" else [])]
    place = ["--server", url] if remote else ["-m", "pocket"]
    assert run([*words, *place, "--max-tokens", "2"]) in (3, 7)
    assert f"snugvl: {bad} {fault}" in " ".join(capsys.readouterr().err.split())


class Kept:
    """A backend that stays open for the next test."""

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        """The session closes it."""


def data_of(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def openai(first: Path, second: Path) -> tuple[str, dict[str, Any], str]:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data_of(path)}"}}
        for path in (first, second)
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    return "/v1/chat/completions", body, "messages[0].content[1].image_url.url"


def responses(first: Path, second: Path) -> tuple[str, dict[str, Any], str]:
    parts = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{data_of(path)}"}
        for path in (first, second)
    ]
    body = {"model": "pocket", "input": [{"role": "user", "content": parts}]}
    return "/v1/responses", body, "input[0].content[1].image_url"


def anthropic(first: Path, second: Path) -> tuple[str, dict[str, Any], str]:
    parts = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data_of(path)}}
        for path in (first, second)
    ]
    body = {"model": "pocket", "max_tokens": 9, "messages": [{"role": "user", "content": parts}]}
    return "/v1/messages", body, "messages[0].content[1].source"


def ollama(first: Path, second: Path) -> tuple[str, dict[str, Any], str]:
    turn = {"role": "user", "content": "What?", "images": [data_of(first), data_of(second)]}
    return "/api/chat", {"model": "pocket", "stream": False, "messages": [turn]}, "messages[0].images[1]"


def vision(first: Path, second: Path) -> tuple[str, dict[str, Any], str]:
    urls = [f"data:image/png;base64,{data_of(path)}" for path in (first, second)]
    return "/v1/vision/ask", {"images": urls, "question": "What?"}, "images[1]"


@pytest.mark.parametrize("protocol", [openai, responses, anthropic, ollama, vision])
def test_a_protocol_says_which_field(
    protocol: Callable[[Path, Path], tuple[str, dict[str, Any], str]],
    url: str,
    good: Path,
    bad: Path,
    fault: str,
) -> None:
    path, body, field = protocol(good, bad)
    answer = httpx.post(url + path, json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"the image at {field}"), message
    assert fault in message


def test_a_warning_names_the_file(at: Any, good: Path, tmp_path: Path) -> None:
    moves = tmp_path / "moves.gif"
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "blue")]
    frames[0].save(moves, save_all=True, append_images=frames[1:])
    with pytest.warns(snugvl.SnugvlWarning) as told:
        at.ask([good, moves], "What?", max_tokens=2)
    assert any(str(one.message).startswith(f"{moves} is animated") for one in told)


def test_pictures_without_names_are_counted_in_a_conversation() -> None:
    backend = FakeBackend()
    red = Image.new("RGB", (8, 8), "red")
    Model(backend).chat([user(red, "?"), "No.", user(Picture(red), Picture(red, name="mine"), "And?")])
    turns = backend.requests[0].messages
    names = [part.name for turn in turns for part in turn.content if isinstance(part, Picture)]
    assert names == ["image 1 of 3", "image 2 of 3", "mine"]
