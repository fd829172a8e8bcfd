"""CUDA_VISIBLE_DEVICES: which GPUs CUDA shows a process, in which order.

CUDA's rules (programming guide, "CUDA Environment Variables"): numbers, or GPU and MIG identifiers that may
be cut short while they stay unique; at the first that means nothing the list ends. Of a GPU in MIG mode a
number means its first slice, and a process sees one slice only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visible:
    """Identifiers in CUDA's order, and what is odd about the list, if anything."""

    uuids: tuple[str, ...]
    note: str | None = None


def visible(variable: str | None, uuids: Sequence[str], slices: Mapping[str, int]) -> Visible:
    """What of the GPUs `uuids` and of `slices` (identifier → position of the GPU it is cut from) is visible.

    A GPU of which there are slices can't be used as a whole.
    """
    first: dict[int, str] = {}
    for uuid, position in slices.items():
        first.setdefault(position, uuid)
    usable = [first.get(position, uuid) for position, uuid in enumerate(uuids)]
    if variable is None:
        chosen, note = list(usable), None
    else:
        chosen, note = _named(variable, usable, [*uuids, *slices])
    cut = [uuid for uuid in chosen if uuid in slices]
    if not cut:
        return Visible(tuple(chosen), note)
    if len(slices) > 1 and variable is None:
        note = (
            f"The GPU is cut into {len(slices)} slices (MIG) and CUDA uses one at a time, the first unless "
            f"CUDA_VISIBLE_DEVICES names another: {', '.join(slices)}."
        )
    return Visible((cut[0],), note)


def _named(variable: str, usable: Sequence[str], known: Sequence[str]) -> tuple[list[str], str | None]:
    chosen: list[str] = []
    words = [word.strip() for word in variable.split(",")] if variable.strip() else []
    for word in words:
        uuid = _one(word, usable, known)
        if uuid is None:
            seen = f"the {len(chosen)} before it" if chosen else "none"
            return chosen, f"CUDA_VISIBLE_DEVICES={variable} has {word!r}, no GPU here; CUDA sees {seen}."
        if uuid in chosen:
            return [], f"CUDA_VISIBLE_DEVICES={variable} names a GPU twice; CUDA then sees none."
        chosen.append(uuid)
    hidden = len(usable) - len(chosen)
    if not hidden or not usable:
        return chosen, None
    return chosen, f"CUDA_VISIBLE_DEVICES={variable} hides {hidden} of {len(usable)} GPUs."


def _one(word: str, usable: Sequence[str], known: Sequence[str]) -> str | None:
    if word.isdigit():
        return usable[int(word)] if int(word) < len(usable) else None
    matches = [uuid for uuid in known if word and uuid.startswith(word)]
    return matches[0] if len(matches) == 1 else None
