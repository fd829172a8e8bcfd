"""Questions about a scene with their true answers.

Only questions whose truth is beyond dispute are asked: relations keep a margin, superlatives need a clear
winner, "red object" is avoided where something red is not a shape. Absent things are asked for as often as
present ones, and are near misses mostly.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.pocket import foreign, language, phrasebook, world
from training.pocket.scenes import Scene, Thing

MARGIN = 0.045  # of the picture's side: how far apart centres must be to be called left or above


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Noun:
    """A way to name things: singular, plural, and the things in the scene that it names."""

    singular: str
    plural: str
    things: tuple[Thing, ...]


def ask_like(rng: random.Random, kind: str, **slots: str) -> str:
    """A random wording of a question, with the liberties that people take."""
    text = rng.choice(phrasebook.TEMPLATES[kind]).format(**slots)
    return liberties(rng, text)


def liberties(rng: random.Random, text: str) -> str:
    """A polite start or end, lower case, no question mark, British spelling: each now and then."""
    if rng.random() < 0.06 and text[-1:] in ("?", "."):
        text = text[:-1] + rng.choice(phrasebook.ENDINGS) + text[-1]
    if rng.random() < 0.06:
        text = rng.choice(phrasebook.POLITE).format(text[:1].lower() + text[1:])
    elif rng.random() < 0.25:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.2:
        text = text.rstrip("?.")
    if rng.random() < 0.3:
        text = re.sub(r"\b([Cc])olor\b", r"\1olour", text)
    if rng.random() < 0.4:
        text = re.sub(r"\bgray\b", "grey", text)
    return text


class Asker:
    """Makes exchanges about one scene. `held_out` also names colour-shape pairs never trained on."""

    def __init__(self, scene: Scene, rng: random.Random, held_out: bool = False) -> None:
        self.scene, self.rng, self.held_out = scene, rng, held_out
        self.shown = scene.shown
        self.by_label = language.grouped(self.shown, with_size=False)
        self.alone = [t for t in self.shown if len(self.by_label[t.label]) == 1]
        self.pure_colors = not any(t.kind != "shape" for t in scene.things)

    # -- nouns ---------------------------------------------------------------------------------------------
    def noun(self, present: bool = True) -> Noun | None:
        """A noun for something in the scene, or for something that is not."""
        if present:
            return self._present(self.rng.choice(self.shown)) if self.shown else None
        return self._absent()

    def _present(self, thing: Thing) -> Noun:
        rng, roll = self.rng, self.rng.random()
        if thing.kind == "pictogram":
            return self._matching(thing.name, lambda t: t.name == thing.name)
        if roll < 0.5:
            return self._matching(thing.label, lambda t: t.label == thing.label)
        if roll < 0.78:
            return self._matching(thing.name, lambda t: t.name == thing.name)
        if roll < 0.9:
            word = rng.choice(("shape", "object", "thing")) if self.pure_colors else "shape"
            return self._matching(
                f"{thing.color} {word}", lambda t: t.kind == "shape" and t.color == thing.color
            )
        if thing.size != "medium":
            return self._matching(language.sized(thing), lambda t: language.sized(t) == language.sized(thing))
        return self._matching(thing.label, lambda t: t.label == thing.label)

    def _matching(self, name: str, test: Callable[[Thing], bool]) -> Noun:
        return Noun(name, world.plural(name), tuple(t for t in self.shown if test(t)))

    def _absent(self) -> Noun | None:
        rng = self.rng
        for _ in range(8):
            roll = rng.random()
            if roll < 0.12:
                name = rng.choice(foreign.NOUNS)
            elif roll < 0.35:
                name = rng.choice(tuple(world.PICTOGRAMS))
            elif roll < 0.5:
                name = rng.choice(world.SHAPES)
            else:
                name = self._near_miss()
            found = [t for t in self.scene.things if name in (t.name, t.label)]
            if name and not found:
                return Noun(name, world.plural(name), ())
        return None

    def _near_miss(self) -> str:
        """A pair made of one thing's colour and another's shape, or nearly."""
        rng = self.rng
        shapes = [t for t in self.shown if t.kind == "shape"]
        color = str(rng.choice(shapes).color) if shapes and rng.random() < 0.7 else rng.choice(world.COLORS)
        shape = rng.choice(shapes).name if shapes and rng.random() < 0.7 else rng.choice(world.SHAPES)
        allowed = self.held_out or (color, shape) not in world.UNSEEN_PAIRS
        return f"{color} {shape}" if allowed else ""

    def _absent_text(self, noun: Noun) -> str:
        if noun.singular in foreign.NOUNS:
            return "I do not see that here."
        return f"There is no {noun.singular}."

    # -- one method a kind: an exchange, or None where the scene does not allow the question -----------------
    def count(self) -> Exchange | None:
        noun = self.noun(self.rng.random() < 0.85)
        if noun is None:
            return None
        return Exchange("count", ask_like(self.rng, "count", p=noun.plural), str(len(noun.things)))

    def count_all(self) -> Exchange | None:
        if self.scene.words:
            return None
        return Exchange("count", ask_like(self.rng, "count_all"), str(len(self.shown)))

    def color(self) -> Exchange | None:
        noun = self.noun(self.rng.random() < 0.93)
        if noun is None or any(t.kind != "shape" for t in noun.things):
            return None  # pictograms' colours: knowledge.pictogram_color
        if noun.things and noun.singular != noun.things[0].name:
            noun = self._matching(noun.things[0].name, lambda t, n=noun.things[0].name: t.name == n)  # type: ignore[misc]
        if not noun.things and noun.singular.partition(" ")[0] in world.COLORS:
            return None
        question = ask_like(self.rng, "color", s=noun.singular)
        return Exchange("color", question, self._several(noun, [str(t.color) for t in noun.things]))

    def _several(self, noun: Noun, values: Sequence[str]) -> str:
        """One value, or "There are 2: a and b", or that there is none."""
        if not values:
            return self._absent_text(noun)
        different = list(dict.fromkeys(values))
        if len(values) == 1:
            return language.capital(values[0])
        return f"There are {len(values)}: {language.join(different)}"

    def shape(self) -> Exchange | None:
        shapes = [t for t in self.shown if t.kind == "shape"]
        if not shapes:
            return None
        color = str(self.rng.choice(shapes).color)
        if not self.pure_colors and self.rng.random() < 0.5:
            return None
        names = [t.name for t in shapes if t.color == color]
        answer = self._several(Noun("", "", ()), names)
        return Exchange("shape", ask_like(self.rng, "shape", c=color), answer)

    def where(self) -> Exchange | None:
        noun = self.noun(self.rng.random() < 0.93)
        if noun is None or len(noun.things) > 5:
            return None
        spots = [language.place(t, self.scene) for t in noun.things]
        return Exchange("where", ask_like(self.rng, "where", s=noun.singular), self._several(noun, spots))

    def exists(self) -> Exchange | None:
        noun = self.noun(self.rng.random() < 0.5)
        if noun is None:
            return None
        question = ask_like(self.rng, "exists", a=world.with_article(noun.singular), p=noun.plural)
        return Exchange("exists", question, "Yes" if noun.things else "No")

    def _offset(self, a: Thing, b: Thing, direction: str) -> float:
        """How far a is from b in the direction, as a share of the picture's side; negative when opposite."""
        axis, sign = (0, -1) if direction == "left" else (0, 1) if direction == "right" else (1, 1)
        sign = -1 if direction == "above" else sign
        side = self.scene.height if axis else self.scene.width
        return sign * (a.box[axis] + a.box[axis + 2] - b.box[axis] - b.box[axis + 2]) / 2 / side

    def beside(self) -> Exchange | None:
        if not self.alone or self.scene.words:
            return None
        anchor, direction = self.rng.choice(self.alone), self.rng.choice(tuple(phrasebook.DIRECTIONS))
        offsets = [(self._offset(t, anchor, direction), t) for t in self.shown if t is not anchor]
        if any(abs(o) < MARGIN for o, _ in offsets):
            return None
        found = [t for o, t in offsets if o > 0]
        if len(found) > 4:
            return None
        words = self.rng.choice(phrasebook.DIRECTIONS[direction])
        answer = language.capital(language.listing(found)) if found else "Nothing"
        return Exchange("beside", ask_like(self.rng, "beside", s=anchor.label, d=words), answer)

    def _pair(self) -> tuple[Thing, Thing] | None:
        return tuple(self.rng.sample(self.alone, 2)) if len(self.alone) > 1 else None  # type: ignore[return-value]

    def is_beside(self) -> Exchange | None:
        pair = self._pair()
        if pair is None:
            return None
        direction = self.rng.choice(tuple(phrasebook.DIRECTIONS))
        offset = self._offset(*pair, direction)
        if abs(offset) < MARGIN:
            return None
        words = self.rng.choice(phrasebook.DIRECTIONS[direction])
        question = ask_like(self.rng, "is_beside", s=pair[0].label, t=pair[1].label, d=words)
        return Exchange("is_beside", question, "Yes" if offset > 0 else "No")

    def bigger(self) -> Exchange | None:
        pair = self._pair()
        if pair is None:
            return None
        small, big = sorted(pair, key=area)
        if area(big) < 1.6 * area(small):
            return None
        kind = self.rng.choice(("bigger", "smaller"))
        question = ask_like(self.rng, kind, s=pair[0].label, t=pair[1].label)
        return Exchange("compare", question, f"The {(big if kind == 'bigger' else small).label}")

    def extreme(self) -> Exchange | None:
        if len(self.shown) < 2 or self.scene.words:
            return None
        kind = self.rng.choice(tuple(phrasebook.EXTREMES))
        if kind in ("largest", "smallest"):
            ranked = sorted(self.shown, key=area, reverse=kind == "largest")
            ratio = area(ranked[0]) / area(ranked[1])
            clear = max(ratio, 1 / ratio) > 1.4
        else:
            direction = {"leftmost": "left", "rightmost": "right", "topmost": "above", "bottommost": "below"}[
                kind
            ]
            first = self.shown[0]
            ranked = sorted(self.shown, key=lambda t: self._offset(t, first, direction), reverse=True)
            clear = self._offset(ranked[0], ranked[1], direction) > MARGIN
        if not clear:
            return None
        question = ask_like(self.rng, "extreme", e=self.rng.choice(phrasebook.EXTREMES[kind]))
        return Exchange("extreme", question, language.capital(world.with_article(ranked[0].label)))

    def size(self) -> Exchange | None:
        if not self.alone:
            return None
        thing = self.rng.choice(self.alone)
        return Exchange("size", ask_like(self.rng, "size", s=thing.label), language.capital(thing.size))

    def at(self) -> Exchange | None:
        spot = self.rng.choice(world.POSITIONS)
        if self.shown and self.rng.random() < 0.7:
            spot = language.place(self.rng.choice(self.shown), self.scene)
        found = [t for t in self.scene.things if language.place(t, self.scene) == spot]
        question = ask_like(self.rng, "at", w=self.rng.choice(phrasebook.PLACES[spot]))
        return Exchange("at", question, language.capital(language.listing(found)) if found else "Nothing")

    def list(self) -> Exchange | None:
        things = self.scene.things
        answer = language.capital(language.listing(things)) if things else "Nothing"
        return Exchange("list", ask_like(self.rng, "list"), answer)

    def describe(self) -> Exchange | None:
        return Exchange("caption", ask_like(self.rng, "describe"), language.short_caption(self.scene))

    def text(self) -> Exchange | None:
        words = self.scene.words
        kind = (
            "number" if words and all(t.text.isdigit() for t in words) and self.rng.random() < 0.5 else "text"
        )
        answer = language.join([f'"{t.text}"' for t in words]) if words else "There is no text."
        return Exchange("text", ask_like(self.rng, kind), answer)

    def has_text(self) -> Exchange | None:
        return Exchange("exists", ask_like(self.rng, "has_text"), "Yes" if self.scene.words else "No")

    def text_color(self) -> Exchange | None:
        noun = Noun("text", "texts", self.scene.words)
        answer = self._several(noun, [str(t.color) for t in noun.things])
        return Exchange("color", ask_like(self.rng, "text_color"), answer)

    def where_text(self) -> Exchange | None:
        noun = Noun("text", "texts", self.scene.words)
        answer = self._several(noun, [language.place(t, self.scene) for t in noun.things])
        return Exchange("where", ask_like(self.rng, "where_text"), answer)

    def background(self) -> Exchange | None:
        return Exchange(
            "background", ask_like(self.rng, "background"), language.capital(self.scene.background.color)
        )

    def pattern(self) -> Exchange | None:
        answer = f"{self.scene.background.pattern} {self.scene.background.color}"
        return Exchange("background", ask_like(self.rng, "pattern"), language.capital(answer))


def area(thing: Thing) -> float:
    """Box area in square pixels."""
    x0, y0, x1, y1 = thing.box
    return (x1 - x0) * (y1 - y0)
