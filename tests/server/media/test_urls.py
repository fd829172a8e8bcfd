"""URLs in the one form in which they are used, and relative redirects."""

import base64
import binascii
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snugvl.errors import ImageError, ImageTooLarge, RequestError
from snugvl.server.media import urls
from snugvl.server.media.urls import FetchTarget, parse_target, read_data_url, scheme_of


@pytest.mark.parametrize(
    ("url", "used", "authority"),
    [
        ("http://Example.COM", "http://example.com/", "example.com"),
        ("https://example.com:443/a?b=c#d", "https://example.com/a?b=c", "example.com"),
        ("https://example.com:8443/", "https://example.com:8443/", "example.com:8443"),
        ("http://example.com./a", "http://example.com/a", "example.com"),
        ("http://example.com/ä?ö=ü", "http://example.com/%C3%A4?%C3%B6=%C3%BC", "example.com"),
        ("http://example.com/a%20b%2Fc", "http://example.com/a%20b%2Fc", "example.com"),
        ("http://bücher.example/", "http://xn--bcher-kva.example/", "xn--bcher-kva.example"),
        ("http://under_score.example/", "http://under_score.example/", "under_score.example"),
        ("http://0x5db8d822/", "http://93.184.216.34/", "93.184.216.34"),
        ("http://[2606:2800:220:1:0:0:0:1]:80/", "http://[2606:2800:220:1::1]/", "[2606:2800:220:1::1]"),
        ("http://example.com?a@b", "http://example.com/?a@b", "example.com"),
        ("http://example.com/@b", "http://example.com/@b", "example.com"),
    ],
)
def test_the_form_that_is_used(url: str, used: str, authority: str) -> None:
    target = parse_target(url, "url")
    assert target.url == used
    assert target.authority == authority
    assert parse_target(target.url, "url") == target


def test_errors_name_the_field() -> None:
    with pytest.raises(RequestError) as caught:
        parse_target("ftp://example.com/", "messages[0].content[1].image_url.url")
    assert caught.value.field == "messages[0].content[1].image_url.url"


@example("http://[::1")
@example("http://\ufeff/")
@example("http://①.⓪/")
@given(st.text(max_size=60) | st.text(max_size=60).map("http://".__add__))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    try:
        target = parse_target(text, "url")
    except RequestError:
        return
    assert isinstance(target, FetchTarget)
    assert target.url.isascii()
    assert not any(c in target.url for c in " \r\n\t\\")


@example("data:;base64,=")
@given(st.text(max_size=60).map("data:".__add__))
def test_any_data_url_is_bytes_or_refused(text: str) -> None:
    with suppress(RequestError, ImageError):
        assert isinstance(read_data_url(text, 1000, "the image", "url"), bytes)


def test_data_urls_are_limited_in_what_they_hold_not_in_line_breaks() -> None:
    body = "QUFB" * 100
    broken = "\n".join(body[i : i + 76] for i in range(0, 400, 76))
    assert read_data_url("data:;base64," + broken, 300, "the image", "url") == b"A" * 300
    with pytest.raises(ImageTooLarge, match="the image has 300 bytes, the limit is 299"):
        read_data_url("data:;base64," + broken, 299, "the image", "url")
    with pytest.raises(ImageTooLarge, match="the image has 300 bytes, the limit is 299"):
        read_data_url("data:," + "A" * 300, 299, "the image", "url")


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("data:,", "data"),
        (" FILE:///", "file"),
        ("https://a", "https"),
        ("none", ""),
        ("", ""),
        ("/a:b", "/a"),
    ],
)
def test_schemes(url: str, scheme: str) -> None:
    assert scheme_of(url) == scheme


def test_percent_encoding_without_end_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(urls, "unquote_to_bytes", None)
    for body in ("%00" * 400_000, "%zz" * 400_000, "a" * 1_200_000):
        with pytest.raises(
            RequestError, match=r"has 1,200,000 characters without ;base64; at most 1,048,576"
        ):
            urls.read_data_url(f"data:image/png,{body}", 64 << 20, "the image", "a")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 1000])
@pytest.mark.parametrize(
    "body", ["QUI=", "QUI", "Q\nU\nJ\tDQQ==", "QUJDQUJD", "QUJD=", "", " \n", "QUJDQQ== \n"]
)
def test_base64_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch, body: str, size: int) -> None:
    monkeypatch.setattr(urls, "_PIECE", size)
    expected = base64.b64decode(body + "==") if body.strip() else b""
    assert urls.read_data_url(f"data:;base64,{body}", 64, "the image", "a") == expected
    for wrong in ("QQ==QQ==", "QQ==\nQUJD", "QUJDQ", "=", "QU*D"):
        with pytest.raises(RequestError, match="not valid base64"):
            urls.read_data_url(f"data:;base64,{wrong}", 64, "the image", "a")


@pytest.mark.parametrize("body", ["-_8-", "+/8+", "-/8+", "-_\n8"])
def test_base64url_is_read(body: str) -> None:
    read = urls.read_data_url(f"data:image/png;base64,{body}", 64, "the image", "a")
    assert read == b"\xfb\xff\x3e"[: len(read)]
    assert len(read) == len(body.replace("\n", "")) * 3 // 4


def test_no_long_base64_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's lock is held for as long as one call takes: a tenth of a second for 60 MB."""
    read: list[int] = []

    def reading(data: bytes, *, strict_mode: bool) -> bytes:
        read.append(len(data))
        return binascii.a2b_base64(data, strict_mode=strict_mode)

    monkeypatch.setattr(urls, "binascii", SimpleNamespace(a2b_base64=reading))
    urls.read_data_url("data:;base64," + "QUJD" * (1 << 20), 64 << 20, "the image", "a")
    assert max(read) <= 1 << 20
    assert sum(read) == 4 << 20


def test_percent_encoded_base64_is_decoded_without_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "unquote_to_bytes", None)  # which makes a list of them
    for plus, slash in (("%2B", "%2F"), ("%2b", "%2f")):
        body = f"AA{plus}{slash}" * 300_000 + "AA%3D%3D%0A%20"
        data = urls.read_data_url(f"data:;base64,{body}", 64 << 20, "the image", "a")
        assert data == b"\x00\x0f\xbf" * 300_000 + b"\x00"
    with pytest.raises(RequestError, match="not valid base64"):
        urls.read_data_url("data:;base64,AA%41A", 64 << 20, "the image", "a")


@pytest.mark.parametrize("size", [48, 5_000, 100_000])
def test_bare_base64_is_told_apart_from_an_address(size: int) -> None:
    """It was too long an address, or one of no scheme that is fetched."""
    bare = base64.b64encode(b"\x89PNG\r\n\x1a\n" * (size // 8)).decode()
    with pytest.raises(RequestError, match="in bare base64; put data:image/png;base64, before it"):
        urls.parse_target(bare, "url")


@pytest.mark.parametrize("url", ["", "  "])
def test_an_empty_url_is_told_to_be_empty(url: str) -> None:
    with pytest.raises(RequestError, match="the URL is empty"):
        urls.parse_target(url, "url")


@pytest.mark.parametrize("url", ["photo.png", "photos/" + "a" * 100, "Qk", "/9j/" + "a" * 30 + ".png"])
def test_what_may_be_a_name_is_no_base64(url: str) -> None:
    with pytest.raises(RequestError, match="the URL must start with"):
        urls.parse_target(url, "url")
