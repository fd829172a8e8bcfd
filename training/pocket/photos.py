"""Pictures of the world outside: photographs that free packages carry, and textures made here.

Pocket must say of all of them that they are beyond it. A photograph belongs to training or to the
evaluation, whole. `build` gathers what a machine has, small, into one file; textures are drawn again from a
seed.
"""

import io
import multiprocessing
import random
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageFilter

SIDE = 256  # pixels along each side of a training picture
KEPT = 512  # longer side of a stored photograph, in pixels

# Where photographs are: folders of Debian packages (unpacked or installed) and of PyPI packages.
FOLDERS: Final = (
    "usr/share/backgrounds/mate/nature", "usr/share/wallpapers", "skimage/data", "sklearn/datasets/images",
    "matplotlib/mpl-data/sample_data",
)  # fmt: skip
# By the stem of the file, or of the folder of a wallpaper. Drawings, diagrams and scans of text are not
# listed.
TRAINING: Final = frozenset(
    [
        "Garden",
        "Dune",
        "Storm",
        "GreenMeadow",
        "RainDrops",
        "FreshFlower",
        "TwoWings",
        "Aqua",
        "FallenLeaf",
        "Path",
        "Autumn",
        "ColdRipple",
        "OneStandsOut",
        "Canopee",
        "Elarun",
        "Kite",
        "FlyingKonqui",
        "Altai",
        "Cascade",
        "Cluster",
        "Flow",
        "Honeywave",
        "Kay",
        "Kokkini",
        "Opal",
        "PastelHills",
        "Patak",
        "Shell",
        "Volna",
        "IceCold",
        "MilkyWay",
        "china",
        "motorcycle_left",
        "hubble_deep_field",
        "retina",
        "camera",
        "brick",
        "grass",
        "gravel",
        "coins",
    ]
)
HELD_OUT: Final = frozenset(
    [
        "astronaut",
        "chelsea",
        "coffee",
        "rocket",
        "flower",
        "grace_hopper",
        "ihc",
        "YellowFlower",
        "LadyBird",
        "BytheWater",
        "EveningGlow",
        "ColorfulCups",
        "Grey",
        "SafeLanding",
        "summer_1am",
    ]
)


def find(roots: list[Path]) -> dict[str, Path]:
    """Photographs under these folders by name, the largest file of each."""
    found: dict[str, Path] = {}
    for root in roots:
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*.*")):
                if path.suffix.lower() not in (".jpg", ".png", ".jpeg") or "screenshot" in path.name:
                    continue
                name = (
                    path.parents[2].name
                    if path.parent.name == "images" and "wallpapers" in folder
                    else path.stem
                )
                if name not in TRAINING | HELD_OUT:
                    continue
                if name not in found or path.stat().st_size > found[name].stat().st_size:
                    found[name] = path
    return found


def build(roots: list[Path], folder: Path) -> dict[str, list[str]]:
    """Store the photographs of `roots` under `folder`, small; returns the names by split."""
    names: dict[str, list[str]] = {"training": [], "held-out": []}
    for name, path in sorted(find(roots).items()):
        split = "training" if name in TRAINING else "held-out"
        (folder / split).mkdir(parents=True, exist_ok=True)
        image = Image.open(path).convert("RGB")
        image.thumbnail((KEPT, KEPT), Image.Resampling.LANCZOS)
        image.save(folder / split / f"{name}.jpg", quality=88)
        names[split].append(name)
    return names


def load(folder: Path, split: str) -> list[Image.Image]:
    """The stored photographs of a split, by name."""
    return [
        Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        for path in sorted((folder / split).glob("*.jpg"))
    ]


def crops(photographs: list[Image.Image], each: int, seed: int) -> list[np.ndarray]:
    """`each` random parts of every photograph, at least half of either side: mirrored, brightened, gray."""
    rng = random.Random(f"crops {seed}")
    out = []
    for image in photographs:
        for _ in range(each):
            w, h = (round(side * rng.uniform(0.5, 1.0)) for side in image.size)
            x, y = rng.randint(0, image.width - w), rng.randint(0, image.height - h)
            part = image.crop((x, y, x + w, y + h)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            if rng.random() < 0.15:
                part = part.convert("L").convert("RGB")
            if rng.random() < 0.2:
                part = part.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 4)))
            pixels = np.asarray(part).astype(np.float32)
            if rng.random() < 0.5:
                pixels = pixels[:, ::-1]
            gains = np.exp(np.array([rng.gauss(0, 0.1) for _ in range(3)]) + rng.gauss(0, 0.2))
            out.append((pixels * gains).clip(0, 255).astype(np.uint8))
    return out


def _clouds(rng: np.random.Generator, slope: float, channels: int) -> np.ndarray:
    """Noise whose power falls with frequency, as in photographs: [SIDE, SIDE, channels], 0..1."""
    fy, fx = np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None]
    fall = 1 / np.maximum(np.hypot(fy, fx), 1 / SIDE) ** slope
    out = np.stack(
        [np.fft.irfft2(np.fft.rfft2(rng.normal(size=(SIDE, SIDE))) * fall) for _ in range(channels)], -1
    )
    low, high = np.quantile(out, (0.01, 0.99), axis=(0, 1))
    return ((out - low) / (high - low)).clip(0, 1)


def _palette(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One channel 0..1 through a ramp of a few random colours: [SIDE, SIDE, 3]."""
    stops = rng.integers(3, 7)
    ramp, at = rng.random((stops, 3)), np.linspace(0, 1, stops)
    return np.stack([np.interp(values, at, ramp[:, c]) for c in range(3)], -1)


def _cells(rng: np.random.Generator) -> np.ndarray:
    """Regions around random points, each with shading of its own: [SIDE, SIDE, 3]."""
    count = int(rng.integers(8, 90))
    points, y, x = rng.random((count, 2)) * SIDE, *np.mgrid[0:SIDE, 0:SIDE]
    distance = np.hypot(x[..., None] - points[:, 0], y[..., None] - points[:, 1])
    nearest = distance.argmin(-1)
    shade = 1 - 0.5 * distance.min(-1) / distance.min(-1).max()
    return rng.random((count, 3))[nearest] * shade[..., None]


def _blobs(rng: np.random.Generator) -> np.ndarray:
    """Soft lights and shadows of random colours over a ramp: [SIDE, SIDE, 3]."""
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    out = _palette((x * rng.normal() + y * rng.normal()) % 1.7 / 1.7, rng) * 0.6
    for _ in range(int(rng.integers(6, 40))):
        cx, cy, r = rng.random(), rng.random(), rng.uniform(0.03, 0.35)
        weight = np.exp(-(((x - cx) / r) ** 2) - ((y - cy) / (r * rng.uniform(0.4, 2.5))) ** 2)[..., None]
        out = out * (1 - weight) + rng.random(3) * weight
    return out


def texture(seed: int) -> np.ndarray:
    """A picture of nothing in pocket's world, far from its one-hued backgrounds: [SIDE, SIDE, 3] uint8."""
    rng = np.random.default_rng([7, seed])
    kind = seed % 5
    if kind == 0:
        mixed = _clouds(rng, rng.uniform(0.6, 1.8), 3)
    elif kind == 1:
        mixed = _palette(_clouds(rng, rng.uniform(1.0, 2.0), 1)[..., 0], rng)
    elif kind == 2:
        mixed = _cells(rng)
    elif kind == 3:
        mixed = _blobs(rng)
    else:  # a land under a sky
        line = _clouds(rng, 1.6, 1)[0, :, 0] * 0.3 + rng.uniform(0.25, 0.6)
        sky, land = _blobs(rng), _palette(_clouds(rng, 1.1, 1)[..., 0], rng)
        mixed = np.where((np.arange(SIDE)[:, None] / SIDE < line)[..., None], sky, land)
    grain = mixed + rng.normal(0, rng.uniform(0, 0.05), mixed.shape) + 0.12 * (_clouds(rng, 1.2, 1) - 0.5)
    return (grain.clip(0, 1) * 255).astype(np.uint8)


def pool(folder: Path, textures: int, seed: int, workers: int = 1) -> np.ndarray:
    """What training draws from: [n, SIDE, SIDE, 3] uint8, photographs' parts first."""
    parts = crops(load(folder, "training"), 16, seed)
    if workers > 1:
        with multiprocessing.get_context("fork").Pool(workers) as helpers:
            parts += helpers.map(texture, range(textures), chunksize=4)
    else:
        parts += [texture(i) for i in range(textures)]
    return np.stack(parts)
