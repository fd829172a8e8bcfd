"""Printed words: which texts, in which fonts, and their ink as small grey sprites."""

import functools
import multiprocessing
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from training.pocket import world

SPRITE_SIZE = 40  # font size of pool sprites, in pixels

FAMILIES = (
    "DejaVuSans", "DejaVuSerif", "FreeMono", "FreeSans", "FreeSerif", "Hack", "LiberationMono",
    "LiberationSans",
    "LiberationSerif", "Lato", "NotoSans-", "NotoSansDisplay-", "NotoSerif-", "NotoSerifDisplay-", "OpenSans",
    "Roboto", "Cantarell",
)  # fmt: skip
_TOO_THIN = ("Hairline", "Thin", "ExtraLight")

# A few words stand twice; the pictures of every seed depend on the order, so leave it.
COMMON = """
stop go exit open closed sale hello world cat dog sun moon love peace home shop bus taxi bank cafe
hotel milk bread water coffee tea juice free new hot cold left right up down in out yes no ok start
end play pause next back menu help news sport music art book page map road street park lake river
sea beach forest tree flower apple pear lemon grape cherry red blue green black white pink big small
fast slow day night time year week one two three four five six seven eight nine ten push pull enter
danger warning caution wet floor keep quiet please thanks sorry welcome team game win lost score
goal ball king queen jack ace joker star heart club paris london berlin rome tokyo north south east
west monday friday sunday june july winter summer spring box zone area level floor room lift stairs
ticket price euro dollar cash card bill menu soup salad pizza cake happy sad good bad best super
ultra mega turbo power light dark fire ice wind rain snow cloud storm test data code file save load
print word text image photo video radio phone email web site user name login pixel model
""".split()  # noqa: SIM905


@functools.cache
def font_files(held_out: bool) -> tuple[str, ...]:
    """Paths of the Latin fonts of Debian's packages, the trained or the held-out ones."""
    listed = subprocess.run(
        ["fc-list", "--format", "%{file}\n"], check=True, capture_output=True, text=True
    ).stdout
    names = sorted(p for p in set(listed.splitlines()) if Path(p).name.startswith(FAMILIES))
    names = [p for p in names if not any(t in p for t in _TOO_THIN)]
    return tuple(p for p in names if Path(p).name.startswith(world.UNSEEN_FONTS) == held_out)


@functools.lru_cache(maxsize=4096)
def load_font(path: str, size: int) -> ImageFont.FreeTypeFont:
    """A font at a size in pixels."""
    return ImageFont.truetype(path, size)


def sample_text(rng: random.Random) -> str:
    """A word of 1..7 letters or a number of 1..4 digits that can be read without guessing its case."""
    while True:
        roll = rng.random()
        if roll < 0.22:
            text = str(rng.randrange(10 ** rng.randint(1, 4)))
        else:
            if roll < 0.5:
                text = rng.choice(COMMON)
            elif roll < 0.68:
                pairs = (
                    rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))
                )
                text = "".join(pairs) + rng.choice(("", "n", "r", "s", "t"))
            else:
                text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 7)))
            text = rng.choice((str.upper, str.upper, str.lower, str.capitalize))(text)
        if not text.isdigit() and all(c in "cosvwxzCOSVWXZIlpP" for c in text):
            continue  # upper and lower case look alike, or I, l and 1 do
        if text not in ("0", "1"):
            return text


def ink(text: str, path: str, size: int) -> np.ndarray:
    """The text's ink, cropped: [height, width] uint8, 255 where printed."""
    font = load_font(path, size)
    x0, y0, x1, y1 = font.getbbox(text)
    image = Image.new("L", (round(x1 - x0) + 8, round(y1 - y0) + 8))
    ImageDraw.Draw(image).text((4 - x0, 4 - y0), text, font=font, fill=255)
    box = image.getbbox()
    return np.asarray(image.crop(box)) if box else np.zeros((1, 1), np.uint8)


@dataclass(frozen=True)
class Pool:
    """Pre-drawn words for training. Flat ink, and per word its text, offset, width and height."""

    texts: list[str]
    ink: np.ndarray  # [bytes] uint8
    offsets: np.ndarray  # [words] int64
    sizes: np.ndarray  # [words, 2] int32: width, height

    def pick(self, rng: random.Random) -> tuple[int, str, float, float]:
        """A random word: (index, text, ink width and height in units of the font size)."""
        i = rng.randrange(len(self.texts))
        return i, self.texts[i], self.sizes[i, 0] / SPRITE_SIZE, self.sizes[i, 1] / SPRITE_SIZE


def _draw_part(job: tuple[int, int, tuple[str, ...]]) -> tuple[list[str], list[np.ndarray]]:
    seed, count, fonts = job
    rng = random.Random(f"words {seed}")
    texts = [sample_text(rng) for _ in range(count)]
    return texts, [ink(t, rng.choice(fonts), SPRITE_SIZE) for t in texts]


def draw_pool(count: int, fonts: tuple[str, ...], seed: int, workers: int) -> Pool:
    """`count` words in these fonts, drawn in parallel; the same for any number of workers."""
    parts = max(1, count // 1000)
    jobs = [(seed * 1_000_003 + i, count // parts, fonts) for i in range(parts)]
    if workers > 1:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            drawn = pool.map(_draw_part, jobs, chunksize=1)
    else:
        drawn = [_draw_part(job) for job in jobs]
    texts = [t for part, _ in drawn for t in part]
    sprites = [s for _, part in drawn for s in part]
    sizes = np.array([(s.shape[1], s.shape[0]) for s in sprites], np.int32)
    ends = np.cumsum([s.size for s in sprites])
    return Pool(
        texts, np.concatenate([s.reshape(-1) for s in sprites]), np.concatenate([[0], ends[:-1]]), sizes
    )


class Live:
    """Words for evaluation: held-out fonts, measured when picked; the handle is the font's index."""

    def __init__(self, fonts: tuple[str, ...]) -> None:
        self.fonts = fonts

    def pick(self, rng: random.Random) -> tuple[int, str, float, float]:
        """A new word: (font index, text, ink width and height in units of the font size)."""
        text, handle = sample_text(rng), rng.randrange(len(self.fonts))
        height, width = ink(text, self.fonts[handle], 160).shape
        return handle, text, width / 160, height / 160
