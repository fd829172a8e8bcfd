"""Measure pocket at the edges of its world: shades of palettes, honesty, photographs, sets of pictograms.

    python -m training.pocket.edges --model .pocket/run/model --json benchmarks/results/pocket/edges.json

A shade counts as right when the question for the colour of a shape of it is answered with a name that
people use for it; each shade is asked about on three shapes and backgrounds. What counts as honest stands
in `honesty.py`.
"""

import argparse
import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image
from training.pocket import assets, honesty, lettering, palettes, photos, scoring, world
from training.pocket.evaluate import FOLDER, Stage, stage
from training.pocket.paint import paint
from training.pocket.scenes import Background, Recipe, Scene, Thing, draw_scene

import snugvl

SIDE = 256  # pixels, of a picture with a shade
DRAWN, PHOTOGRAPHS = 100, 15  # pictures; two questions about a drawing, seven about a photograph


def shade_picture(shade: palettes.Shade, number: int) -> tuple[Image.Image, str]:
    """A picture of one shape in this shade on white, light gray or black, and the shape's name."""
    rng = random.Random(f"shade {shade.palette} {shade.name} {number}")
    shape = rng.choice(("circle", "square", "triangle", "hexagon", "star", "heart", "diamond"))
    grounds = ((255, 255, 255), (222, 222, 222), (0, 0, 0))
    ground = max(grounds[number:] + grounds[:number], key=lambda g: world.color_distance(shade.rgb, g) > 42)
    background = Background("white", "plain", ground, ground, 40, 0, 0, 0)
    half = rng.uniform(0.13, 0.3) * SIDE
    x, y = (rng.uniform(half, SIDE - half) for _ in range(2))
    thing = Thing(
        "shape", shape, shade.right[0], shade.rgb, (x, y), (half, half), 0.0,
        (x - half, y - half, x + half, y + half), "medium",
    )  # fmt: skip
    return paint(Scene(SIDE, SIDE, background, (thing,)), (), rng, {}), shape


def measure_shades(model: Any, threads: int) -> dict[str, Any]:
    """Share of right names: families of one name, families between two, by palette; and the mistakes."""
    found = palettes.shades(assets.PACK / "palettes.json")
    jobs = [(shade, n) for shade in found for n in range(3)]

    def ask(job: tuple[palettes.Shade, int]) -> tuple[palettes.Shade, str]:
        picture, shape = shade_picture(*job)
        return job[0], scoring.plain(model.ask(picture, f"What color is the {shape}?").text)

    right, asked = Counter[str](), Counter[str]()
    wrong: dict[str, list[str]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for shade, said in pool.map(ask, jobs):
            good = said in shade.right
            for group in (
                shade.palette,
                "one name" if len(shade.right) == 1 else "either of two names",
                "all",
            ):
                asked[group] += 1
                right[group] += good
            if not good:
                wrong.setdefault(f"{shade.palette} {shade.name}", []).append(said)
    shares = {group: round(right[group] / asked[group], 4) for group in sorted(asked)}
    return {"shades": len(found), "questions": asked["all"], **shares, "mistakes": wrong}


def drawn_scene(on: Stage, number: int) -> tuple[Scene, Image.Image]:
    """Drawn picture `number` of the honesty questions."""
    rng = random.Random(f"honesty {number}")
    recipe = Recipe(evaluation=True, word_share=0.15)
    while True:
        scene = draw_scene(rng, recipe, on.cast, lettering.Live(on.fonts))
        if scene.shown and max(scene.width, scene.height) < 4 * min(scene.width, scene.height):
            return scene, paint(scene, on.fonts, rng, on.pictograms)


def measure_honesty(model: Any, threads: int) -> dict[str, Any]:
    """Share of right answers to the three hundred questions, by what they are about; and the mistakes."""
    on = stage("noto")
    shots = photos.load(assets.PACK / "photos", "held-out")[:PHOTOGRAPHS]

    def drawn(number: int) -> list[tuple[str, str, str, bool]]:
        scene, picture = drawn_scene(on, number)
        items = honesty.drawn_items(scene, random.Random(f"items {number}"), number)
        said = [model.ask(picture, item.question).text for item in items]
        return [(i.question, i.rule, s, i.right(s)) for i, s in zip(items, said, strict=True)]

    def shot(number: int) -> list[tuple[str, str, str, bool]]:
        return honesty.ask_photo(model, shots[number], number)

    if shots:
        model.detect(shots[0])  # compiles the grammar before the threads compete for the processor
    with ThreadPoolExecutor(threads) as pool:
        parts = {
            "drawn": [a for p in pool.map(drawn, range(DRAWN)) for a in p],
            "photographs": [a for p in pool.map(shot, range(len(shots))) for a in p],
        }
    answers = [a for part in parts.values() for a in part]
    groups = {**parts, "all": answers, "beyond, drawn": [a for a in parts["drawn"] if "honest" in a[1]],
              "edge, drawn": [a for a in parts["drawn"] if "honest" not in a[1]]}  # fmt: skip
    table = {name: round(sum(a[3] for a in group) / max(1, len(group)), 4) for name, group in groups.items()}
    return {"questions": {n: len(g) for n, g in groups.items()}, "right": table,
            "mistakes": [a[:3] for a in answers if not a[3]]}  # fmt: skip


def measure(folder: Path, threads: int) -> dict[str, Any]:
    """Both measurements of a model folder, and the minutes that they took."""
    started = time.monotonic()
    with snugvl.load(folder) as model:
        result: dict[str, Any] = {
            "palettes": measure_shades(model, threads), "honesty": measure_honesty(model, threads),
        }  # fmt: skip
    return result | {"minutes": round((time.monotonic() - started) / 60, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args.model, args.threads)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, part in result.items():
        shown = {k: v for k, v in part.items() if k != "mistakes"} if isinstance(part, dict) else part
        print(f"{name}: {shown}")


if __name__ == "__main__":
    main()
