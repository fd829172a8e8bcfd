"""What pocket says about a whole scene: captions, scene analysis, boxes. One canonical wording each.

Every sentence here is a function of the scene alone, so that facts can be read back from it and checked.
"""

import importlib.util
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from training.pocket import world
from training.pocket.scenes import Background, Scene, Thing

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
KNOWN = "I only know shapes, colors, pictograms and short words."
BEYOND = f"{KNOWN} I see "
OUTSIDE = f"{KNOWN} This picture looks like something else."


def _load_prompts() -> ModuleType:
    """snugvl's task prompts, read by path: training needs no installed snugvl."""
    path = Path(__file__).parents[2] / "src/snugvl/tasks/prompts.py"
    spec = importlib.util.spec_from_file_location("snugvl_prompts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROMPTS = _load_prompts()


def join(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def capital(text: str) -> str:
    """`text` with a capital first letter."""
    return text[:1].upper() + text[1:]


def counted(label: str, count: int) -> str:
    """ "a red circle", "two red circles"."""
    return world.with_article(label) if count == 1 else f"{NUMBER_WORDS[count]} {world.plural(label)}"


def sized(thing: Thing) -> str:
    """The label with its size; medium goes without saying."""
    return thing.label if thing.size == "medium" else f"{thing.size} {thing.label}"


def printed(thing: Thing) -> str:
    """'the word "CAT"' or 'the number "42"'."""
    return f'the {"number" if thing.text.isdigit() else "word"} "{thing.text}"'


def grouped(things: Iterable[Thing], with_size: bool) -> dict[str, list[Thing]]:
    """Things by (sized) label, groups and members in reading order."""
    groups: dict[str, list[Thing]] = {}
    for thing in things:
        groups.setdefault(sized(thing) if with_size else thing.label, []).append(thing)
    return groups


def listing(things: Sequence[Thing], with_size: bool = False) -> str:
    """ "a red circle, two blue squares and the word "CAT"" (not empty)."""
    shown = [t for t in things if t.kind != "word"]
    parts = [counted(label, len(members)) for label, members in grouped(shown, with_size).items()]
    return join(parts + [printed(t) for t in things if t.kind == "word"])


def backdrop(background: Background) -> str:
    """ "white background", "striped blue background"."""
    pattern = "" if background.pattern == "plain" else background.pattern + " "
    return f"{pattern}{background.color} background"


def short_caption(scene: Scene) -> str:
    """One sentence: everything with counts and sizes, the background; of a photograph, that it is beyond."""
    if scene.photo >= 0:
        return OUTSIDE
    where = world.with_article(backdrop(scene.background))
    if not scene.things:
        return capital(f"{where} with nothing on it.")
    return capital(f"{listing(scene.things, with_size=True)} on {where}.")


def place(thing: Thing, scene: Scene) -> str:
    """The one of nine places where the thing's middle is."""
    x0, y0, x1, y1 = thing.box
    return world.position_name((x0 + x1) / 2 / scene.width, (y0 + y1) / 2 / scene.height)


def places(things: Sequence[Thing], scene: Scene) -> list[str]:
    """The things' places, each once, in reading order of the things."""
    return list(dict.fromkeys(place(t, scene) for t in things))


def relations(scene: Scene, most: int) -> list[str]:
    """Sentences without a full stop about neighbours in reading order that have a name of their own."""
    names = grouped(scene.shown, with_size=False)
    alone = [t for t in scene.shown if len(names[t.label]) == 1]
    out = []
    for a, b in pairwise(alone):
        dx = (a.box[0] + a.box[2]) - (b.box[0] + b.box[2])
        dy = (a.box[1] + a.box[3]) - (b.box[1] + b.box[3])
        beside, over = "left of" if dx < 0 else "right of", "above" if dy < 0 else "below"
        word = beside if abs(dx) > abs(dy) else over
        out.append(f"the {a.label} is {word} the {b.label}")
    return out[:most]


def detailed_caption(scene: Scene) -> str:
    """A sentence a group with its places, then the background, then up to two relations."""
    if scene.photo >= 0:
        return OUTSIDE
    out = []
    for members in grouped(scene.shown, with_size=True).values():
        verb = "is" if len(members) == 1 else "are"
        spots = join([f"the {p}" for p in places(members, scene)])
        out.append(f"There {verb} {counted(sized(members[0]), len(members))} in {spots}.")
    out += [f"{capital(printed(t))} is in the {place(t, scene)}." for t in scene.words]
    pattern = "" if scene.background.pattern == "plain" else scene.background.pattern + " "
    out.append(f"The background is {pattern}{scene.background.color}.")
    out += [capital(r) + "." for r in relations(scene, 2)]
    return " ".join(out)


def setting(scene: Scene) -> str:
    """ "plain white background", or "unknown" of a photograph."""
    return (
        "unknown" if scene.photo >= 0 else f"{scene.background.pattern} {scene.background.color} background"
    )


def scene_json(scene: Scene) -> str:
    """The scene analysis, one line, keys in the order of the prompt."""
    objects = [
        {"name": label, "count": len(members), "positions": places(members, scene)}
        for label, members in grouped(scene.shown, with_size=False).items()
    ]
    return json.dumps({
        "summary": short_caption(scene).replace('"', "'"),
        "setting": setting(scene),
        "objects": objects,
        "text": [t.text for t in scene.words],
        "relations": relations(scene, 3),
    })  # fmt: skip


def thousandths(thing: Thing, scene: Scene) -> tuple[int, int, int, int]:
    """The box in Qwen3-VL's 0..1000."""
    x0, y0, x1, y1 = thing.box
    w, h = scene.width, scene.height
    a, b, c, d = (min(1000, max(0, round(v * 1000))) for v in (x0 / w, y0 / h, x1 / w, y1 / h))
    return a, b, c, d


def boxes_json(things: Sequence[Thing], scene: Scene) -> str:
    """Boxes as Qwen3-VL writes them: a fenced JSON list, in reading order."""
    if not things:
        return "```json\n[]\n```"
    rows = []
    for t in things:
        x0, y0, x1, y1 = thousandths(t, scene)
        rows.append(f'\n\t{{"bbox_2d": [{x0}, {y0}, {x1}, {y1}], "label": "{t.label}"}}')
    return "```json\n[" + ",".join(rows) + "\n]\n```"


def beyond(scene: Scene) -> str:
    """The honest answer to a question outside pocket's world, or about a picture outside it."""
    if scene.photo >= 0:
        return OUTSIDE
    caption = short_caption(scene)
    return BEYOND + caption[:1].lower() + caption[1:]
