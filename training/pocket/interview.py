"""Which question is asked of a scene: one exchange at a time, of a random kind that fits."""

from typing import Final

from training.pocket import knowledge
from training.pocket.questions import Asker, Exchange

# How often each kind is tried in scenes without and with printed words.
WEIGHTS: Final[dict[str, tuple[int, int]]] = {
    "count": (16, 6), "count_all": (4, 0), "color": (10, 4), "shape": (6, 2), "where": (9, 4),
    "exists": (10, 5),
    "beside": (6, 0), "is_beside": (6, 2), "bigger": (5, 2), "extreme": (5, 0), "size": (4, 2), "at": (6, 4),
    "list": (4, 3), "describe": (2, 1), "text": (1, 44), "has_text": (2, 3), "text_color": (1, 6),
    "where_text": (1, 6), "background": (4, 2), "pattern": (3, 2),
    "sides": (4, 1), "kinds": (6, 2), "count_words": (1, 3), "choice": (5, 2), "coordinates": (2, 1),
    "pictogram_color": (5, 2), "is_color": (3, 1), "beyond": (16, 8),
}  # fmt: skip
_KINDS = tuple(WEIGHTS)
_WITHOUT, _WITH = ([w[i] for w in WEIGHTS.values()] for i in (0, 1))
_EDGE = frozenset(kind for kind in _KINDS if hasattr(knowledge, kind))


def ask(asker: Asker, edge: bool = True) -> Exchange | None:
    """One exchange of a random kind, or None where that kind does not fit the scene.

    Without `edge` only kinds that have been asked since pocket's first evaluation: figures stay comparable.
    """
    if asker.scene.photo >= 0:
        return knowledge.outside(asker)
    kind = asker.rng.choices(_KINDS, _WITH if asker.scene.words else _WITHOUT)[0]
    if kind not in _EDGE:
        result: Exchange | None = getattr(asker, kind)()
        return result
    found: Exchange | None = getattr(knowledge, kind)(asker) if edge else None
    return found
