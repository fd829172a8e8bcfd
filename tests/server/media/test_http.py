"""Hostile pictures through the whole server: the right status and form in every protocol."""

import asyncio
import base64
from typing import Any

import httpx
import pytest

from snugvl.errors import ImageError
from snugvl.server.media.fetch import Fetcher
from tests.patience import PATIENCE_S
from tests.server.media import pictures
from tests.server.media.pictures import encoded

HOSTILE: dict[str, tuple[bytes | str, int, str]] = {
    "text": (b"root:x:0:0", 400, "is not a picture that can be read: it looks like text"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 400, "an SVG drawing; export it as PNG first"),
    "truncated": (encoded("JPEG", (400, 400))[:-200], 400, "is damaged or incomplete"),
    "pages": (pictures.animation("TIFF"), 400, "has 6 pages; extract one page as PNG first"),
    "bomb": (pictures.png(50_000, 50_000), 413, "is far larger than 100 million pixels"),
    "loopback": ("http://127.0.0.1:9/a.png", 400, "127.0.0.1 is not the name or address of a public host"),
    "metadata": ("http://169.254.169.254/", 400, "169.254.169.254 is not the name or address of a public"),
    "private": ("http://10.0.0.1/a.png", 400, "or start the server with --allow-private-media"),
    "a path of Windows": ("C:\\cats\\a.png", 400, "looks like the path of a file"),
    "another path of Windows": ("c:/cats/a.png", 400, "looks like the path of a file"),
    "a share": ("\\\\host\\a.png", 400, "looks like the path of a file"),
    "file": ("file:///etc/passwd", 400, "file: URLs are not read by this server"),
    "not base64": ("data:image/png;base64,*", 400, " is not valid base64; send the bytes of its file"),
}


def url_of(value: bytes | str) -> str:
    return value if isinstance(value, str) else "data:image/png;base64," + base64.b64encode(value).decode()


def openai(url: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "pocket", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.sample(*(f"False-{name}" for name in HOSTILE), "True-truncated", "True-loopback")
def test_chat_completions(name: str, stream: bool, url: str) -> None:
    value, status, text = HOSTILE[name]
    body = openai(url_of(value)) | {"stream": stream}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/chat/completions", json=openai(url_of(encoded("PNG", (64, 64))))).is_success


@pytest.mark.parametrize("name", HOSTILE)
def test_messages(name: str, url: str) -> None:
    value, status, text = HOSTILE[name]
    if isinstance(value, bytes):
        data = base64.b64encode(value).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
    else:
        source = {"type": "url", "url": value}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    body = {"model": "pocket", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}
    answer = httpx.post(f"{url}/v1/messages", json=body)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert text in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", [name for name, (value, _, _) in HOSTILE.items() if isinstance(value, bytes)]
)
def test_ollama(name: str, url: str) -> None:
    value, status, text = HOSTILE[name]
    assert isinstance(value, bytes)
    message = {"role": "user", "content": "what?", "images": [base64.b64encode(value).decode()]}
    body = {"model": "pocket", "messages": [message], "stream": False, "options": {"num_predict": 1}}
    answer = httpx.post(f"{url}/api/chat", json=body)
    assert answer.status_code == status
    assert text in answer.json()["error"]


def test_detail_that_is_not_known_is_refused_by_name(url: str) -> None:
    body = openai(url_of(encoded("PNG")))
    body["messages"][0]["content"][1]["image_url"]["detail"] = "ultra"
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "detail" in answer.json()["error"]["param"]


def test_low_detail_costs_fewer_tokens(url: str) -> None:
    def tokens(detail: str) -> int:
        body = openai(url_of(encoded("PNG", (1024, 1024))))
        body["messages"][0]["content"][1]["image_url"]["detail"] = detail
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.is_success, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    assert tokens("low") <= tokens("auto") == tokens("high")


@pytest.mark.parametrize(
    ("domains", "url", "text"),
    [
        ((), "https://example.org/a.png", "this server fetches nothing from URLs (--allowed-media-domains)"),
        (("example.org",), "https://example.com/a", "fetches from example.org alone"),
        (("example.org",), "https://badexample.org/a", "not from badexample.org"),
        (("example.org",), "http://127.0.0.1/a", "not from 127.0.0.1"),
    ],
)
def test_only_listed_hosts_are_fetched_from(domains: tuple[str, ...], url: str, text: str) -> None:
    def looked_up(host: str, port: int) -> list[str]:
        raise AssertionError(host)

    async def fetch() -> None:
        fetcher = Fetcher(domains=domains, resolver=looked_up)
        try:
            await fetcher.fetch(url, accept="*/*", max_bytes=99, name="the image", field="f")
        finally:
            fetcher.close()

    with pytest.raises(ImageError) as raised:
        asyncio.run(fetch())
    assert text in str(raised.value)


@pytest.mark.parametrize("host", ["example.org", "cdn.example.org"])
def test_listed_hosts_and_those_below_are_looked_up(host: str) -> None:
    asked: list[str] = []

    def looked_up(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    async def fetch() -> None:
        fetcher = Fetcher(domains=("example.org",), resolver=looked_up)
        try:
            await fetcher.fetch(f"https://{host}/a", accept="*/*", max_bytes=99, name="the image", field="f")
        finally:
            fetcher.close()

    with pytest.raises(ImageError, match="public host"):
        asyncio.run(fetch())
    assert asked == [host]
