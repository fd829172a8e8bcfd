"""A tiny asset pack without system fonts: Pillow's own font, made-up pictograms, the shipped tokenizer."""

import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from training.pocket import assets, lettering, looks, scenes, world  # noqa: E402


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack's folder."""
    out = tmp_path_factory.mktemp("pack")
    (out / "fonts").mkdir()
    (out / "fonts/pillow.ttf").write_bytes(ImageFont.load_default(20).path.getvalue())
    rng = np.random.default_rng(0)
    (out / "pictograms").mkdir()
    for part in ("noto", "twemoji"):
        sprites = {name: rng.integers(0, 255, (96, 96, 4), dtype=np.uint8) for name in world.PICTOGRAMS}
        np.savez(out / f"pictograms/{part}.npz", **sprites)
    (out / "photos/training").mkdir(parents=True)
    Image.fromarray(rng.integers(0, 255, (90, 120, 3), dtype=np.uint8)).save(
        out / "photos/training/noise.jpg"
    )
    shutil.copyfile(ROOT / "src/snugvl/pocket/tokenizer.json", out / "tokenizer.json")
    return out


@pytest.fixture(scope="session")
def pack(folder: Path) -> assets.Pack:
    return assets.load(folder)


@pytest.fixture(scope="session")
def cast(pack: assets.Pack) -> looks.Cast:
    return looks.audition(pack.sets, 0, 0, 1, photos=3)[1]


@pytest.fixture(scope="session")
def pool(pack: assets.Pack) -> lettering.Pool:
    return lettering.draw_pool(200, pack.fonts, 0, 1)


@pytest.fixture(scope="session")
def drawn(cast: looks.Cast, pool: lettering.Pool) -> list[scenes.Scene]:
    """300 training scenes."""
    rng = random.Random("tests")
    return [scenes.draw_scene(rng, scenes.Recipe(), cast, pool) for _ in range(300)]
