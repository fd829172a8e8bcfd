"""True answers to questions at the edge of pocket's world: sides, kinds, choices, coordinates, a
pictogram's colour.

Where the world allows no true answer, the honest sentence is the answer. Every function takes an Asker and
gives an exchange, or None where the scene does not allow the question.
"""

from training.pocket import foreign, language, phrasebook, world
from training.pocket.questions import Asker, Exchange, ask_like, liberties
from training.pocket.scenes import Thing


def sides(asker: Asker) -> Exchange | None:
    """How many sides or corners a shape has."""
    rng = asker.rng
    corners = rng.random() < 0.3
    table = world.CORNERS if corners else world.SIDES
    shapes = [t for t in asker.shown if t.kind == "shape" and t.name in table]
    if shapes and rng.random() < 0.9:
        thing = rng.choice(shapes)
        alike = [t for t in asker.shown if t.name == thing.name]
        name = thing.name if len(alike) == 1 or rng.random() < 0.3 else thing.label
        answer = str(table[thing.name])
    else:
        name = rng.choice(tuple(table))
        if any(t.name == name for t in asker.shown):
            return None
        answer = f"There is no {name}."
    return Exchange(
        "sides", ask_like(rng, "corners" if corners else "sides", s=name, p=world.plural(name)), answer
    )


def kinds(asker: Asker) -> Exchange | None:
    """How many animals there are, which, or whether there is any."""
    rng = asker.rng
    present = [k for k, (_, members) in world.KINDS.items() if any(t.name in members for t in asker.shown)]
    kind = rng.choice(present) if present and rng.random() < 0.75 else rng.choice(tuple(world.KINDS))
    plural, members = world.KINDS[kind]
    found = [t for t in asker.shown if t.name in members]
    roll = rng.random()
    if roll < 0.5:
        return Exchange("count", ask_like(rng, "count", p=plural), str(len(found)))
    if roll < 0.75:
        question = ask_like(rng, "exists", a=world.with_article(kind), p=plural)
        return Exchange("exists", question, "Yes" if found else "No")
    answer = language.capital(language.listing(found)) if found else f"There is no {kind}."
    return Exchange("list", ask_like(rng, "which", p=plural, s=kind), answer)


def count_words(asker: Asker) -> Exchange | None:
    """How many words or numbers are printed."""
    numbers = asker.rng.random() < 0.3
    found = [t for t in asker.scene.words if t.text.isdigit()] if numbers else list(asker.scene.words)
    if not numbers and any(t.text.isdigit() for t in found):
        return None  # whether a number is a word is a matter of taste
    return Exchange(
        "count", ask_like(asker.rng, "count", p="numbers" if numbers else "words"), str(len(found))
    )


def choice(asker: Asker) -> Exchange | None:
    """Is the circle red or blue; is the red shape a circle or a square."""
    rng = asker.rng
    alone = [t for t in asker.shown if t.color and sum(o.name == t.name for o in asker.shown) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    if thing.kind == "shape" and rng.random() < 0.35:
        same = [t for t in asker.shown if t.kind == "shape" and t.color == thing.color]
        if len(same) > 1:
            return None
        true, others = thing.name, [n for n in world.SHAPES if n != thing.name]
        names = [true, rng.choice(others)] if asker.held_out else _allowed(asker, thing, others)
        rng.shuffle(names)
        one, two = (world.with_article(n) for n in names)
        return Exchange(
            "either", ask_like(rng, "shape_or", c=str(thing.color), a=one, b=two), language.capital(true)
        )
    others = [c for c in world.COLORS if c != thing.color and (c, thing.name) not in world.UNSEEN_PAIRS]
    names = [str(thing.color), rng.choice(others)]
    if rng.random() < 0.15:
        names = rng.sample(others, 2)  # neither: what it is instead
    rng.shuffle(names)
    question = ask_like(rng, "color_or", s=thing.name, a=names[0], b=names[1])
    return Exchange("either", question, language.capital(str(thing.color)))


def _allowed(asker: Asker, thing: Thing, others: list[str]) -> list[str]:
    return [thing.name, asker.rng.choice([n for n in others if (thing.color, n) not in world.UNSEEN_PAIRS])]


def coordinates(asker: Asker) -> Exchange | None:
    """Where exactly something is: its box."""
    noun = asker.noun(asker.rng.random() < 0.9)
    if noun is None:
        return None
    question = ask_like(asker.rng, "coordinates", s=noun.singular)
    return Exchange("detect", question, language.boxes_json(noun.things, asker.scene))


def pictogram_color(asker: Asker) -> Exchange | None:
    """The colour that most of a pictogram has; the honest sentence where it has several."""
    rng = asker.rng
    shown = [
        t for t in asker.shown if t.kind == "pictogram" and sum(o.name == t.name for o in asker.shown) == 1
    ]
    if not shown:
        return None
    thing = rng.choice(shown)
    if thing.color is None:
        return None
    if thing.color and rng.random() < 0.3:
        other = rng.choice([c for c in world.COLORS if c != thing.color])
        asked = rng.choice((thing.color, thing.color, other))
        question = ask_like(rng, "is_color", s=thing.name, c=asked)
        return Exchange("exists", question, "Yes" if asked == thing.color else "No")
    answer = language.capital(thing.color) if thing.color else language.beyond(asker.scene)
    return Exchange("color" if thing.color else "beyond", ask_like(rng, "color", s=thing.name), answer)


def is_color(asker: Asker) -> Exchange | None:
    """Is the circle red."""
    rng = asker.rng
    shapes = [t for t in asker.shown if t.kind == "shape" and sum(o.name == t.name for o in asker.shown) == 1]
    if not shapes:
        return None
    thing = rng.choice(shapes)
    others = [c for c in world.COLORS if c != thing.color and (c, thing.name) not in world.UNSEEN_PAIRS]
    asked = rng.choice((str(thing.color), rng.choice(others)))
    question = ask_like(rng, "is_color", s=thing.name, c=asked)
    return Exchange("exists", question, "Yes" if asked == thing.color else "No")


def beyond(asker: Asker) -> Exchange | None:
    """A question that no picture of this world answers, about things here as often as about others."""
    rng = asker.rng
    names = [(n, world.plural(n)) for n in rng.sample(foreign.NOUNS, 2)]
    names += [(t.label if rng.random() < 0.4 else t.name, world.plural(t.name)) for t in asker.shown[:3]]
    names.append((name := rng.choice(tuple(world.PICTOGRAMS)), world.plural(name)))
    names += [("text", "words")] * (rng.random() < 0.1) + [("picture", "pictures")] * (rng.random() < 0.15)
    text = foreign.question(rng, names)
    return Exchange("beyond", liberties(rng, text), language.beyond(asker.scene))


def outside(asker: Asker) -> Exchange:
    """Any question about a photograph: the honest sentence."""
    rng = asker.rng
    if rng.random() < 0.4:
        found = beyond(asker)
        assert found is not None
        return found
    noun, other = (rng.choice((*foreign.NOUNS, *world.PICTOGRAMS, *world.SHAPES)) for _ in range(2))
    colors = rng.sample(world.COLORS, 2)
    noun = f"{rng.choice(colors)} {noun}" if noun in world.SHAPES and rng.random() < 0.5 else noun
    slots = {
        "s": noun, "p": world.plural(noun), "a": world.with_article(noun), "t": other, "c": colors[0],
        "b": colors[1], "d": rng.choice(phrasebook.DIRECTIONS[rng.choice(tuple(phrasebook.DIRECTIONS))]),
        "e": rng.choice(phrasebook.EXTREMES[rng.choice(tuple(phrasebook.EXTREMES))]),
        "w": rng.choice(phrasebook.PLACES[rng.choice(world.POSITIONS)]),
    }  # fmt: skip
    kind = rng.choice([k for k in phrasebook.TEMPLATES if k != "coordinates"])
    if kind == "color_or":
        slots |= {"a": colors[0], "b": colors[1]}
    elif kind == "shape_or":
        slots["b"] = world.with_article(rng.choice(world.SHAPES))
    return Exchange("photo", ask_like(rng, kind, **slots), language.OUTSIDE)
