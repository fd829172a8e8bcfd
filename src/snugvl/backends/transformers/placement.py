"""Which module goes where: the plan's placement checked, or the vision tower alone kept off the GPU."""

from collections.abc import Mapping
from typing import Any

import torch

from snugvl.errors import RequestError

_TOWERS = frozenset(
    ("visual", "vision_tower", "vision_model", "vision_encoder", "image_tower", "vision_embed_tokens")
)


def checked(
    placement: tuple[tuple[str, str], ...], skeleton: torch.nn.Module, device: torch.device
) -> dict[str, str]:
    """The plan's placement as transformers takes it. `skeleton`: the network without memory ("meta").

    Raises:
        RequestError: a device that is none, or another GPU than the one that was asked for; a module that the
            network doesn't have, or weights that nobody placed.
    """
    placed = dict(placement)
    names = {name for name, _ in skeleton.named_modules()} | {name for name, _ in skeleton.named_parameters()}
    for module, where in placement:
        if where not in ("cpu", "disk", str(device)):
            raise RequestError(
                f"module {module!r} is placed on {where!r}; it can be on {device}, cpu or disk",
                field="placement",
            )
        if module not in names:
            raise RequestError(f"the placement names {module!r}, which is no module here", field="placement")
    for name, _ in skeleton.named_parameters():
        if not any(_holds(module, name) for module in placed):
            raise RequestError(f"the placement says nothing of {name!r}", field="placement")
    return placed


def without_tower(skeleton: torch.nn.Module, device: torch.device) -> dict[str, str]:
    """Everything on `device` but the vision tower, which is never asked, in main memory.

    `skeleton`: the network without memory ("meta").
    """
    towers = [name for name, _ in skeleton.named_modules() if name.rpartition(".")[2] in _TOWERS]
    outer = [name for name in towers if not any(name.startswith(other + ".") for other in towers)]
    placed: dict[str, str] = dict.fromkeys(outer, "cpu")
    _spread(skeleton, "", outer, str(device), placed)
    return placed


def _spread(
    module: torch.nn.Module, name: str, towers: list[str], device: str, placed: dict[str, str]
) -> None:
    """Put what is beside the towers on `device`, in pieces as large as possible."""
    prefix = f"{name}." if name else ""
    for child_name, child in module.named_children():
        path = prefix + child_name
        if path in placed:
            continue
        if any(tower.startswith(path + ".") for tower in towers):
            _spread(child, path, towers, device, placed)
        else:
            placed[path] = device
    direct = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    placed.update({prefix + own: device for own, _ in direct})


def split_bytes(model: Any, placed: Mapping[str, str] | None, device: torch.device) -> dict[str, int]:
    """Bytes of the weights by row of the ledger: on the device, and offloaded to main memory."""
    rows = {"weights": 0}
    main = device.type
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        where = _where(name, placed) if placed else tensor.device.type
        if where == "disk":
            continue
        row = "weights" if torch.device(where).type == main else "weights in main memory"
        rows[row] = rows.get(row, 0) + tensor.nbytes
    return rows


def _where(name: str, placed: Mapping[str, str]) -> str:
    """The place of the longest module that holds a parameter."""
    holding = [module for module in placed if _holds(module, name)]
    return placed[max(holding, key=len)] if holding else "cpu"


def _holds(module: str, name: str) -> bool:
    """Whether a parameter belongs to a module; everything belongs to ""."""
    return not module or name == module or name.startswith(module + ".")
