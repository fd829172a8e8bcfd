"""Hostile inputs, each with the exact answer it gets: the error (so the HTTP status) and its sentence.

    URLS     what a URL alone is refused for, before anything is sent anywhere
    SERVERS  what a server may answer
    FILES    what a file may be

"{…}" in a sentence stands for what is the same many times, filled in by `sentence`.
"""

import base64
import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from ipaddress import ip_address
from zipfile import ZipFile

from snugvl.errors import ImageError, ImageTooLarge, InputError, RequestError
from tests.server.media import pictures, standin
from tests.server.media.pictures import encoded

NAME = "the image at url"
_FAILED = f"{NAME} could not be fetched: "
_PHRASES = {
    "hidden": f"{NAME} could not be fetched: %s is not the name or address of a public host; "
    "send the picture as a data URL, or start the server with --allow-private-media",
    "unread": f"{NAME} is not a picture that can be read: it looks like ",
    "schemes": "the URL must start with https://, http:// or data:; other schemes are not fetched",
    "unsafe": "the URL contains a space, a backslash, a control or a broken character; percent-encode it",
    "host": "the URL's host is not a valid name or address; check it",
    "malformed": "the URL is malformed: its host or port can't be read",
    "user": "the URL contains a user name or password; remove it",
    "base64": f"{NAME} is not valid base64; send the bytes of its file, encoded in base64 (in a data URL "
    "they follow the comma)",
    "huge": f"{NAME} is far larger than 100 million pixels; scale it down first",
    "failed": _FAILED,
    "again": "; copy or download it again",
    "html": "an HTML page, perhaps the error page of a failed download; download the picture itself",
    "formats": "send a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC",
    "broken": f"{_FAILED}pictures.test broke off or doesn't speak HTTP; send it as a data URL",
    "elsewhere": f"{_FAILED}pictures.test redirects to something that is not a proper http(s) URL; "
    "give the address of the picture itself",
    "compressed": f"{_FAILED}pictures.test sent it compressed, though asked not to; send it as a data URL",
    "sign-in": "check that the URL opens without signing in",
    "percent": "the data URL is not percent-encoded properly; encode it, or use ;base64",
    "file": "file: URLs are not read by this server; send a data URL, "
    "or start it with --allow-local-media FOLDER",
    "comma": "the data URL has no comma; write data:image/png;base64,… with the encoded file after it",
    "slow": f"{_FAILED}pictures.test took longer than 1 s; send it as a data URL",
    "scale": "; scale it down first, or raise the limit",
    "avif": "an AVIF picture, damaged or too new for this Pillow; convert it to PNG first",
    "name": NAME,
}


@dataclass(frozen=True)
class Case:
    """One hostile input. `error` None: it is harmless and has to work."""

    id: str
    value: str | bytes | standin.Reply | Callable[[], bytes]
    error: type[InputError] | None
    text: str = ""

    @property
    def sentence(self) -> str:
        """The whole message that is expected."""
        text = self.text
        for key, phrase in _PHRASES.items():
            text = text.replace("{" + key + "}", phrase)
        return text


def _hidden(id_: str, url: str, host: str) -> Case:
    return Case(id_, url, ImageError, _PHRASES["hidden"] % host)


# What the resolver of the tests knows. Anything else doesn't exist.
NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "intranet": ["10.1.2.3"],
    "internal.test": ["192.168.1.1"],
    "metadata.test": ["169.254.169.254"],
    "mixed.test": ["93.184.216.34", "10.0.0.1"],
    "mixed6.test": ["2606:2800:220:1::1", "fd00::1"],
    "scoped.test": ["fe80::1%eth0"],
    "nothing.test": [],
    "rubbish.test": ["not an address"],
    "xn--bcher-kva.test": ["10.0.0.1"],
}

_PRIVATE = {
    "private-10": "10.0.0.1",
    "private-172": "172.16.0.1",
    "private-192": "192.168.0.1",
    "loopback": "127.0.0.1",
    "loopback-end": "127.255.255.254",
    "unspecified": "0.0.0.0",
    "this-network": "0.1.2.3",
    "metadata": "169.254.169.254",
    "carrier-nat": "100.64.0.1",
    "alibaba-metadata": "100.100.100.200",
    "azure-host": "168.63.129.16",
    "protocol-assignments": "192.0.0.192",
    "documentation-1": "192.0.2.1",
    "documentation-2": "198.51.100.1",
    "documentation-3": "203.0.113.1",
    "benchmark": "198.19.255.255",
    "6to4-relay": "192.88.99.1",
    "multicast": "224.0.0.1",
    "reserved": "240.0.0.1",
    "broadcast": "255.255.255.255",
    "v6-loopback": "[::1]",
    "v6-unspecified": "[::]",
    "v6-mapped": "[::ffff:127.0.0.1]",
    "v6-mapped-public": "[::ffff:93.184.216.34]",
    "v6-compatible": "[::127.0.0.1]",
    "v6-link-local": "[fe80::1]",
    "v6-site-local": "[fec0::1]",
    "v6-unique-local": "[fd00:ec2::254]",
    "v6-multicast": "[ff02::1]",
    "v6-documentation": "[2001:db8::1]",
    "v6-6to4": "[2002:7f00:1::]",
    "v6-teredo": "[2001:0:4136:e378:8000:63bf:3fff:fdd2]",
    "v6-nat64": "[64:ff9b::7f00:1]",
    "v6-nat64-local": "[64:ff9b:1::a00:1]",
    "v6-discard": "[100::1]",
}
_NOTATIONS = {
    "short": "127.1",
    "one-number": "2130706433",
    "hexadecimal": "0x7f000001",
    "octal": "0177.0.0.1",
    "mixed-notation": "0x7f.0.0x1",
    "zero": "0",
    "final-dot": "127.0.0.1.",
    "full-width": "１２７．０．０．１",
    "circled": "①②⑦.⓪.⓪.①",
}


def _literal(host: str) -> str:
    return ip_address(host.strip("[]")).compressed


URLS = (
    *(_hidden(id_, f"http://{host}/a.png", _literal(host)) for id_, host in _PRIVATE.items()),
    *(
        _hidden(id_, f"https://{host}/a.png", "0.0.0.0" if id_ == "zero" else "127.0.0.1")
        for id_, host in _NOTATIONS.items()
    ),
    _hidden("name-of-loopback", "http://localhost:8000/metrics", "localhost"),
    _hidden("upper-case", "HTTP://LOCALHOST/", "localhost"),
    _hidden("single-label", "http://intranet/", "intranet"),
    _hidden("private-name", "https://internal.test/", "internal.test"),
    _hidden("metadata-name", "http://metadata.test/latest/meta-data/", "metadata.test"),
    _hidden("one-of-two-private", "http://mixed.test/", "mixed.test"),
    _hidden("one-of-two-private-v6", "http://mixed6.test/", "mixed6.test"),
    _hidden("scoped-answer", "http://scoped.test/", "scoped.test"),
    _hidden("no-answer", "http://nothing.test/", "nothing.test"),
    _hidden("rubbish-answer", "http://rubbish.test/", "rubbish.test"),
    _hidden("unknown-name", "http://unknown.test/", "unknown.test"),
    _hidden("idna", "http://bücher.test/", "xn--bcher-kva.test"),
    Case("user", "http://user:password@localhost/", RequestError, "{user}"),
    Case("user-trick", "http://example.com@127.0.0.1/", RequestError, "{user}"),
    Case("empty-user", "http://@localhost/", RequestError, "{user}"),
    Case("backslash", "http://localhost\\@example.com/", RequestError, "{unsafe}"),
    Case("newline", "http://example.com/\r\nHost: localhost", RequestError, "{unsafe}"),
    Case("tab-in-host", "http://local\thost/", RequestError, "{unsafe}"),
    Case("null", "http://example.com/\0", RequestError, "{unsafe}"),
    Case("space", "http://example.com/a b.png", RequestError, "{unsafe}"),
    Case("leading-space", " http://example.com/", RequestError, "{unsafe}"),
    Case("surrogate", "http://example.com/\ud800", RequestError, "{unsafe}"),
    Case("scope", "http://[fe80::1%25eth0]/", RequestError, "{host}"),
    Case("open-bracket", "http://[::1/", RequestError, "{malformed}"),
    Case("not-v6", "http://[127.0.0.1]/", RequestError, "{malformed}"),
    Case("percent-host", "http://%6cocalhost/", RequestError, "{host}"),
    Case("slash-lookalike", "http://example.com\u2044.evil/", RequestError, "{host}"),
    Case("account-lookalike", "http://example\u2100.com/", RequestError, "{malformed}"),
    Case("empty-host", "http:///etc/passwd", RequestError, "{host}"),
    Case("only-dots", "http://../", RequestError, "{host}"),
    Case("long-host", f"http://{'a' * 300}.com/", RequestError, "{host}"),
    Case(
        "port-0",
        "http://example.com:0/",
        RequestError,
        "the URL has port 0; leave the port out or give a real one",
    ),
    Case("port-99999", "http://example.com:99999/", RequestError, "{malformed}"),
    Case("port-words", "http://example.com:http/", RequestError, "{malformed}"),
    Case(
        "long",
        "http://example.com/" + "a" * 10_000,
        RequestError,
        "the URL has 10,019 characters, the limit is 8,192",
    ),
    Case("empty", "", RequestError, "the URL is empty; send a data URL, or an address of the web"),
    Case("path", "/etc/passwd", RequestError, "{schemes}"),
    Case("bare-base64", "iVBORw0KGgo=", RequestError, "{schemes}"),
    Case("ftp", "ftp://example.com/a.png", RequestError, "{schemes}"),
    Case("gopher", "gopher://example.com/_x", RequestError, "{schemes}"),
    Case("javascript", "javascript:alert(1)", RequestError, "{schemes}"),
    Case("blob", "blob:https://example.com/1", RequestError, "{schemes}"),
    Case("unix-socket", "http+unix://%2Fvar%2Frun%2Fdocker.sock/", RequestError, "{schemes}"),
    Case("scheme-relative", "//localhost/", RequestError, "{schemes}"),
    Case("file", "file:///etc/passwd", RequestError, "{file}"),
    Case("file-upper-case", "FILE:///etc/passwd", RequestError, "{file}"),
    Case("data-no-comma", "data:image/png;base64", RequestError, "{comma}"),
    Case("data-not-base64", "data:image/png;base64,not*base64", RequestError, "{base64}"),
    Case("data-cut-base64", "data:image/png;base64,AAAAA", RequestError, "{base64}"),
    Case("data-unicode-base64", "data:image/png;base64,ÄÖÜ=", RequestError, "{base64}"),
    Case("data-bad-percent", "data:image/png,%zz", RequestError, "{percent}"),
    Case("data-unicode", "data:image/png,ü", RequestError, "{percent}"),
    Case("data-empty", "data:,", ImageError, f"{NAME} is empty (0 bytes); send a picture"),
    Case(
        "data-empty-base64",
        "data:image/png;base64,",
        ImageError,
        f"{NAME} is empty (0 bytes); send a picture",
    ),
    Case("data-html", "data:text/html,<html><script>1</script>", ImageError, "{unread}{html}"),
    Case("data-text", "data:;base64,aGVsbG8=", ImageError, "{unread}text; {formats}"),
    Case(
        "data-100-MB",
        "data:image/png;base64," + "A" * 100_000_000,
        ImageTooLarge,
        f"{NAME} has about 75,000,000 bytes, the limit is 67,108,864; save it smaller",
    ),
)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


_PNG = encoded("PNG")
HARMLESS_URLS = (
    Case("data-plain", "data:image/png;base64," + _base64(_PNG), None),
    Case("data-upper-case", "DATA:IMAGE/PNG;BASE64," + _base64(_PNG), None),
    Case("data-lying-type", "data:text/html;charset=utf-8;base64," + _base64(_PNG), None),
    Case("data-no-type", "data:;base64," + _base64(_PNG), None),
    Case("data-line-breaks", "data:image/png;base64," + base64.encodebytes(_PNG).decode(), None),
    Case("data-no-padding", "data:image/png;base64," + _base64(_PNG).rstrip("="), None),
    Case("data-percent", "data:image/png," + "".join(f"%{byte:02x}" for byte in _PNG), None),
    Case(
        "data-percent-base64",
        "data:image/png;base64," + _base64(_PNG).replace("+", "%2B").replace("=", "%3D"),
        None,
    ),
)


def _zip() -> bytes:
    file = BytesIO()
    with ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "hello")
    return file.getvalue()


_SVG = (
    b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
)


@cache
def _long_text() -> bytes:
    return pictures.png(8, 6)[:33] + pictures.chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26), 9))


FILES = (
    Case("empty", b"", ImageError, f"{NAME} is empty (0 bytes); send a picture"),
    Case("text", b"root:x:0:0:root:/root:/bin/bash\n", ImageError, "{unread}text; {formats}"),
    Case("json", b'{"password": "hush"}', ImageError, "{unread}JSON text; send a picture"),
    Case("svg", _SVG, ImageError, "{unread}an SVG drawing; export it as PNG first"),
    Case("html", b"<!doctype html><title>Sign in</title>", ImageError, "{unread}{html}"),
    Case("pdf", b"%PDF-1.7\n", ImageError, "{unread}a PDF; export the page as PNG first"),
    Case(
        "postscript",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        ImageError,
        "{unread}a PostScript file; export it as PNG first",
    ),
    Case("zip", _zip(), ImageError, "{unread}a ZIP archive or an office document; extract the picture first"),
    Case("gzip", gzip.compress(_PNG), ImageError, "{unread}a gzip archive; unpack the picture first"),
    Case(
        "rar", b"Rar!\x1a\x07\x01\x00" + _PNG, ImageError, "{unread}a RAR archive; unpack the picture first"
    ),
    Case(
        "an older office document",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504),
        ImageError,
        "{unread}an older office document; export the picture as PNG first",
    ),
    Case("program", b"\x7fELF\x02\x01\x01" + bytes(40), ImageError, "{unread}a program; send a picture"),
    Case(
        "mp4",
        b"\0\0\0\x18ftypisom" + bytes(12),
        ImageError,
        "{unread}a video (MP4 or QuickTime); extract a frame first",
    ),
    Case("secret-bytes", b"\x00\xffSECRET\x00" * 9, ImageError, "{unread}unknown data; {formats}"),
    Case("icon", b"\0\0\1\0" + bytes(60), ImageError, "{unread}a Windows icon; convert it to PNG first"),
    Case("photoshop", b"8BPS" + bytes(60), ImageError, "{unread}a Photoshop file; export it as PNG first"),
    Case("ppm", b"P6\n1 1\n255\nabc", ImageError, "{unread}text; {formats}"),
    Case(
        "gif-then-script",
        b"GIF89a/*<script>alert(1)</script>*/=1;",
        ImageError,
        "{unread}a damaged GIF file{again}",
    ),
    Case("png-magic-only", b"\x89PNG\r\n\x1a\n", ImageError, "{unread}a damaged PNG file{again}"),
    Case("png-no-pixels", pictures.png(0, 5), ImageError, "{unread}a damaged PNG file{again}"),
    Case("png-truncated", pictures.encoded("PNG", (300, 300))[:200], ImageError, "*is damaged or incomplete"),
    Case(
        "png-too-few-rows",
        pictures.png(100, 100, zlib.compress(bytes(10))),
        ImageError,
        "*is damaged or incomplete",
    ),
    Case("jpeg-magic-only", b"\xff\xd8\xff\xe0", ImageError, "{unread}a damaged JPEG file{again}"),
    Case(
        "jpeg-truncated", pictures.encoded("JPEG", (400, 400))[:-200], ImageError, "*is damaged or incomplete"
    ),
    Case(
        "webp-truncated",
        pictures.encoded("WEBP", (64, 64))[:30],
        ImageError,
        "{unread}a damaged WebP file{again}",
    ),
    Case(
        "tiff-pages",
        lambda: pictures.animation("TIFF"),
        ImageError,
        f"{NAME} has 6 pages; extract one page as PNG first",
    ),
    Case(
        "bomb-png",
        lambda: pictures.png_bomb(9000, 8000),
        ImageTooLarge,
        "{name} is 9,000×8,000 = 72,000,000 pixels, the limit is 64,000,000{scale}",
    ),
    Case("bomb-png-claim", pictures.png(50_000, 50_000), ImageTooLarge, "{huge}"),
    Case("bomb-png-text", _long_text, ImageError, "{unread}a damaged PNG file{again}"),
    Case("bomb-gif-claim", lambda: pictures.gif_claim(65_535, 65_535), ImageTooLarge, "{huge}"),
    Case("bomb-jpeg-claim", lambda: pictures.jpeg_claim(65_535, 65_535), ImageTooLarge, "{huge}"),
    Case("bomb-bmp-claim", lambda: pictures.bmp_claim(2**31 - 1, 2**31 - 1), ImageTooLarge, "{huge}"),
    Case("bomb-bmp-negative", lambda: pictures.bmp_claim(-5, 5), ImageTooLarge, "{huge}"),
    Case("bomb-tiff-claim", lambda: pictures.tiff_claim(60_000, 60_000), ImageTooLarge, "{huge}"),
    Case("bomb-webp-claim", lambda: pictures.webp_claim(16_000, 16_000), ImageTooLarge, "{huge}"),
    Case("bomb-avif-claim", lambda: pictures.avif_claim(30_000, 30_000), ImageError, "{unread}{avif}"),
)

HARMLESS_FILES = (
    # What follows a picture is never looked at.
    Case("jpeg-then-zip", encoded("JPEG") + _zip(), None),
    Case("jpeg-then-html", encoded("JPEG") + b"<script>alert(1)</script>", None),
    Case("png-then-program", encoded("PNG") + b"MZ" + bytes(100), None),
    Case("gif-then-pdf", encoded("GIF") + b"%PDF-1.7", None),
)

SERVERS = (
    Case(
        "404",
        standin.answer(b"secret page", status="404 Not Found"),
        ImageError,
        "{failed}pictures.test answered 404; {sign-in}",
    ),
    Case(
        "401",
        standin.answer(b"", "WWW-Authenticate: Basic", status="401 No"),
        ImageError,
        "{failed}pictures.test answered 401; {sign-in}",
    ),
    Case(
        "206",
        standin.answer(_PNG, status="206 Partial"),
        ImageError,
        "{failed}pictures.test answered 206; {sign-in}",
    ),
    Case(
        "html",
        standin.answer(b"<html>SECRET</html>", "Content-Type: image/png"),
        ImageError,
        "{unread}{html}",
    ),
    Case(
        "gzip-encoding",
        standin.answer(gzip.compress(_PNG), "Content-Encoding: gzip"),
        ImageError,
        "{compressed}",
    ),
    Case("unknown-encoding", standin.answer(_PNG, "Content-Encoding: br, gzip"), ImageError, "{compressed}"),
    Case("gzip-transfer", standin.answer(_PNG, "Transfer-Encoding: gzip"), ImageError, "{broken}"),
    Case(
        "long-claim",
        standin.answer(b"x", length=10**12),
        ImageTooLarge,
        f"{NAME} has 1,000,000,000,000 bytes, the limit is 200,000; use a smaller one",
    ),
    Case(
        "endless",
        standin.endless,
        ImageTooLarge,
        f"{NAME} has more than 200,000 bytes, the limit; use a smaller one",
    ),
    Case(
        "endless-chunks",
        standin.endless_chunks,
        ImageTooLarge,
        f"{NAME} has more than 200,000 bytes, the limit; use a smaller one",
    ),
    Case("shorter-than-said", standin.answer(_PNG, length=5000), ImageError, "{broken}"),
    Case("two-lengths", standin.answer(_PNG, "Content-Length: 3"), ImageError, "{broken}"),
    Case("negative-length", standin.answer(_PNG, length=-1), ImageError, "{broken}"),
    Case("not-http", b"SSH-2.0-OpenSSH_9.6\r\n", ImageError, "{broken}"),
    Case("nothing", b"", ImageError, "{broken}"),
    Case("huge-headers", standin.answer(_PNG, "X-Long: " + "a" * 300_000), ImageError, "{broken}"),
    Case("empty", standin.answer(b""), ImageError, f"{NAME} is empty (0 bytes); send a picture"),
    Case("slow-body", standin.drip, ImageError, "{slow}"),
    Case("slow-headers", standin.drip_headers, ImageError, "{slow}"),
    Case("endless-continue", standin.endless_continue, ImageError, "{slow}"),
    Case("silent", standin.silent, ImageError, "{failed}pictures.test doesn't answer; send it as a data URL"),
    Case(
        "loop",
        standin.redirect("/case"),
        ImageError,
        "{failed}more than 3 redirects; give the address where they end",
    ),
    Case("redirect-nowhere", standin.answer(b"", status="302 Found"), ImageError, "{elsewhere}"),
    Case("redirect-file", standin.redirect("file:///etc/passwd"), ImageError, "{elsewhere}"),
    Case("redirect-data", standin.redirect("data:image/png;base64,AAAA"), ImageError, "{elsewhere}"),
    Case("redirect-user", standin.redirect("http://a:b@pictures.test/"), ImageError, "{elsewhere}"),
    Case("redirect-rubbish", standin.redirect("http://[::1"), ImageError, "{elsewhere}"),
    Case(
        "redirect-private", standin.redirect("http://10.0.0.1/"), ImageError, _PHRASES["hidden"] % "10.0.0.1"
    ),
    Case(
        "redirect-private-308",
        standin.redirect("//192.168.0.1/", "308 P"),
        ImageError,
        _PHRASES["hidden"] % "192.168.0.1",
    ),
    Case(
        "redirect-metadata",
        standin.redirect("http://metadata.test/"),
        ImageError,
        _PHRASES["hidden"] % "metadata.test",
    ),
    Case(
        "redirect-mapped",
        standin.redirect("http://[::ffff:7f00:1]/"),
        ImageError,
        _PHRASES["hidden"] % ip_address("::ffff:7f00:1"),  # which Python 3.13 writes otherwise
    ),
)

HARMLESS_SERVERS = (
    Case("plain", standin.answer(_PNG), None),
    Case("lying-type", standin.answer(_PNG, "Content-Type: text/html"), None),
    Case("no-length", b"HTTP/1.1 200 OK\r\n\r\n" + _PNG, None),
    Case("http-1.0", b"HTTP/1.0 200 OK\r\n\r\n" + _PNG, None),
    Case(
        "chunks",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(_PNG) + _PNG + b"\r\n0\r\n\r\n",
        None,
    ),
    Case("longer-than-said", standin.answer(_PNG + b"more", length=len(_PNG)), None),
    Case("identity-encoding", standin.answer(_PNG, "Content-Encoding: identity"), None),
)
