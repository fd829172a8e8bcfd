"""What counts as right: answers, facts of captions and scene analyses, boxes, words."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from training.pocket import language, world
from training.pocket.scenes import Box, Scene, Thing

_PARTS = re.compile(r", | and ")


def same_answer(kind: str, said: str, true: str) -> bool:
    """Equal but for case and full stops; lists in any order. Printed words to the letter."""
    if kind == "text":
        return Counter(words_in(said)) == Counter(words_in(true)) if '"' in true else said == true
    if kind in ("list", "at", "beside"):
        return Counter(_PARTS.split(plain(said))) == Counter(_PARTS.split(plain(true)))
    return plain(said) == plain(true)


def plain(text: str) -> str:
    """Lower case without the final full stop."""
    return text.strip().lower().rstrip(".")


def words_in(text: str) -> list[str]:
    """Everything in double quotes."""
    return re.findall(r'"([^"]*)"', text)


def caption_facts(caption: str) -> Counter[str]:
    """The facts of a short caption: one a group (count, size, label), a printed word, the background."""
    body, _, ground = plain_case(caption).rpartition(" on ")
    facts = Counter(_PARTS.split(body)) if body else Counter({plain_case(caption): 1})
    facts[f"on {ground}"] += 1
    return facts


def plain_case(text: str) -> str:
    """Without final full stop, first letter in lower case."""
    text = text.strip().rstrip(".")
    return text[:1].lower() + text[1:]


def agreement(said: Counter[str], true: Counter[str]) -> tuple[int, int]:
    """(facts that are right, facts that are said or true, whichever are more)."""
    return (said & true).total(), max(said.total(), true.total())


def scene_facts(objects: dict[str, int], setting: str, text: Sequence[str]) -> Counter[str]:
    """The facts of a scene analysis."""
    return Counter(
        [*(f"{n} {name}" for name, n in objects.items()), f"on {setting}", *(f'"{t}"' for t in text)]
    )


def true_scene_facts(scene: Scene) -> Counter[str]:
    """The same of the truth."""
    objects = {label: len(m) for label, m in language.grouped(scene.shown, with_size=False).items()}
    setting = f"{scene.background.pattern} {scene.background.color} background"
    return scene_facts(objects, setting, [t.text for t in scene.words])


def iou(a: Box, b: Box) -> float:
    """Intersection over union."""
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    return w * h / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - w * h)


@dataclass
class Tally:
    """Sums of one tier."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    overlap: float = 0.0

    def add(self, name: str, right: int, asked: int = 1) -> None:
        """Count `right` of `asked` under a measure's name."""
        self.right[name] += right
        self.asked[name] += asked

    def boxes(self, found: Sequence[tuple[str, Box]], true: Sequence[Thing]) -> int:
        """Match boxes of equal label greedily by overlap; returns how many reach 0.5."""
        pairs = sorted(
            (
                (iou(b, t.box), i, j)
                for i, (label, b) in enumerate(found)
                for j, t in enumerate(true)
                if label == t.label
            ),
            reverse=True,
        )
        used: set[tuple[str, int]] = set()
        for value, i, j in pairs:
            if value >= 0.5 and ("f", i) not in used and ("t", j) not in used:
                used |= {("f", i), ("t", j)}
                self.overlap += value
        hits = len(used) // 2
        self.add("matched", hits, 0)
        self.add("found", len(found), 0)
        self.add("true", len(true), 0)
        return hits

    def table(self) -> dict[str, float | int]:
        """The measures as shares."""
        out: dict[str, float | int] = {
            k: round(self.right[k] / n, 4) for k, n in sorted(self.asked.items()) if n
        }
        matched, found, true = (self.right[k] for k in ("matched", "found", "true"))
        if found + true:
            out["F1@0.5"] = round(2 * matched / (found + true), 4)
            out["mean IoU"] = round(self.overlap / max(1, matched), 4)
        return out


def tier(scene: Scene) -> str:
    """The most demanding kind of thing in the scene."""
    if scene.words:
        return "words"
    return "pictograms" if any(t.kind == "pictogram" for t in scene.things) else "shapes"


def unseen_pair(scene: Scene) -> bool:
    """Whether a colour-shape pair that was never trained on is in the scene."""
    return any((t.color, t.name) in world.UNSEEN_PAIRS for t in scene.shown)
