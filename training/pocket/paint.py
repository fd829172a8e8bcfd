"""The evaluation's own painter: scenes drawn with Pillow at the author's size, edges smooth or hard.

It shares the scenes with the training renderer but none of its drawing code: polygons, fonts and pictograms
come straight from Pillow, at full size, and the pictures go through the real image processor afterwards.
"""

import math
import random
from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw
from training.pocket import geometry, lettering
from training.pocket.scenes import Background, Scene, Thing

SMOOTH = 4  # supersampling of smooth edges


def paint(
    scene: Scene, fonts: tuple[str, ...], rng: random.Random, pictograms: Mapping[str, Image.Image]
) -> Image.Image:
    """The scene's picture with these drawings of pictograms; whether edges are smooth is up to `rng`."""
    image = _background(scene.background, scene.width, scene.height, rng.randrange(1 << 30))
    scale = SMOOTH if rng.random() < 0.6 else 1
    for thing in scene.things:
        if thing.kind == "shape":
            _shape(image, thing, scale)
        elif thing.kind == "pictogram":
            _pictogram(image, thing, pictograms[thing.name])
        else:
            _word(image, thing, fonts[thing.handle])
    if scene.background.noise:
        noise = np.random.default_rng(rng.randrange(1 << 30)).normal(
            0, scene.background.noise, (*image.size[::-1], 3)
        )
        image = Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    return image


def _background(b: Background, width: int, height: int, seed: int) -> Image.Image:
    """Pattern and colours as an RGB picture."""
    y, x = np.mgrid[0:height, 0:width] + 0.5
    cos, sin = math.cos(math.radians(b.angle)), math.sin(math.radians(b.angle))
    along = (x - width / 2) * cos + (y - height / 2) * sin
    mix = np.zeros((height, width))
    if b.pattern == "gradient":
        mix = (along / (width * abs(cos) + height * abs(sin)) + 0.5).clip(0, 1)
    elif b.pattern == "striped":
        mix = ((along / b.period + b.phase) % 1 < 0.5).astype(float)
    elif b.pattern == "checkered":
        mix = (np.floor(x / b.period + b.phase) + np.floor(y / b.period + b.phase)) % 2
    elif b.pattern == "dotted":
        u, v = (x / b.period + b.phase) % 1 - 0.5, (y / b.period + b.phase) % 1 - 0.5
        mix = (u * u + v * v < 0.08).astype(float)
    elif b.pattern == "textured":
        mix = (
            _grain(width, height, b.period / 1.5, seed) * 0.6
            + _grain(width, height, b.period / 5, seed + 1) * 0.4
        )
    colors = np.asarray(b.rgb) * (1 - mix[..., None]) + np.asarray(b.second) * mix[..., None]
    return Image.fromarray(colors.round().astype(np.uint8))


def _grain(width: int, height: int, period: float, seed: int) -> np.ndarray:
    """Smooth random values 0..1 with features of `period` pixels."""
    columns, rows = max(2, math.ceil(width / period)), max(2, math.ceil(height / period))
    coarse = np.random.default_rng(seed).random((rows, columns)) * 255
    image = Image.fromarray(coarse.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image) / 255


def _shape(image: Image.Image, thing: Thing, scale: int) -> None:
    """A polygon (or ring), with its outline inside its edge, on a tile of its own."""
    x0, y0 = math.floor(thing.box[0]) - 2, math.floor(thing.box[1]) - 2
    x1, y1 = math.ceil(thing.box[2]) + 2, math.ceil(thing.box[3]) + 2
    size = ((x1 - x0) * scale, (y1 - y0) * scale)
    cx, cy = (thing.center[0] - x0) * scale, (thing.center[1] - y0) * scale
    half = (thing.half[0] * scale, thing.half[1] * scale)
    points = [(cx + x, cy + y) for x, y in geometry.turned(thing.name, thing.angle, half)]
    mask, rim = Image.new("L", size), Image.new("L", size)
    ImageDraw.Draw(mask).polygon(points, fill=255)
    width = 2 * max(1, round(thing.outline_width * min(half)))
    closed = [*points, points[0], points[1]]
    ImageDraw.Draw(rim).line(closed, fill=255, width=width, joint="curve")
    if thing.name == "ring":
        hole = geometry.RING_HOLE * half[0]
        circle = (cx - hole, cy - hole, cx + hole, cy + hole)
        ImageDraw.Draw(rim).ellipse(circle, outline=255, width=max(1, width // 2))
        ImageDraw.Draw(mask).ellipse(circle, fill=0)
    if scale > 1:
        mask, rim = (m.resize((x1 - x0, y1 - y0), Image.Resampling.BOX) for m in (mask, rim))
    rows = np.arange(y0, y1)[:, None, None] + 0.5 - thing.center[1]
    shade = 1 + thing.shade * rows / thing.half[1]
    fill = (np.asarray(thing.rgb) * shade).clip(0, 255).round().astype(np.uint8)
    tile = Image.fromarray(np.broadcast_to(fill, (y1 - y0, x1 - x0, 3)).copy())
    if thing.outline:
        tile.paste(Image.new("RGB", tile.size, thing.outline), (0, 0), rim)
    image.paste(tile, (x0, y0), mask)


def _pictogram(image: Image.Image, thing: Thing, drawing: Image.Image) -> None:
    x0, y0, x1, y1 = (round(v) for v in thing.box)
    sprite = drawing.resize((max(1, x1 - x0), max(1, y1 - y0)), Image.Resampling.LANCZOS)
    image.paste(sprite, (x0, y0), sprite)


def _word(image: Image.Image, thing: Thing, font: str) -> None:
    """The text at the size whose ink fills the box."""
    x0, y0, x1, y1 = thing.box
    height, width = lettering.ink(thing.text, font, 160).shape
    size = max(4, round(160 * ((x1 - x0) / width + (y1 - y0) / height) / 2))
    ink = Image.fromarray(lettering.ink(thing.text, font, size))
    corner = (round((x0 + x1 - ink.width) / 2), round((y0 + y1 - ink.height) / 2))
    image.paste(Image.new("RGB", ink.size, thing.rgb), corner, ink)
