"""Scenes: what stands where on which background, drawn from a seed, before any picture exists.

All lengths are pixels of the picture as its author drew it (`width` x `height`), origin at the top left.
A scene is unambiguous by construction: centres keep away from the lines between the nine places, relative
sizes keep away from the borders between small, medium and large, colours lie well inside their names.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from training.pocket import geometry, world
from training.pocket.looks import Cast, Look
from training.pocket.world import Rgb

SQUARES = (64, 96, 128, 192, 224, 256, 300, 384, 400, 512, 640, 768, 1000, 1024)  # sides of square pictures
Box = tuple[float, float, float, float]
Kind = Literal["shape", "pictogram", "word"]
UNIT = 255.0  # about the side, in pixels, of the square picture that the network sees


class Lettering(Protocol):
    """Where printed words come from: the sprite pool in training, the fonts in evaluation."""

    def pick(self, rng: random.Random) -> tuple[int, str, float, float]:
        """(handle, text, ink width, ink height), the ink sizes in units of the font size."""


@dataclass(frozen=True, slots=True)
class Thing:
    """One object. `half` are the half extents before turning by `angle` degrees; `box` holds the ink.

    `color` of a pictogram is that of `looks.Look`; `handle` is a font or a word of the pool, or a sprite's
    number.
    """

    kind: Kind
    name: str
    color: str | None
    rgb: Rgb
    center: tuple[float, float]
    half: tuple[float, float]
    angle: float
    box: Box
    size: str
    text: str = ""
    handle: int = 0
    outline: Rgb | None = None
    outline_width: float = 0.0  # share of the smaller half extent
    shade: float = 0.0  # brightness change from top to bottom of the fill, -0.2..0.2
    line: float | None = None  # for words that share a line: where that line sorts

    @property
    def order(self) -> tuple[float, float]:
        """Reading order."""
        return self.line or self.box[1] + self.box[3], self.box[0] + self.box[2]

    @property
    def label(self) -> str:
        """What detection calls it: "red circle", "cat", "text"."""
        return f"{self.color} {self.name}" if self.kind == "shape" else self.name


@dataclass(frozen=True, slots=True)
class Background:
    """Two colours and a pattern; `period` in pixels, `angle` in degrees, `phase` in 0..1."""

    color: str
    pattern: str
    rgb: Rgb
    second: Rgb
    period: float
    angle: float
    phase: float
    noise: float  # standard deviation of grain, 0..255


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture's truth, things in reading order (by centre, top to bottom, then left to right)."""

    width: int
    height: int
    background: Background
    things: tuple[Thing, ...]
    photo: int = -1  # number of a picture of the world outside, which is then all there is

    @property
    def shown(self) -> tuple[Thing, ...]:
        """Shapes and pictograms, without printed words."""
        return tuple(t for t in self.things if t.kind != "word")

    @property
    def words(self) -> tuple[Thing, ...]:
        """Printed words."""
        return tuple(t for t in self.things if t.kind == "word")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a split may draw. Training keeps off everything held out; evaluation seeks it."""

    evaluation: bool = False
    word_share: float = 0.35
    strip_share: float = 0.3  # of pictures of any shape down to 1:16, among those that are not square
    slim_share: float = 0.0  # of pictures of 6:1 to 16:1 (`geometry.strip`), beside those
    photo_share: float = 0.0
    max_tokens: int = 72


def _canvas(rng: random.Random, recipe: Recipe) -> tuple[int, int]:
    slim = recipe.slim_share > 0 and rng.random() < recipe.slim_share
    while True:
        if slim:
            width, height = geometry.strip(rng)
        elif rng.random() < 0.35:
            width = height = rng.choice(SQUARES)
        else:
            area = math.exp(rng.uniform(math.log(80), math.log(860)))
            wide = rng.random() < recipe.strip_share  # strips down to 1:16 among ordinary pictures
            ratio = math.exp(rng.uniform(-2.78, 2.78) if wide else rng.triangular(-1.6, 1.6, 0))
            width, height = round(area * ratio**0.5), round(area / ratio**0.5)
        if recipe.evaluation and not slim:
            height += rng.randrange(10)
        if not (geometry.SIDES[0] <= min(width, height) and max(width, height) <= geometry.SIDES[1]):
            continue
        if world.unseen_canvas(width, height) != recipe.evaluation:
            continue
        if math.prod(geometry.token_grid(width, height)) <= recipe.max_tokens:
            return width, height


def _background(rng: random.Random, width: int, height: int) -> Background:
    roll = rng.random()
    if roll < 0.36:
        color = "white"
    elif roll < 0.44:
        color = "black"
    elif roll < 0.62:
        color = rng.choice(tuple(world.PALE_BOXES))
    else:
        color = rng.choice(world.COLORS)
    rgb = world.sample_rgb(color, rng)
    if color in ("white", "black") and rng.random() < 0.6:
        rgb = (255, 255, 255) if color == "white" else (0, 0, 0)
    pattern = rng.choices(world.PATTERNS, (45, 11, 12, 10, 9, 13))[0]
    lighter = sum(rgb) < 380
    mix = rng.uniform(0.13, 0.26)
    second: Rgb = tuple(round(c + ((255 if lighter else 0) - c) * mix) for c in rgb)  # type: ignore[assignment]
    unit = math.sqrt(width * height)
    noise = rng.choice((0.0, 0.0, 0.0, rng.uniform(1, 7)))
    return Background(
        color, pattern, rgb, second, unit * rng.uniform(0.07, 0.2),
        rng.choice((0, 90, 45, 135, rng.uniform(0, 180))), rng.random(), noise,
    )  # fmt: skip


class _Artist:
    """Places things one by one on one canvas, keeping them apart."""

    def __init__(self, rng: random.Random, recipe: Recipe, width: int, height: int) -> None:
        self.rng, self.recipe = rng, recipe
        self.width, self.height, self.unit = width, height, math.sqrt(width * height)
        self.background = _background(rng, width, height)
        self.things: list[Thing] = []
        # Now and then things may cover each other's corners a little.
        self.gap = (-0.03 if rng.random() < 0.12 else 0.012) * self.unit

    def color_for(self, shape: str, wanted: str | None = None) -> tuple[str, Rgb] | None:
        """A colour name and value visible on the background, allowed with `shape` in this split."""
        rng = self.rng
        pool = [c for _, c in self._unseen_of(shape)] if self.recipe.evaluation and rng.random() < 0.6 else []
        for _ in range(12):
            name = wanted or rng.choice(pool or world.COLORS)
            if not self.recipe.evaluation and (name, shape) in world.UNSEEN_PAIRS:
                if wanted:
                    return None
                continue
            rgb = world.sample_rgb(name, rng)
            if self._visible(rgb) and name != self.background.color:
                return name, rgb
            pool = []
        return None

    def _unseen_of(self, shape: str) -> list[tuple[str, str]]:
        return [(s, c) for c, s in sorted(world.UNSEEN_PAIRS) if s == shape]

    def _visible(self, rgb: Rgb) -> bool:
        b = self.background
        return min(world.color_distance(rgb, b.rgb), world.color_distance(rgb, b.second)) > 42

    def relative_size(self, wanted: str, smallest: float) -> float | None:
        """A relative size in class `wanted`, out of (training) or often in (evaluation) the held-out band."""
        lo, hi = {"small": (0.07, world.SMALL_MAX), "medium": world.MEDIUM, "large": (world.LARGE_MIN, 0.6)}[
            wanted
        ]
        lo, hi = max(lo, smallest), min(hi, 0.86 * min(self.width, self.height) / self.unit)
        if lo >= hi:
            return None
        if (
            self.recipe.evaluation
            and wanted == "medium"
            and lo < world.UNSEEN_BAND[0]
            and hi > world.UNSEEN_BAND[1]
        ):
            lo, hi = world.UNSEEN_BAND
        value = self.rng.uniform(lo, hi)
        inside = world.UNSEEN_BAND[0] < value < world.UNSEEN_BAND[1]
        return None if inside and not self.recipe.evaluation else value

    def place(self, half_box: tuple[float, float]) -> tuple[float, float] | None:
        """A free centre for a thing whose upright box has these half extents, or None."""
        bw, bh = half_box
        rng, gap = self.rng, self.gap
        margin = 0.004 * self.unit
        if 2 * (bw + margin) >= self.width or 2 * (bh + margin) >= self.height:
            return None
        for _ in range(14):
            x = rng.uniform(bw + margin, self.width - bw - margin)
            y = rng.uniform(bh + margin, self.height - bh - margin)
            fx, fy = x / self.width, y / self.height
            if min(abs(fx - 1 / 3), abs(fx - 2 / 3), abs(fy - 1 / 3), abs(fy - 2 / 3)) < 0.022:
                continue
            if self.free(x, y, bw, bh, gap):
                return x, y
        return None

    def free(self, x: float, y: float, bw: float, bh: float, gap: float) -> bool:
        """Whether a box of half extents (bw, bh) around (x, y) keeps its distance, from words always."""
        for t in self.things:
            g = max(gap, 0.008 * self.unit) if t.kind == "word" else gap
            if (
                x - bw <= t.box[2] + g
                and x + bw >= t.box[0] - g
                and y - bh <= t.box[3] + g
                and y + bh >= t.box[1] - g
            ):
                return False
        return True

    def add_shape(self, shape: str, color: str | None, size: str) -> bool:
        """Place one shape; False when it can't be placed or coloured."""
        rng = self.rng
        paint = self.color_for(shape, color)
        relative = self.relative_size(size, max(0.07, 9 / self.unit))
        if paint is None or relative is None:
            return False
        turn = 0.0
        if world.TURN[shape] and rng.random() < 0.4:
            turn = float(rng.randint(-world.TURN[shape], world.TURN[shape]))  # whole degrees: exact boxes
        aspect = (
            math.exp(rng.randint(26, 61) * rng.choice((-1, 1)) / 64)
            if shape in ("rectangle", "oval")
            else 1.0
        )
        bw, bh = geometry.upright_half(
            shape, aspect, turn
        )  # for a shape of half extents (sqrt(aspect), 1/sqrt)
        scale = relative * self.unit / (2 * math.sqrt(bw * bh))
        spot = self.place((bw * scale, bh * scale))
        if spot is None:
            return False
        ox, oy = geometry.upright_offset(shape, turn)  # of the box centre from the turning point
        outline, width = None, 0.0
        if rng.random() < 0.25:
            outline = rng.choice(((0, 0, 0), (0, 0, 0), (255, 255, 255), (90, 90, 90)))
            width = rng.uniform(0.05, 0.14)
        self.things.append(Thing(
            "shape", shape, *paint, (spot[0] - ox * scale, spot[1] - oy * scale),
            (scale * math.sqrt(aspect), scale / math.sqrt(aspect)), turn,
            (spot[0] - bw * scale, spot[1] - bh * scale, spot[0] + bw * scale, spot[1] + bh * scale),
            world.size_name(relative), outline=outline, outline_width=width,
            shade=rng.uniform(-0.16, 0.16) if rng.random() < 0.2 else 0.0,
        ))  # fmt: skip
        return True

    def add_pictogram(self, name: str, look: Look, size: str) -> bool:
        """Place one pictogram with this look; False when there is no room or contrast."""
        aspect, mean = look.aspect, look.mean
        relative = self.relative_size(size, max(0.105, 17 / self.unit))
        if relative is None or not self._visible(mean):
            return False
        half = (relative * self.unit * math.sqrt(aspect) / 2, relative * self.unit / math.sqrt(aspect) / 2)
        spot = self.place(half)
        if spot is None:
            return False
        self.things.append(Thing(
            "pictogram", name, look.color, mean, spot, half, 0.0,
            (spot[0] - half[0], spot[1] - half[1], spot[0] + half[0], spot[1] + half[1]),
            world.size_name(relative), handle=look.sprite,
        ))  # fmt: skip
        return True

    def add_word(self, letters: Lettering) -> bool:
        """Place one printed word; the font is at least 15 pixels tall as the network sees it."""
        rng = self.rng
        paint = self.color_for("word")
        handle, text, ink_w, ink_h = letters.pick(rng)
        least, most = max(15.5, 12 * UNIT / self.unit), 0.42 * UNIT
        tall = math.exp(rng.uniform(math.log(least), math.log(max(least * 1.05, most)))) * self.unit / UNIT
        room = min(0.94 * self.width / ink_w, 0.9 * self.height / ink_h)
        tall = min(tall, room)
        if paint is None or tall * UNIT / self.unit < least:
            return False
        half = (ink_w * tall / 2, ink_h * tall / 2)
        spot = self.place(half)
        if spot is None:
            return False
        self._write(text, handle, paint, spot, half, None)
        if rng.random() < 0.3:
            self._continue_line(letters, tall, paint)
        return True

    def _write(
        self, text: str, handle: int, paint: tuple[str, Rgb], spot: tuple[float, float],
        half: tuple[float, float], line: float | None,
    ) -> None:  # fmt: skip
        box = (spot[0] - half[0], spot[1] - half[1], spot[0] + half[0], spot[1] + half[1])
        self.things.append(
            Thing("word", "text", *paint, spot, half, 0.0, box, "medium", text=text, handle=handle, line=line)
        )

    def _continue_line(self, letters: Lettering, tall: float, paint: tuple[str, Rgb]) -> None:
        """A second word to the right of the last one, as in "HELLO WORLD", if there is room."""
        last = self.things[-1]
        handle, text, ink_w, ink_h = letters.pick(self.rng)
        half = (ink_w * tall / 2, ink_h * tall / 2)
        x = last.box[2] + tall * self.rng.uniform(0.22, 0.5) + half[0]
        y = last.center[1]
        fx = x / self.width
        if x + half[0] > 0.99 * self.width or min(abs(fx - 1 / 3), abs(fx - 2 / 3)) < 0.022:
            return
        if not 0 < y - half[1] < y + half[1] < self.height:
            return
        others = [t for t in self.things if t is not last]
        self.things, kept = others, self.things
        clear = self.free(x, y, *half, 0.01 * self.unit)
        self.things = kept
        if clear:
            self._write(text, handle, paint, (x, y), half, last.box[1] + last.box[3])


def _groups(rng: random.Random, pictograms: Sequence[str]) -> list[tuple[str, str, int]]:
    """(kind, name, count) of each group to try, about 1..10 things in all."""
    share = rng.choice((0.0, 0.0, 1.0, 0.35, 0.5))  # of pictograms
    roll = rng.random()
    if roll < 0.12:
        counts = [1]
    elif roll < 0.42:
        counts = [rng.randint(2, 10)] + [rng.choice((1, 1, 2)) for _ in range(rng.choice((0, 0, 1, 2)))]
    else:
        counts = [rng.choice((1, 1, 1, 1, 2, 3)) for _ in range(rng.randint(2, 6))]
    groups: list[tuple[str, str, int]] = []
    for count in counts:
        if rng.random() < share:
            groups.append(("pictogram", rng.choice(pictograms), count))
        else:
            again = [g[1] for g in groups if g[0] == "shape"]
            name = rng.choice(again) if again and rng.random() < 0.4 else rng.choice(world.SHAPES)
            groups.append(("shape", name, count))
    return groups


def draw_scene(rng: random.Random, recipe: Recipe, cast: Cast, letters: Lettering) -> Scene:
    """One scene of at most ten shapes and pictograms and three words; never empty, mostly."""
    artist = _Artist(rng, recipe, *_canvas(rng, recipe))
    if cast.photos and rng.random() < recipe.photo_share:
        return Scene(artist.width, artist.height, artist.background, (), rng.randrange(cast.photos))
    words = rng.choice((1, 1, 1, 2, 2, 3)) if rng.random() < recipe.word_share else 0
    for _ in range(words):
        if len(artist.things) < 3:
            artist.add_word(letters)
    del artist.things[3:]
    groups = [] if words and rng.random() < 0.3 else _groups(rng, tuple(cast.looks))
    crowd = sum(g[2] for g in groups)
    usual = rng.choice(("small", "medium") if crowd > 5 else ("small", "medium", "large"))
    colors: list[str] = []
    free = 10
    for kind, name, count in groups:
        color = rng.choice(colors) if colors and rng.random() < 0.3 else None
        same = rng.random() < 0.7  # a group of pictograms looks alike, mostly
        look = rng.choice(cast.looks[name]) if kind == "pictogram" else None
        for _ in range(min(count, free)):
            if rng.random() < 0.35:
                usual = rng.choice(("small", "small", "medium", "medium", "large"))
            if look is not None:
                look = look if same else rng.choice(cast.looks[name])
                done = artist.add_pictogram(name, look, usual)
            else:
                done = artist.add_shape(name, color, usual)
            if not done:
                continue
            free -= 1
            if kind == "shape" and (color is None or rng.random() < 0.05):
                color = artist.things[-1].color  # a group keeps its colour, mostly
                colors.append(color)
    things = sorted(artist.things, key=lambda t: t.order)
    return Scene(artist.width, artist.height, artist.background, tuple(things))
