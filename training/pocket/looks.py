"""How each pictogram may look: the drawings of all sets and altered copies of them, with the facts about
each.

Copies are turned, mirrored, slanted, tinted, flattened to a few colours, or drawn over with dark lines, so
that a set that training never saw looks like one more of the kind. Facts are measured on the copy, so they
stay true.
"""

import multiprocessing
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps
from training.pocket import world
from training.pocket.world import Rgb

Sprites = Mapping[str, np.ndarray]  # name → [height, width, 4] uint8
SIDE = 96  # longer side of a copy, in pixels
MOST, FEW = (
    0.62,
    0.4,
)  # shares of the ink from which a pictogram is called by a colour, and up to which it isn't


@dataclass(frozen=True, slots=True)
class Look:
    """One drawing of a pictogram: its number among the sprites, and what placing and asking need to know.

    `color` is the colour that most of it has, "" where it has several, None where that is a matter of taste.
    """

    sprite: int
    aspect: float  # width / height
    mean: Rgb
    color: str | None = None


@dataclass(frozen=True, slots=True)
class Cast:
    """All looks by pictogram name, and how many pictures of the world outside there are."""

    looks: dict[str, tuple[Look, ...]]
    photos: int = 0


def main_color(sprite: np.ndarray) -> str | None:
    """`Look.color` of a [height, width, 4] sprite."""
    small = np.asarray(Image.fromarray(sprite).resize((20, 20), Image.Resampling.BOX)).reshape(-1, 4)
    ink = small[small[:, 3] > 200, :3]
    if len(ink) < 30:
        return None
    names = [world.certain_name((r, g, b), 0.06) for r, g, b in ink.tolist()]
    best = max(world.COLORS, key=names.count)
    share = names.count(best) / len(names)
    return best if share >= MOST else "" if share <= FEW else None


def look(sprite: np.ndarray, number: int) -> Look:
    """The facts about sprite number `number`."""
    weight = sprite[..., 3:].astype(float)
    r, g, b = (round(v) for v in (sprite[..., :3] * weight).sum((0, 1)) / max(1.0, weight.sum()))
    return Look(number, sprite.shape[1] / sprite.shape[0], (r, g, b), main_color(sprite))


def _moved(image: Image.Image, rng: random.Random) -> Image.Image:
    """Mirrored, turned, slanted and stretched a little, on a canvas with room."""
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    side = 2 * SIDE
    canvas = Image.new("RGBA", (side, side))
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    turn, slant = rng.gauss(0, 0.13), rng.gauss(0, 0.1)
    c, s, half = np.cos(turn), np.sin(turn), side / 2
    sx, sy = np.exp(rng.gauss(0, 0.09)), np.exp(rng.gauss(0, 0.09))
    a, b, d, e = c * sx, (s + slant) * sx, -s * sy, c * sy
    shift = (half - a * half - b * half, half - d * half - e * half)
    return canvas.transform(
        (side, side), Image.Transform.AFFINE, (a, b, shift[0], d, e, shift[1]), Image.Resampling.BICUBIC
    )


def _tinted(image: Image.Image, rng: random.Random) -> Image.Image:
    """Other hue, saturation and brightness, alpha kept."""
    alpha = image.getchannel("A")
    hue, sat, val = image.convert("RGB").convert("HSV").split()
    if rng.random() < 0.6:
        far = rng.random() < 0.25
        step = rng.randrange(256) if far else round(rng.gauss(0, 10))
        hue = hue.point([(v + step) % 256 for v in range(256)])
    more = np.exp(rng.gauss(0, 0.35))
    sat = sat.point([min(255, round(v * more)) for v in range(256)])
    rgb = Image.merge("HSV", (hue, sat, val)).convert("RGB")
    rgb = ImageEnhance.Brightness(rgb).enhance(float(np.exp(rng.gauss(0, 0.15))))
    rgb = ImageEnhance.Contrast(rgb).enhance(float(np.exp(rng.gauss(0, 0.15))))
    rgb.putalpha(alpha)
    return rgb


def _flat(image: Image.Image, rng: random.Random, lines: bool) -> Image.Image:
    """Few flat colours; with `lines` dark ones around the drawing and between its colours."""
    alpha = image.getchannel("A")
    body = Image.new("RGB", image.size, (255, 255, 255))
    body.paste(image, (0, 0), alpha)
    few = body.filter(ImageFilter.MedianFilter(5)).quantize(rng.randint(3, 8), dither=Image.Dither.NONE)
    flat = few.convert("RGB")
    if lines:
        width = rng.choice((3, 3, 5))
        solid = alpha.point([0] * 128 + [255] * 128)
        gray = few.convert("RGB").convert("L").filter(ImageFilter.ModeFilter(5))
        inner = ImageChops.subtract(
            gray.filter(ImageFilter.MaxFilter(3)), gray.filter(ImageFilter.MinFilter(3))
        )
        least = rng.randint(10, 60)
        inner = inner.point([0] * least + [255] * (256 - least))
        rim = ImageChops.subtract(
            solid.filter(ImageFilter.MaxFilter(width)), solid.filter(ImageFilter.MinFilter(3))
        )
        drawn = ImageChops.lighter(rim, inner) if rng.random() < 0.75 else rim
        dark = (0, 0, 0) if rng.random() < 0.7 else tuple(rng.randrange(70) for _ in range(3))
        if rng.random() < 0.25:  # fill with one bright colour or white, as line drawings have it
            light = (
                (255, 255, 255) if rng.random() < 0.6 else tuple(rng.randrange(120, 256) for _ in range(3))
            )
            flat = Image.blend(flat, Image.new("RGB", flat.size, light), rng.uniform(0.4, 1.0))
        flat.paste(Image.new("RGB", flat.size, dark), (0, 0), drawn.filter(ImageFilter.SMOOTH))
        alpha = ImageChops.lighter(alpha, drawn)
    flat.putalpha(alpha)
    return flat


def copy(sprite: np.ndarray, rng: random.Random) -> np.ndarray:
    """An altered copy of a sprite, at most SIDE pixels on its longer side."""
    image = _moved(Image.fromarray(sprite), rng)
    left, top, right, bottom = image.getbbox()
    image = image.crop((left - 6, top - 6, right + 6, bottom + 6))  # room for lines around it
    if rng.random() < 0.75:
        image = _tinted(image, rng)
    roll = rng.random()
    if roll < 0.55:
        image = _flat(image, rng, lines=roll < 0.42)
    box = image.getchannel("A").point([0] * 24 + [255] * 232).getbbox()
    image = image.crop(box)
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return np.asarray(image)


def _copies(job: tuple[str, np.ndarray, int]) -> tuple[list[np.ndarray], list[Look]]:
    """The sprite and its copies, with what is known of each (numbers to be set by the caller)."""
    seed, sprite, count = job
    rng = random.Random(seed)
    made = [sprite, *(copy(sprite, rng) for _ in range(count))]
    return made, [look(s, 0) for s in made]


def audition(
    sets: Mapping[str, Sprites], copies: int, seed: int, workers: int, photos: int = 0
) -> tuple[list[np.ndarray], Cast]:
    """(all sprites, the cast) of these sets with `copies` altered copies of every drawing.

    The originals of the first set stand four times, so that it stays the best known. The result is the same
    for any number of workers.
    """
    keys = [(s, name) for s, drawings in sets.items() for name in drawings]
    jobs = [(f"looks {seed} {s} {name}", sets[s][name], copies) for s, name in keys]
    if workers > 1 and copies:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            parts = pool.map(_copies, jobs, chunksize=8)
    else:
        parts = [_copies(job) for job in jobs]
    first = next(iter(sets))
    sprites: list[np.ndarray] = []
    looks: dict[str, list[Look]] = {
        name: [] for name in world.PICTOGRAMS if any(name in d for d in sets.values())
    }
    for (s, name), (made, facts) in zip(keys, parts, strict=True):
        known = [Look(len(sprites) + i, f.aspect, f.mean, f.color) for i, f in enumerate(facts)]
        looks[name] += known + known[:1] * (3 if s == first and copies else 0)
        sprites += made
    return sprites, Cast({name: tuple(found) for name, found in looks.items()}, photos)
