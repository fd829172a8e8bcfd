"""Shapes as closed outlines and distances, and the grid on which the network sees a picture.

Unit space of a shape: x to the right, y down, the shape inside [-1, 1] x [-1, 1] before turning. Rectangles
and ovals are the unit square and the unit circle, stretched by their half extents.
"""

import functools
import math
import random

import numpy as np

PATCH = 16  # pixels
MERGE = 2  # patches along each side of one image token
TOKEN = PATCH * MERGE  # pixels along each side of one image token
SLIM = 6.0, 16.0  # long side over short side of a strip
SIDES = 64, 1024  # pixels: the shortest and the longest side of a picture
MIN_PIXELS, MAX_PIXELS = 53_248, 73_728  # 52..72 image tokens for ordinary shapes of picture

Points = tuple[tuple[float, float], ...]


def strip(rng: random.Random) -> tuple[int, int]:
    """The sides of a strip in pixels, every ratio as likely as the others (on a logarithmic scale).

    The ratio comes first: a random area and a random ratio rarely fit between the shortest and the longest
    side, and the more rarely the slimmer the strip is.
    """
    ratio = math.exp(rng.uniform(*map(math.log, SLIM)))
    short = math.exp(rng.uniform(math.log(SIDES[0]), math.log(SIDES[1] / ratio)))
    sides = round(short * ratio), round(short)
    return sides if rng.random() < 0.5 else sides[::-1]


@functools.cache
def token_grid(width: int, height: int) -> tuple[int, int]:
    """(rows, columns) of image tokens for a picture of this size in pixels: Qwen's smart_resize."""
    rows, columns = round(height / TOKEN), round(width / TOKEN)
    area = rows * columns * TOKEN * TOKEN
    if area > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        rows = max(1, math.floor(height / shrink / TOKEN))
        columns = max(1, math.floor(width / shrink / TOKEN))
    elif area < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = math.ceil(height * grow / TOKEN), math.ceil(width * grow / TOKEN)
    return rows, columns


def _regular(corners: int, inner: float | None = None) -> Points:
    steps = corners if inner is None else 2 * corners
    out = []
    for i in range(steps):
        radius = inner if inner is not None and i % 2 else 1.0
        angle = -math.pi / 2 + 2 * math.pi * i / steps
        out.append((radius * math.cos(angle), radius * math.sin(angle)))
    return tuple(out)


def _heart() -> Points:
    out = []
    for i in range(72):
        t = 2 * math.pi * i / 72
        x = 16 * math.sin(t) ** 3
        y = -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t))
        out.append((x / 16, (y - 2.5) / 14.6))
    return tuple(out)


def _arc(radius: float, cx: float, start: float, stop: float, steps: int) -> list[tuple[float, float]]:
    angles = (math.radians(start + (stop - start) * i / steps) for i in range(steps + 1))
    return [(cx + radius * math.cos(a), radius * math.sin(a)) for a in angles]


def _crescent() -> Points:
    # A unit disc less a disc of radius 0.82 moved 0.46 to the right; they meet at (mx, +-my).
    mx = (1 + 0.46**2 - 0.82**2) / (2 * 0.46)
    my = math.sqrt(1 - mx * mx)
    outer = math.degrees(math.atan2(my, mx))
    inner = math.degrees(math.atan2(my, mx - 0.46))
    points = _arc(1.0, 0.0, outer, 360 - outer, 48) + _arc(0.82, 0.46, 360 - inner, inner, 36)
    return tuple((x + 0.2, y) for x, y in points)


def _cross() -> Points:
    a, b = 1.0, 0.33
    return (
        (-b, -a),
        (b, -a),
        (b, -b),
        (a, -b),
        (a, b),
        (b, b),
        (b, a),
        (-b, a),
        (-b, b),
        (-a, b),
        (-a, -b),
        (-b, -b),
    )


RING_HOLE = 0.58  # inner radius of a ring

OUTLINES: dict[str, Points] = {
    "circle": _regular(72),
    "oval": _regular(72),
    "ring": _regular(72),
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "rectangle": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "triangle": _regular(3),
    "star": _regular(5, 0.42),
    "heart": _heart(),
    "diamond": ((0, -1.0), (0.72, 0), (0, 1.0), (-0.72, 0)),
    "pentagon": _regular(5),
    "hexagon": _regular(6),
    "cross": _cross(),
    "arrow": ((-1.0, -0.26), (0.1, -0.26), (0.1, -0.72), (1.0, 0), (0.1, 0.72), (0.1, 0.26), (-1.0, 0.26)),
    "crescent": _crescent(),
}


def turned(shape: str, angle: float, half: tuple[float, float] = (1.0, 1.0)) -> list[tuple[float, float]]:
    """The outline, stretched by `half`, then turned clockwise (y down) by `angle` degrees."""
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    stretched = ((x * half[0], y * half[1]) for x, y in OUTLINES[shape])
    return [(c * x - s * y, s * x + c * y) for x, y in stretched]


@functools.cache
def _bounds(shape: str, degrees: int, aspect_steps: int) -> tuple[float, float, float, float]:
    root = math.sqrt(math.exp(aspect_steps / 64))
    points = turned(shape, degrees, (root, 1 / root))
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    return min(xs), min(ys), max(xs), max(ys)


def _lookup(shape: str, aspect: float, angle: float) -> tuple[float, float, float, float]:
    return _bounds(shape, round(angle), round(math.log(aspect) * 64))


def upright_half(shape: str, aspect: float, angle: float) -> tuple[float, float]:
    """Half width and half height of the upright box around a turned shape of half extents sqrt(aspect)**±1.

    Looked up at whole degrees and 1/64 log steps, the only values scenes use.
    """
    x0, y0, x1, y1 = _lookup(shape, aspect, angle)
    return (x1 - x0) / 2, (y1 - y0) / 2


def upright_offset(shape: str, angle: float) -> tuple[float, float]:
    """Where the middle of the upright box lies, seen from the turning point (zero for stretched shapes)."""
    x0, y0, x1, y1 = _lookup(shape, 1.0, angle)
    return (x0 + x1) / 2, (y0 + y1) / 2


def distance_field(shape: str, size: int, reach: float) -> np.ndarray:
    """Signed distance to the outline, negative inside, sampled on [-reach, reach]^2: [size, size] float32."""
    axis = (np.arange(size) + 0.5) / size * 2 * reach - reach
    x, y = np.meshgrid(axis, axis)
    points = np.asarray(OUTLINES[shape])
    best = np.full(x.shape, np.inf)
    inside = np.zeros(x.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(points, np.roll(points, -1, axis=0), strict=True):
        ex, ey = bx - ax, by - ay
        t = np.clip(((x - ax) * ex + (y - ay) * ey) / max(ex * ex + ey * ey, 1e-12), 0, 1)
        best = np.minimum(best, np.hypot(x - ax - t * ex, y - ay - t * ey))
        if ay != by:
            crosses = (ay > y) != (by > y)
            inside ^= crosses & (x < ax + (y - ay) / (by - ay) * ex)
    signed = np.where(inside, -best, best)
    if shape == "ring":
        signed = np.maximum(signed, RING_HOLE - np.hypot(x, y))
    return signed.astype(np.float32)
