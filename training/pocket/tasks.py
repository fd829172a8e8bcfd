"""The product's own prompts as exchanges: captions, scene analysis, boxes for everything or for names."""

import random
from collections.abc import Callable

from training.pocket import language, phrasebook, world
from training.pocket.questions import Asker, Exchange
from training.pocket.scenes import Scene, Thing


def caption(scene: Scene, detailed: bool) -> Exchange:
    """The caption prompt."""
    if detailed:
        return Exchange("detailed", language.PROMPTS.CAPTION["detailed"], language.detailed_caption(scene))
    return Exchange("caption", language.PROMPTS.CAPTION["short"], language.short_caption(scene))


def analysis(scene: Scene) -> Exchange:
    """The scene prompt."""
    return Exchange("scene", language.PROMPTS.SCENE, language.scene_json(scene))


def detect_all(scene: Scene) -> Exchange:
    """Boxes of everything."""
    return Exchange("detect_all", language.PROMPTS.DETECT_ALL, language.boxes_json(scene.things, scene))


def wanted(asker: Asker) -> tuple[str, Callable[[Thing], bool]]:
    """A name to look for and the test of what it means."""
    rng, scene = asker.rng, asker.scene
    roll = rng.random()
    if scene.words and roll < 0.25:
        return rng.choice(("text", "word", "words", "text")), lambda t: t.kind == "word"
    if roll < 0.06:
        return rng.choice(("shape", "shapes")), lambda t: t.kind == "shape"
    if roll < 0.09:
        return rng.choice(("pictogram", "pictograms", "emoji")), lambda t: t.kind == "pictogram"
    colors = [t.color for t in asker.shown if t.kind == "shape" and t.color]
    if colors and roll < 0.2:
        color = rng.choice(colors)
        name = rng.choice((color, f"{color} shape", f"{color} shapes"))
        return name, lambda t: t.kind == "shape" and t.color == color
    noun = asker.noun(bool(asker.shown) and rng.random() < 0.75)
    if noun is None:
        return "text", lambda t: t.kind == "word"
    found = frozenset(id(t) for t in noun.things)
    return rng.choice((noun.singular, noun.singular, noun.plural)), lambda t: id(t) in found


def detect_named(asker: Asker) -> Exchange:
    """Boxes of one to three named kinds; an empty list when there are none."""
    rng = asker.rng
    pairs = [wanted(asker) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    names = [n for n, _ in pairs]
    found = [t for t in asker.scene.things if any(test(t) for _, test in pairs)]
    question = language.PROMPTS.detect(names)
    if rng.random() < 0.25:
        names = [world.plural(n) if n in world.PICTOGRAMS or n in world.SHAPES else n for n in names]
        question = rng.choice(phrasebook.DETECT_LIKE).format(n=language.join(names))
    if rng.random() < 0.15:
        question = question.replace("gray", "grey")
    return Exchange("detect", question, language.boxes_json(found, asker.scene))


def pick(asker: Asker, rng: random.Random) -> Exchange:
    """One task of the product, at random."""
    roll = rng.random()
    if roll < 0.3:
        return caption(asker.scene, detailed=False)
    if roll < 0.4:
        return caption(asker.scene, detailed=True)
    if roll < 0.52:
        return analysis(asker.scene)
    return detect_all(asker.scene) if roll < 0.75 else detect_named(asker)
