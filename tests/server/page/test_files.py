"""What / serves, and how: no browser needed."""

import hashlib
import re
from pathlib import Path

import httpx
import pytest

from snugvl.server import page as routes
from snugvl.server.settings import ServerSettings
from tests.server.fake import FakeService
from tests.server.live import live

STATIC = Path(routes.__file__).parent / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css", "/favicon.ico"])
def test_every_file_has_the_strict_headers(url: str, path: str) -> None:
    answer = httpx.get(url + path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    for directive in ("require-trusted-types-for 'script'", "trusted-types 'none'", "base-uri 'none'"):
        assert directive in policy.split("; ")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-frame-options"] == "DENY"
    assert "camera=(self)" in answer.headers["permissions-policy"]


def test_types(url: str) -> None:
    assert httpx.get(url).headers["content-type"] == "text/html; charset=utf-8"
    assert httpx.get(f"{url}/page/app.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert httpx.get(f"{url}/favicon.ico").headers["content-type"] == "image/svg+xml"


def test_head_has_the_headers_and_no_body(url: str) -> None:
    whole, head = httpx.get(url), httpx.head(url)
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == whole.headers["content-length"]


def test_an_unchanged_file_is_not_sent_again(url: str) -> None:
    etag = httpx.get(f"{url}/page/app.js").headers["etag"]
    again = httpx.get(f"{url}/page/app.js", headers={"If-None-Match": etag})
    assert again.status_code == 304
    assert again.content == b""
    assert httpx.get(f"{url}/page/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "routes.py", "app.js%00"]
)
def test_only_files_of_the_page_are_served(url: str, name: str) -> None:
    assert httpx.get(f"{url}/page/{name}").status_code == 404


def test_the_page_needs_no_key_and_what_it_asks_for_does() -> None:
    with live(FakeService(), ServerSettings(api_keys=("right",))) as base:
        for path in ("/", "/favicon.ico", "/page/app.js"):
            assert httpx.get(base + path).status_code == 200
        assert httpx.get(f"{base}/memory").status_code == 401


def test_every_name_in_the_page_is_a_file_of_it() -> None:
    html = (STATIC / "index.html").read_text("utf-8")
    named = set(re.findall(r'"page/([^"]+)"', html)) | set(re.findall(r'data-sample="([^"]+)"', html))
    imported = {
        name for path in SCRIPTS for name in re.findall(r'from "\./([^"]+)"', path.read_text("utf-8"))
    }
    fonts = {path.name for path in routes.VENDOR.glob("*.woff2")}  # a style sheet names them
    assert named | imported | fonts | {routes.INDEX, routes.ICON} == set(routes.assets())


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in (*SCRIPTS, STATIC / "index.html", STATIC / "style.css"):
        text = path.read_text("utf-8").replace("https://cocodataset.org/#format-data", "")
        text = text.replace("http://www.w3.org/1998/Math/MathML", "")  # a namespace
        assert "://" not in text, path.name
        assert "@import" not in text, path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_text_never_becomes_html(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|DOMParser", text)


# Packages of npm and the sha512 of each: markdown-it 15.0.3 +Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vE…, temml 0.13.5
# aPkDDgunanpLNL0ql32HbolqLep+w8DRcVXRql7rWrMt/PhczdLgL4UBYYVU3BYj…
PUBLISHED = {
    "markdown-it.umd.min.js": "391f2aa638e75e6c7859d0a5c5650ef0956722a45998f17e05b83bc655778e1e",
    "temml.min.js": "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95",
    "Temml-Local.css": "544f4e3fee4c36f4568e4f145fa626dc9573c5f4c96c523aadcc433c3989a239",
    "Temml.woff2": "fc70501355ae6d38ff0b80f825af153557d5f2f474198d6b9b7dd2d3a291a0cc",
}
LICENCES = {
    "markdown-it": ("markdown-it 15.0.3", "linkify-it", "mdurl", "punycode.js", "uc.micro", "entities"),
    "temml": ("temml 0.13.5",),
}
MOST_VENDORED = 300_000  # bytes of others' code that every new visitor loads


def test_others_code_is_as_they_published_it() -> None:
    library = {path.name: path for path in routes.VENDOR.iterdir() if path.suffix != ".txt"}
    assert {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in library.items()
    } == PUBLISHED
    assert sum(path.stat().st_size for path in library.values()) <= MOST_VENDORED
    for name, packages in LICENCES.items():
        licence = (routes.VENDOR / f"{name}.LICENSE.txt").read_text("utf-8")
        for package in packages:
            assert f"\n{package}" in licence
    assert {path.name for path in routes.VENDOR.iterdir()} <= set(routes.assets())
