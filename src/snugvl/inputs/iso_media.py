"""Kinds of ISO media files (`ftyp`): MP4 and QuickTime films, HEIF and AVIF, still or moving.

They share a container. Brands say what a reader must know (ISO/IEC 23008-12, AVIF 1.1): the major one alone
isn't enough, since encoders write "mif1" and "msf1" in its place. Whether there is a still picture in it is
said by its boxes: still pictures are described in a `meta` box, films and sequences in a `moov` box.
"""

from collections.abc import Iterator
from typing import Final, Literal

Kind = Literal["HEIF", "AVIF", "sequence", "film"]
"""HEIF and AVIF have a still picture, or frames, that Pillow's plugins read; a "sequence" is HEIF of which
there is but a track, as in a film."""

_AVIF: Final = frozenset((b"avif", b"avis"))
_HEVC: Final = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"))
_HEIF: Final = _AVIF | _HEVC | {b"mif1", b"mif2", b"msf1", b"miaf"}
_MOST_BRANDS: Final = 64
_MOST_BOXES: Final = 256


def kind_of(data: bytes) -> Kind | None:
    """Kind of the file; None where it is no ISO media. A part of a file will do, for as far as it goes."""
    if data[4:8] != b"ftyp":
        return None
    end = min(int.from_bytes(data[:4]), 16 + 4 * _MOST_BRANDS)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, end, 4))}
    if not brands & _HEIF:
        return "film"
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
