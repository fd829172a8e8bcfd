"""What media loading allows. Every limit has a number, and every refusal names it."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from snugvl.core.sizes import MIB
from snugvl.inputs.frames import VideoLimits
from snugvl.inputs.image import ImageLimits

FEWEST_WORKERS, MOST_WORKERS = 2, 4  # of which the largest picture may take 1.9 GB each


def workers_for(cores: int | None = None) -> int:
    """A quarter of the cores that this process may use, or of so many, within bounds."""
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // 4, FEWEST_WORKERS), MOST_WORKERS)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of one fetch over http(s), redirects included.

    Attributes:
        total_s: from the first look-up to the last byte, waiting for a free slot included.
        connect_s, read_s: for one connection; for the first byte, and between two pieces of data.
        max_redirects: followed before giving up.
        concurrent, per_address: fetches at once in all, and from one address.
    """

    total_s: float = 20.0
    connect_s: float = 5.0
    read_s: float = 10.0
    max_redirects: int = 3
    concurrent: int = 16
    per_address: int = 4


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Settings of a server's media loading.

    Attributes:
        image: bytes and pixels of one picture, checked before it is decoded.
        local_folder: from which `file:` URLs are read; None for none.
        allow_private: whether http(s) URLs may point to private addresses.
        domains: hosts, with all below them, that http(s) URLs may name; None for any.
        workers: pictures decoded at once, each in a process of its own; processes start when first needed.
        decode_s: seconds one picture may take to decode.
        max_live_bytes: of all decoded pictures and videos of one request, 3 for each pixel; reserved before
            one is decoded, until the engine has them. It is 14 photos of 12 megapixels.
        shared_bytes: the same of several requests: those that don't fit together take turns. A request that
            needs more has its turn alone. The largest picture that there is fits.
        wait_s: seconds that a picture waits for others to leave room, before `QueueFull`.
    """

    image: ImageLimits = field(default_factory=lambda: ImageLimits(max_pixels=64_000_000))
    video: VideoLimits = field(default_factory=VideoLimits)
    fetch: FetchLimits = field(default_factory=FetchLimits)
    local_folder: Path | None = None
    allow_private: bool = False
    domains: tuple[str, ...] | None = None
    workers: int = field(default_factory=workers_for)
    decode_s: float = 15.0
    max_live_bytes: int = 512 * MIB
    shared_bytes: int = 192 * MIB
    wait_s: float = 20.0
