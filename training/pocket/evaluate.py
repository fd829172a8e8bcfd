"""Measure a pocket folder on scenes it never trained on, through snugvl's public API.

    python -m training.pocket.evaluate --scenes 2000 --json benchmarks/results/pocket/evaluation.json

Every picture has a size never trained on, words are in fonts never trained on, sizes and colour-shape pairs
are drawn from the held-out ones where possible. `--split dev` uses other seeds, to look at while developing.
`--strips` draws nothing but pictures from 6:1 to 16:1, of which there are fourteen among the first thousand.
"""

import argparse
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image
from training.pocket import (
    assets,
    interview,
    language,
    lettering,
    looks,
    packing,
    pictograms,
    scoring,
    tasks,
    world,
)  # fmt: skip
from training.pocket.questions import Asker, Exchange
from training.pocket.scenes import Box, Recipe, Scene, Thing, draw_scene
from training.pocket.scoring import Tally

import snugvl
from snugvl.backends.native import loading

FOLDER = Path(__file__).parents[2] / "src/snugvl/pocket"
STRIPS = {8: "6:1 to 8:1", 11: "8:1 to 11:1", 17: "11:1 to 16:1"}  # tiers by the ratio they end before
QUESTIONS = 5  # a scene, beside the captions, the boxes, the analysis and the reading


@dataclass(frozen=True)
class Stage:
    """What evaluation scenes are made of: one set of pictograms, and fonts never trained on."""

    cast: looks.Cast
    pictograms: dict[str, Image.Image]
    fonts: tuple[str, ...]


def stage(name: str) -> Stage:
    """The stage with this set of pictograms: Noto from its font at full size, others from the pack."""
    if pictograms.SETS[name].package:
        images = {n: Image.fromarray(pixels) for n, pixels in assets.drawings(assets.PACK, name).items()}
    else:
        images = {n: pictograms.from_font(code) for n, code in world.PICTOGRAMS.items()}
    arrays = {n: np.asarray(image) for n, image in images.items()}
    return Stage(looks.audition({name: arrays}, 0, 0, 1)[1], images, lettering.font_files(held_out=True))


def make(
    split: str, index: int, on: Stage, strips: bool = False
) -> tuple[Scene, Image.Image, list[Exchange]]:
    """Scene number `index` of a split, or of its strips: truth, picture, questions."""
    from training.pocket.paint import paint

    rng = random.Random(f"{split} {index}")
    recipe = Recipe(evaluation=True, word_share=0.34)
    if strips:
        recipe = replace(recipe, slim_share=1.0, max_tokens=packing.IMAGE)
    scene = draw_scene(rng, recipe, on.cast, lettering.Live(on.fonts))
    while not scene.things:
        scene = draw_scene(rng, recipe, on.cast, lettering.Live(on.fonts))
    asker = Asker(scene, rng, held_out=True)
    asked: list[Exchange] = []
    while len(asked) < QUESTIONS:
        exchange = interview.ask(asker, edge=False)
        if exchange is not None and exchange.kind not in ("caption", "text"):
            asked.append(exchange)
    if scene.words:
        asked.append(
            Exchange("text", "What does it say?", language.join([f'"{t.text}"' for t in scene.words]))
        )
    return scene, paint(scene, on.fonts, rng, on.pictograms), asked


def named(scene: Scene, index: int) -> tuple[list[str], list[Thing]]:
    """One or two names to look for and the things they mean."""
    asker = Asker(scene, random.Random(f"named {index}"), held_out=True)
    pairs = [tasks.wanted(asker) for _ in range(1 + index % 2)]
    return [n for n, _ in pairs], [t for t in scene.things if any(test(t) for _, test in pairs)]


def boxes(detections: Any) -> list[tuple[str, Box]]:
    """Labels and boxes in pixels of the picture."""
    return [(d.label, (d.box.x1, d.box.y1, d.box.x2, d.box.y2)) for d in detections.objects]


def judge(
    model: Any, scene: Scene, image: Image.Image, asked: list[Exchange], index: int
) -> tuple[Tally, list[Any]]:
    """One scene's tally and its mistakes."""
    tally, wrong = Tally(), []
    for e in asked:
        said = model.ask(image, e.question).text
        good = scoring.same_answer(e.kind, said, e.answer)
        tally.add("questions", good)
        tally.add(f"question: {e.kind}", good)
        if e.kind == "text":
            found = scoring.Counter(scoring.words_in(said)) & scoring.Counter(scoring.words_in(e.answer))
            tally.add("words", found.total(), len(scene.words))
        if not good:
            wrong.append([index, e.question, e.answer, said])
    truth = language.short_caption(scene)
    said = model.caption(image).text
    tally.add("caption facts", *scoring.agreement(scoring.caption_facts(said), scoring.caption_facts(truth)))
    if said != truth:
        wrong.append([index, "caption", truth, said])
    try:
        tally.boxes(boxes(model.detect(image)), scene.things)
        names, true = named(scene, index)
        found_named, side = boxes(model.detect(image, names)), Tally()
        tally.add("named boxes", side.boxes(found_named, true) * 2 + (not true and not found_named),
                  len(found_named) + len(true) + (not true and not found_named))  # fmt: skip
        analysis = model.scene(image)
        facts = scoring.scene_facts(
            {o.name: o.count for o in analysis.objects}, analysis.setting, analysis.text
        )
        tally.add("scene facts", *scoring.agreement(facts, scoring.true_scene_facts(scene)))
    except snugvl.OutputError as error:
        tally.add("unreadable answers", 1)
        wrong.append([index, "output", str(error), ""])
    return tally, wrong


def merge(total: Tally, part: Tally) -> None:
    """Add a scene's tally to a tier's."""
    total.right.update(part.right)
    total.asked.update(part.asked)
    total.overlap += part.overlap


Part = tuple[dict[str, Tally], list[Any]]


def stored_as(tower: str) -> Any:
    """Make `snugvl.load` keep the vision tower in this format, which only a plan chooses otherwise."""
    plain = loading.storage_of
    return patch.object(loading, "storage_of", lambda *given: replace(plain(*given), tower=tower))


def measure(
    folder: Path,
    split: str,
    first: int,
    count: int,
    threads: int,
    weights: str,
    tower: str,
    kv_cache: str,
    pictogram_set: str = "noto",
    strips: bool = False,
) -> Part:
    """Tallies by tier, and every mistake, of some scenes: one model, many threads that share its batches."""
    on = stage(pictogram_set)
    groups: dict[str, Tally] = {}
    wrong: list[Any] = []

    def work(index: int) -> tuple[Scene, Tally, list[Any]]:
        scene, image, asked = make(split, index, on, strips)
        return scene, *judge(model, scene, image, asked, index)

    with (
        stored_as(tower),
        snugvl.load(folder, weights=weights, kv_cache=kv_cache) as model,
        ThreadPoolExecutor(threads) as pool,
    ):
        for scene, tally, mistakes in pool.map(work, range(first, first + count)):
            ratio = max(scene.width / scene.height, scene.height / scene.width)
            extra = {"unseen pairs": scoring.unseen_pair(scene), "beyond 6:1": ratio > 6}
            if strips:
                extra[STRIPS[next(most for most in STRIPS if ratio < most)]] = True
            for name in ("all", scoring.tier(scene), *(n for n, yes in extra.items() if yes)):
                group = groups.setdefault(name, Tally())
                merge(group, tally)
                group.add("scenes", 1, 0)
            wrong += mistakes
    return groups, wrong


def evaluate(
    folder: Path,
    split: str,
    first: int,
    count: int,
    threads: int,
    processes: int = 1,
    weights: str = "auto",
    tower: str = "bf16",
    kv_cache: str = "auto",
    pictogram_set: str = "noto",
    strips: bool = False,
) -> dict[str, Any]:
    """All measures by tier, with every mistake; the same for any number of processes."""
    started = time.monotonic()
    ends = [first + count * n // processes for n in range(processes + 1)]
    jobs = [
        (folder, split, a, b - a, threads, weights, tower, kv_cache, pictogram_set, strips)
        for a, b in pairwise(ends)
    ]
    if processes == 1:
        parts = [measure(*jobs[0])]
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            parts = [future.result() for future in [pool.submit(measure, *job) for job in jobs]]
    groups: dict[str, Tally] = {}
    for part, _ in parts:
        for name, tally in part.items():
            merge(groups.setdefault(name, Tally()), tally)
    tables = {name: {"scenes": g.right["scenes"], **g.table()} for name, g in sorted(groups.items())}
    minutes = round((time.monotonic() - started) / 60, 1)
    return {"split": split, "pictograms": pictogram_set, "scenes": count, "minutes": minutes,
            "tiers": tables, "mistakes": [mistake for _, wrong in parts for mistake in wrong]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--split", default="final")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--scenes", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--weights", default="auto", help="format they are stored in: int8, int4, …")
    parser.add_argument("--tower", default="bf16", help="the same of the vision tower: bf16 (as it is), int8")
    parser.add_argument("--kv-cache", default="auto", help="format of keys and values: bf16, fp8")
    parser.add_argument("--pictograms", choices=tuple(pictograms.SETS), default="noto")
    parser.add_argument("--strips", action="store_true", help="pictures from 6:1 to 16:1 only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = evaluate(
        args.model,
        args.split,
        args.first,
        args.scenes,
        args.threads,
        args.processes,
        args.weights,
        args.tower,
        args.kv_cache,
        args.pictograms,
        args.strips,
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    names = list(result["tiers"])
    print(f"{'':24}" + "".join(f"{n:>14}" for n in names))
    for measure in sorted({m for t in result["tiers"].values() for m in t}):
        print(f"{measure:24}" + "".join(f"{result['tiers'][n].get(measure, ''):>14}" for n in names))


if __name__ == "__main__":
    main()
