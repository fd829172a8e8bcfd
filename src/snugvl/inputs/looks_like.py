"""Kinds of files by their content: of what is not a readable picture, and what to do about it; of ISO media.
Suffixes of picture and video files, to find them in folders and to tell a file's name from words.

ISO media files (`ftyp`) are MP4 and QuickTime films, HEIF and AVIF, still or moving, in one container. Brands
say what a reader must know (ISO/IEC 23008-12, AVIF 1.1): the major one alone isn't enough, since encoders
write "mif1" and "msf1" in its place. Boxes say whether a still picture is in it: still pictures are described
in a `meta` box, films and sequences in a `moov` box.
"""

import re
from collections.abc import Iterator
from typing import Final, Literal

PICTURES: Final = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif",
    ".heic", ".heif", ".heics", ".heifs", ".hif", ".mpo",
))  # fmt: skip
URL_SCHEMES: Final = ("http://", "https://", "data:")  # of what is not a path
VIDEOS: Final = frozenset((".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".ogv"))
Kind = Literal["HEIF", "AVIF", "sequence", "film"]
"""HEIF and AVIF have a still picture, or frames, that Pillow's plugins read; a "sequence" is HEIF of which
there is but a track, as in a film."""

_AVIF: Final = frozenset((b"avif", b"avis"))
_HEVC: Final = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"))
_HEIF: Final = _AVIF | _HEVC | {b"mif1", b"mif2", b"msf1", b"miaf"}
_RAW: Final = b"crx "  # what Canon's cameras keep beside a JPEG
_MOST_BRANDS: Final = 64
_MOST_BOXES: Final = 256

# Beginnings of PNG, JPEG, GIF, WebP, BMP, TIFF, HEIC and AVIF, and enough of what follows.
_IN_BASE64: Final = re.compile(
    r"(iVBORw0KG|/9j/|R0lGOD|UklGR|Qk|SUkqA|TU0AK|AAAA)[A-Za-z0-9+/\s]{32,}={0,2}\s*\Z"
)


def kind_of(data: bytes) -> Kind | None:
    """Kind of the file; None where it is not ISO media. A part of a file will do, for as far as it goes."""
    if data[4:8] != b"ftyp":
        return None
    end = min(int.from_bytes(data[:4]), 16 + 4 * _MOST_BRANDS)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, end, 4))}
    if not brands & _HEIF:
        return None if data[8:12] == _RAW else "film"
    if data[8:12] in _AVIF or (brands & _AVIF and not brands & _HEVC):
        return "AVIF"
    boxes = {kind for kind, _ in _boxes(data)}
    return "sequence" if b"moov" in boxes and b"meta" not in boxes else "HEIF"


def has_track(data: bytes) -> bool:
    """Whether there is a track in it, as in a film: a sequence may stand beside the still picture."""
    return any(kind == b"moov" for kind, _ in _boxes(data))


def hide(data: bytes, box: bytes) -> bytes:
    """A HEIF file of which readers see the still picture alone (`box` is "moov"), or the track ("meta").

    Readers stumble over the other one: libheif refuses a good picture beside a track that it can't read,
    FFmpeg takes the picture for the film.
    """
    if kind_of(data) != "HEIF" or not has_track(data):
        return data
    hidden = bytearray(data)
    for kind, at in _boxes(data):
        if kind == box:
            hidden[at : at + 4] = b"free"
    return bytes(hidden)


def _boxes(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Type of each outermost box, and where it is written, as far as they hang together."""
    at = 0
    for _ in range(_MOST_BOXES):
        size, head = int.from_bytes(data[at : at + 4]), 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16]), 16
        if len(data) < at + head:
            return
        yield data[at + 4 : at + 8], at + 4
        if size < head:  # 0: up to the end of the file; else it is damaged
            return
        at += size


_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"%PDF", "a PDF; export the page as PNG first"),
    (b"%!PS", "a PostScript file; export it as PNG first"),
    (b"8BPS", "a Photoshop file; export it as PNG first"),
    (b"\x00\x00\x01\x00", "a Windows icon; convert it to PNG first"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL picture; convert it to PNG or JPEG first"),
    (b"\xff\x0a", "a JPEG XL picture; convert it to PNG or JPEG first"),
    (b"\x00\x00\x00\x0cjP", "a JPEG 2000 picture; convert it to PNG or JPEG first"),
    (b"\x1aE\xdf\xa3", "a video (Matroska or WebM); extract a frame first"),
    (b"ID3", "an audio file; send a picture"),
    (b"OggS", "an Ogg audio or video file; send a picture"),
    (b"PK\x03\x04", "a ZIP archive or an office document; extract the picture first"),
    (b"\x1f\x8b", "a gzip archive; unpack the picture first"),
    (b"7z\xbc\xaf", "a 7z archive; unpack the picture first"),
    (b"Rar!\x1a\x07", "a RAR archive; unpack the picture first"),
    (b"\xd0\xcf\x11\xe0", "an older office document; export the picture as PNG first"),
    (b"\x7fELF", "a program; send a picture"),
    (b"MZ", "a Windows program; send a picture"),
    (b"SQLite format 3", "a database; send a picture"),
    (b"version https://git-lfs", "a Git LFS pointer, not the picture itself; run `git lfs pull`"),
)

# Formats that are read: their signature with a failing decoder means a damaged file.
_PICTURES: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
)

_SEND = "send a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF or HEIC"
_UNKNOWN = "application/octet-stream"
_FILMS = ((b"\x1aE\xdf\xa3", "video/webm"), (b"OggS", "video/ogg"))
_ISO_MEDIA: dict[Kind, str] = {
    "HEIF": "a damaged HEIC photo; copy or download it again",
    "AVIF": "an AVIF picture, damaged or too new for this Pillow; convert it to PNG first",
    "sequence": "a HEIF sequence without a still picture; send it as a video, or extract a frame first",
    "film": "a video (MP4 or QuickTime); extract a frame first",
}


def describe(data: bytes, *, quote: bool = True) -> str:
    """Kind of `data` by its looks, and what to do, as the end of a sentence: "a PDF; export …".

    Without `quote`, not even the first bytes of unknown data are shown.
    """
    container = _container(data)
    if container:
        return container
    for signature, kind in _PICTURES:
        if data.startswith(signature):
            return f"a damaged {kind} file; copy or download it again"
    for signature, advice in _SIGNATURES:
        if data.startswith(signature):
            return advice
    start = f" (it starts with {data[:4].hex(' ')})" if quote else ""
    return _text(data) or f"unknown data{start}; {_SEND}"


def _container(data: bytes) -> str | None:
    """RIFF and ISO media name their content a few bytes in."""
    if data[:4] == b"RIFF":
        kinds = {
            b"WEBP": "a damaged WebP file; copy or download it again",
            b"AVI ": "a video (AVI); extract a frame first",
            b"WAVE": "an audio file (WAV); send a picture",
        }
        return kinds.get(data[8:12])
    if data[4:12] == b"ftyp" + _RAW:
        return "a camera's raw file; export it as JPEG first"
    kind = kind_of(data)
    return _ISO_MEDIA[kind] if kind else None


def _text(data: bytes) -> str | None:
    """Kind of text, and what to do; None when it isn't text."""
    head = data[:4096]
    # The last character may be cut in half: only that is forgiven.
    text = head.decode("utf-8", "ignore")
    if len(text.encode()) < len(head) - 3 or any(ord(c) < 32 and c not in "\t\n\r\f" for c in text):
        return None
    start = text.lstrip("\ufeff \t\r\n").lower()
    if "<svg" in start:
        return "an SVG drawing; export it as PNG first"
    if start.startswith(("<!doctype html", "<html", "<head")):
        return "an HTML page, perhaps the error page of a failed download; download the picture itself"
    if start.startswith(("{", "[")):
        return "JSON text; send a picture"
    return f"text; {_SEND}"


def media_type(data: bytes) -> str:
    """The media type of a picture or video by its content; "application/octet-stream" of anything else."""
    if kind := kind_of(data):
        return {"AVIF": "image/avif", "HEIF": "image/heic", "sequence": "image/heic-sequence"}.get(
            kind, "video/mp4"
        )
    if data[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"AVI ": "video/x-msvideo"}.get(data[8:12], _UNKNOWN)
    kinds = (f"image/{kind.lower()}" for signature, kind in _PICTURES if data.startswith(signature))
    films = (kind for signature, kind in _FILMS if data.startswith(signature))
    return next(kinds, None) or next(films, _UNKNOWN)


def in_base64(text: str) -> bool:
    """Whether `text` is a picture's file in bare base64: no path or address."""
    return _IN_BASE64.match(text[:128]) is not None
