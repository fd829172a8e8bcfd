"""Three hundred questions at and beyond the edge of pocket's world, and what counts as right.

Two hundred are about drawn pictures: `BEYOND` must get the honest sentence (what it then sees is not judged
here; captions are measured elsewhere), `EDGE` has a true answer, which must be given. A hundred are about
held-out photographs: captions and answers must be the sentence for pictures of another kind, and detection
finds nothing. No wording here stands in training's lists (a test holds that).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image
from training.pocket import language, scoring, world
from training.pocket.scenes import Scene, Thing

# {o}: something in the picture.
BEYOND: Final = (
    "What breed of {o} would you say this is?", "Any idea what breed the {o} belongs to?",
    "What's the price of the {o} in dollars?", "How much money is the {o} worth today?",
    "What would I pay for such a {o}?", "What is the area of the {o} in square centimeters?",
    "How large is the surface area of the {o} in pixels?", "Please calculate the perimeter of the {o}.",
    "Is the {o} cute?", "Do you find the {o} cute?", "Is that a beautiful {o}?", "Isn't the {o} adorable?",
    "How old might the {o} be?", "In what year was the {o} born?", "Guess the age of this {o}.",
    "Which brand made the {o}?", "Who manufactures this {o}?", "Is the {o} made by Toyota?",
    "Who does the {o} belong to?", "Who drew this picture?", "Who put the {o} there?", "Who is your creator?",
    "Why is there a {o} in the picture?", "Why did someone draw the {o}?", "Why is the sky blue?",
    "What's 7 times 8?", "Can you compute 12 + 30?", "What is 100 divided by 4?", "Is 17 prime?",
    "What is the weather like in Paris right now?", "Will there be snow tonight?",
    "Do I need an umbrella today?",
    "How do I say {o} in French?", "Please translate {o} into Spanish.", "What's the German word for {o}?",
    "How many legs does a {o} usually have?", "How many legs has the {o}?",
    "How many fingers am I holding up?",
    "How heavy would the {o} be in kilograms?", "How many grams does the {o} weigh?",
    "Is the {o} dangerous to humans?", "Could I keep the {o} at home?",
    "Would the {o} survive in the desert?",
    "What noise does the {o} make?", "What does the {o} like to eat?", "What is the {o} feeling?",
    "Is the {o} angry with me?", "Tell me the history of the {o}.", "Where do you usually find a {o}?",
    "What's the scientific name of the {o}?", "Which country does the {o} come from?",
    "Who wrote Hamlet?", "Who won the world cup?", "What is the tallest mountain on earth?",
    "Give me a fun fact about the {o}.", "Make up a short story with the {o}.",
    "Compose a haiku about the {o}.",
    "What should I name my {o}?", "Would you rather have a {o} or a dog?", "Is this a good drawing?",
    "What material is the {o} made from?", "Is the {o} soft to the touch?", "How does the {o} taste?",
    "What is the {o} used for?", "Explain why the {o} matters.", "What will the {o} do next?",
    "What day of the week is it today?", "What's the time?", "Where do you live?", "What's your age?",
    "Do you have feelings?", "What is love?", "Are you a person?", "Can you help me with my homework?",
    "Was this picture taken at night?", "Which camera took this?", "What's the resolution of this image?",
    "Is the {o} for adults or for children?", "How popular is the {o}?", "Can I eat the {o}?",
)  # fmt: skip

PHOTO_QUESTIONS: Final = (
    "What is in the image?", "Is there a cat?", "What color is the sky?", "How many people are there?",
    "What does it say?", "Where was this taken?", "What breed is it?", "How many red circles are there?",
    "What do you see?", "What is in the center?", "Who is the person?", "Is it a dog or a cat?",
    "What is the background?", "Describe the picture.", "Is this a photograph?",
)  # fmt: skip

# Questions at the edge, with the slots of `phrasebook.TEMPLATES`.
EDGE: Final = {
    "sides": ("What number of sides does this {s} have?", "Say how many sides the {s} has.",
              "How many sides are there on the {s}?"),
    "kinds": ("How many {p} have you found?", "What's the number of {p} here?", "How many {p} in total?"),
    "color": ("Is the {s} {a} or rather {b}?", "Would you say the {s} is {a} or {b}?"),
    "shape": ("Is the {c} shape {a} or rather {b}?",),
    "box": ("What are the exact coordinates of the {s}?", "Please give the {s}'s coordinates."),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """One question and the rule that its answer must keep."""

    question: str
    rule: str  # in words, for the report
    right: Callable[[str], bool]


def _honest(said: str) -> bool:
    return said.startswith(language.BEYOND)


def _same(true: str) -> Callable[[str], bool]:
    return lambda said: scoring.plain(said) == scoring.plain(true)


def _number(true: int) -> Callable[[str], bool]:
    return lambda said: scoring.plain(said) == str(true)


def _box(thing: Thing, scene: Scene) -> Callable[[str], bool]:
    """Whether the first four numbers said are the thing's box, in thousandths, at an overlap of a half."""
    true = language.thousandths(thing, scene)

    def right(said: str) -> bool:
        found = [float(n) for n in re.findall(r"\d+", said.partition('bbox_2d":')[2])][:4]
        return len(found) == 4 and scoring.iou(tuple(found), true) >= 0.5  # type: ignore[arg-type]

    return right


def edge(scene: Scene, rng: random.Random) -> Item | None:
    """A question that has a true answer here, in words that training never used; None where there is none."""
    alone = [t for t in scene.shown if sum(o.name == t.name for o in scene.shown) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    kind = rng.choice(("sides", "kinds", "kinds", "color", "shape", "box"))
    if kind == "sides" and thing.name in world.SIDES:
        text = rng.choice(EDGE[kind])
        return Item(text.format(s=thing.name), "its sides", _number(world.SIDES[thing.name]))
    if kind == "kinds":
        name = rng.choice(("animal", "animal", "vehicle", "fruit", "shape"))
        plural, members = world.KINDS[name]
        text = rng.choice(EDGE[kind])
        return Item(text.format(p=plural), "the number", _number(sum(t.name in members for t in scene.shown)))
    if kind == "color" and thing.color:
        names = [thing.color, rng.choice([c for c in world.COLORS if c != thing.color])]
        rng.shuffle(names)
        text = rng.choice(EDGE[kind]).format(s=thing.name, a=names[0], b=names[1])
        return Item(text, "the colour that it has", _same(thing.color))
    if kind == "shape" and thing.kind == "shape" and sum(t.color == thing.color for t in scene.shown) == 1:
        names = [thing.name, rng.choice([s for s in world.SHAPES if s != thing.name])]
        rng.shuffle(names)
        one, two = map(world.with_article, names)
        text = EDGE[kind][0].format(c=thing.color, a=one, b=two)
        return Item(text, "the shape", _same(thing.name))
    if kind == "box":
        text = rng.choice(EDGE[kind])
        return Item(text.format(s=thing.name), "its box", _box(thing, scene))
    return None


def drawn_items(scene: Scene, rng: random.Random, number: int) -> list[Item]:
    """The two questions about drawn picture `number`: one beyond the world mostly, one at its edge."""
    thing = rng.choice(scene.shown)
    texts = [BEYOND[(2 * number + k) % len(BEYOND)] for k in (0, 1)]
    items = [Item(t.format(o=thing.name), "the honest sentence", _honest) for t in texts]
    found = next((e for _ in range(4) if (e := edge(scene, rng))), None)
    return [items[0], found] if found else items


def photo_items(number: int) -> list[Item]:
    """Questions about photograph `number`."""
    count = len(PHOTO_QUESTIONS)
    texts = [PHOTO_QUESTIONS[(number * 5 + k) % count] for k in range(5)]
    return [Item(t, "that it is another kind of picture", _same(language.OUTSIDE)) for t in texts]


def ask_photo(model: Any, image: Image.Image, number: int) -> list[tuple[str, str, str, bool]]:
    """(question, rule, answer, right) of a photograph: a caption, a detection and five questions."""
    caption = model.caption(image).text
    rule = "that it is another kind of picture"
    out = [("caption", rule, caption, _same(language.OUTSIDE)(caption))]
    found = [d.label for d in model.detect(image).objects]
    out.append(("detect", "no boxes", str(found), not found))
    for item in photo_items(number):
        said = model.ask(image, item.question).text
        out.append((item.question, item.rule, said, item.right(said)))
    return out
